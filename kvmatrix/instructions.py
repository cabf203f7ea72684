"""Machine instructions of a call: a second opinion that no other load of the machine can change.

Counted by ``perf stat`` where the processor's counter can be read, which is not so in most virtual machines, and else by
valgrind's callgrind. N calls are counted, and then twice as many in the same process: all that is not the call is in both, and
their difference is N calls. It is done twice, and counts that do not agree are no counts.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kvmatrix.errors import InfraError
from kvmatrix.live import Live, live
from kvmatrix.processes import Parent
from kvmatrix.runner import Context

COUNTED_SECONDS = 0.005
"""About as long N calls take when nothing counts them: some 70 million instructions, less than a second under callgrind."""
WARM_UP = 20
"""Requests before anything is counted: Python's interpreter adapts to code that has run a few times, that of a request, too."""
AGREEMENT = 0.001
"""Two counts of the same arm differ by this share of them at most."""
EVENT = "instructions:u"
TOOL_TIMEOUT_S = 60
CALLGRIND_PRELOAD_S = 900
"""Under valgrind an import takes ten times as long."""

CALLGRIND_ENV = {
    # Whatever hashes text does the same work in each process, and in the next run, too.
    "PYTHONHASHSEED": "0",
    # A long copy of glibc's is one instruction that callgrind counts a byte at a time. Whether a list that grows is copied
    # at all is chance: a handful of them would outweigh all other noise.
    "GLIBC_TUNABLES": "glibc.cpu.x86_rep_movsb_threshold=0x40000000:glibc.cpu.x86_rep_stosb_threshold=0x40000000",
}

Work = Callable[[], object]


class Unavailable(Exception):
    """Nothing here can count; the message says why."""


class Counter(Protocol):
    """Counts what one process does."""

    def count(self, work: Work) -> float:
        """Instructions of the process while ``work`` was done, and a few more that are the same each time."""


class Tool(Protocol):
    name: str

    def parent(self, ctx: Context, pin: str, backend: str) -> Parent | None:
        """Whose children it can count; None: any."""

    def attach(self, pid: int) -> Counter: ...


def of_calls(
    ctx: Context, pin: str, backend: str, jobs: Mapping[str, dict[str, Any]], calls: Mapping[str, int]
) -> tuple[dict[str, float], str]:
    """Instructions of one call per arm, and what counted them; nothing, and why, where they cannot be counted.

    Args:
        jobs: arm -> a job that answers ``{"calls": n}`` requests.
        calls: arm -> N.
    """
    try:
        tool = find_tool()
        counts = {}
        with live(ctx, pin, backend, tool.parent(ctx, pin, backend)) as group:
            for arm, job in jobs.items():
                counts[arm] = _of_arm(tool, group, arm, job, calls[arm])
    except Unavailable as e:
        return {}, str(e)
    except (InfraError, OSError, subprocess.SubprocessError, ValueError) as e:
        return {}, f"counting failed: {' '.join(str(e).split())}"
    return counts, tool.name


def _of_arm(tool: Tool, group: Live, arm: str, job: dict[str, Any], calls: int) -> float:
    with group.block():
        child, _ = group.start(job, f"instructions-{arm}")
        for _ in range(WARM_UP):
            group.ask(child, {"calls": 1})
        return per_call(tool.attach(child.pid), lambda n: group.ask(child, {"calls": n}), calls)


def per_call(counter: Counter, ask: Callable[[int], object], calls: int) -> float:
    """Instructions of a call, of ``calls`` and twice as many that ``ask`` makes the process do.

    Raises:
        ValueError: two counts do not agree, or are of nothing.
    """
    ask(calls)
    counts = [_difference(counter, ask, calls) for _ in range(2)]
    if min(counts) <= 0:
        raise ValueError(f"{2 * calls} calls took no more instructions than {calls}")
    if max(counts) - min(counts) > AGREEMENT * min(counts):
        raise ValueError(f"two counts of the same call are {counts[0]:.0f} and {counts[1]:.0f} instructions")
    return sum(counts) / 2


def _difference(counter: Counter, ask: Callable[[int], object], calls: int) -> float:
    once = counter.count(lambda: ask(calls))
    return (counter.count(lambda: ask(2 * calls)) - once) / calls


def find_tool() -> Tool:
    """What can count here.

    Raises:
        Unavailable: nothing.
    """
    refusals = []
    for find in (_find_perf, _find_callgrind):
        try:
            return find()
        except Unavailable as e:
            refusals.append(str(e))
    raise Unavailable("; ".join(refusals))


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False)
    return done.stdout + done.stderr


# --- perf -------------------------------------------------------------------------------------------------------------


def parse_perf(text: str, event: str = EVENT) -> float:
    """The count of ``event`` in what ``perf stat -x,`` wrote.

    Raises:
        Unavailable: perf says that the event is not supported, or was not counted.
        ValueError: there is no such line.
    """
    for line in text.splitlines():
        value, _, rest = line.partition(",")
        if event in rest.split(","):
            if value.startswith("<"):
                raise Unavailable(f"perf: {event} is {value.strip('<>')} here")
            return float(value)
    raise ValueError(f"perf stat said nothing of {event}: {' '.join(text.split())[:200]}")


def _find_perf() -> Tool:
    if not shutil.which("perf"):
        raise Unavailable("perf is not installed")
    try:
        parse_perf(_output("perf", "stat", "-x,", "-e", EVENT, "true"))
    except (OSError, subprocess.SubprocessError, ValueError) as e:
        raise Unavailable(f"perf cannot be used: {e}") from None
    return PerfStat()


class PerfStat:
    """The processor's own counter, attached to a process that runs already."""

    def __init__(self, event: str = EVENT) -> None:
        self.event = event
        self.name = f"perf stat -e {event}"

    def parent(self, ctx: Context, pin: str, backend: str) -> Parent | None:
        return None

    def attach(self, pid: int) -> Counter:
        return _PerfCounter(pid, self.event)


class _PerfCounter:
    def __init__(self, pid: int, event: str) -> None:
        self.pid, self.event = pid, event

    def count(self, work: Work) -> float:
        with contextlib.ExitStack() as stack:
            commands, orders = _pipe(stack)
            answers, acks = _pipe(stack)
            # It starts with the event off (-D -1), and says when a command is done: no work can be missed, and none waits.
            command = ["perf", "stat", "-x,", "-e", self.event, "-D", "-1", "-p", str(self.pid)]
            process = subprocess.Popen(
                [*command, "--control", f"fd:{commands},{acks}"],
                pass_fds=[commands, acks],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            try:
                _command(orders, answers, "enable")
                work()
                _command(orders, answers, "disable")
                process.send_signal(signal.SIGINT)  # how perf is told to write what it has
                _, text = process.communicate(timeout=TOOL_TIMEOUT_S)
            finally:
                process.kill()
                process.wait()
        return parse_perf(text, self.event)


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        stack.callback(os.close, end)
    return ends


def _command(orders: int, answers: int, command: str) -> None:
    os.write(orders, f"{command}\n".encode())
    if not select.select([answers], [], [], TOOL_TIMEOUT_S)[0]:
        raise ValueError(f"perf does not answer to {command!r}")
    if not (answer := os.read(answers, 64)).startswith(b"ack"):
        raise ValueError(f"perf answers {answer!r} to {command!r}")


# --- callgrind --------------------------------------------------------------------------------------------------------


def parse_callgrind(text: str) -> int:
    """Instructions since the start, over all threads, in what ``callgrind_control -e`` wrote.

    Raises:
        ValueError: there are none in it.
    """
    _, _, table = text.partition("Totals:")
    if table.split()[:1] != ["Ir"]:
        raise ValueError(f"callgrind_control told no count: {' '.join(text.split())[:200]}")
    # A thread that has done nothing yet has no line.
    return sum(int(count.replace(",", "")) for count in re.findall(r"^\s*Th\s*\d+\s+([\d,]+)", table, re.MULTILINE))


def _find_callgrind() -> Tool:
    if not (shutil.which("valgrind") and shutil.which("callgrind_control")):
        raise Unavailable("valgrind is not installed")
    try:
        version = _output("valgrind", "--version").split()
    except (OSError, subprocess.SubprocessError) as e:
        raise Unavailable(f"valgrind cannot be used: {e}") from None
    return Callgrind(" ".join(version[:1]))


class Callgrind:
    """A parent that runs under valgrind and forks the processes: vLLM is imported once, and nothing is counted meanwhile."""

    def __init__(self, version: str) -> None:
        self.name = f"callgrind of {version}"

    def parent(self, ctx: Context, pin: str, backend: str) -> Parent | None:
        if not ctx.pool.preload:
            raise Unavailable(f"{self.name}: an arm replaces a file that must be imported for all arms at once")
        # Without --trace-children a forked process does not listen to callgrind_control.
        under = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--trace-children=yes", "-q"]
        env = ctx.parent_variables(pin, "host", backend) | CALLGRIND_ENV
        under.append(f"--callgrind-out-file={os.devnull}")
        return ctx.pool.get(ctx.envs[pin].python, env, under, CALLGRIND_PRELOAD_S)

    def attach(self, pid: int) -> Counter:
        return _CallgrindCounter(pid)


class _CallgrindCounter:
    def __init__(self, pid: int) -> None:
        self.pid = str(pid)
        _output("callgrind_control", "-i", "on", self.pid)

    def _read(self) -> int:
        return parse_callgrind(_output("callgrind_control", "-e", self.pid))

    def count(self, work: Work) -> float:
        before = self._read()
        work()
        return self._read() - before
