"""The oracle against the definition of chunked-local attention, counted out position by position."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from kvmatrix.oracle import Window, first_needed_token, longest_sound_hit, missing_blocks, mixed_hit_class, needed_blocks

GEOMETRIES = [(4, 8), (4, 12), (16, 32), (16, 64)]
GROUP_CHUNKS = [None, 8]


def seen(token: int, chunk: int | None) -> range:
    """The definition: which positions ``token`` attends to."""
    return range(0 if chunk is None else token // chunk * chunk, token + 1)


def needed_by_definition(end: int, block: int, chunk: int | None) -> set[int]:
    """Blocks below ``end`` that the token at ``end`` or any later one sees."""
    later = range(end, end + 2 * (chunk or 1))
    return {p // block for t in later for p in seen(t, chunk) if p < end}


@pytest.mark.parametrize(("block", "chunk"), [*GEOMETRIES, (4, None)])
def test_needed_blocks(block: int, chunk: int | None) -> None:
    for end in range(0, 5 * (chunk or 16) + 1, block):
        assert set(needed_blocks(end, block, chunk)) == needed_by_definition(end, block, chunk), end


def test_a_hit_ends_on_a_block_boundary() -> None:
    with pytest.raises(ValueError, match="17 is not a multiple of 16"):
        needed_blocks(17, 16, 64)


@pytest.mark.parametrize("window_held", [True, False])
@pytest.mark.parametrize("chunk", [None, 12])
def test_missing_blocks(chunk: int | None, window_held: bool) -> None:
    block = 4
    for prefix, blocks in itertools.product(range(0, 28, block), range(5)):
        hit = blocks * block
        for loaded in itertools.product([True, False], repeat=blocks):
            real = {prefix // block + i for i, there in enumerate(loaded) if there}
            real |= set(range(prefix // block)) if window_held else set()
            expected = sorted(needed_by_definition(prefix + hit, block, chunk) - real) if hit else []
            assert missing_blocks(prefix, hit, block, chunk, loaded, window_held) == expected


def test_blocks_beyond_what_was_reported_are_missing() -> None:
    assert missing_blocks(0, 32, 16, None, [True]) == [1]


def longest_by_definition(prefix: int, prompt: int, block: int, groups: Sequence[tuple[int | None, Sequence[bool]]]) -> int:
    best = 0
    for end in range(prefix, prompt):  # at least the last token is computed
        if end % block:
            continue
        wanted = [(needed_by_definition(end, block, chunk), resident) for chunk, resident in groups]
        if all(resident[i] for blocks, resident in wanted for i in blocks if i * block >= prefix):
            best = max(best, end - prefix)
    return best


def test_longest_sound_hit() -> None:
    rng = random.Random(0)
    block, answers = 4, set()
    for _ in range(400):
        prompt = rng.randrange(5, 45)
        prefix = rng.randrange(0, prompt, block)
        share = rng.choice([0.5, 0.8, 1.0])
        groups = [(chunk, [rng.random() < share for _ in range(prompt // block)]) for chunk in GROUP_CHUNKS]
        found = longest_sound_hit(prefix, prompt, block, groups)
        assert found == longest_by_definition(prefix, prompt, block, groups)
        answers.add(found)
    assert len(answers) > 5, "the cases are too much alike to show anything"


def test_everything_resident_serves_all_but_the_last_token() -> None:
    groups = [(None, [True] * 5), (64, [True] * 5)]
    assert longest_sound_hit(16, 81, 16, groups) == 64
    assert longest_sound_hit(16, 80, 16, groups) == 48


# --- the four classes of a mixed hit ----------------------------------------------------------------------------------


def corrupt_by_definition(prefix: int, hit: int, block: int, chunk: int) -> bool:
    """The suffix-only lookup takes blocks for padding that lie, counted from the suffix's start, before its last chunk."""
    padding = {(prefix + i) // block for i in range(0, hit // chunk * chunk, block)}
    return bool(padding & needed_by_definition(prefix + hit, block, chunk))


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


@pytest.mark.parametrize(("end", "first"), [(0, 0), (3, 0), (7, 0), (8, 1), (100, 93)])
def test_a_window_slides(end: int, first: int) -> None:
    """By the definition: the token at ``end`` sees itself and the seven before it."""
    assert first_needed_token(end, Window(8)) == first
    assert end - first + 1 <= 8


def test_the_blocks_of_a_window() -> None:
    assert needed_blocks(16, 4, Window(8)) == range(2, 4)  # tokens 9 to 15
    assert needed_blocks(16, 4, Window(9)) == range(2, 4)
    assert needed_blocks(16, 4, Window(10)) == range(1, 4)
    assert needed_blocks(16, 4, 8) == range(4, 4), "a chunk that has just begun needs nothing"
    assert longest_sound_hit(0, 17, 4, [(Window(8), [False, False, True, True])]) == 16
    assert longest_sound_hit(0, 17, 4, [(Window(8), [True, False, True, False])]) == 4
    assert repr([None, Window(8)]) == "[None, window 8]"
