"""The tags that stand for KV, the checks on made-up pools, and how programs are drawn and made small; then a real scheduler."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvmatrix import programs, rig_invariants, stateful, tools
from kvmatrix.kv_memory import Copies, Job, Tier, content, digests
from kvmatrix.programs import Program
from kvmatrix.rig_invariants import Violation
from kvmatrix.scheduler_rig import prompt_tokens

SIZE = 4
TABLE = [3, 1, 2]


# --- tags -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def prefix() -> list[int]:
    return digests(range(10), [])


@pytest.fixture
def written(prefix: list[int]) -> Tier:
    """A tier that holds ten tokens of group 0 in the blocks of ``TABLE``."""
    tier = Tier(6, SIZE)
    tier.write(TABLE, 0, prefix, 0, 10)
    return tier


def wrong(tier: Tier, prefix: list[int], table: list[int] = TABLE, group: int = 0, start: int = 0) -> int | None:
    return tier.first_wrong(table, group, prefix, start, 10)


def test_digests_are_of_the_whole_prefix() -> None:
    known = digests([5, 6], [])
    assert digests([5, 6, 7], list(known))[:2] == known
    assert digests([5, 6, 7], list(known)) == digests([5, 6, 7], [])
    assert digests([4, 6], [])[1] != known[1]


def test_what_was_written_is_found(written: Tier, prefix: list[int]) -> None:
    assert wrong(written, prefix) is None
    assert written.blocks[3] == content(0, prefix, 0, SIZE)


@pytest.mark.parametrize(
    ("table", "group", "position"),
    [([1, 3, 2], 0, 0), ([3, 1, 0], 0, 8), ([3, 1], 0, 8), ([1, 2, 3], 0, 0), (TABLE, 1, 0)],
    ids=["swapped", "null", "short", "shifted", "group"],
)
def test_what_is_elsewhere_is_not(written: Tier, prefix: list[int], table: list[int], group: int, position: int) -> None:
    assert wrong(written, prefix, table, group) == position


def test_another_prompt_with_the_same_tokens_at_the_end(written: Tier) -> None:
    assert wrong(written, digests([99, *range(1, 10)], [])) == 0


def test_a_block_that_is_given_out_holds_nothing(written: Tier, prefix: list[int]) -> None:
    written.clear([1])
    assert wrong(written, prefix) == 4
    assert wrong(written, prefix, start=8) is None


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def copies(written: Tier) -> Copies:
    """Two stores and no load, none of which ran."""
    return Copies(written, Tier(6, SIZE), [Job("store", 0, [3], [5]), Job("store", 1, [1, 2], [4, 0])])


def test_a_copy_takes_what_is_there_when_it_runs(copies: Copies, prefix: list[int]) -> None:
    copies.device.clear([3])
    copies.run(copies.jobs[0])
    assert copies.cpu.blocks[5] == [None] * SIZE
    copies.run(copies.jobs[1])
    copies.device.clear([1])
    copies.run(copies.jobs[1])  # a copy runs once
    assert copies.cpu.blocks[4] == content(0, prefix, 1, SIZE)


def test_copies_are_reported_late_and_in_any_order(copies: Copies, prefix: list[int]) -> None:
    assert [job.event for job in copies.report([False, True])] == [1]
    assert copies.cpu.blocks[4] == content(0, prefix, 1, SIZE)
    assert copies.cpu.blocks[5] == [None] * SIZE
    assert (copies.pinned("device"), copies.pinned("cpu")) == ([3], [5])
    assert [job.event for job in copies.report([True])] == [0]
    assert copies.jobs == []


def test_a_load_brings_back_what_was_stored(copies: Copies, prefix: list[int]) -> None:
    copies.report([True, True])
    copies.jobs.append(Job("load", 0, [5, 4], [0, 5]))
    assert (copies.pinned("device"), copies.pinned("cpu")) == ([0, 5], [5, 4])
    copies.run_all()
    assert wrong(copies.device, prefix, [0, 5, 2]) is None


# --- invariants, on pools that are made up ----------------------------------------------------------------------------


class Pool:
    """Four blocks: the null block, one in use, two free; ``changes`` are reference counts, ``free`` is the queue."""

    def __init__(self, counts: tuple[int, ...] = (0, 1, 0, 0), free: tuple[int, ...] = (2, 3)) -> None:
        self.blocks = [SimpleNamespace(block_id=i, ref_cnt=n, block_hash=None) for i, n in enumerate(counts)]
        self.free_block_queue = SimpleNamespace(get_all_free_blocks=lambda: [self.blocks[i] for i in free])
        self.get_num_free_blocks = lambda: 2
        self.found: dict[bytes, Any] = {}
        self.cached_block_hash_to_block = SimpleNamespace(get_one_block=self.found.get)


def rig(device: Pool | None = None, cpu: Pool | None = None, **manager: Any) -> Any:
    """A rig as the checks see it: one request that has device block 1, one lookup that pins CPU block 1."""
    request = SimpleNamespace(is_finished=lambda: False, num_computed_tokens=0)
    tables = [SimpleNamespace(req_to_blocks={"r0": [SimpleNamespace(block_id=1)]})]
    return SimpleNamespace(
        scheduler=SimpleNamespace(
            requests={"r0": request},
            kv_cache_manager=SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=tables)),
        ),
        manager=SimpleNamespace(**{"_pending_cpu_hits": {"r0": (([SimpleNamespace(block_id=1)],), 4, 0)}, **manager}),
        copies=Copies(Tier(4, SIZE), Tier(4, SIZE)),
        device_pool=device or Pool(),
        cpu_pool=cpu or Pool(),
        device=Tier(4, SIZE),
        cpu=Tier(4, SIZE),
        hashed={},
        bookkeeping=["_pending_cpu_hits"],
        live=list,
    )


def violated(made: Any, check: Callable[[Any], None] = rig_invariants.check) -> str:
    with pytest.raises(Violation) as caught:
        check(made)
    assert str(caught.value).startswith(f"{caught.value.invariant}: ")
    return caught.value.invariant


def test_what_adds_up_passes() -> None:
    rig_invariants.check(rig())


@pytest.mark.parametrize("tier", ["device", "cpu"])
@pytest.mark.parametrize(
    ("counts", "free", "invariant"),
    [
        ((0, 2, 0, 0), (2, 3), "references"),
        ((0, 0, 0, 0), (1, 2, 3), "references"),
        ((0, 1, 1, 0), (3,), "references"),
        ((0, 1, 0, 0), (1, 2, 3), "queue"),
        ((0, 1, 0, 0), (2, 2), "queue"),
        ((0, 1, 0, 0), (3,), "queue"),
    ],
)
def test_pools_that_do_not_add_up(tier: str, counts: tuple[int, ...], free: tuple[int, ...], invariant: str) -> None:
    assert violated(rig(**{tier: Pool(counts, free)})) == invariant


def test_a_copy_that_is_under_way_is_a_user() -> None:
    made = rig()
    made.copies.jobs.append(Job("load", 0, [2], [3]))
    assert violated(made) == "references"
    made = rig(device=Pool((0, 1, 0, 1), (2,)), cpu=Pool((0, 1, 1, 0), (3,)))
    made.device_pool.get_num_free_blocks = made.cpu_pool.get_num_free_blocks = lambda: 1
    made.copies.jobs.append(Job("load", 0, [2], [3]))
    rig_invariants.check(made)


def test_a_cached_block_without_its_content() -> None:
    made = rig()
    made.cpu_pool.blocks[2].block_hash = b"hash"
    rig_invariants.check(made)  # nothing finds it yet
    made.cpu_pool.found[b"hash"] = made.cpu_pool.blocks[2]
    assert violated(made) == "stale"
    made.hashed[b"hash"] = [None] * SIZE
    rig_invariants.check(made)


@pytest.mark.parametrize("change", [{"is_finished": lambda: True}, {"num_computed_tokens": 8}])
def test_a_pin_that_outlives_the_wait(change: dict[str, Any]) -> None:
    made = rig()
    vars(made.scheduler.requests["r0"]).update(change)
    assert violated(made) == "pin"


def test_what_is_left_when_all_is_done() -> None:
    drained = rig(_pending_cpu_hits={}, device=Pool((0, 0, 0, 0)), cpu=Pool((0, 0, 0, 0)))
    rig_invariants.check_drained(drained)
    assert violated(rig(_pending_cpu_hits={}), rig_invariants.check_drained) == "leaked"
    assert violated(rig(), rig_invariants.check_drained) == "leaked"
    drained.live = lambda: ["r0"]
    assert violated(drained, rig_invariants.check_drained) == "stuck"


# --- programs ---------------------------------------------------------------------------------------------------------


def test_prompts_share_a_prefix_and_no_more() -> None:
    first, second = prompt_tokens(0, 8, 20), prompt_tokens(1, 8, 30)
    assert (len(first), len(second)) == (20, 30)
    assert first[:8] == second[:8]
    assert not set(first[8:]) & set(second[8:])
    assert prompt_tokens(0, 8, 5) == first[:5]


def sums_to_nine(program: Program) -> bool:
    return sum(int(number) for _, *numbers in program for number in numbers) >= 9


LONG: Program = [["add", 7, 1], *[["step", 0, 0]] * 30, ["add", 5, 0], ["copy", 1]]


def test_a_failing_program_is_made_small() -> None:
    small = programs.shrink(LONG, sums_to_nine, 400)
    assert sums_to_nine(small)
    assert len(small) == 2
    assert programs.text(small) == "add(7,0) add(5,0)"


def test_only_so_many_programs_are_tried() -> None:
    tried = []

    def fails(program: Program) -> bool:
        tried.append(program)
        return sums_to_nine(program)

    assert sums_to_nine(programs.shrink(LONG, fails, 7))
    assert len(tried) == 7


# --- hypothesis for another interpreter -------------------------------------------------------------------------------


def test_only_what_is_needed_is_linked(tmp_path: Path) -> None:
    folder = tools.provide(tmp_path)
    assert {"hypothesis", "sortedcontainers"} <= {link.name for link in folder.iterdir()}
    assert all(link.resolve().exists() for link in folder.iterdir())
    assert not list(folder.glob("*/**/*.so")), "another interpreter could not import it"
    assert tools.provide(tmp_path) == folder


def test_a_link_that_leads_nowhere_is_made_again(tmp_path: Path) -> None:
    link = tools.provide(tmp_path) / "hypothesis"
    link.unlink()
    link.symlink_to(tmp_path / "gone")
    assert (tools.provide(tmp_path) / "hypothesis" / "__init__.py").is_file()


# --- the search, on rigs that are made up -----------------------------------------------------------------------------


class FakeRig:
    """Breaks an invariant at the third reset of the device."""

    def __init__(self, factory: object, counts: Counter[str]) -> None:
        self.program: Program = []

    def apply(self, *operation: int | str) -> None:
        self.program.append(list(operation))
        if self.program.count(["reset-device"]) == 3:
            raise Violation("leaked", "three resets")

    def finish(self) -> None: ...


def test_the_search_finds_and_makes_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stateful, "Rig", FakeRig)
    monkeypatch.setattr(stateful, "Factory", lambda chunks, lazy: None)
    answers = [stateful.run([8], False, 20, 20, 7) for _ in range(2)]
    assert answers[0]["violation"] == "leaked: three resets"
    assert answers[0]["program"] == " ".join(["reset-device()"] * 3)
    assert [a | {"seconds": 0} for a in answers[:1]] == [a | {"seconds": 0} for a in answers[1:]]


def test_another_fault_is_no_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: FakeRig, *operation: int | str) -> None:
        raise KeyError("a fault of the rig")

    monkeypatch.setattr(FakeRig, "apply", broken)
    monkeypatch.setattr(stateful, "Rig", FakeRig)
    monkeypatch.setattr(stateful, "Factory", lambda chunks, lazy: None)
    with pytest.raises(KeyError):
        stateful.run([8], False, 2, 2, 7)


# --- the real scheduler -----------------------------------------------------------------------------------------------

REPLAY = """
import json, sys
case = json.loads(sys.stdin.read())
sys.path.append(case["tools"])
from kvmatrix import stateful
from kvmatrix.oracle import chunked
from kvmatrix.rig_factory import Factory
with stateful.quiet():
    search = stateful.Search(Factory([chunked(8)], False))
    found = [str(search.replay(program, search.counts) or "") for program in case["programs"]]
    print(json.dumps([found, search.counts["loads"]]))
"""


def revisited(head: int) -> Program:
    """A prompt of 37 tokens served, forgotten by the device, its first ``head`` tokens served again, then all of it."""
    served: Program = [["step", 16, stateful.EVERYTHING]] * 8
    return [["add", 0, 8, 37, 2], *served, ["reset-device"], ["add", 0, 8, head, 1], *served, ["add", 0, 8, 37, 2], *served]


def test_stock_in_the_default_pin(told_in_env: Callable[..., Any], tmp_path: Path) -> None:
    sent = {"tools": str(tools.provide(tmp_path)), "programs": [revisited(9), revisited(13)]}
    found, loads = told_in_env(REPLAY, stdin=json.dumps(sent))
    assert found[0] == "", "the device prefix of 8 tokens ends on a chunk boundary"
    assert found[1].startswith(("unsound: ", "misdirected: ")), "that of 12 tokens ends inside a chunk"
    assert loads >= 2
