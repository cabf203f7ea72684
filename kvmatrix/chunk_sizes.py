"""Chunk sizes of their own for the layers of a Llama 4, in vLLM and in transformers.

Both know one ``attention_chunk_size`` for a whole model. A checkpoint whose config has ``kvmatrix_chunk_sizes``, one size in
tokens a layer (0: full attention), gets these; nothing changes for any other model.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import wraps
from typing import Any

ATTRIBUTE = "kvmatrix_chunk_sizes"


def give_vllm() -> None:
    """Make vLLM's Llama 4 attention read the sizes; harmless when repeated."""
    from vllm.model_executor.models.llama4 import Llama4Attention

    original = Llama4Attention.__init__
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, of_layer(config, kwargs.get("prefix", "")), *args, **kwargs)

    Llama4Attention.__init__ = init


def of_layer(config: Any, prefix: str) -> Any:
    """``config`` as the layer named ``prefix`` (``…layers.2.self_attn``) shall see it: itself where it has no sizes."""
    sizes = getattr(config, ATTRIBUTE, None)
    if not sizes:
        return config
    own = copy.copy(config)
    own.attention_chunk_size = sizes[next(int(part) for part in prefix.split(".") if part.isdigit())]
    return own


def give_transformers(model: Any, sizes: Sequence[int]) -> None:
    """Replace the attention mask of each chunked layer of transformers' Llama 4 by the one of its own size."""
    for layer, size in zip(model.model.layers, sizes, strict=True):
        if size:
            layer.register_forward_pre_hook(_masked(size), with_kwargs=True)


def _masked(size: int) -> Any:
    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = args[0] if args else kwargs["hidden_states"]
        return args, kwargs | {"attention_mask": chunk_mask(hidden.shape[1], size, hidden.dtype)}

    return hook


def chunk_mask(length: int, size: int, dtype: Any) -> Any:
    """Additive mask [1, 1, length, length]: 0 where a token may look (back, in its own chunk), the lowest value elsewhere."""
    import torch

    at = torch.arange(length)
    seen = (at[None] <= at[:, None]) & (at[None] // size == at[:, None] // size)
    return torch.zeros(length, length, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[None, None]
