"""A rule-based state machine (hypothesis) over the scheduler rig, its totals, and the smallest program that breaks a rule.

Hypothesis is not in a pin's environment: its folder is put on the path of the process that runs this (:mod:`kvmatrix.tools`).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvmatrix import programs
from kvmatrix.oracle import chunked
from kvmatrix.programs import Program
from kvmatrix.rig_factory import BUDGET, Factory, quiet
from kvmatrix.rig_invariants import Violation
from kvmatrix.scheduler_rig import CHOICES, Rig

SHRINK_TRIES = 150
EVERYTHING = 2**CHOICES - 1
COUNTS = (
    "programs",
    "requests",
    "steps",
    "lookups",
    "retries",  # lookups of a request that was looked up before: it got no blocks, or was preempted
    "mixed",  # lookups behind a device prefix where the CPU tier could serve more
    "misaligned",  # of these, where the prefix ends inside a chunk
    "misaligned_served",
    "loads",
    "stores",
    "evictions",
    "preemptions",
    "aborts",
    "aborts_loading",
    "device_resets",
    "cpu_resets",
)


PROMPT = st.tuples(
    st.sampled_from(programs.BRANCHES),
    st.sampled_from(programs.CUTS),
    st.sampled_from(programs.LENGTHS),
    st.sampled_from(programs.ANSWERS),
)


class Search:
    """What one machine's programs came to."""

    def __init__(self, factory: Factory) -> None:
        self.factory = factory
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self.found: tuple[Violation, Program] | None = None

    def replay(self, program: Program, counts: Counter[str] | None = None) -> Violation | None:
        """Run a program from its beginning to its end; what it violates."""
        rig = Rig(self.factory, Counter() if counts is None else counts)
        try:
            for name, *numbers in program:
                rig.apply(str(name), *map(int, numbers))
            rig.finish()
        except Violation as violation:
            return violation
        return None

    def smallest(self) -> tuple[Violation, Program]:
        """The program that was found, made small, and what it violates."""
        assert self.found is not None
        violation, program = self.found

        def fails(candidate: Program) -> bool:
            seen = self.replay(candidate)
            return seen is not None and seen.invariant == violation.invariant

        program = programs.shrink(program, fails, SHRINK_TRIES)
        return self.replay(program) or violation, program


class Offload(RuleBasedStateMachine):
    """The state machine; a subclass says which search its programs belong to."""

    search: ClassVar[Search]

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(self.search.factory, self.search.counts)
        self.broken = False
        self.search.counts["programs"] += 1

    def do(self, name: str, *numbers: int) -> None:
        with self._noted():
            self.rig.apply(name, *numbers)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except Violation as violation:
            self.broken = True
            self.search.found = violation, list(self.rig.program)
            raise

    @initialize(spare=st.sampled_from(programs.SPARE_BLOCKS), cpu=st.sampled_from(programs.CPU_BLOCKS))
    def pools(self, spare: int, cpu: int) -> None:
        self.do("pools", spare, cpu)

    @rule(prompt=PROMPT)
    def add(self, prompt: tuple[int, int, int, int]) -> None:
        self.do("add", *prompt)

    @rule(prompt=PROMPT, choice=st.integers(0, EVERYTHING))
    def crowd(self, prompt: tuple[int, int, int, int], choice: int) -> None:
        """More at once than there is room for: they wait, are tried again, and preempt each other."""
        branch, cut, _, answer = prompt
        self.do("add", *prompt)
        for other in (1 - branch, branch):
            self.do("add", other, cut, programs.LENGTHS[-1], answer)
        self.do("step", BUDGET, choice)

    @rule(prompt=PROMPT)
    def serve(self, prompt: tuple[int, int, int, int]) -> None:
        """A request, and the steps that it takes with nothing else to do."""
        self.do("add", *prompt)
        self.run(8)

    @rule(prompt=PROMPT, head=st.sampled_from(programs.HEADS))
    def revisit(self, prompt: tuple[int, int, int, int], head: int) -> None:
        """A prompt whose first tokens alone came back to the device since it was served: left to chance this is rare."""
        branch, cut, _, _ = prompt
        self.serve(prompt)
        self.do("reset-device")
        self.serve((branch, cut, head, 1))
        self.do("add", *prompt)

    @rule(steps=st.integers(1, 8))
    def run(self, steps: int) -> None:
        """Steps in which every copy is done at once."""
        for _ in range(steps):
            self.do("step", BUDGET, EVERYTHING)

    @rule(budget=st.sampled_from(programs.BUDGETS), choice=st.integers(0, EVERYTHING))
    def step(self, budget: int, choice: int) -> None:
        """A step that reports some copies, late and out of order, and computes fewer tokens than there are."""
        self.do("step", budget, choice)

    @rule(which=st.integers(0, CHOICES - 1))
    def copy(self, which: int) -> None:
        self.do("copy", which)

    @rule(which=st.integers(0, 5), abort=st.booleans(), choice=st.sampled_from([0, 0, 1, EVERYTHING]))
    def interrupt(self, which: int, abort: bool, choice: int) -> None:
        """A step, most often with its copies held back, and then the end or the preemption of a request."""
        self.do("step", BUDGET, choice)
        if abort:
            self.do("abort", which)
        else:
            self.do("preempt")

    @rule(tier=st.sampled_from(["device", "device", "cpu"]))
    def reset(self, tier: str) -> None:
        self.do(f"reset-{tier}")

    def teardown(self) -> None:
        if not self.broken:
            with self._noted():
                self.rig.finish()


def run(chunks: Sequence[int], lazy: bool, programs_: int, steps: int, seed_: int) -> dict[str, Any]:
    """Run so many programs of at most so many rules; the same seed gives the same ones.

    Answers with :data:`COUNTS`, ``seconds``, and, where an invariant is broken, ``violation`` (what, of the smallest program)
    and ``program`` (that one, as :func:`kvmatrix.programs.text` writes it). The whole program is printed.

    Raises:
        Unsupported: this release's scheduler cannot be built for it.
    """
    started = time.perf_counter()
    with quiet():
        search = Search(Factory([*map(chunked, chunks)], lazy))
        _generate(search, programs_, steps, seed_)
        answer: dict[str, Any] = {name: search.counts[name] for name in COUNTS} | {"violation": "", "program": ""}
        if search.found is not None:
            print("found:", json.dumps(search.found[1]))
            violation, program = search.smallest()
            print("smallest:", json.dumps(program), violation)
            answer |= {"violation": str(violation), "program": programs.text(program)}
    return answer | {"seconds": round(time.perf_counter() - started, 3)}


def _generate(search: Search, programs_: int, steps: int, seed_: int) -> None:
    """Run programs until one breaks an invariant or there are no more."""
    made = seed(seed_)(type("Offload", (Offload,), {"search": search}))
    chosen = settings(
        max_examples=programs_,
        stateful_step_count=steps,
        database=None,
        deadline=None,
        phases=(Phase.generate,),  # hypothesis has no bound for shrinking that is not a time: see `programs.shrink`
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
    )
    with contextlib.suppress(Violation):
        run_state_machine_as_test(made, settings=chosen)  # type: ignore[no-untyped-call]
