"""What counts instructions: the tools' words, made up and real, and counts that do not agree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmatrix import instructions
from kvmatrix.errors import InfraError
from kvmatrix.instructions import Callgrind, PerfStat, Unavailable, find_tool, parse_callgrind, parse_perf, per_call

COUNTED = "1234567,,instructions:u,950000,100.00,,\n"
UNSUPPORTED = "<not supported>,,instructions:u,0,100.00,,\n"
CONTROL = """PID 7000: python -m kvmatrix.forkserver 4

  Totals:       Ir\x20
   Th 1  1,490,950\x20
   Th 2      9,050\x20

 sending command status internal to pid 7000
"""


def test_perf_count() -> None:
    assert parse_perf(f"a warning, before it\n{COUNTED}") == 1234567


@pytest.mark.parametrize("said", ["not supported", "not counted"])
def test_perf_event_that_is_not_there(said: str) -> None:
    with pytest.raises(Unavailable, match=f"^perf: instructions:u is {said} here$"):
        parse_perf(f"<{said}>,,instructions:u,0,100.00,,\n")


def test_perf_that_says_something_else() -> None:
    with pytest.raises(ValueError, match="nothing of instructions:u: Access to performance"):
        parse_perf("Access to performance monitoring is limited\n12,,cycles:u,0,100.00,,\n")


def test_callgrind_count_is_of_all_threads() -> None:
    assert parse_callgrind(CONTROL) == 1_500_000


def test_callgrind_before_anything_was_counted() -> None:
    assert parse_callgrind("PID 7: python\n  Totals:Ir\n sending command status internal to pid 7\n") == 0


def test_callgrind_that_does_not_find_the_process() -> None:
    with pytest.raises(ValueError, match="told no count: Error: Callgrind task with PID/name '7' not detected"):
        parse_callgrind("Error: Callgrind task with PID/name '7' not detected.\n")


# --- which tool -------------------------------------------------------------------------------------------------------

Tools = Callable[..., None]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    """Puts scripts in the place of all programs: name=its text in Python."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def put(**scripts: str) -> None:
        for name, text in scripts.items():
            file = tmp_path / name
            file.write_text(f"#!{sys.executable}\nimport sys\n{text}\n", encoding="utf-8")
            file.chmod(0o755)

    return put


def says(text: str) -> str:
    return f"sys.stderr.write({text!r})"


def test_nothing_is_installed(tools: Tools) -> None:
    tools()
    with pytest.raises(Unavailable, match=r"^perf is not installed; valgrind is not installed$"):
        find_tool()


def test_perf_is_preferred(tools: Tools) -> None:
    tools(perf=says(COUNTED), valgrind="print('valgrind-3.1')", callgrind_control="")
    assert find_tool().name == "perf stat -e instructions:u"


def test_callgrind_where_perf_has_no_such_event(tools: Tools) -> None:
    tools(perf=says(UNSUPPORTED), valgrind="print('valgrind-3.1')", callgrind_control="")
    assert find_tool().name == "callgrind of valgrind-3.1"


@pytest.mark.parametrize("text", ["no permission\n", ""])
def test_perf_that_cannot_be_used(tools: Tools, text: str) -> None:
    tools(perf=says(text), valgrind="print('valgrind-3.1')")
    with pytest.raises(Unavailable, match=r"^perf cannot be used: perf stat said nothing of .*; valgrind is not installed$"):
        find_tool()


# --- a count ----------------------------------------------------------------------------------------------------------


class Made:
    """A process in which a request takes 1,000 instructions and a call of it 50, and each count some more."""

    def __init__(self, *more: int) -> None:
        self.more = list(more)
        self.asked: list[int] = []

    def ask(self, calls: int) -> None:
        self.asked.append(calls)

    def count(self, work: Callable[[], object]) -> int:
        before = len(self.asked)
        work()
        return sum(1000 + 50 * n for n in self.asked[before:]) + self.more.pop(0)


def test_what_is_not_the_call_cancels() -> None:
    made = Made(7, 7, 7, 7)
    assert per_call(made, made.ask, 300) == 50
    assert made.asked == [300, 300, 600, 300, 600]


def test_counts_that_differ_a_little_are_averaged() -> None:
    made = Made(0, 0, 0, 12)
    assert per_call(made, made.ask, 300) == pytest.approx(50.02)


@pytest.mark.parametrize("more", [(0, 0, 0, 300), (0, 300, 0, 0)])
def test_counts_that_do_not_agree_are_none(more: tuple[int, ...]) -> None:
    made = Made(*more)
    with pytest.raises(ValueError, match=r"two counts of the same call are 5[01] and 5[01] instructions"):
        per_call(made, made.ask, 300)


def test_a_count_of_nothing_is_none() -> None:
    made = Made(0, -15000, 0, -15000)
    with pytest.raises(ValueError, match="600 calls took no more instructions than 300"):
        per_call(made, made.ask, 300)


class _Pool:
    preload = True


class _Context:
    pool = _Pool()


def counted(monkeypatch: pytest.MonkeyPatch, error: Exception) -> tuple[dict[str, float], str]:
    def fail() -> Any:
        raise error

    monkeypatch.setattr(instructions, "find_tool", fail)
    return instructions.of_calls(_Context(), "0.32.0", "CPU_ATTN", {}, {})  # type: ignore[arg-type]


def test_why_there_is_no_count_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted(monkeypatch, Unavailable("perf is not installed")) == ({}, "perf is not installed")


@pytest.mark.parametrize(
    "error",
    [InfraError("a process\nended"), OSError("a process\nended"), ValueError("a process\nended")],
)
def test_a_count_that_fails_fails_no_run(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    assert counted(monkeypatch, error) == ({}, "counting failed: a process ended")


def test_a_tool_that_hangs_fails_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, why = counted(monkeypatch, subprocess.TimeoutExpired(["callgrind_control"], 60))
    assert counts == {}
    assert why.startswith("counting failed: Command")


def test_no_callgrind_where_arms_replace_what_is_preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Pool, "preload", False)
    with pytest.raises(Unavailable, match=r"^callgrind of valgrind-3\.1: an arm replaces a file"):
        Callgrind("valgrind-3.1").parent(_Context(), "0.32.0", "CPU_ATTN")  # type: ignore[arg-type]


# --- the real tools ---------------------------------------------------------------------------------------------------

LOOP = """
import sys
print("ready", flush=True)
for line in sys.stdin:
    for _ in range(int(line)):
        sum(range(1000))
    print("done", flush=True)
"""


@pytest.fixture
def looping(request: pytest.FixtureRequest) -> Iterator[tuple[int, Callable[[int], object]]]:
    """A process that sums up as often as it is asked: its id, and how to ask."""
    under = getattr(request, "param", [])
    environ = os.environ | {"PYTHONHASHSEED": "0"}
    process = subprocess.Popen(
        [*under, sys.executable, "-c", LOOP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"

    def ask(calls: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{calls}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"

    yield process.pid, ask
    process.stdin.close()
    process.wait(timeout=30)
    process.stdout.close()


@pytest.mark.skipif(not shutil.which("perf"), reason="perf is not installed")
def test_perf_counts_just_while_it_is_asked_to(looping: tuple[int, Callable[[int], object]]) -> None:
    """By the one clock that perf has everywhere, for which the process's own time is the measure."""
    pid, ask = looping
    perf = PerfStat("task-clock").attach(pid)
    try:
        few, many = perf.count(lambda: ask(20)), perf.count(lambda: ask(20_000))
    except (Unavailable, ValueError) as e:
        pytest.skip(f"perf has no task-clock here: {e}")
    assert 0 < few < many / 10


CALLGRIND = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "-q", f"--callgrind-out-file={os.devnull}"]


@pytest.mark.skipif(not shutil.which("callgrind_control"), reason="valgrind is not installed")
@pytest.mark.parametrize("looping", [CALLGRIND], indirect=True)
def test_callgrind_counts_the_same_twice(looping: tuple[int, Callable[[int], object]]) -> None:
    pid, ask = looping
    for _ in range(20):
        ask(1)
    counter = Callgrind("").attach(pid)
    first, second = (per_call(counter, ask, 100) for _ in range(2))
    assert first == pytest.approx(second, rel=instructions.AGREEMENT)
    assert first > 1000
