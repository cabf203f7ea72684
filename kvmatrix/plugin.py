"""vLLM plug-ins (entry points): they run in every vLLM process, the engine core's and the workers' included.

Where vLLM runs on a GPU they change nothing: an overlay is installed if one is named, and readers are attached.
"""

from __future__ import annotations

import os

from kvmatrix import overlay
from kvmatrix.host import triton_cpu


def platform() -> None:
    """``vllm.platform_plugins``: never claims a platform; it is the earliest hook that vLLM offers."""
    overlay.install()
    if triton_cpu.wanted() and not _gpu_present():
        triton_cpu.list_cpu_backend()


def general() -> None:
    """``vllm.general_plugins``: turn a CPU platform into the host device, and let engines report on themselves."""
    from vllm.platforms import current_platform

    from kvmatrix import chunk_sizes, introspect

    introspect.attach()
    chunk_sizes.give_vllm()
    if not current_platform.is_cpu() or _gpu_present():
        return
    from kvmatrix.host import copy, disk, ops

    copy.patch_worker()
    disk.patch_worker()
    if triton_cpu.wanted():
        ops.define_missing()
        triton_cpu.honour_backend_request()
        triton_cpu.skip_kernel_warmup()
        triton_cpu.sample_without_triton()
        triton_cpu.answer_capability()
        triton_cpu.run_flex_uncompiled()


def _gpu_present() -> bool:
    import torch

    return torch.cuda.is_available() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
