"""Preloaded parents and the children that they fork, seen from the orchestrator.

A parent is one process per pin environment and set of variables that must be in force when vLLM is imported. Every wait
is bounded, and only processes that were started here are ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvmatrix.errors import InfraError

COMMON_ENV = {
    "OMP_NUM_THREADS": "1",  # a parent that is to be forked must stay single-threaded
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "kvmatrix",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
NOT_INHERITED = ("KVMATRIX_OVERLAY", "VLLM_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE_", "TRITON_")
"""The caller's own settings of what is under test do not reach it: a cell is what matrix.toml says."""
HOST_ENV = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
INTERPRETER_ENV = {"TRITON_INTERPRET": "1"}


class JobTimeout(Exception):
    """A child did not end within its time."""


def parent_env(device: str, backend: str) -> dict[str, str]:
    """Variables that must be set when the parent of a cell on ``backend`` starts."""
    env = dict(COMMON_ENV)
    if device == "host":
        env |= HOST_ENV
        if backend in ("TRITON_ATTN", "FLEX_ATTENTION"):
            env |= INTERPRETER_ENV
    return env


@dataclass
class Job:
    """A forked child: its channel, and how it ended."""

    pid: int
    channel: socket.socket
    parent: Parent
    ended: threading.Event = field(default_factory=threading.Event)
    exit_code: int | None = None
    """Exit status; below zero: killed by that signal."""
    max_rss_kib: int | None = None
    _buffer: bytes = b""

    def messages(self, timeout: float) -> Iterator[dict[str, Any]]:
        """The child's messages until it closes its channel.

        Raises:
            JobTimeout: it is still open after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while (message := self.receive(deadline - time.monotonic())) is not None:
            yield message

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """The next message, or None when the channel is closed.

        Raises:
            JobTimeout: none came within ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.channel], [], [], left)[0]:
                raise JobTimeout
            try:
                data = self.channel.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                return None
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return dict(json.loads(line))

    def send(self, message: dict[str, Any]) -> None:
        self.channel.sendall(json.dumps(message).encode() + b"\n")

    def finish(self, timeout: float = 30) -> None:
        """Close the channel, wait for the child's end, and kill it when it does not come."""
        self.channel.close()
        if not self.ended.wait(timeout):
            self.kill()

    def kill(self) -> None:
        """End the child and everything in its process group."""
        if self.pid > 0 and not self.ended.is_set():
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                # Just forked: it has no group of its own yet, or it has ended.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(self.pid, signal.SIGKILL)
            self.ended.wait(10)


class Parent:
    """One preloaded parent process.

    Args:
        python: interpreter of the pin's environment.
        env: variables over the caller's own.
        log: file that takes the parent's output.
        preload: False gives a parent that imports nothing: its child then imports all by itself.
        under: words of a command that runs the parent. Such a one imports only what the scheduler harness needs.
    """

    def __init__(self, python: Path, env: dict[str, str], log: Path, preload: bool = True, under: Sequence[str] = ()) -> None:
        self.log = log
        self.ready: dict[str, Any] | None = None
        self._jobs: dict[int, Job] = {}
        self._pids: dict[int, queue.SimpleQueue[int]] = {}
        self._lock = threading.Lock()
        self._next_id = 0
        self._is_ready = threading.Event()
        self._control, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        log.parent.mkdir(parents=True, exist_ok=True)
        argv = [*under, str(python), "-m", "kvmatrix.forkserver", str(remote.fileno())]
        argv += ["--scheduler-only"] if under else []
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                argv + ([] if preload else ["--no-preload"]),
                env={k: v for k, v in os.environ.items() if not k.startswith(NOT_INHERITED)} | env,
                pass_fds=[remote.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd=log.parent,
            )
        remote.close()
        self._reader = threading.Thread(target=self._read, name="kvmatrix-parent", daemon=True)
        self._reader.start()

    def wait_ready(self, timeout: float) -> None:
        """Wait until the parent has imported vLLM.

        Raises:
            InfraError: it died, took longer than ``timeout`` seconds, or cannot be forked safely.
        """
        if not self._is_ready.wait(timeout):
            raise InfraError(f"the preloaded parent was not ready after {timeout:g} s: see {self.log}")
        if self.ready is None:
            raise InfraError(f"the preloaded parent ended while it imported vLLM: see {self.log}")
        if self.ready["spoilt"]:
            raise InfraError("the preloaded parent imported the offload manager: an arm could not replace it any more")
        if self.ready["threads"] != 1:
            raise InfraError(f"the preloaded parent has {self.ready['threads']} threads: it cannot be forked safely")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def start(self, job: dict[str, Any], log: Path, timeout: float = 30) -> Job:
        """Fork a child for ``job``; its output goes to ``log``.

        Raises:
            InfraError: the parent has died, or does not answer.
        """
        ours, theirs = socket.socketpair()
        with self._lock:
            self._next_id += 1
            number = self._next_id
            answer: queue.SimpleQueue[int] = queue.SimpleQueue()
            self._pids[number] = answer
            started = Job(pid=-1, channel=ours, parent=self)
            self._jobs[number] = started
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("ab") as out:
                request = json.dumps({"id": number, "job": job}).encode()
                socket.send_fds(self._control, [request], [theirs.fileno(), out.fileno()])
            started.pid = answer.get(timeout=timeout)
        except (OSError, queue.Empty) as e:
            ours.close()
            raise InfraError(f"the preloaded parent does not answer ({type(e).__name__}): see {self.log}") from e
        finally:
            theirs.close()
        if started.pid < 0:
            ours.close()
            raise InfraError(f"the preloaded parent ended: see {self.log}")
        return started

    def _read(self) -> None:
        while True:
            try:
                data = self._control.recv(1 << 20)
            except OSError:
                data = b""
            if not data:
                break
            self._dispatch(json.loads(data))
        self._is_ready.set()
        for answer in list(self._pids.values()):
            answer.put(-1)
        for job in list(self._jobs.values()):
            if job.pid > 0:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(job.pid, signal.SIGKILL)
            job.ended.set()

    def _dispatch(self, message: dict[str, Any]) -> None:
        if message.get("ready"):
            self.ready = message
            self._is_ready.set()
        elif "pid" in message:
            self._jobs[message["id"]].pid = message["pid"]  # also when nobody waits for it any more: `close` ends it
            self._pids.pop(message["id"]).put(message["pid"])
        elif message["id"] in self._jobs:
            job = self._jobs.pop(message["id"])
            job.exit_code, job.max_rss_kib = message["exit"], message["max_rss_kib"]
            job.ended.set()

    def close(self) -> None:
        """End the parent and with it every child that is left."""
        for job in list(self._jobs.values()):
            job.kill()
        with contextlib.suppress(OSError):  # the parent may have gone already
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            # Nothing is lost with a parent that still imports, and it would not look up before it is done.
            self.process.wait(timeout=10 if self.ready is not None else 0)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=10)
        self._reader.join(timeout=10)
        self._control.close()


class ParentPool:
    """Parents by environment and variables, started when first asked for and reused."""

    def __init__(self, logs: Path, preload_timeout: float, preload: bool = True) -> None:
        self.logs = logs
        self.preload = preload
        self.preload_timeout = preload_timeout
        self._parents: dict[tuple[str, tuple[tuple[str, str], ...], tuple[str, ...]], Parent] = {}
        self._lock = threading.Lock()
        self._started = 0
        self.closing = False

    def launch(self, python: Path, env: dict[str, str], under: Sequence[str] = ()) -> Parent:
        """The parent for ``env``, which may still be importing; one that has died is replaced once it is asked for.

        ``under``: the command that runs it, see :class:`Parent`.
        """
        key = (str(python), tuple(sorted(env.items())), tuple(under))
        with self._lock:
            if self.closing:
                raise InfraError("the run is being ended")
            parent = self._parents.get(key)
            if parent is not None and not parent.alive:
                parent.close()
                parent = None
            if parent is None:
                self._started += 1
                parent = Parent(python, env, self.logs / f"parent-{self._started}.log", self.preload, under)
                self._parents[key] = parent
            return parent

    def get(self, python: Path, env: dict[str, str], under: Sequence[str] = (), timeout: float | None = None) -> Parent:
        """The parent for ``env``, ready to fork; ``under`` as for :meth:`launch`, ``timeout`` in place of the pool's.

        Raises:
            InfraError: it could not be made ready.
        """
        parent = self.launch(python, env, under)
        parent.wait_ready(timeout or self.preload_timeout)
        return parent

    def close(self) -> None:
        """End all parents and children; no further parent is started."""
        with self._lock:
            self.closing = True
        for parent in self._parents.values():
            parent.close()
