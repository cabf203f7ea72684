"""The oracle against the definition of each kind of attention, counted out position by position."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from kvmatrix.oracle import (
    FULL,
    Attention,
    Needs,
    Served,
    boundary_resident,
    chunked,
    longest_sound_hit,
    missing_blocks,
    mixed_hit_class,
    needed_blocks,
    of_chunk,
    sliding,
)

GEOMETRIES = [(4, 8), (4, 12), (16, 32), (16, 64)]
KINDS = [FULL, chunked(8), chunked(12), sliding(2), sliding(5), sliding(8), sliding(9)]
MODELS = [(FULL, chunked(8)), (FULL, sliding(6)), (chunked(12), FULL, sliding(9)), (FULL, chunked(8), chunked(12)), (FULL,)]


def sees(group: Attention, token: int, position: int) -> bool:
    """The definition: whether ``token`` attends to ``position``."""
    if position > token:
        return False
    if group.kind == "chunked":
        return token // group.size == position // group.size
    return group.kind == "full" or token - position < group.size


def needed_by_definition(end: int, block: int, group: Attention) -> set[int]:
    """Blocks below ``end`` that the token at ``end`` or any later one sees."""
    later = range(end, end + 2 * (group.size or 1))
    return {p // block for t in later for p in range(end) if sees(group, t, p)}


@pytest.mark.parametrize(("block", "group"), [*((b, chunked(c)) for b, c in GEOMETRIES), *((4, g) for g in KINDS)])
def test_needed_blocks(block: int, group: Attention) -> None:
    for end in range(0, 5 * (group.size or 16) + 1, block):
        assert set(needed_blocks(end, block, group)) == needed_by_definition(end, block, group), end


@pytest.mark.parametrize(
    ("window", "blocks"), [(2, [4]), (5, [4]), (6, [3, 4]), (9, [3, 4]), (10, [2, 3, 4]), (99, [0, 1, 2, 3, 4])]
)
def test_a_window_counts_the_token_itself(window: int, blocks: list[int]) -> None:
    """Token 20 sees 20 and window - 1 tokens before it: with a window of 5 those from 16 on, with 6 those from 15 on."""
    assert list(needed_blocks(20, 4, sliding(window))) == blocks


def test_kinds() -> None:
    assert [of_chunk(None), of_chunk(8)] == [FULL, chunked(8)]
    assert [g.chunk for g in (FULL, chunked(8), sliding(8))] == [None, 8, None]
    assert [str(g) for g in (FULL, chunked(8), sliding(9))] == ["full attention", "chunk 8", "window 9"]


def test_a_hit_ends_on_a_block_boundary() -> None:
    with pytest.raises(ValueError, match="17 is not a multiple of 16"):
        needed_blocks(17, 16, chunked(64))


@pytest.mark.parametrize("window_held", [True, False])
@pytest.mark.parametrize("group", [FULL, chunked(12), sliding(7)])
def test_missing_blocks(group: Attention, window_held: bool) -> None:
    block = 4
    for prefix, blocks in itertools.product(range(0, 28, block), range(5)):
        hit = blocks * block
        for loaded in itertools.product([True, False], repeat=blocks):
            real = {prefix // block + i for i, there in enumerate(loaded) if there}
            real |= set(range(prefix // block)) if window_held else set()
            expected = sorted(needed_by_definition(prefix + hit, block, group) - real) if hit else []
            assert missing_blocks(prefix, hit, block, group, loaded, window_held) == expected


def test_blocks_beyond_what_was_reported_are_missing() -> None:
    assert missing_blocks(0, 32, 16, FULL, [True]) == [1]


def longest_by_definition(prefix: int, prompt: int, block: int, groups: Sequence[tuple[Attention, Sequence[bool]]]) -> int:
    best = 0
    for end in range(prefix, prompt):  # at least the last token is computed
        if end % block:
            continue
        wanted = [(needed_by_definition(end, block, group), resident) for group, resident in groups]
        if all(resident[i] for blocks, resident in wanted for i in blocks if i * block >= prefix):
            best = max(best, end - prefix)
    return best


@pytest.mark.parametrize("kinds", MODELS)
def test_longest_sound_hit(kinds: Sequence[Attention]) -> None:
    rng = random.Random(0)
    block, answers = 4, set()
    for _ in range(200):
        prompt = rng.randrange(5, 45)
        prefix = rng.randrange(0, prompt, block)
        share = rng.choice([0.5, 0.8, 1.0])
        groups = [(kind, [rng.random() < share for _ in range(prompt // block)]) for kind in kinds]
        found = longest_sound_hit(prefix, prompt, block, groups)
        assert found == longest_by_definition(prefix, prompt, block, groups)
        answers.add(found)
    assert len(answers) > 5, "the cases are too much alike to show anything"


@pytest.mark.parametrize("kinds", MODELS)
def test_the_tables_say_what_the_functions_say(kinds: Sequence[Attention]) -> None:
    """Sweeps look their answers up: each must be the one that is counted out for a single hit."""
    rng = random.Random(1)
    block, blocks, met = 4, 9, 0
    needs = Needs(block, kinds, blocks)
    for _ in range(60):
        share = rng.choice([0.5, 0.8, 1.0])
        resident = [[rng.random() < share for _ in range(blocks)] for _ in kinds]
        served = Served(needs, resident)
        for prompt in range(block * blocks, block * blocks + 4):
            limit = (prompt - 1) // block
            for first, end in enumerate(served.ends(limit)):
                ideal = longest_sound_hit(first * block, prompt, block, list(zip(kinds, resident, strict=True)))
                assert end - first == ideal // block, (prompt, first)
        for first in range(blocks + 1):
            assert served.at_boundary[first] == boundary_resident(first * block, block, kinds, resident), first
            for end in range(first + 1, blocks + 1):
                loaded = [held[first:end] for held in resident]
                lacking = [
                    missing_blocks(first * block, (end - first) * block, block, g, f)
                    for g, f in zip(kinds, loaded, strict=True)
                ]
                assert needs.met(first, end, loaded) == (not any(lacking)), (first, end)
                met += not any(lacking)
    assert 100 < met < 60 * 45, "the cases are too much alike to show anything"


def test_too_few_loaded_blocks_do_not_meet_the_needs() -> None:
    needs = Needs(4, [FULL, chunked(8)], 4)
    assert needs.met(1, 3, [[True, True], [True, True]])
    assert not needs.met(1, 3, [[True], [True, True]])
    assert needs.met(0, 2, [[True, True], []]), "the hit ends on a chunk boundary: nothing of that group is needed"


def test_everything_resident_serves_all_but_the_last_token() -> None:
    groups = [(FULL, [True] * 5), (chunked(64), [True] * 5)]
    assert longest_sound_hit(16, 81, 16, groups) == 64
    assert longest_sound_hit(16, 80, 16, groups) == 48


# --- the four classes of a mixed hit ----------------------------------------------------------------------------------


def corrupt_by_definition(prefix: int, hit: int, block: int, chunk: int) -> bool:
    """The suffix-only lookup takes blocks for padding that lie, counted from the suffix's start, before its last chunk."""
    padding = {(prefix + i) // block for i in range(0, hit // chunk * chunk, block)}
    return bool(padding & needed_by_definition(prefix + hit, block, chunked(chunk)))


def all_resident_geometries(block: int, chunk: int) -> list[tuple[int, int]]:
    """(prefix, external hit) for every prompt up to four chunks and every block-aligned prefix."""
    found = []
    for prompt in range(block + 1, 4 * chunk + 1):
        reusable = (prompt - 1) // block * block
        found += [(prefix, reusable - prefix) for prefix in range(0, reusable, block)]
    return found


def test_the_2480_geometries() -> None:
    total = corrupt = 0
    for block, chunk in ((4, 8), (16, 32), (16, 64)):
        for prefix, hit in all_resident_geometries(block, chunk):
            kind = mixed_hit_class(chunk, prefix, hit)
            assert (kind == "corrupt") == corrupt_by_definition(prefix, hit, block, chunk), (block, chunk, prefix, hit)
            assert (kind == "aligned") == (prefix % chunk == 0)
            assert kind != "safe-short" or hit < chunk
            total, corrupt = total + 1, corrupt + (kind == "corrupt")
    assert (total, corrupt) == (2480, 696)


@pytest.mark.parametrize(
    ("chunk", "prefix", "hit", "kind"),
    [
        (64, 16, 64, "corrupt"),
        (8, 4, 8, "corrupt"),
        (64, 0, 80, "aligned"),
        (64, 64, 64, "aligned"),
        (64, 16, 48, "safe-short"),
        (64, 48, 80, "safe-crossing"),
    ],
)
def test_known_cases(chunk: int, prefix: int, hit: int, kind: str) -> None:
    assert mixed_hit_class(chunk, prefix, hit) == kind


def test_a_window_is_served_where_its_own_blocks_are() -> None:
    window = sliding(8)
    assert needed_blocks(16, 4, window) == range(2, 4)  # tokens 9 to 15
    assert needed_blocks(16, 4, chunked(8)) == range(4, 4), "a chunk that has just begun needs nothing"
    assert longest_sound_hit(0, 17, 4, [(window, [False, False, True, True])]) == 16
    assert longest_sound_hit(0, 17, 4, [(window, [True, False, True, False])]) == 4
    assert (window.window, window.chunk, chunked(8).window) == (8, None, None)
