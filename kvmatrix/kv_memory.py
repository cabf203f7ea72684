"""What the blocks of both tiers hold, as tags in place of numbers, and the copies between them.

vLLM's scheduler moves block ids; whether the right KV is behind an id is seen only where KV is kept. Here each slot of a block
holds the tag of the token whose KV it would hold: a layer's KV at a position follows from all tokens up to it, so a tag is the
KV group and a digest of that prefix. A block that was swapped, shifted, never loaded or overwritten has other tags than
attention expects. No call into vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Tag = tuple[int, int]
"""KV group, digest of the tokens up to and with the slot's own."""
Content = list[Tag | None]
"""A block's slots; None: nothing that may be relied on."""
Kind = Literal["load", "store"]


def digests(tokens: Sequence[int], known: list[int]) -> list[int]:
    """Extend ``known``, the digests of a sequence's first tokens, to all of ``tokens``; the same list comes back."""
    value = known[-1] if known else 0
    for token in tokens[len(known) :]:
        value = hash((value, token))
        known.append(value)
    return known


class Tier:
    """The blocks of one tier.

    Args:
        blocks: how many there are; ids count from 0.
        size: slots (tokens) of a block.
    """

    def __init__(self, blocks: int, size: int) -> None:
        self.size = size
        self.blocks: list[Content] = [[None] * size for _ in range(blocks)]

    def clear(self, ids: Iterable[int]) -> None:
        """Forget blocks: their new owner must not rely on what an earlier one left there, though a device would keep it."""
        for block in ids:
            self.blocks[block] = [None] * self.size

    def write(self, table: Sequence[int], group: int, prefix: Sequence[int], start: int, end: int) -> None:
        """Write the KV of positions [start, end) of a request through its block table; ``prefix``: its digests."""
        for position in range(start, end):
            self.blocks[table[position // self.size]][position % self.size] = (group, prefix[position])

    def first_wrong(self, table: Sequence[int], group: int, prefix: Sequence[int], start: int, end: int) -> int | None:
        """The first position of [start, end) whose KV is not behind the block table; None when all of it is."""
        for position in range(start, end):
            index = position // self.size
            if index >= len(table) or self.blocks[table[index]][position % self.size] != (group, prefix[position]):
                return position
        return None


def content(group: int, prefix: Sequence[int], index: int, size: int) -> Content:
    """What the whole block ``index`` of a request must hold in ``group``."""
    return [(group, digest) for digest in prefix[index * size : (index + 1) * size]]


@dataclass
class Job:
    """One event's copies, of blocks ``sources`` to blocks ``targets`` of the other tier."""

    kind: Kind
    event: int
    sources: list[int]
    targets: list[int]
    ran: bool = False


@dataclass
class Copies:
    """Copies that were issued and not yet reported: any of them may run at any time, and be reported at any later one."""

    device: Tier
    cpu: Tier
    jobs: list[Job] = field(default_factory=list)

    def run(self, job: Job) -> None:
        """Copy now what is there now; once."""
        if job.ran:
            return
        source, target = (self.cpu, self.device) if job.kind == "load" else (self.device, self.cpu)
        taken = [list(source.blocks[block]) for block in job.sources]
        for block, held in zip(job.targets, taken, strict=True):
            target.blocks[block] = held
        job.ran = True

    def run_all(self) -> None:
        for job in self.jobs:
            self.run(job)

    def report(self, chosen: Sequence[bool]) -> list[Job]:
        """Run the chosen jobs, by their place among those pending, and take them off."""
        done = [job for job, take in zip(self.jobs, chosen, strict=True) if take]
        for job in done:
            self.run(job)
        self.jobs = [job for job in self.jobs if job not in done]
        return done

    def pinned(self, tier: Literal["device", "cpu"]) -> list[int]:
        """Blocks of a tier that a pending copy reads or writes, one entry for each time."""
        reads = "store" if tier == "device" else "load"
        return [block for job in self.jobs for block in (job.sources if job.kind == reads else job.targets)]
