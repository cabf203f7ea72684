"""Which blocks attention needs, from the definition of the attention kinds alone (no call into vLLM).

Positions are absolute token indices of a prompt. A hit that ends at ``end`` means: tokens [0, end) will not be computed,
token ``end`` is the next one computed. Full attention lets it (and every later token) see all of [0, end); chunked-local
attention with chunk C lets a token see only its own chunk [t // C * C, t].
"""

from __future__ import annotations

import math
from collections.abc import Sequence


class Window(int):
    """A sliding window in tokens, in place of a chunk: a token sees that many, itself among them."""

    def __repr__(self) -> str:
        return f"window {int(self)}"


def first_needed_token(end: int, chunk: int | None) -> int:
    """First cached token that the token at ``end`` or any later one can attend to; ``end`` itself when there is none.

    ``chunk`` is the group's ``attention_chunk_size`` in tokens, None for full attention, a :class:`Window` for a sliding one.
    """
    if isinstance(chunk, Window):
        return max(0, end - chunk + 1)
    return 0 if chunk is None else end // chunk * chunk


def needed_blocks(end: int, block: int, chunk: int | None) -> range:
    """Indices of the ``block``-token blocks that must hold real KV for a hit that ends at ``end``.

    Raises:
        ValueError: ``end`` is not a multiple of ``block``.
    """
    if end % block:
        raise ValueError(f"a hit ends on a block boundary, {end} is not a multiple of {block}")
    return range(first_needed_token(end, chunk) // block, end // block)


def missing_blocks(
    prefix: int, hit: int, block: int, chunk: int | None, loaded: Sequence[bool], window_held: bool = True
) -> list[int]:
    """Needed blocks without real KV, for a device prefix of ``prefix`` tokens and a claimed external hit of ``hit``.

    ``loaded[i]`` says whether block ``prefix // block + i`` is loaded from the CPU tier. With ``window_held`` the device
    holds every needed block before the prefix's end. An empty answer means that the claim is sound for this group.
    """
    if hit == 0:
        return []
    first = prefix // block
    missing = []
    for index in needed_blocks(prefix + hit, block, chunk):
        offset = index - first
        present = window_held if offset < 0 else offset < len(loaded) and loaded[offset]
        if not present:
            missing.append(index)
    return missing


def longest_sound_hit(prefix: int, prompt: int, block: int, groups: Sequence[tuple[int | None, Sequence[bool]]]) -> int:
    """The ideal: tokens beyond ``prefix`` that the CPU tier can soundly serve to a prompt of ``prompt`` tokens.

    ``groups``: per KV group its chunk (None: full attention) and, per block of the prompt, whether the CPU tier holds it.
    At least the last prompt token is always computed.
    """
    for end in range((prompt - 1) // block * block, prefix, -block):
        if all(resident[i] for chunk, resident in groups for i in needed_blocks(end, block, chunk) if i >= prefix // block):
            return end - prefix
    return 0


def boundary_resident(prefix: int, block: int, chunks: Sequence[int | None], resident: Sequence[Sequence[bool]]) -> bool:
    """Whether the CPU tier holds every group's blocks from the last common chunk boundary to the prefix's end.

    ``chunks`` has each group's chunk (None: full attention), ``resident`` is ``[group][block of the prompt]``.
    """
    period = math.lcm(block, *(c for c in chunks if c))
    start = prefix // period * period
    return all(all(held[start // block : prefix // block]) for held in resident)


def mixed_hit_class(chunk: int, prefix: int, hit: int) -> str:
    """Class of a mixed hit whose whole suffix is resident: aligned, corrupt, safe-short or safe-crossing.

    ``hit`` is the external hit in tokens. Closed form of the suffix-only lookup's fault: it places the chunk boundary at a
    multiple of the chunk counted from ``prefix`` instead of from 0.
    """
    r = prefix % chunk
    if r == 0:
        return "aligned"
    if hit < chunk:
        return "safe-short"
    return "corrupt" if r + hit % chunk < chunk else "safe-crossing"
