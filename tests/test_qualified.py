"""No figure is taken from a cell whose conformance is not whole and as expected, and nothing else is published."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvmatrix import facts
from kvmatrix.qualified import is_qualified
from kvmatrix.records import ProbeRow

MakeRow = Callable[..., ProbeRow]
PROBES = ["cold", "pure-cpu-hit"]


def test_every_probe_must_have_run(make_row: MakeRow) -> None:
    whole = [make_row(p, "PASS") for p in PROBES]
    assert is_qualified(whole, PROBES)
    assert not is_qualified(whole[:1], PROBES)
    assert not is_qualified([], PROBES)


@pytest.mark.parametrize("status", ["NOT_RUN", "UNSUPPORTED", "CRASH", "TIMEOUT", "INFRA"])
def test_a_probe_without_an_answer_does_not_qualify(make_row: MakeRow, status: str) -> None:
    assert not is_qualified([make_row("cold", "PASS"), make_row("pure-cpu-hit", status)], PROBES)


@pytest.mark.parametrize(
    ("argument", "kept"),
    [
        ("/home/Jane Doe/my.diff", "my.diff"),
        ("alice/secret/my.diff", "my.diff"),
        ("/my.diff", "my.diff"),
        ("--patch=/home/jane/my.diff", "--patch=my.diff"),
        ("/home/jane/bin:/usr/bin", "bin:bin"),
        ("mixed and not cold", "mixed and not cold"),
        ("0.32.0", "0.32.0"),
    ],
)
def test_an_argument_keeps_no_folder(argument: str, kept: str) -> None:
    assert facts.without_folders(argument) == kept


def test_a_reason_keeps_no_folder() -> None:
    text = "the preloaded parent ended: see /home/jane/kv/.kvmatrix/runs/x/logs/parent-1.log, 3/4 done"
    assert facts.without_paths(text) == "the preloaded parent ended: see parent-1.log, 3/4 done"
