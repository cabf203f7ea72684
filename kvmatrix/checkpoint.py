"""Deterministic small text models, saved as real checkpoints: Llama 4, and EXAONE 4 where there are sliding-window layers.

Every weight is drawn from a generator seeded by the model's seed and the parameter's own name, so the same parameters
give the same bytes whatever order a library initialises them in. Scales are chosen so that attention spreads over
several tokens and dominates the residual stream: a block that was not loaded moves the logits by whole nats.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvmatrix import chunk_sizes
from kvmatrix import layers as letters

GENERATOR_VERSION = 2
MARKER = "kvmatrix-checkpoint.json"
LONG_PROMPT = 4096
"""Tokens of a prompt from which on the reference must not hold whole matrices of scores: they would be gigabytes."""


FLOAT32_BYTES = 4


@dataclass(frozen=True)
class CheckpointSpec:
    """Parameters of one model; ``layers`` has the letters of :mod:`kvmatrix.layers`."""

    chunk: int = 64
    """Chunk or window in tokens."""
    layers: str = "cf"
    vocab_size: int = 512
    hidden_size: int = 64
    intermediate_size: int = 128
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 512
    seed: int = 0

    @classmethod
    def kv_bytes_of_token(cls, layers: int) -> int:
        """Bytes of a token's keys and values in ``layers`` layers, in float32, with the sizes that no cell changes."""
        return 2 * cls.num_key_value_heads * cls.head_dim * FLOAT32_BYTES * layers

    @property
    def key(self) -> str:
        """First 16 hex digits of the sha256 of the parameters: the checkpoint's folder name."""
        text = json.dumps([GENERATOR_VERSION, asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _std(name: str, shape: tuple[int, ...]) -> float:
    """Standard deviation for a weight matrix [fan_out, fan_in], by its role."""
    if "embed_tokens" in name:
        return 1.0
    fan_in = shape[-1]
    gain = {"q_proj": 1.6, "k_proj": 1.6, "o_proj": 2.0, "lm_head": 4.0}
    role = next((r for r in gain if r in name), "")
    return gain.get(role, 1.0) / math.sqrt(fan_in)


QK_NORM = 1.6
"""Weight of the norms of queries and keys, where a model has them: it stands for their projections' gain."""


def _fill(model: Any, seed: int) -> None:
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(QK_NORM if "q_norm" in name or "k_norm" in name else 1.0)
                continue
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.copy_(values * _std(name, tuple(parameter.shape)))


def _config(spec: CheckpointSpec) -> Any:
    from transformers import Exaone4Config, Llama4TextConfig

    common: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position_embeddings,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if letters.SLIDING in spec.layers:
        return Exaone4Config(**common, sliding_window=spec.chunk, layer_types=_layer_types(spec.layers))
    sizes = _chunk_sizes(spec)
    return Llama4TextConfig(
        **common,
        intermediate_size_mlp=spec.intermediate_size,
        num_local_experts=2,
        num_experts_per_tok=1,
        moe_layers=[],
        interleave_moe_layer_step=len(spec.layers) + 1,
        attention_chunk_size=spec.chunk,
        no_rope_layers=[1 if size else 0 for size in sizes],
        use_qk_norm=False,
        # From 8,192 tokens on it matters, and vLLM follows the length of the context (over 32,768) in place of this value.
        attn_temperature_tuning=False,
        **({chunk_sizes.ATTRIBUTE: sizes} if _differs_by_layer(spec) else {}),
    )


def _layer_types(layers: str) -> list[str]:
    """transformers' names of the layers' kinds."""
    names = {"f": "full_attention", letters.SLIDING: "sliding_attention"}
    return [names.get(letter, "chunked_attention") for letter in layers]


def _chunk_sizes(spec: CheckpointSpec) -> list[int]:
    """Per layer its chunk in tokens, 0 where it has none."""
    return [letters.chunk_of(letter, spec.chunk) or 0 for letter in spec.layers]


def _differs_by_layer(spec: CheckpointSpec) -> bool:
    """Whether a layer has another chunk size than the config's one for all."""
    return any(size not in (0, spec.chunk) for size in _chunk_sizes(spec))


def _model_class(spec: CheckpointSpec) -> Any:
    from transformers import Exaone4ForCausalLM, Llama4ForCausalLM

    return Exaone4ForCausalLM if letters.SLIDING in spec.layers else Llama4ForCausalLM


def ensure(params: Mapping[str, Any], cache: str | os.PathLike[str]) -> str:
    """Path of the checkpoint with ``params`` (fields of :class:`CheckpointSpec`), made if it is not in ``cache``.

    Raises:
        TypeError: an unknown parameter.
        ValueError: ``layers`` are of no known kind, or of two architectures.
    """
    spec = CheckpointSpec(**params)
    if not re.fullmatch(letters.PATTERN, spec.layers):
        raise ValueError(f"layers must be of 'c', 'd' and 'f', or of 's' and 'f', not {spec.layers!r}")
    target = Path(cache) / spec.key
    if (target / MARKER).exists():
        return str(target)
    Path(cache).mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".making-", dir=cache))
    try:
        _save(spec, work)
        try:
            work.rename(target)
        except OSError:
            # Another process made the same checkpoint first; the bytes are the same.
            if not (target / MARKER).exists():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return str(target)


def _save(spec: CheckpointSpec, folder: Path) -> None:
    import torch

    model = _model_class(spec)(_config(spec)).to(torch.float32)
    assert list(model.config.layer_types) == _layer_types(spec.layers), model.config.layer_types
    _fill(model, spec.seed)
    model.save_pretrained(str(folder))
    weights = hashlib.sha256()
    for part in sorted(folder.glob("*.safetensors")):
        weights.update(part.read_bytes())
    marker = {"spec": asdict(spec), "generator": GENERATOR_VERSION, "weights_sha256": weights.hexdigest()}
    (folder / MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")


def weights_sha256(folder: str | os.PathLike[str]) -> str:
    """The weights' digest that was recorded when the checkpoint was made."""
    return str(_marker(folder)["weights_sha256"])


def _marker(folder: str | os.PathLike[str]) -> dict[str, Any]:
    return dict(json.loads((Path(folder) / MARKER).read_text(encoding="utf-8")))


def reference(folder: str, prompt: list[int], new_tokens: int) -> tuple[list[int], list[list[float]]]:
    """What :func:`reference_logprobs` answers, computed once and kept beside the checkpoint: it is the same for all arms."""
    import torch
    import transformers

    asked = json.dumps([prompt, new_tokens, torch.__version__, transformers.__version__])
    kept = Path(folder) / f"reference-{hashlib.sha256(asked.encode()).hexdigest()[:16]}.json"
    if kept.exists():
        told = json.loads(kept.read_text(encoding="utf-8"))
        return told["token_ids"], told["logprobs"]
    tokens, rows = reference_logprobs(folder, prompt, new_tokens)
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".making-", delete=False, encoding="utf-8") as work:
        json.dump({"token_ids": tokens, "logprobs": rows}, work)
    Path(work.name).rename(kept)  # whole, or not at all: other cells look for it meanwhile
    return tokens, rows


def reference_logprobs(folder: str, prompt: list[int], new_tokens: int) -> tuple[list[int], list[list[float]]]:
    """transformers' own answer on a checkpoint: greedy tokens, and full-vocabulary logprobs [new_tokens, vocab] in nats."""
    import torch

    spec = CheckpointSpec(**_marker(folder)["spec"])
    attention = "eager" if len(prompt) <= LONG_PROMPT else "sdpa"
    model = _model_class(spec).from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()
    if _differs_by_layer(spec):
        chunk_sizes.give_transformers(model, _chunk_sizes(spec))
    ids, rows = list(prompt), []
    with torch.no_grad():
        for _ in range(new_tokens):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            rows.append(torch.log_softmax(logits.double(), dim=-1).tolist())
            ids.append(int(logits.argmax()))
    return ids[len(prompt) :], rows
