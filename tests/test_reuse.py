"""The sweep over small geometries, with lookups that are right, greedy, leaky or shy in place of vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvmatrix import oracle, reuse
from kvmatrix.reuse import RESIDENCIES, VARIANTS, Resident, residencies

SHAPE = {"block": 4, "hash_block": 4, "chunks": [8], "periods": 4}
Answer = Callable[["FakeScheduler", int, int], int]


class FakeScheduler:
    """Stands in for ``SchedulerUnderTest``: answers with ``answer`` and loads what is resident and needed."""

    answer: Answer
    leaks = False
    is_async = True

    def __init__(self, block: int, chunks: list[int | None], tokens: int, hash_block: int) -> None:
        self.block, self.chunks, self.free = block, chunks, 100
        self.cpu_pool = SimpleNamespace(get_num_free_blocks=lambda: self.free)
        self.resident: Resident = []
        self.dropped = 0

    def request(self, tokens: int) -> int:
        return tokens

    def refill_cpu(self, request: int, resident: Resident) -> None:
        self.resident = resident

    def ideal(self, prompt: int, prefix: int) -> int:
        return oracle.longest_sound_hit(prefix, prompt, self.block, list(zip(self.chunks, self.resident, strict=True)))

    def lookup(self, request: int, prefix: int) -> tuple[int, bool]:
        external = type(self).answer(self, request, prefix)
        self.free -= 1 if external or self.leaks else 0
        return external, self.is_async and external > 0

    def planned_loads(self, request: int, prefix: int, external: int) -> list[list[bool]]:
        return [held[prefix // self.block : (prefix + external) // self.block] for held in self.resident]

    def drop_hit(self, request: int) -> None:
        self.free += 1


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    def run(answer: Answer, kind: reuse.Residency = "all", **attributes: Any) -> dict[str, Any]:
        scheduler = type("Scheduler", (FakeScheduler,), {"answer": answer, **attributes})
        monkeypatch.setattr(reuse, "SchedulerUnderTest", scheduler)
        return reuse.sweep([SHAPE], kind)

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


@pytest.mark.parametrize("kind", RESIDENCIES)
def test_the_ideal_lookup_keeps_all_and_is_sound(swept: Callable[..., dict[str, Any]], kind: reuse.Residency) -> None:
    totals = swept(ideal, kind)
    assert totals["kept"] == totals["ideal"] > 0
    assert totals["kept_resident"] == totals["ideal_resident"] > 0
    assert not any(totals[key] for key in ("unsound", "leaked", "lost_aligned", "contract"))


@pytest.mark.parametrize("kind", [k for k in RESIDENCIES if k != "all"])
def test_a_greedy_lookup_is_unsound(swept: Callable[..., dict[str, Any]], kind: reuse.Residency) -> None:
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


def test_a_pin_that_stays_is_counted(swept: Callable[..., dict[str, Any]]) -> None:
    totals = swept(nothing, leaks=True)
    assert totals["leaked"] == totals["geometries"]


def test_a_hit_that_is_not_asynchronous_is_counted(swept: Callable[..., dict[str, Any]]) -> None:
    assert swept(ideal, is_async=False)["contract"] == 112


@pytest.mark.parametrize("kind", [k for k in RESIDENCIES if k != "all"])
def test_residencies(kind: reuse.Residency) -> None:
    made = list(residencies(kind, 3, 8, seed=5))
    assert len(made) == VARIANTS
    assert all(len(r) == 3 and all(len(held) == 8 for held in r) for r in made)
    assert all(not all(map(all, r)) for r in made), "something is gone in each"
    assert made == list(residencies(kind, 3, 8, seed=5)), "the same again for the same prompt"


@pytest.mark.parametrize(("kind", "gone"), [("tail-gone", [7]), ("head-gone", [0])])
def test_which_groups_lose_blocks(kind: reuse.Residency, gone: list[int]) -> None:
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
    assert reuse.boundary_resident(prefix, 16, [None, 32, 48], resident) is expected
