"""The preloaded parent: imports vLLM once, then forks a child for each job it is sent.

Started as ``python -m kvmatrix.forkserver FD`` in a pin's environment, with a Unix socket on ``FD``. A request is one
datagram ``{"id", "job"}`` carrying two descriptors (the child's channel and its log file); answers are
``{"id", "pid"}`` and, when the child ends, ``{"id", "exit", "max_rss_kib"}`` (``exit`` below zero: killed by that signal).

Nothing here may start a thread before a fork: a lock held by another thread would stay locked in the child for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any

MAX_MESSAGE = 1 << 20

# Imported before the fork because each cell needs them. Nothing here may import a file that a patch touches:
# the offload manager and the connector that imports it stay out, and `preload` checks it.
PRELOAD = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama4",
    "vllm.model_executor.model_loader",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.attention.backends.flex_attention",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.simple_kv_offload.worker",
    "vllm.distributed.kv_transfer.kv_connector.v1",
    "transformers.models.llama4.modeling_llama4",
    "torch._inductor.compile_fx",
)
# All that a lookup without a model needs: under a tool that makes everything slow, the rest would take minutes.
PRELOAD_SCHEDULER = (
    "vllm.sampling_params",
    "vllm.utils.hashing",
    "vllm.distributed.kv_events",
    "vllm.distributed.kv_transfer.kv_connector.utils",
    "vllm.v1.core.block_pool",
    "vllm.v1.core.kv_cache_coordinator",
    "vllm.v1.core.kv_cache_manager",
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.core.sched.output",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.outputs",
    "vllm.v1.request",
)
NEVER_PRELOADED = "vllm.v1.simple_kv_offload.manager"


def preload(scheduler_only: bool = False) -> dict[str, Any]:
    """Import what every cell needs; report what failed and whether the process may be forked."""
    missing = {}
    for name in PRELOAD_SCHEDULER if scheduler_only else PRELOAD:
        try:
            importlib.import_module(name)
        except ImportError as e:
            missing[name] = str(e)
    if not scheduler_only:
        from vllm.plugins import load_general_plugins

        load_general_plugins()
    gc.collect()
    gc.freeze()  # what was imported lives on: children's collections need not walk it, and so copy its pages
    return {
        "missing": missing,
        "threads": len(os.listdir("/proc/self/task")),
        "spoilt": NEVER_PRELOADED in sys.modules,
    }


class Child:
    """The channel of a job: one JSON object a line, both ways."""

    def __init__(self, fd: int) -> None:
        self._file = socket.socket(fileno=fd).makefile("rw", encoding="utf-8")

    def send(self, message: dict[str, Any]) -> None:
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def receive(self) -> dict[str, Any] | None:
        line = self._file.readline()
        return json.loads(line) if line else None


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)  # it died before it could be watched


def child_main(job: dict[str, Any], channel_fd: int, log_fd: int, parent: int) -> int:
    """Body of a child that ``parent`` forked; the return value is its exit status."""
    os.setsid()
    _die_with_parent(parent)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    channel = Child(channel_fd)
    try:
        from kvmatrix import jobs

        jobs.enter_child(job)
        jobs.run(job, channel.send, channel.receive)
        channel.send({"type": "done"})
        return 0
    except BaseException as e:
        traceback.print_exc()
        reason = " ".join((str(e) or _failed_line(e)).split())[:2000]
        channel.send({"type": "error", "error": type(e).__name__, "message": reason, "causes": _causes(e)})
        return 1


def _failed_line(error: BaseException) -> str:
    """The source line that raised ``error``: all that an assertion without a message says."""
    frames = traceback.extract_tb(error.__traceback__)
    return (frames[-1].line or "") if frames else ""


def _causes(error: BaseException) -> list[str]:
    """The chain behind an error, innermost last: vLLM wraps the real reason of a refusal."""
    chain: list[str] = []
    current = error.__cause__ or error.__context__
    while current is not None and len(chain) < 8:
        chain.append(f"{type(current).__name__}: {' '.join((str(current) or _failed_line(current)).split())[:500]}")
        current = current.__cause__ or current.__context__
    return chain


class ForkServer:
    """The loop of the parent: fork on request, report every child's end."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.children: dict[int, int] = {}
        self.wake_read, wake_write = os.pipe()
        for fd in (self.wake_read, wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the orchestrator decides what Ctrl-C ends

    def reply(self, message: dict[str, Any]) -> None:
        self.control.send(json.dumps(message).encode())

    def serve(self) -> None:
        while True:
            ready, _, _ = select.select([self.control.fileno(), self.wake_read], [], [])
            if self.wake_read in ready:
                os.read(self.wake_read, 4096)
                self._reap()
            if self.control.fileno() in ready and not self._accept():
                return

    def _accept(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self.control, MAX_MESSAGE, 2)
        if not data:
            return False
        request = json.loads(data)
        sys.stdout.flush()
        sys.stderr.flush()
        own_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                self.control.close()
                status = child_main(request["job"], fds[0], fds[1], own_pid)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(status)  # never back into the parent's loop, which would end the other children
        for fd in fds:
            os.close(fd)
        self.children[pid] = request["id"]
        self.reply({"id": request["id"], "pid": pid})
        return True

    def _reap(self) -> None:
        while self.children:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what the child had started
            code = os.waitstatus_to_exitcode(status)
            self.reply({"id": self.children.pop(pid), "exit": code, "max_rss_kib": usage.ru_maxrss})

    def close(self) -> None:
        for pid in self.children:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def main() -> int:
    control = socket.socket(fileno=int(sys.argv[1]))
    server = ForkServer(control)
    nothing = {"missing": {}, "threads": 1, "spoilt": False}
    facts = nothing if "--no-preload" in sys.argv else preload(scheduler_only="--scheduler-only" in sys.argv)
    server.reply({"ready": True, **facts})
    try:
        server.serve()
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # with vLLM imported, an orderly interpreter exit takes seconds and tidies nothing that matters
