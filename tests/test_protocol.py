"""The calls around a lookup, on a scheduler of a few lines that is right until one thing of it is broken."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvmatrix import protocol, reuse
from kvmatrix.oracle import Attention
from kvmatrix.protocol import CHECKS
from kvmatrix.reuse import Resident
from kvmatrix.scheduler_harness import Loads, Unsupported, contract_fault

SHAPE = {"block": 4, "hash_block": 2, "chunks": [8], "periods": 2}
Run = Callable[..., dict[str, Any]]


class FakeSut:
    """Serves whatever follows the device prefix; what ``broken`` names goes wrong."""

    broken = ""
    pins = True

    def __init__(self, block: int, groups: list[Attention], tokens: int, lazy_offload: bool, hash_block: int) -> None:
        self.block, self.groups, self.hash_block = block, groups, hash_block
        self.hits: dict[int, int] = {}
        self.leaked = 0
        self.empty = False
        self.index: set[int] = set()
        self.cpu_pool = SimpleNamespace(
            get_num_free_blocks=lambda: 100 - self.leaked - len(set(self.hits.values())), cached_block_hash_to_block=self.index
        )
        self.scheduler = SimpleNamespace(request_finished=self.finished, reset=self.reset)
        self.made = 0

    def request(self, tokens: int) -> Any:
        self.made += 1
        request = SimpleNamespace(id=self.made, num_tokens=tokens, skip_reading_prefix_cache=False, generated=0)

        def append(ids: list[int]) -> None:
            request.num_tokens += len(ids)
            request.generated += len(ids)

        request.append_output_token_ids = append
        return request

    def ask(self, request: Any, prefix: int) -> tuple[int, bool]:
        if self.hits.pop(request.id, 0) and self.broken == "stale":
            self.leaked += 1
        if self.broken == "index":
            self.index.add(request.id)
        refused = request.skip_reading_prefix_cache and self.broken != "skip"
        refused = refused or (prefix % self.block and self.broken != "unaligned")
        seen = request.num_tokens - (request.generated if self.broken == "resumed" else 0)
        served = max(seen - 1 - prefix, 0) // self.block * self.block
        if refused or (self.empty and self.broken != "reset-serves"):
            served = 0
        if served:
            self.hits[request.id] = served
        return served, served > 0

    def checked_lookup(self, request: Any, prefix: int) -> tuple[int, str]:
        return self.ask(request, prefix)[0], ""

    def planned(self, request: Any, prefix: int, external: int) -> Loads:
        return Loads(
            [[True] * (external // self.block) for _ in self.groups], "mispinned: x" if self.broken == "planned" else ""
        )

    def load(self, request: Any, prefix: int, external: int) -> Loads:
        hit = self.hits.pop(request.id, 0)
        self.leaked += self.broken == "fewer" and external < hit
        count = external // self.block - (self.broken == "loads-less")
        return Loads([[True] * count for _ in self.groups], "misplaced: x" if self.broken == "load" else "")

    def finished(self, request: Any, block_ids: list[int]) -> None:
        if self.broken != "finished":
            self.hits.pop(request.id, None)

    def reset(self) -> bool:
        self.empty = True
        self.hits.clear()
        return self.broken != "reset-refuses"

    def refill_cpu(self, request: Any, resident: Resident) -> None:
        self.empty = False

    def drop_hit(self, request: Any) -> None:
        self.hits.pop(request.id, None)

    def left_behind(self) -> str:
        return f"leaked: {self.leaked} and {len(self.hits)}" if self.leaked or self.hits else ""

    def let_go(self) -> None:
        self.leaked = 0
        self.hits.clear()


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(check: str, broken: str = "", has: bool = True, **attributes: Any) -> dict[str, Any]:
        monkeypatch.setattr(reuse, "SchedulerUnderTest", type("Sut", (FakeSut,), {"broken": broken, **attributes}))
        monkeypatch.setattr(protocol, "release_has", lambda words: has)
        return protocol.run(check, [SHAPE])

    return run


@pytest.mark.parametrize("check", CHECKS)
def test_a_scheduler_that_is_right(tried: Run, check: str) -> None:
    found = tried(check)
    assert found["asked"] > 0
    assert (found["faults"], found["first_fault"]) == (0, "")


@pytest.mark.parametrize(
    ("check", "broken", "code"),
    [
        ("load", "load", "misplaced: x"),
        ("load", "loads-less", "misplaced: another set"),
        ("load", "planned", "mispinned: x"),
        ("fewer-accepted", "fewer", "leaked: "),
        ("retried", "stale", "leaked: "),
        ("finished", "finished", "leaked: "),
        ("two-requests", "load", "misplaced: x"),
        ("two-requests", "planned", "mispinned: x"),
        ("reset", "reset-refuses", "leaked: the CPU tier refuses"),
        ("reset", "reset-serves", "unsound: "),
        ("resumed", "resumed", "lost-reuse: "),
        ("index-size", "index", "leaked: the CPU tier's index grows"),
        ("skips-cache", "skip", "contract: "),
        ("inside-a-block", "unaligned", "contract: "),
    ],
)
def test_what_each_check_sees(tried: Run, check: str, broken: str, code: str) -> None:
    found = tried(check, broken)
    assert 0 < found["faults"] <= found["asked"]
    assert found["first_fault"].startswith(code)
    assert ", block 4, chunks [8], prompt " in found["first_fault"]


@pytest.mark.parametrize("check", ["reset", "skips-cache", "inside-a-block"])
def test_what_the_release_itself_never_did_is_asked_of_no_patch(tried: Run, check: str) -> None:
    with pytest.raises(Unsupported, match="refused: "):
        tried(check, has=False)


@pytest.mark.parametrize("check", ["fewer-accepted", "two-requests"])
def test_a_release_that_keeps_no_hit(tried: Run, check: str) -> None:
    with pytest.raises(Unsupported):
        tried(check, pins=False)


@pytest.mark.parametrize(
    ("answer", "is_async", "fault"),
    [
        (0, False, ""),
        (8, True, ""),
        (12, True, ""),
        (16, True, "at most 12"),
        (6, True, "no number of blocks"),
        (-4, True, "no number of blocks"),
        (None, False, "answers None"),
        (8, False, "loaded asynchronously"),
        (0, True, "loaded asynchronously"),
    ],
)
def test_possible_answers(answer: int | None, is_async: bool, fault: str) -> None:
    found = contract_fault(answer, is_async, 12, 4)
    assert fault in found
    assert bool(found) == bool(fault)
