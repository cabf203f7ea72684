"""Public reports that take whole requests: programs on vLLM's real ``Scheduler``, over a worker that keeps tags in place of KV.

What must hold after every operation is in :mod:`kvmatrix.rig_invariants`: each token finds its own KV, each reference count
adds up, a block is free or in use but not both, and nothing is left in the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvmatrix.oracle import chunked, sliding
from kvmatrix.rig_factory import BLOCK, BUDGET, LONGEST_ANSWER, LONGEST_PROMPT, Factory
from kvmatrix.rig_invariants import Violation
from kvmatrix.scheduler_rig import CHOICES, Operation, Rig, prompt_tokens

if TYPE_CHECKING:
    from kvmatrix.public_cases import Found

EVERYTHING = 2**CHOICES - 1
"""A step's choice that reports every copy; 0 reports none."""
PROMPT = 33
"""Tokens: eight whole blocks and one more."""
AT_MOST = 40
"""Steps in which one request must be done."""


def _steps(count: int, choice: int) -> list[Operation]:
    return [("step", BUDGET, choice)] * count


def _run(found: Found, factory: Factory, pools: tuple[int, int], program: Sequence[Operation]) -> Counter[str]:
    """Run a program to its end on pools of these sizes; what it violates is a fault. Its counts come back."""
    rig = Rig(factory, Counter())
    fault = ""
    try:
        for name, *numbers in [("pools", *pools), *program]:
            rig.apply(str(name), *map(int, numbers))
        rig.finish()
    except Violation as violation:
        fault = f"{violation}, groups {rig.groups}, {pools[0]} spare device blocks, {pools[1]} CPU blocks"
    found.ask(fault)
    return rig.counts


def _check_reached(found: Found, counts: Counter[str], needed: Sequence[str]) -> None:
    """A set of programs that did not come to what it is about says nothing."""
    if lacking := [name for name in needed if not counts[name]]:
        found.ask(f"vacuous: no {', '.join(lacking)} in {found.asked} programs")


def second_long_prompt(found: Found) -> None:
    """#42085: after one long request was served, the next one exhausts the device's blocks: an assertion in the allocator.

    Three prompts of 44 tokens with nothing in common, one after the other, on a device pool just large enough for one, with 8,
    30 and 100 CPU blocks. Beside full attention there are sliding windows of 8, of 12 and 4, or a chunk of 8. Stores are done
    at once, late, or held back while the next request needs their blocks. All are served, and every block is given back.
    """
    counts: Counter[str] = Counter()
    for local in ([sliding(8)], [sliding(12), sliding(4)], [chunked(8)]):
        factory = Factory(local, lazy=False)
        for cpu in (8, 30, 100):
            for choice in (EVERYTHING, 1, 0):
                program: list[Operation] = []
                for branch in range(3):
                    program += [("add", branch, 0, LONGEST_PROMPT, LONGEST_ANSWER), *_steps(12, choice)]
                counts += _run(found, factory, (0, cpu), program)
    _check_reached(found, counts, ("stores", "evictions"))


def double_free(found: Found) -> None:
    """#42571, #42615: a block is freed twice, with eager stores and a sliding window, whose blocks leave while it is stored.

    Two prompts of 44 tokens that share 4, three times over, on a small device pool, with preemptions and copies held back;
    windows of 8, of 12 and 4, and of 6, which is no number of blocks. Reference counts add up after every step.
    """
    counts: Counter[str] = Counter()
    for local in ([sliding(8)], [sliding(12), sliding(4)], [sliding(6)]):
        factory = Factory(local, lazy=False)
        for cpu in (8, 60):
            for choice in (EVERYTHING, 0):
                program: list[Operation] = []
                for _ in range(3):
                    for branch in (0, 1):
                        program += [("add", branch, 4, LONGEST_PROMPT, LONGEST_ANSWER), *_steps(4, choice)]
                    program += [*_steps(3, 1), ("preempt",), *_steps(2, 0), *_steps(3, EVERYTHING)]
                counts += _run(found, factory, (8, cpu), program)
    _check_reached(found, counts, ("stores", "loads", "preemptions", "evictions"))


# --- one request, watched ---------------------------------------------------------------------------------------------


def _served(rig: Rig) -> int:
    """Tokens that a fresh request of the prompt would be served from the CPU tier, with nothing on the device."""
    request = rig.factory.request(f"asked{rig.counts['lookups']}", prompt_tokens(0, 0, PROMPT), 1)
    answer, _ = rig.manager.get_num_new_matched_tokens(request, 0)
    rig.manager.request_finished(request, [])
    return int(answer or 0)


def _after_one_request() -> Rig:
    """A scheduler that has served the prompt once, and whose stores are done."""
    rig = Rig(Factory([chunked(8)], lazy=False), Counter())
    rig.apply("add", 0, 0, PROMPT, 2)
    for _ in range(AT_MOST):
        if not rig.live() and not rig.copies.jobs and not rig.manager.has_pending_stores():
            break
        rig.apply("step", BUDGET, EVERYTHING)
    return rig


def _reset(found: Found, **options: bool) -> None:
    rig = _after_one_request()
    whole = (PROMPT - 1) // BLOCK * BLOCK
    before = _served(rig)
    found.ask("" if before == whole else f"lost-reuse: {before} of {whole} stored tokens are served before the reset")
    reported = rig.scheduler.reset_prefix_cache(**options)
    found.ask("" if reported else "refused-reset: the reset reports failure with nothing in flight")
    served = _served(rig)
    if reported and served:
        found.ask(f"still-served: the reset reports success, and {served} of {whole} tokens come from the CPU tier")


def reset(found: Found) -> None:
    """#57727: the reset of the prefix cache reports success while the CPU tier still serves the prompt.

    A prompt of 33 tokens in blocks of 4 is served and stored, nothing is in flight, and the cache is reset as it is when
    nothing else is asked for. A reset that reports success leaves nothing to be served.
    """
    _reset(found)


def reset_with_connector(found: Found) -> None:
    """#57727, its other half: the same with ``reset_connector``, which is there for it."""
    _reset(found, reset_connector=True)


def store_order(found: Found) -> None:
    """#45704: a store is read before its KV is computed, or served before it is copied.

    A prompt of 33 tokens in blocks of 4, computed over three steps with every copy held back. Stores are issued for blocks that
    are computed; a lookup sees nothing of them before they are reported, though they ran; then it is served 32 tokens.
    """
    rig = _Observed(Factory([chunked(8)], lazy=False), Counter())
    rig.apply("add", 0, 0, PROMPT, 2)
    issued: set[int] = set()
    for _ in range(AT_MOST):
        rig.apply("step", BUDGET, 0)
        for fault in _issue_faults(rig, issued):
            found.ask(fault)
        found.ask(_early(rig, "is issued"))
        if not rig.live() and issued:
            break
    if not issued:
        found.ask("never-stored: the request is done and no store was issued")
    rig.copies.run_all()
    found.ask(_early(rig, "ran and is not reported"))
    rig.finish()
    whole, served = (PROMPT - 1) // BLOCK * BLOCK, _served(rig)
    found.ask("" if served == whole else f"lost-reuse: {served} of {whole} stored tokens are served once all is reported")


class _Observed(Rig):
    """Keeps what the device held before a step computed anything: all that a store of that step may read."""

    def _compute(self, scheduled: dict[str, int]) -> dict[str, list[int]]:
        self.before = [list(block) for block in self.device.blocks]
        return super()._compute(scheduled)


def _early(rig: Rig, state: str) -> str:
    served = _served(rig)
    return f"early: {served} tokens are served whose store {state}" if served else ""


def _issue_faults(rig: _Observed, issued: set[int]) -> Iterator[str]:
    """Of each store that the last step issued: whether the device held what it is to copy. ``issued``: events before it."""
    for job in rig.copies.jobs:
        if job.event in issued or job.kind != "store":
            continue
        issued.add(job.event)
        blocks: list[Any] = [rig.device_pool.blocks[source] for source in job.sources]
        early = sum(rig.before[b.block_id] != rig.hashed.get(b.block_hash) for b in blocks)
        yield f"early: store {job.event} reads {early} of {len(blocks)} blocks that are not computed" if early else ""
