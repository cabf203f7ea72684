"""Expected failures: whom they match, what they do not excuse, and what a run's exit code makes of them."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvmatrix import expectations
from kvmatrix.cells import Cell, Selection
from kvmatrix.config import Project
from kvmatrix.errors import ExitCode, UsageError
from kvmatrix.expectations import Expectation, Expectations, expected_status, expired_line, is_problem, stale_line
from kvmatrix.pytest_plugin import ConformancePlugin, check
from kvmatrix.records import ProbeRow
from kvmatrix.session import exit_code

DAY = datetime.date(2027, 6, 30)
ENTRY = {"status": "FAIL", "message": "^wrong-output: ", "why": "w", "link": "l", "expires": DAY, "arm": ["stock"]}
TOML = (
    '[[expect]]\nstatus = "FAIL"\nmessage = "^wrong-output: "\nwhy = "w"\nlink = "l"\nexpires = 2027-06-30\narm = ["stock"]\n'
)
TEST = TOML + 'tier = ["upstream"]\ntest = ["*::test_a*"]\n'
REASON = "wrong-output: tokens [1] for [2]"


def entry(**changes: Any) -> Expectation:
    return Expectation(**ENTRY | changes)


def load(folder: Path, text: str | bytes) -> Expectations:
    (folder / "stock.toml").write_bytes(text.encode() if isinstance(text, str) else text)
    return Expectations.load(folder)


@pytest.mark.parametrize(
    "axis",
    [
        {"arm": ["fix"]},
        {"tier": ["scheduler"]},
        {"probe": ["cold"]},
        {"pin": ["0.33.0"]},
        {"device": ["cuda"]},
        {"backend": ["TRITON_ATTN"]},
        {"mode": ["compiled"]},
        {"chunk": [64]},
        {"block": [16]},
        {"layers": ["cc"]},
    ],
    ids=lambda a: next(iter(a)),
)
def test_every_axis_must_match(make_cell: Callable[..., Cell], axis: dict[str, Any]) -> None:
    cell = make_cell()
    assert entry().matches(cell, "mixed-misaligned")
    assert not entry(**axis).matches(cell, "mixed-misaligned")


def test_any_value_of_a_list_matches(make_cell: Callable[..., Cell]) -> None:
    assert entry(chunk=[64, 128], probe=["cold", "mixed-misaligned"]).matches(make_cell(), "mixed-misaligned")


def test_without_an_entry_pass_is_expected() -> None:
    assert expected_status(None, "FAIL", REASON) == "PASS"
    assert expected_status(None, "PASS", "") == "PASS"


def test_an_expected_failure() -> None:
    assert expected_status(entry(), "FAIL", REASON) == "FAIL"


def test_a_failure_with_another_reason_is_not_the_expected_one() -> None:
    assert expected_status(entry(), "FAIL", "lost-reuse: 0 of 64") == "PASS"


@pytest.mark.parametrize("status", ["PASS", "CRASH", "TIMEOUT", "INFRA"])
def test_anything_else_than_the_expected_failure_is_a_problem(make_row: Callable[..., ProbeRow], status: Any) -> None:
    expected = expected_status(entry(), status, "")
    assert expected == "FAIL"
    assert is_problem(make_row(status=status, expected=expected))


@pytest.mark.parametrize(
    ("status", "expected", "problem"),
    [
        ("PASS", "PASS", False),
        ("FAIL", "FAIL", False),
        ("FAIL", "PASS", True),
        ("PASS", "FAIL", True),
        ("CRASH", "PASS", True),
        ("TIMEOUT", "PASS", True),
        ("INFRA", "PASS", True),
        ("UNSUPPORTED", "FAIL", False),
        ("NOT_RUN", "PASS", False),
    ],
)
def test_what_is_a_problem(make_row: Callable[..., ProbeRow], status: str, expected: str, problem: bool) -> None:
    assert is_problem(make_row(status=status, expected=expected)) is problem


def test_unused_entries(make_cell: Callable[..., Cell]) -> None:
    used, stale = entry(), entry(pin=["0.1.0"])
    entries = Expectations([stale, used])
    assert entries.find(make_cell(), "cold") is used
    assert entries.find(make_cell(arm="fix"), "cold") is None
    assert entries.unused({"0.1.0", "0.32.0"}) == [stale]
    assert entries.unused({"0.32.0"}) == []  # what is about another pin only is not this run's


def test_the_first_match_counts(make_cell: Callable[..., Cell]) -> None:
    first, second = entry(why="one"), entry(why="two")
    entries = Expectations([first, second])
    assert entries.find(make_cell(), "cold") is first
    assert entries.unused({"0.32.0"}) == [second]


def test_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "more.toml").write_text(TOML, encoding="utf-8")
    assert [e.arm for e in load(tmp_path, TOML).entries] == [("stock",), ("stock",)]


@pytest.mark.parametrize(
    "text",
    [
        TOML.replace("[[expect]]", "[[expect]"),
        TOML.replace('status = "FAIL"', 'status = "PASS"'),
        TOML.replace('status = "FAIL"', 'status = "CRASH"'),
        TOML.replace('why = "w"\n', ""),
        TOML.replace('arm = ["stock"]\n', ""),
        TOML + 'bakend = ["CPU_ATTN"]\n',
        TOML.replace("^wrong", "(wrong"),
        TOML.replace("[[expect]]", "[[expected]]"),
        TOML.replace("[[expect]]", "[expect]"),
        TOML.encode() + b"# \xff\n",
        TOML.replace("expires = 2027-06-30\n", ""),
        TOML.replace("2027-06-30", '"2027-06-30"'),
        TOML.replace("2027-06-30", "2027-06-31"),
        TOML.replace('["stock"]', '["*", "stock"]'),
        TOML + 'test = ["*::test_a"]\n',
        TOML + 'tier = ["upstream"]\n',
        TEST + "chunk = [64]\n",
        TEST.replace('["upstream"]', '["upstream", "llm"]'),
    ],
    ids=[
        "toml",
        "pass",
        "crash",
        "no-why",
        "no-arm",
        "unknown-key",
        "bad-regex",
        "other-table",
        "not-a-list",
        "not-utf-8",
        "no-expiry",
        "expiry-in-quotes",
        "no-such-day",
        "every-arm-and-one",
        "test-of-a-cell",
        "upstream-without-test",
        "upstream-with-a-cells-axis",
        "upstream-and-another-tier",
    ],
)
def test_a_bad_entry_is_refused(tmp_path: Path, text: str | bytes) -> None:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text)
    assert str(caught.value).startswith("stock.toml")
    assert "\n" not in str(caught.value)


def test_no_patch_has_its_failures_excused(project: Project) -> None:
    """Of cells: stock alone, or a fault of the release that every arm has. Of vLLM's own tests patches too, with a reason."""
    entries = Expectations.load(project.root / "conformance" / "expectations").entries
    cells = [e for e in entries if not e.test and e.status == "FAIL"]
    assert cells
    assert all(e.arm == ("stock",) or (e.of_every_arm and all(p.startswith("public-") for p in e.probe)) for e in cells)
    assert all(e.link.startswith("https://github.com/vllm-project/vllm/") for e in entries)


def test_every_arm_matches_any_arm(make_cell: Callable[..., Cell]) -> None:
    everywhere = entry(arm=["*"])
    assert everywhere.of_every_arm
    assert all(everywhere.matches(make_cell(arm=arm), "cold") for arm in ("stock", "fix", "somebodys-own"))
    assert not entry().of_every_arm


# --- vLLM's own tests --------------------------------------------------------------------------------------------------


NODE = "tests/v1/x.py::test_a[16-4-0]"


def test_an_entry_about_a_test(make_cell: Callable[..., Cell], tmp_path: Path) -> None:
    entries = load(tmp_path, TEST.replace("test_a*", "test_a[[]16-*") + 'pin = ["0.32.0"]\n')
    (one,) = entries.entries
    assert entries.find(make_cell(), "cold") is None  # no cell is meant
    assert entries.unused({"0.32.0"}) == []
    assert entries.unused({"0.32.0"}, upstream=True) == [one]
    for other in (("0.33.0", "stock", NODE), ("0.32.0", "fix", NODE), ("0.32.0", "stock", NODE.replace("[16", "[64"))):
        assert entries.find_test(other[0], "host", *other[1:]) is None
    assert entries.find_test("0.32.0", "host", "stock", NODE) is one
    assert entries.unused({"0.32.0"}, upstream=True) == []


# --- expiry -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("day", "gone"), [(0, False), (1, True)])
def test_an_entry_expires_the_day_after(
    make_cell: Callable[..., Cell], monkeypatch: pytest.MonkeyPatch, day: int, gone: bool
) -> None:
    needed, other = entry(), entry(pin=["0.1.0"])
    entries = Expectations([needed, other])
    monkeypatch.setattr(expectations, "today", lambda: DAY + datetime.timedelta(days=day))
    assert entries.expired() == []  # nothing has needed it yet
    entries.find(make_cell(), "cold")
    assert entries.expired() == ([needed] if gone else [])


class FakeSession:
    """A run whose one cell has one row, as the entry ``known`` describes it."""

    def __init__(self, project: Project, known: Expectation, row: ProbeRow) -> None:
        self.project, self.matrix, self.row, self.selection = project, project.matrix, row, Selection(tiers=("llm",))
        self.expectations = Expectations([known])

    def open(self, planned: list[str]) -> SimpleNamespace:
        return SimpleNamespace(expectations=self.expectations)

    def run_cells(self, cells: list[Cell]) -> list[ProbeRow]:
        assert self.expectations.find(cells[0], self.row.probe) is not None
        return [self.row]


@pytest.mark.parametrize(("day", "code"), [(0, ExitCode.OK), (1, ExitCode.UNEXPECTED)])
def test_a_run_that_needs_an_expired_entry_is_red(
    project: Project,
    make_cell: Callable[..., Cell],
    make_row: Callable[..., ProbeRow],
    monkeypatch: pytest.MonkeyPatch,
    day: int,
    code: ExitCode,
) -> None:
    """However narrow the run is: the row itself is as expected on both days."""
    known = entry(probe=["mixed-misaligned"])
    row = make_row("mixed-misaligned", "FAIL", expected="FAIL", reason=REASON)
    monkeypatch.setattr(expectations, "today", lambda: DAY + datetime.timedelta(days=day))
    plugin = ConformancePlugin(FakeSession(project, known, row), [make_cell()])  # type: ignore[arg-type]
    plugin._run([make_cell()])
    assert (plugin.stale, plugin.expired) == ([], [known] if day else [])
    assert plugin.result() is code


def test_what_is_said_of_an_expired_entry() -> None:
    line = expired_line(entry(probe=["reuse-*"], link="https://a.link/1"))
    assert "\n" not in line
    for part in (
        "FAIL for reuse-*",
        "expired on 2027-06-30",
        "red on purpose",
        "https://a.link/1",
        "extend its date",
        "remove it",
    ):
        assert part in line
    assert stale_line(entry()).startswith("expectation of FAIL for any probe (w) matches no row")


def test_the_day_is_now() -> None:
    assert abs(expectations.today() - datetime.datetime.now(datetime.UTC).date()) <= datetime.timedelta(days=1)


def test_a_refusal_comes_before_the_failure_that_the_same_cell_would_have(
    project: Project, make_cell: Callable[..., Cell]
) -> None:
    entries = Expectations.load(project.root / "conformance" / "expectations")
    found = [entries.find(make_cell(layers=layers), "mixed-misaligned") for layers in ("cf", "cc")]
    assert [e.status for e in found if e] == ["FAIL", "UNSUPPORTED"]
    assert entries.refusal(make_cell()) is None
    assert entries.refusal(make_cell(layers="cc", arm="fix"))
    assert entries.refusal(make_cell(chunk=80))


def test_a_refusal_that_does_not_come(make_row: Callable[..., ProbeRow]) -> None:
    refusal = Expectation(**ENTRY | {"status": "UNSUPPORTED", "message": "has none", "arm": []})
    assert expected_status(refusal, "UNSUPPORTED", "refused: it has none") == "UNSUPPORTED"
    assert expected_status(refusal, "UNSUPPORTED", "refused: no kernel") == "PASS"
    assert not is_problem(make_row(status="UNSUPPORTED", expected="UNSUPPORTED", reason="refused: it has none"))
    for status in ("PASS", "FAIL", "CRASH"):
        expected = expected_status(refusal, status, "")  # type: ignore[arg-type]
        assert is_problem(make_row(status=status, expected=expected)), status


# --- what becomes of a row ----------------------------------------------------------------------------------------------


def test_the_exit_code_of_rows(make_row: Callable[..., ProbeRow]) -> None:
    fine = make_row()
    known = make_row(status="FAIL", expected="FAIL", reason=REASON)
    assert exit_code([fine, known]) is ExitCode.OK
    assert exit_code([fine], stale=1) is ExitCode.UNEXPECTED
    assert exit_code([fine, make_row(status="FAIL")]) is ExitCode.UNEXPECTED
    assert exit_code([fine, make_row(expected="FAIL")]) is ExitCode.UNEXPECTED
    assert exit_code([fine, make_row(status="INFRA")]) is ExitCode.INFRA
    assert exit_code([fine, make_row(status="CRASH")]) is ExitCode.INFRA
    assert exit_code([make_row(status="INFRA"), make_row(status="FAIL")]) is ExitCode.UNEXPECTED


def test_what_ran_instead_of_what_was_asked_for_is_a_problem(make_row: Callable[..., ProbeRow]) -> None:
    row = make_row(status="UNSUPPORTED", reason="not-honoured: backend TRITON_ATTN was asked for, vLLM runs CPU_ATTN")
    assert is_problem(row)
    assert not is_problem(make_row(status="UNSUPPORTED", reason="no-compiler: no C++ compiler (g++) is installed"))


def test_a_run_without_a_result_is_not_a_pass(make_row: Callable[..., ProbeRow]) -> None:
    assert exit_code([]) is ExitCode.NOTHING_RAN
    assert exit_code([make_row(status="UNSUPPORTED"), make_row(status="NOT_RUN")]) is ExitCode.NOTHING_RAN


def test_a_row_as_a_pytest_item(make_row: Callable[..., ProbeRow]) -> None:
    check(make_row())
    with pytest.raises(pytest.xfail.Exception):
        check(make_row(status="FAIL", expected="FAIL", reason=REASON))
    for status in ("UNSUPPORTED", "NOT_RUN"):
        with pytest.raises(pytest.skip.Exception, match="the reason"):
            check(make_row(status=status, reason="the reason"))
    for status, expected in (("PASS", "FAIL"), ("FAIL", "PASS"), ("CRASH", "PASS"), ("TIMEOUT", "FAIL"), ("INFRA", "PASS")):
        with pytest.raises(pytest.fail.Exception, match=f"is {status}"):
            check(make_row(status=status, expected=expected))
