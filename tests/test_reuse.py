"""The sweep over small geometries, with lookups that are right, greedy, leaky or shy in place of vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from kvmatrix import oracle, reuse
from kvmatrix.config import Residency
from kvmatrix.oracle import FULL, Attention, Needs, chunked, sliding
from kvmatrix.reuse import VARIANTS, Resident, residencies
from kvmatrix.scheduler_harness import Loads, Unsupported

SAMPLED: tuple[Residency, ...] = ("all", "tail-gone", "head-gone", "one-hole", "random")
SHAPE = {"block": 4, "hash_block": 4, "chunks": [8], "periods": 4}
Answer = Callable[["FakeScheduler", int, int], int]


class FakeScheduler:
    """Stands in for ``SchedulerUnderTest``: answers with ``answer`` and loads what is resident and needed."""

    answer: Answer
    leaks = False
    is_async: bool | None = True
    planned_fault = ""
    null_needed = 0
    pins = True
    evicts = ""
    """What is wrong with the load that follows a lookup after others took the whole tier."""

    def __init__(self, block: int, groups: list[Attention], tokens: int, lazy_offload: bool, hash_block: int) -> None:
        self.block, self.groups, self.lazy = block, groups, lazy_offload
        self.needs = Needs(block, groups, tokens // block)
        self.resident: Resident = []
        self.refills: list[tuple[int, Resident]] = []
        self.held = False
        self.asked: list[tuple[int, int]] = []
        self.let_go_of = 0
        type(self).made.append(self)

    made: ClassVar[list[FakeScheduler]] = []

    def request(self, tokens: int) -> int:
        return tokens

    def refill_cpu(self, request: int, resident: Resident) -> None:
        self.resident = resident
        self.refills.append((request, resident))

    def ideal(self, prompt: int, prefix: int) -> int:
        return oracle.longest_sound_hit(prefix, prompt, self.block, list(zip(self.groups, self.resident, strict=True)))

    def ask(self, request: int, prefix: int) -> tuple[int | None, bool]:
        self.asked.append((request, prefix))
        external = type(self).answer(self, request, prefix)
        self.held = bool(external)
        return (None, False) if self.is_async is None else (external, self.is_async and external > 0)

    def planned(self, request: int, prefix: int, external: int) -> Loads:
        taken = slice(prefix // self.block, (prefix + external) // self.block)
        loaded = [held[taken] for held in self.resident]
        return Loads(loaded, self.planned_fault, *((3, 2, self.null_needed) if external else ()))

    def press(self) -> list[str]:
        self.resident = [[False] * len(held) for held in self.resident]
        return ["taken"]

    def load(self, request: int, prefix: int, external: int) -> Loads:
        assert not any(map(any, self.resident)), "the load comes after the tier was filled by others"
        self.resident = self.refills[-1][1]
        self.held = self.leaks
        return replace(self.planned(request, prefix, external), fault=self.evicts)

    def relieve(self, taken: list[str]) -> str:
        assert taken == ["taken"]
        return ""

    def drop_hit(self, request: int) -> None:
        self.held = self.leaks

    def left_behind(self) -> str:
        return "leaked: it" if self.held else ""

    def let_go(self) -> None:
        self.held = False
        self.let_go_of += 1


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    def run(answer: Answer, kind: Residency = "all", **attributes: Any) -> dict[str, Any]:
        FakeScheduler.made.clear()
        shape, hit_class = SHAPE | attributes.pop("shape", {}), attributes.pop("hit_class", None)
        scheduler = type("Scheduler", (FakeScheduler,), {"answer": answer, **attributes})
        monkeypatch.setattr(reuse, "SchedulerUnderTest", scheduler)
        return reuse.sweep([shape], kind, hit_class)

    return run


def ideal(sut: FakeScheduler, prompt: int, prefix: int) -> int:
    return sut.ideal(prompt, prefix)


def everything(sut: FakeScheduler, prompt: int, prefix: int) -> int:
    return (prompt - 1) // sut.block * sut.block - prefix


def nothing(sut: FakeScheduler, prompt: int, prefix: int) -> int:
    return 0


def test_every_geometry_is_asked(swept: Callable[..., dict[str, Any]]) -> None:
    totals = swept(ideal)
    assert totals["geometries"] == sum((prompt - 1) // 4 for prompt in range(5, 33)) == 112
    assert totals["ideal"] == totals["kept"] == sum(4 * k * (k + 1) // 2 for p in range(5, 33) for k in [(p - 1) // 4])


@pytest.mark.parametrize("kind", [*SAMPLED, "evicted-pinned"])
def test_the_ideal_lookup_keeps_all_and_is_sound(swept: Callable[..., dict[str, Any]], kind: Residency) -> None:
    totals = swept(ideal, kind)
    assert totals["kept"] == totals["ideal"] > 0
    assert totals["kept_resident"] == totals["ideal_resident"] > 0
    wrong = ("unsound", "leaked", "misplanned", "contract", "lost_aligned", "lost_resident", "lost")
    assert not any(totals[key] for key in wrong)


@pytest.mark.parametrize("kind", SAMPLED[1:])
def test_a_greedy_lookup_is_unsound(swept: Callable[..., dict[str, Any]], kind: Residency) -> None:
    totals = swept(everything, kind)
    assert totals["unsound"] > 0
    assert totals["first_unsound"].startswith("block 4, chunks [8], prompt ")
    if kind != "head-gone":  # where the head is gone an unsound hit has no sound part
        assert totals["kept"] < totals["ideal"], "an unsound hit keeps nothing"


def test_a_lookup_that_always_declines_loses_the_aligned_ones(swept: Callable[..., dict[str, Any]]) -> None:
    totals = swept(nothing)
    assert totals["kept"] == totals["unsound"] == 0
    assert totals["lost_aligned"] == sum(prefix % 8 == 0 for p in range(5, 33) for prefix in range(0, (p - 1) // 4 * 4, 4))
    assert "prefix 0: 0 of 4 tokens" in totals["first_lost_aligned"]


def decline_misaligned(sut: FakeScheduler, prompt: int, prefix: int) -> int:
    return 0 if prefix % 8 else sut.ideal(prompt, prefix)


def test_what_a_declining_lookup_loses_is_told_apart(swept: Callable[..., dict[str, Any]]) -> None:
    totals = swept(decline_misaligned, "head-gone")
    assert totals["lost_aligned"] == 0
    assert 0 < totals["lost_resident"] < totals["lost"], "where the head is gone, some of it is no loss of a rebased lookup"
    assert "prefix 12: 0 of " in totals["first_lost_resident"]


def test_the_longest_prefix_is_asked_first_and_the_one_with_nothing_left_too(swept: Callable[..., dict[str, Any]]) -> None:
    """So what a lookup leaves in the tier is met by those that need it, and each must drop the hit of the one before."""
    swept(ideal)
    asked = FakeScheduler.made[0].asked
    assert [prefix for prompt, prefix in asked if prompt == 17] == [16, 12, 8, 4, 0]
    assert [prefix for prompt, prefix in asked if prompt == 16] == [12, 8, 4, 0]


def test_an_answer_where_nothing_is_left_is_against_the_contract(swept: Callable[..., dict[str, Any]]) -> None:
    totals = swept(lambda sut, prompt, prefix: sut.ideal(prompt, prefix) or sut.block)
    assert totals["contract"] == 28, "one for each prompt"
    assert "at most" in totals["first_contract"]
    assert totals["unsound"] == totals["lost"] == 0


def test_a_pin_that_stays_is_counted(swept: Callable[..., dict[str, Any]]) -> None:
    assert swept(nothing, leaks=True)["leaked"] == 28, "once for each content of the CPU tier"
    assert FakeScheduler.made[0].let_go_of == 28, "and given up, so that the next one starts clean"


def test_a_hit_that_is_held_otherwise_than_answered_is_counted(swept: Callable[..., dict[str, Any]]) -> None:
    totals = swept(ideal, planned_fault="misplaced: one")
    assert totals["misplanned"] == 112 + 28
    assert totals["first_misplanned"] == "misplaced: one, block 4, chunks [8], prompt 5, prefix 4"


def test_a_hit_that_is_not_asynchronous_is_counted(swept: Callable[..., dict[str, Any]]) -> None:
    assert swept(ideal, is_async=False)["contract"] == 112


def test_none_is_no_answer(swept: Callable[..., dict[str, Any]]) -> None:
    totals = swept(ideal, is_async=None)
    assert totals["contract"] == 112 + 28
    assert "answers None" in totals["first_contract"]


def test_the_groups_of_a_shape(swept: Callable[..., dict[str, Any]]) -> None:
    """The full-attention group where the shape has it, its own residency with it, and lazy offload where it asks for it."""
    totals = swept(ideal, "tail-gone", shape={"chunks": [8, 12], "full_at": 1, "lazy": True})
    (sut,) = FakeScheduler.made
    assert (sut.groups, sut.lazy) == ([chunked(8), FULL, chunked(12)], True)
    assert [all(held) for held in sut.resident] == [True, False, True], "the last content lacks blocks of full attention only"
    assert totals["kept"] == totals["ideal"] > 0


def test_a_shape_without_chunks(swept: Callable[..., dict[str, Any]]) -> None:
    totals = swept(nothing, shape={"chunks": []})
    assert totals["lost_aligned"] == totals["geometries"] == sum((p - 1) // 4 for p in range(5, 17))


@pytest.mark.parametrize("kind", SAMPLED[1:])
def test_residencies(kind: Residency) -> None:
    made = list(residencies(kind, 3, 8, seed=5))
    assert len(made) == VARIANTS
    assert all(len(r) == 3 and all(len(held) == 8 for held in r) for r in made)
    assert all(not all(map(all, r)) for r in made), "something is gone in each"
    assert made == list(residencies(kind, 3, 8, seed=5)), "the same again for the same prompt"


@pytest.mark.parametrize(("kind", "gone"), [("tail-gone", [7]), ("head-gone", [0])])
def test_which_groups_lose_blocks(kind: Residency, gone: list[int]) -> None:
    lost = [[[i for i, held in enumerate(group) if not held] for group in r] for r in residencies(kind, 3, 8, 5)]
    half = [4, 5, 6, 7] if kind == "tail-gone" else [0, 1, 2, 3]
    assert lost == [[gone] * 3, [half] * 3, [[], gone, gone], [[], half, half], [gone, [], []], [half, [], []]]


@pytest.mark.parametrize(
    ("prefix", "gone", "expected"),
    [
        (96, (1, 5), True),  # 96 is a boundary of 32 and of 48: nothing lies between
        (80, (1, 4), False),  # the last common boundary is 0
        (80, (2, 0), False),
        (80, (1, 5), True),
        (112, (0, 6), False),
        (112, (0, 5), True),
    ],
)
def test_where_the_boundary_is(prefix: int, gone: tuple[int, int], expected: bool) -> None:
    resident = [[(g, i) != gone for i in range(10)] for g in range(3)]
    assert oracle.boundary_resident(prefix, 16, [FULL, chunked(32), chunked(48)], resident) is expected


# --- sliding windows, classes, every subset, and what is evicted meanwhile -------------------------------------------------


def test_a_shape_with_a_window(swept: Callable[..., dict[str, Any]]) -> None:
    totals = swept(everything, "tail-gone", shape={"chunks": [], "windows": [6], "full_at": 1})
    (sut,) = FakeScheduler.made
    assert sut.groups == [sliding(6), FULL]
    assert max(prompt for prompt, _ in sut.asked) == 32, "four windows of two blocks each"
    assert totals["first_unsound"].startswith("block 4, chunks [], windows [6], prompt ")


def test_prompts_about_the_boundaries(swept: Callable[..., dict[str, Any]]) -> None:
    swept(ideal, shape={"edges": True})
    prompts = sorted({prompt for prompt, _ in FakeScheduler.made[0].asked})
    assert prompts == [p for b in range(4, 33, 4) for p in (b - 1, b, b + 1) if 5 <= p <= 32]


def test_prompts_of_as_many_blocks_share_their_contents(swept: Callable[..., dict[str, Any]]) -> None:
    """What the tier holds is put there by the longest of them, whose block hashes the others have too."""
    swept(ideal, "one-hole")
    refills = FakeScheduler.made[0].refills
    assert [prompt for prompt, _ in refills] == [p for p in (*range(7, 32, 4), 32) for _ in range(VARIANTS)]
    assert all(len(held) == prompt // 4 for prompt, resident in refills for held in resident)


@pytest.mark.parametrize(("name", "count"), [("aligned", 64), ("corrupt", 24), ("safe-short", 12), ("safe-crossing", 12)])
def test_a_class_by_itself(swept: Callable[..., dict[str, Any]], name: str, count: int) -> None:
    totals = swept(ideal, hit_class=name)
    asked = FakeScheduler.made[0].asked
    assert totals["geometries"] == len(asked) == count
    assert {oracle.mixed_hit_class(8, prefix, (prompt - 1) // 4 * 4 - prefix) for prompt, prefix in asked} <= {name}


def test_every_subset() -> None:
    made = [tuple(map(tuple, r)) for r in residencies("every-subset", 2, 3, 0)]
    assert len(made) == len(set(made)) == 2**6


def test_copies_are_summed_up(swept: Callable[..., dict[str, Any]]) -> None:
    totals = swept(ideal)
    assert (totals["copies"], totals["null_copies"], totals["null_needed"]) == (3 * 112, 2 * 112, 0)


def test_a_needed_block_that_goes_to_the_null_block_is_unsound(swept: Callable[..., dict[str, Any]]) -> None:
    totals = swept(ideal, null_needed=1)
    assert totals["unsound"] == totals["null_needed"] == 112
    assert totals["kept"] == 0


def test_each_hit_is_held_while_others_take_the_tier(swept: Callable[..., dict[str, Any]]) -> None:
    totals = swept(decline_misaligned, "evicted-pinned")
    assert 0 < totals["pressed"] < totals["geometries"]
    assert (totals["misplanned"], totals["residency"]) == (0, "evicted-pinned")
    refills = FakeScheduler.made[0].refills
    assert len(refills) == totals["pressed"] + 3 * 8, "the tier is filled anew after each, and for each content"


def test_a_hit_that_does_not_survive_is_counted(swept: Callable[..., dict[str, Any]]) -> None:
    totals = swept(ideal, "evicted-pinned", evicts="misplaced: 1 of 2 copies")
    assert totals["misplanned"] == totals["pressed"] > 0
    assert totals["first_misplanned"].startswith("misplaced: 1 of 2 copies, block 4, chunks [8], prompt ")


def test_what_a_pressed_load_leaves_is_counted(swept: Callable[..., dict[str, Any]]) -> None:
    totals = swept(ideal, "evicted-pinned", leaks=True)
    assert totals["first_misplanned"].startswith("leaked: it, block 4, ")


def test_a_release_that_pins_nothing_is_not_pressed(swept: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(Unsupported, match="pins nothing between the lookup and the load"):
        swept(ideal, "evicted-pinned", pins=False)
