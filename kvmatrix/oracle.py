"""Which blocks attention needs, from the definition of the attention kinds alone (no call into vLLM).

Positions are absolute token indices of a prompt. A hit that ends at ``end`` means: tokens [0, end) will not be computed,
token ``end`` is the next one computed. What a token t attends to, itself included:

full             all of [0, t]
chunked-local    its own chunk, [t // chunk * chunk, t]
sliding window   the last ``window`` tokens, [t - window + 1, t]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal


@dataclass(frozen=True)
class Attention:
    """How the layers of a KV group attend."""

    kind: Literal["full", "chunked", "sliding"]
    size: int = 0
    """Tokens of a chunk, or of a window, the attending token included; 0 for full attention."""

    @property
    def chunk(self) -> int | None:
        """Tokens of an attention chunk; None for the kinds that have none."""
        return self.size if self.kind == "chunked" else None

    @property
    def window(self) -> int | None:
        """Tokens of a sliding window; None for the kinds that have none."""
        return self.size if self.kind == "sliding" else None

    def first_needed_token(self, end: int) -> int:
        """First token that the token at ``end`` or any later one can attend to; ``end`` itself when all before is out of sight.

        No later token sees further back than the one at ``end``, whatever the kind.
        """
        if self.kind == "full":
            return 0
        return end // self.size * self.size if self.kind == "chunked" else max(0, end - self.size + 1)

    def __str__(self) -> str:
        return {"full": "full attention", "chunked": f"chunk {self.size}", "sliding": f"window {self.size}"}[self.kind]


FULL = Attention("full")


def chunked(size: int) -> Attention:
    """Chunked-local attention with chunks of ``size`` tokens."""
    return Attention("chunked", size)


def sliding(window: int) -> Attention:
    """Attention to the last ``window`` tokens, the attending one included."""
    return Attention("sliding", window)


def of_chunk(chunk: int | None) -> Attention:
    """The group of an ``attention_chunk_size``, which is None for full attention."""
    return FULL if chunk is None else chunked(chunk)


def needed_blocks(end: int, block: int, group: Attention) -> range:
    """Indices of the ``block``-token blocks that must hold real KV for a hit that ends at ``end``.

    Raises:
        ValueError: ``end`` is not a multiple of ``block``.
    """
    if end % block:
        raise ValueError(f"a hit ends on a block boundary, {end} is not a multiple of {block}")
    return range(group.first_needed_token(end) // block, end // block)


def missing_blocks(
    prefix: int, hit: int, block: int, group: Attention, loaded: Sequence[bool], window_held: bool = True
) -> list[int]:
    """Needed blocks without real KV, for a device prefix of ``prefix`` tokens and a claimed external hit of ``hit``.

    ``loaded[i]`` says whether block ``prefix // block + i`` is loaded from the CPU tier. With ``window_held`` the device
    holds every needed block before the prefix's end. An empty answer means that the claim is sound for this group.
    """
    if hit == 0:
        return []
    first = prefix // block
    missing = []
    for index in needed_blocks(prefix + hit, block, group):
        offset = index - first
        present = window_held if offset < 0 else offset < len(loaded) and loaded[offset]
        if not present:
            missing.append(index)
    return missing


def longest_sound_hit(prefix: int, prompt: int, block: int, groups: Sequence[tuple[Attention, Sequence[bool]]]) -> int:
    """The ideal: tokens beyond ``prefix`` that the CPU tier can soundly serve to a prompt of ``prompt`` tokens.

    ``groups``: each KV group and, per block of the prompt, whether the CPU tier holds it. At least the last prompt token is
    always computed.
    """
    for end in range((prompt - 1) // block * block, prefix, -block):
        if all(resident[i] for group, resident in groups for i in needed_blocks(end, block, group) if i >= prefix // block):
            return end - prefix
    return 0


def boundary_resident(prefix: int, block: int, groups: Sequence[Attention], resident: Sequence[Sequence[bool]]) -> bool:
    """Whether the CPU tier holds every group's blocks from the last common chunk boundary to the prefix's end.

    ``resident`` is ``[group][block of the prompt]``.
    """
    start = _boundary_block(prefix // block, block, groups)
    return all(all(held[start : prefix // block]) for held in resident)


def _boundary_block(first: int, block: int, groups: Sequence[Attention]) -> int:
    """Block at the last common boundary of all chunks that lies not behind block ``first``."""
    period = math.lcm(block, *(g.chunk for g in groups if g.chunk)) // block
    return first // period * period


class Needs:
    """What the groups of a model need, looked up by block: the functions above for sweeps of many thousand hits.

    Args:
        block: tokens of a block in every group.
        blocks: the longest prompt, in blocks.
    """

    def __init__(self, block: int, groups: Sequence[Attention], blocks: int) -> None:
        self.block, self.groups = block, groups
        self.firsts = [[g.first_needed_token(end * block) // block for g in groups] for end in range(blocks + 1)]
        """``[end of a hit, in blocks][group]``: its first needed block."""
        self.boundaries = [_boundary_block(first, block, groups) for first in range(blocks + 1)]

    def met(self, first: int, end: int, loaded: Sequence[list[bool]]) -> bool:
        """Whether a hit of the blocks ``first`` to ``end`` is sound where ``loaded[group][i]`` is so of block ``first + i``.

        The device holds what is needed before block ``first``.
        """
        count = end - first
        for needed, flags in zip(self.firsts[end], loaded, strict=True):
            if needed < end and (len(flags) < count or not all(flags[max(0, needed - first) : count])):
                return False
        return True


class Served:
    """What one content of the CPU tier can soundly serve behind each device prefix, in blocks.

    Args:
        resident: ``[group][block]``: does the CPU tier hold it.
    """

    def __init__(self, needs: Needs, resident: Sequence[Sequence[bool]]) -> None:
        self._needs, self._resident = needs, resident
        self._ends: dict[int, list[int]] = {}

    def ends(self, limit: int) -> list[int]:
        """Per device prefix of 0 to ``limit`` blocks, where the longest sound hit of at most ``limit`` blocks ends."""
        if limit not in self._ends:
            self._ends[limit] = [self._end(first, limit) for first in range(limit + 1)]
        return self._ends[limit]

    def _end(self, first: int, limit: int) -> int:
        barriers = self._barriers
        return next((end for end in range(limit, first, -1) if barriers[end] <= first), first)

    @cached_property
    def _barriers(self) -> list[int]:
        """``[end]``: the fewest blocks that the device must hold for a hit that ends there, those that are gone among them."""
        barriers = [0] * (len(self._resident[0]) + 1)
        for group, held in enumerate(self._resident):
            behind_gone = 0
            for end, there in enumerate(held, 1):
                behind_gone = behind_gone if there else end
                if behind_gone > self._needs.firsts[end][group]:
                    barriers[end] = max(barriers[end], behind_gone)
        return barriers

    @cached_property
    def at_boundary(self) -> list[bool]:
        """Per device prefix in blocks: what :func:`boundary_resident` says of it."""
        flags, behind_gone = [True], 0
        for first, there in enumerate(zip(*self._resident, strict=True), 1):
            behind_gone = behind_gone if all(there) else first
            flags.append(behind_gone <= self._needs.boundaries[first])
        return flags


HitClass = Literal["aligned", "corrupt", "safe-short", "safe-crossing"]


def mixed_hit_class(chunk: int, prefix: int, hit: int) -> HitClass:
    """Class of a mixed hit whose whole suffix is resident.

    ``hit`` is the external hit in tokens. Closed form of the suffix-only lookup's fault: it places the chunk boundary at a
    multiple of the chunk counted from ``prefix`` instead of from 0.
    """
    r = prefix % chunk
    if r == 0:
        return "aligned"
    if hit < chunk:
        return "safe-short"
    return "corrupt" if r + hit % chunk < chunk else "safe-crossing"
