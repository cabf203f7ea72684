"""Stand-ins for vLLM's own tests that ask for a GPU and can live without: what is on the device is in host memory.

A test file that asks "is this CUDA or ROCm" is answered yes; nobody else is. While such a file's tests run, ``"cuda"`` means
the CPU wherever torch is given a device, memory is not pinned, and streams, events and the copy backend are those of
:mod:`kvmatrix.host.copy`. What needs the real thing (a driver, a kernel that takes its time) still fails and says so.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from kvmatrix.host.copy import HostCopyBackend, HostEvent, HostStream


class _OnHost(TorchFunctionMode):  # type: ignore[misc]
    """Every torch call with a CUDA device in its arguments gets the CPU in its place, and pageable memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _host(value) for name, value in (kwargs or {}).items()}
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return func(*(_host(value) for value in args), **kwargs)


def _host(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value


class StandIns:
    """``prefix``: name that a module must begin with to be answered."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._asked: set[str] = set()

    def install(self) -> None:
        """Turn this process into the host device, and answer test files that ask for a GPU.

        To be called once vLLM is imported, before a test file is.
        """
        import vllm.v1.simple_kv_offload.copy_backend as copy_backend
        from vllm.platforms import current_platform
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        if not current_platform.is_cpu():
            return
        copy_backend.DmaCopyBackend = HostCopyBackend  # as the offload worker has it on the host device
        platform, original = type(current_platform), current_platform.is_cuda_alike

        def is_cuda_alike(_: Any) -> bool:
            module = str(sys._getframe(1).f_globals.get("__name__", ""))
            if not module.startswith(self.prefix):
                return bool(original())
            self._asked.add(module)
            return True

        platform.is_cuda_alike = is_cuda_alike

    def wanted_by(self, module: str) -> bool:
        """Whether ``module`` has asked for a GPU."""
        return module in self._asked

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While it lasts, what torch does on a CUDA device it does on the CPU."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch, "Event", HostEvent))
            stack.enter_context(mock.patch.object(torch.cuda, "Stream", HostStream))
            stack.enter_context(mock.patch.object(torch.cuda, "current_stream", return_value=HostStream()))
            stack.enter_context(_OnHost())
            yield
