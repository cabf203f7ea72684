"""What is known about a pin comes from rows of that very pin, and from the newest of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvmatrix import cli, pin_status
from kvmatrix.config import Project
from kvmatrix.patch_files import sha256
from kvmatrix.pin_status import PinStatus, state_of
from kvmatrix.records import EndRow, ProbeRow, Row, RowWriter, RunRow
from kvmatrix.report import document

ROOT = Path(__file__).resolve().parents[1]
PIN = "0.32.0"
FIX = "decline-misaligned"
WRONG = "wrong-output: tokens [137] for [338], logprob error 20.957 nats"
SCHEDULER = {"tier": "scheduler", "chunk": 64, "block": 16, "prompt": 213}
MakeRow = Callable[..., ProbeRow]


@dataclass
class Lab:
    """A project, and writers of finished runs: of this machine, or published."""

    project: Project
    run_row: RunRow

    @property
    def wheel(self) -> str:
        """sha256 of a wheel that the pin's lock has."""
        lock = (self.project.root / "envs" / f"vllm-{PIN}-host.lock").read_text(encoding="utf-8")
        return lock.partition("\nvllm-cpu==")[2].partition("--hash=sha256:")[2][:64]

    def run(
        self,
        number: int,
        rows: list[ProbeRow],
        pins: dict[str, Any] | None = None,
        published: bool = False,
        ended: bool = True,
        suite: str = "conformance",
    ) -> Path:
        name = f"20260101T00{number:02}00Z-0000"
        pins = pins if pins is not None else {PIN: {"device": "host", "wheel_sha256": self.wheel}}
        first = self.run_row.model_copy(
            update={"suite": suite, "facts": self.run_row.facts | {"pins": pins}, "started": f"day {number}"}
        )
        end = EndRow(run=name, finished="", exit_code=0, counts={}, seconds=1.0)
        path = self.project.home / "runs" / name / "rows.jsonl"
        if published:
            path = self.project.results / PIN / "host" / "stock" / name / "conformance.jsonl"
        all_rows: list[Row] = [first, *rows, *([end] if ended else [])]
        with RowWriter(path) as writer:
            for row in all_rows:
                writer.write(row.model_copy(update={"run": name}))
        return path

    def status(self, version: str = PIN) -> PinStatus:
        return next(s for s in pin_status.statuses(self.project) if (s.version, s.device) == (version, "host"))


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_row: RunRow) -> Lab:
    monkeypatch.delenv("KVMATRIX_HOME", raising=False)
    root = tmp_path / "root"
    root.mkdir()
    shutil.copy(ROOT / "matrix.toml", root)
    for name in ("envs", "patches"):
        shutil.copytree(ROOT / name, root / name)
    return Lab(Project(root=root), run_row)


@pytest.fixture
def bad(make_row: MakeRow) -> ProbeRow:
    return make_row("mixed-misaligned", "FAIL", reason=WRONG, expected="FAIL")


@pytest.fixture
def good(make_row: MakeRow) -> ProbeRow:
    return make_row("mixed-misaligned", "PASS")


# --- the state --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probe", "status", "cell", "reason", "state"),
    [
        ("mixed-misaligned", "FAIL", {}, WRONG, "affected"),
        ("prompt81-prefix16-tail-present", "FAIL", SCHEDULER, "unsound: answers (64, True)", "affected"),
        ("mixed-misaligned", "PASS", {}, "", "fixed upstream"),
        ("mixed-misaligned", "PASS", SCHEDULER, "", "unknown"),
        ("prompt81-prefix16-tail-present", "PASS", SCHEDULER, "", "unknown"),
        ("cold", "PASS", {}, "", "unknown"),
        ("mixed-misaligned", "INFRA", {}, WRONG, "unknown"),
        ("mixed-misaligned", "CRASH", {}, WRONG, "unknown"),
        ("mixed-misaligned", "NOT_RUN", {}, "", "unknown"),
        ("mixed-misaligned", "FAIL", {}, "leaked-pin: 1 pending", "unknown"),
        ("cold", "FAIL", {}, WRONG, "unknown"),
        ("prompt81-prefix0-tail-absent", "FAIL", SCHEDULER, "lost-reuse: answers", "unknown"),
        ("mixed-misaligned", "FAIL", {"arm": "fix"}, WRONG, "unknown"),
        ("mixed-misaligned", "PASS", {"arm": "fix"}, "", "unknown"),
    ],
)
def test_what_one_row_says(make_row: MakeRow, probe: str, status: str, cell: Any, reason: str, state: str) -> None:
    assert state_of([make_row(probe, status, cell, reason=reason)]) == state


def test_one_failure_outweighs_what_passes(good: ProbeRow, bad: ProbeRow) -> None:
    assert state_of([good, bad, good]) == "affected"


def test_nothing_is_known_without_rows(lab: Lab) -> None:
    status = lab.status()
    assert (status.state, status.run, status.date, status.patches) == ("unknown", "", "", ())
    assert "default" in status.notes
    assert "run `nox -s conformance -- --pin 0.32.0`" in status.notes


@pytest.mark.parametrize("published", [False, True])
def test_a_finished_run_shows_the_state(lab: Lab, bad: ProbeRow, published: bool) -> None:
    lab.run(1, [bad], published=published)
    status = lab.status()
    assert (status.state, status.run, status.date) == ("affected", "20260101T000100Z-0000", "day 1")
    assert not any("run `nox" in note for note in status.notes)


@pytest.mark.parametrize(("older", "newer"), [(False, True), (True, False), (False, False), (True, True)])
def test_the_newest_run_wins(lab: Lab, good: ProbeRow, bad: ProbeRow, older: bool, newer: bool) -> None:
    """Wherever it lies."""
    lab.run(1, [bad], published=older)
    lab.run(2, [good], published=newer)
    assert (lab.status().state, lab.status().run) == ("fixed upstream", "20260101T000200Z-0000")
    lab.run(3, [bad], published=older)
    assert lab.status().state == "affected"


def test_a_newer_run_that_says_nothing_changes_nothing(lab: Lab, bad: ProbeRow, make_row: MakeRow) -> None:
    lab.run(1, [bad])
    lab.run(2, [make_row("cold")])
    assert (lab.status().state, lab.status().run) == ("affected", "20260101T000100Z-0000")


# --- which rows count -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pins",
    [
        {},
        {PIN: {"device": "host"}},
        {PIN: {"device": "host", "wheel_sha256": "0" * 64}},
        {PIN: {"device": "cuda", "wheel_sha256": "THIS"}},
        {"0.29.0": {"device": "host", "wheel_sha256": "THIS"}},
        {PIN: {"device": "host", "wheel_sha256": "THIS," + "0" * 64}},
    ],
)
def test_rows_of_another_install_do_not_count(lab: Lab, bad: ProbeRow, pins: dict[str, Any]) -> None:
    lab.run(1, [bad], json.loads(json.dumps(pins).replace("THIS", lab.wheel)))
    assert {s.state for s in pin_status.statuses(lab.project)} == {"unknown"}


@pytest.mark.parametrize(
    "cell", [{"prompt": 193}, {"prefix": 64}, {"chunk": 256}, {"backend": "TRITON_ATTN"}, {"layers": "cff"}, {"device": "cuda"}]
)
def test_rows_of_another_matrix_do_not_count(lab: Lab, make_row: MakeRow, cell: dict[str, Any]) -> None:
    lab.run(1, [make_row("mixed-misaligned", "FAIL", cell, reason=WRONG)])
    assert lab.status().state == "unknown"


@pytest.mark.parametrize("how", [{"ended": False}, {"ended": False, "published": True}, {"suite": "perf"}])
def test_a_run_that_is_not_a_finished_conformance_run_does_not_count(lab: Lab, bad: ProbeRow, how: dict[str, Any]) -> None:
    lab.run(1, [bad], **how)
    assert lab.status().state == "unknown"


def test_only_the_last_attempt_counts(lab: Lab, good: ProbeRow, bad: ProbeRow) -> None:
    lab.run(1, [bad, good.model_copy(update={"attempt": 2})])
    assert lab.status().state == "fixed upstream"


@pytest.mark.parametrize("published", [False, True])
def test_damaged_rows_are_passed_over(lab: Lab, good: ProbeRow, bad: ProbeRow, published: bool) -> None:
    lab.run(1, [bad])
    path = lab.run(2, [good], published=published)
    path.write_bytes(path.read_bytes()[:-20])
    assert lab.status().state == "affected"


def test_a_mixed_build_needs_both_of_its_wheels(lab: Lab, make_row: MakeRow) -> None:
    pin = next((p for p in lab.project.matrix.pins if p.mixed), None)
    if pin is None or pin.mixed is None:
        pytest.skip("matrix.toml has no mixed build")
    row = make_row("mixed-misaligned", "PASS", {"pin": pin.version})
    both = f"{pin.mixed.wheel_sha256} (Python files), {lab.wheel} (extensions)"
    for number, (text, state) in enumerate(
        [(lab.wheel, "unknown"), (pin.mixed.wheel_sha256, "unknown"), (both, "fixed upstream")]
    ):
        lab.run(number, [row], {pin.version: {"device": "host", "wheel_sha256": text}})
        assert lab.status(pin.version).state == state
    assert f"mixed build over the extensions of {pin.mixed.base}" in lab.status(pin.version).notes


# --- patches ----------------------------------------------------------------------------------------------------------


def test_patches_are_those_of_the_very_file_that_is_there(lab: Lab, bad: ProbeRow, make_row: MakeRow) -> None:
    file = lab.project.patches / FIX / f"{PIN}.patch"

    def run(number: int, status: str = "PASS") -> None:
        row = make_row("mixed-misaligned", status, {"arm": FIX}, patch_sha256=sha256(file.read_bytes()), reason=WRONG)
        lab.run(number, [bad, row])

    run(1)
    assert lab.status().patches == (FIX,)
    run(2, "FAIL")
    assert lab.status().patches == ()
    run(3)
    assert lab.status().patches == (FIX,)
    file.write_bytes(file.read_bytes() + b"\n")
    assert lab.status().patches == ()


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def called(lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    monkeypatch.setenv("KVMATRIX_ROOT", str(lab.project.root))

    def call(*args: str) -> tuple[int, str]:
        capsys.readouterr()
        code = cli.main(["pin", "status", *args])
        return code, capsys.readouterr().out

    return call


def test_the_table(lab: Lab, bad: ProbeRow, called: Callable[..., tuple[int, str]]) -> None:
    lab.run(1, [bad])
    code, out = called()
    lines = out.splitlines()
    assert code == 0
    assert len(lines) == 2 + len(lab.project.matrix.pins)
    (line,) = [text for text in lines if text.startswith(f"| {PIN} ")]
    assert "| affected " in line
    assert "| 20260101T000100Z-0000, day 1 " in line
    assert all("| unknown " in text for text in lines[2:] if text is not line)


def test_json(lab: Lab, bad: ProbeRow, called: Callable[..., tuple[int, str]]) -> None:
    lab.run(1, [bad])
    code, out = called("--json")
    first = json.loads(out)[0]
    assert code == 0
    assert first | {"notes": []} == {
        "version": PIN,
        "device": "host",
        "state": "affected",
        "run": "20260101T000100Z-0000",
        "date": "day 1",
        "patches": [],
        "notes": [],
    }


# --- a run of stock alone, published ----------------------------------------------------------------------------------


def test_stock_alone_is_published(lab: Lab, good: ProbeRow, make_row: MakeRow) -> None:
    lab.run(1, [make_row("cold"), good])
    (tables,) = document.publish(lab.project.home, lab.project.results)
    assert tables.relative_to(lab.project.results).parts[:3] == (PIN, "host", "stock")
    text = tables.read_text(encoding="utf-8")
    assert "# vLLM 0.32.0, host device: stock\n" in text
    assert "**NOT AFFECTED: 2 of 2 probes PASS on stock: the fault is not in this release.**" in text
    assert "patch sha256" not in text
    assert document.stale_tables(lab.project.results) == []
    tables.write_text(text + "\n", encoding="utf-8")
    assert document.stale_tables(lab.project.results) == [tables]


def test_beside_a_patch_stock_has_no_folder_of_its_own(make_row: MakeRow) -> None:
    rows = [make_row("cold"), make_row("cold", cell={"arm": "fix"}), make_row("cold", cell={"pin": "0.29.0"})]
    assert document.pins_and_patches(rows) == [("0.29.0", "host", "stock"), (PIN, "host", "fix")]


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        (
            [("mixed-misaligned", "PASS", "PASS")],
            "NOT AFFECTED: 2 of 2 probes PASS on stock: the fault is not in this release.",
        ),
        ([("mixed-misaligned", "FAIL", "FAIL")], "AFFECTED: stock shows the fault: 1 of 2 probes FAIL as expected, 1 PASS."),
        ([("mixed-misaligned", "FAIL", "PASS")], "UNEXPECTED: 1 rows of stock are not as expected"),
        ([("mixed-misaligned", "PASS", "FAIL")], "UNEXPECTED: 1 rows of stock are not as expected"),
        ([("mixed-misaligned", "INFRA", "PASS")], "UNEXPECTED: 1 rows of stock are not as expected"),
        ([("mixed-misaligned", "NOT_RUN", "PASS")], "INCOMPLETE: no engine ran the misaligned mixed hit."),
        ([], "INCOMPLETE: no engine ran the misaligned mixed hit."),
        ([("mixed-misaligned", "PASS", "PASS"), ("device-hit", "UNSUPPORTED", "PASS")], "NOT AFFECTED where it ran: 1 rows"),
    ],
)
def test_the_verdict_on_stock(make_row: MakeRow, changes: list[tuple[str, str, str]], verdict: str) -> None:
    rows = [make_row("cold"), *(make_row(p, s, expected=e, reason=WRONG) for p, s, e in changes)]
    assert document.verdict(rows, "stock").startswith(verdict)
    assert f"stock on vLLM {PIN}, host device: {verdict}" in document.conformance_summary(rows)
