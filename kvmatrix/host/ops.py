"""Ops that vLLM's CPU build lacks and a host-device backend needs."""

from __future__ import annotations

import torch

_lib: torch.library.Library | None = None

_SCHEMA = (
    "reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,"
    " Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()"
)


def _reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Write ``key``/``value`` [tokens, heads, head_size] into caches [blocks, block_size, heads, head_size].

    Slots below zero are padding. Raises ValueError for a quantised cache, which this op does not scale.
    """
    if kv_cache_dtype not in ("auto", str(key_cache.dtype).removeprefix("torch.")):
        raise ValueError(f"host reshape_and_cache_flash does not support kv_cache_dtype {kv_cache_dtype!r}")
    used = slot_mapping >= 0
    slots = slot_mapping[used]
    block, offset = slots // key_cache.shape[1], slots % key_cache.shape[1]
    tokens = slot_mapping.shape[0]
    key_cache[block, offset] = key[:tokens][used]
    value_cache[block, offset] = value[:tokens][used]


def define_missing() -> None:
    """Define ``_C_cache_ops::reshape_and_cache_flash`` for the CPU where the build has none."""
    global _lib
    if _lib is not None or hasattr(torch.ops._C_cache_ops, "reshape_and_cache_flash"):
        return
    _lib = torch.library.Library("_C_cache_ops", "FRAGMENT")
    _lib.define(_SCHEMA)
    _lib.impl("reshape_and_cache_flash", _reshape_and_cache_flash, "CPU")
