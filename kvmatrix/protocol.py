"""What a lookup owes to the calls around it, whatever it answers: tried over every small geometry of some shapes.

Soundness of the answers is judged elsewhere (:mod:`kvmatrix.reuse`). Here it is what is held while a request waits, what the
load then copies and from where, and that nothing is left when a request is retried, cut short, ended, or the cache reset.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from kvmatrix.reuse import Resident, filled_tiers, place, residencies
from kvmatrix.scheduler_harness import Loads, SchedulerUnderTest, Unsupported

MANAGER = "manager.py"


@dataclass
class Tried:
    """Outcome of one check over all shapes."""

    asked: int = 0
    """Geometries in which the check had something to ask."""
    faults: int = 0
    first_fault: str = ""
    """Of the first of them: a code, a colon, what is wrong, and where."""


class Asker:
    """One scheduler whose CPU tier holds the prompt's blocks as ``resident`` says."""

    def __init__(self, sut: SchedulerUnderTest, prompt: int, resident: Resident) -> None:
        self.sut, self.prompt, self.resident = sut, prompt, resident

    @property
    def prefixes(self) -> range:
        """Every device prefix that leaves at least one token to compute, none included; in tokens."""
        return range(0, (self.prompt - 1) // self.sut.block * self.sut.block + 1, self.sut.block)

    def request(self) -> Any:
        return self.sut.request(self.prompt)

    def lookup(self, request: Any, prefix: int) -> tuple[int, Loads, str]:
        """Tokens served, what is planned for them, and the first thing that is wrong."""
        external, fault = self.sut.checked_lookup(request, prefix)
        planned = self.sut.planned(request, prefix, external) if self.sut.pins else Loads()
        return external, planned, fault or planned.fault

    def load(self, request: Any, prefix: int, external: int, planned: Loads) -> str:
        """Load ``external`` tokens of a hit, all or the leading ones; what is wrong with it."""
        done = self.sut.load(request, prefix, external)
        if done.fault:
            return done.fault
        count = external // self.sut.block
        if self.sut.pins and external and [g[:count] for g in planned.loaded] != done.loaded:
            return "misplaced: another set of blocks is loaded than was pinned"
        return ""


Check = Callable[[Asker, int], Iterator[str]]
"""For one device prefix: what was wrong with each thing that was asked, an empty text where nothing was."""


def _load(asker: Asker, prefix: int) -> Iterator[str]:
    """The hit is loaded whole: each block from its own copy, all pins given back."""
    request = asker.request()
    external, planned, fault = asker.lookup(request, prefix)
    yield fault or asker.load(request, prefix, external, planned) or asker.sut.left_behind()


def _fewer(asker: Asker, prefix: int) -> Iterator[str]:
    """vLLM's scheduler takes fewer tokens than were offered: the leading blocks are loaded, the others' pins given back."""
    if not asker.sut.pins:
        return  # such a release looks up once more, and insists on what it was asked to load
    for cut in (lambda offered: offered - asker.sut.block, lambda offered: asker.sut.block):
        request = asker.request()
        external, planned, fault = asker.lookup(request, prefix)
        if not fault and external <= asker.sut.block:
            asker.sut.drop_hit(request)
            return
        yield fault or asker.load(request, prefix, cut(external), planned) or asker.sut.left_behind()


def _retried(asker: Asker, prefix: int) -> Iterator[str]:
    """A request that got no blocks asks again, meanwhile with another device prefix: the first hit's pins are gone."""
    for other in {0, prefix, asker.prefixes[-1]}:
        request = asker.request()
        _, _, fault = asker.lookup(request, prefix)
        external, planned, second = asker.lookup(request, other)
        yield fault or second or asker.load(request, other, external, planned) or asker.sut.left_behind()


def _finished(asker: Asker, prefix: int) -> Iterator[str]:
    """The request is cancelled before it loads."""
    request = asker.request()
    _, _, fault = asker.lookup(request, prefix)
    asker.sut.scheduler.request_finished(request, [])
    yield fault or asker.sut.left_behind()


def _two(asker: Asker, prefix: int) -> Iterator[str]:
    """Two requests wait at once: the first one's load and end leave the second one's hit alone."""
    if not asker.sut.pins:
        return
    first, second = asker.request(), asker.request()
    external, planned, fault = asker.lookup(first, prefix)
    free = asker.sut.cpu_pool.get_num_free_blocks()
    other, wrong = asker.sut.checked_lookup(second, prefix)
    if not (fault or wrong) and other != external:
        fault = f"unstable: two requests with one prompt are served {external} and {other} tokens"
    if not fault and asker.sut.cpu_pool.get_num_free_blocks() != free:
        fault = "mispinned: the same hit for a second request takes other CPU blocks"
    fault = fault or wrong or asker.load(first, prefix, external, planned)
    again = asker.sut.planned(second, prefix, other)
    yield fault or again.fault or asker.load(second, prefix, other, again) or asker.sut.left_behind()


def _reset(asker: Asker, prefix: int) -> Iterator[str]:
    """The cache is reset while a request waits: nothing stays pinned, and nothing is served from an empty tier."""
    scheduler = asker.sut.scheduler
    if not release_has("_pending_cpu_hits.clear()"):
        return  # before vLLM 0.30.0 a reset forgets what is pinned for requests that wait
    request = asker.request()
    _, _, fault = asker.lookup(request, prefix)
    emptied = scheduler.reset()
    yield fault or asker.sut.left_behind() or ("" if emptied else "leaked: the CPU tier refuses to be reset")
    served, fault = asker.sut.checked_lookup(request, prefix)
    asker.sut.drop_hit(request)
    yield fault or (f"unsound: {served} tokens are served from an empty CPU tier" if served else asker.sut.left_behind())
    asker.sut.refill_cpu(request, asker.resident)
    served, planned, fault = asker.lookup(request, prefix)
    yield fault or asker.load(request, prefix, served, planned) or asker.sut.left_behind()


def _resumed(asker: Asker, prefix: int) -> Iterator[str]:
    """A request that was preempted after it had generated tokens is served what a prompt of all its tokens would be."""
    if asker.prompt < 2:
        return
    fresh, resumed = asker.request(), asker.sut.request(asker.prompt - 1)
    resumed.append_output_token_ids([asker.prompt - 1])  # the very token that the longer prompt has there
    expected, _, fault = asker.lookup(fresh, prefix)
    asker.sut.drop_hit(fresh)
    served, planned, wrong = asker.lookup(resumed, prefix)
    if not (fault or wrong) and served != expected:
        fault = f"lost-reuse: a resumed request is served {served} tokens, a fresh one of its length {expected}"
    yield fault or wrong or asker.load(resumed, prefix, served, planned) or asker.sut.left_behind()


def _kept_small(asker: Asker, prefix: int) -> Iterator[str]:
    """Lookups of further requests leave no further entries in the CPU tier's index: nothing would ever remove them."""
    sizes = []
    for _ in range(3):
        request = asker.request()
        _, _, fault = asker.lookup(request, prefix)
        asker.sut.drop_hit(request)
        if fault:
            yield fault
        sizes.append(len(asker.sut.cpu_pool.cached_block_hash_to_block))
    yield f"leaked: the CPU tier's index grows from lookup to lookup, {sizes} entries" if sizes[0] != sizes[-1] else ""


def _skipped(asker: Asker, prefix: int) -> Iterator[str]:
    """A request that must not read the cache, as for prompt logprobs: nothing is served, an earlier hit is given back."""
    if not release_has("skip_reading_prefix_cache"):
        return
    request = asker.request()
    _, _, fault = asker.lookup(request, prefix)
    request.skip_reading_prefix_cache = True
    served, _, wrong = asker.lookup(request, prefix)
    yield fault or wrong or (f"contract: {served} tokens for a request that reads no cache" if served else "")
    asker.sut.drop_hit(request)


def _unaligned(asker: Asker, prefix: int) -> Iterator[str]:
    """A device prefix that ends inside a block, on a hash's boundary: transfers are whole blocks, so nothing is served."""
    block, hash_block = asker.sut.block, asker.sut.hash_block
    if not release_has("num_computed_tokens % self.block_size"):
        return
    for odd in range(prefix + hash_block, min(prefix + block, asker.prompt), hash_block):
        request = asker.request()
        _, _, fault = asker.lookup(request, prefix)
        answer, is_async = asker.sut.ask(request, odd)
        if not fault and (answer, is_async) != (0, False):
            fault = f"contract: answers ({answer}, {is_async}) where the device prefix ends inside a block, at {odd}"
        asker.sut.drop_hit(request)
        yield fault or asker.sut.left_behind()


CHECKS: dict[str, Check] = {
    "load": _load,
    "fewer-accepted": _fewer,
    "retried": _retried,
    "finished": _finished,
    "two-requests": _two,
    "reset": _reset,
    "resumed": _resumed,
    "index-size": _kept_small,
    "skips-cache": _skipped,
    "inside-a-block": _unaligned,
}


@cache
def release_has(words: str) -> bool:
    """Whether the installed lookup, not the arm's, has ``words`` in its source: what it never did is asked of no patch."""
    spec = importlib.util.find_spec("vllm.v1.simple_kv_offload")
    folders = spec.submodule_search_locations if spec is not None else None
    return any(words in (Path(f) / MANAGER).read_text(encoding="utf-8") for f in folders or ())


def run(check: str, shapes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Try one of ``CHECKS`` over the geometries of ``shapes`` (see :func:`kvmatrix.reuse.sweep`): the fields of ``Tried``.

    A shape that this release cannot have is left out.

    Raises:
        Unsupported: none of it can be asked of this release.
    """
    tried = Tried()
    for shape in shapes:
        try:
            for sut, requests, resident in filled_tiers(contents, **shape):
                for asker in (Asker(sut, prompt, resident) for prompt in requests):
                    for prefix in asker.prefixes:
                        _try(tried, CHECKS[check], asker, prefix)
        except Unsupported:
            continue
    if not tried.asked:
        raise Unsupported("refused: this release does nothing that could be asked so")
    return asdict(tried)


def contents(groups: int, blocks: int, seed: int) -> Iterator[Resident]:
    """The CPU tier with everything, without its tail, and with one hole in the chunked-local groups."""
    variants = chain(residencies("all", groups, blocks, seed), residencies("tail-gone", groups, blocks, seed))
    yield next(variants)
    yield next(variants)
    yield list(residencies("one-hole", groups, blocks, seed))[2]


def _try(tried: Tried, check: Check, asker: Asker, prefix: int) -> None:
    for fault in check(asker, prefix):
        tried.asked += 1
        if fault:
            tried.faults += 1
            where = f"{place(asker.sut)}, prompt {asker.prompt}, prefix {prefix}"
            tried.first_fault = tried.first_fault or f"{fault}, {where}"
            asker.sut.let_go()
