"""Wrong fixes: the index of them, what kills one and what does not, and how the run ends. No engine runs here."""

from __future__ import annotations

import io
import shutil
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from kvmatrix import cli, envs, mutants
from kvmatrix.arms import load_patch
from kvmatrix.cells import STOCK, Cell
from kvmatrix.config import Pin, Project
from kvmatrix.errors import ExitCode, PatchError, UsageError
from kvmatrix.mutants import Controls, MutantSession, exit_code, judged, load_index, narrowed, report
from kvmatrix.qualified import newest_runs
from kvmatrix.records import EndRow, ProbeRow, RowWriter, RunRow
from kvmatrix.runner import WITH_PARENT

MakeRow = Callable[..., ProbeRow]
CASE, SWEEP = "prompt81-prefix16-tail-present", "reuse-two-sizes-all"
PROBES = (CASE, SWEEP)
PATCHES = ("one", "two")


# --- the index --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(project: Project, tmp_path: Path) -> Path:
    return Path(shutil.copytree(project.patches / mutants.MUTANTS, tmp_path / "patches" / mutants.MUTANTS))


def edit(folder: Path, old: str, new: str) -> None:
    path = folder / "mutants.toml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_the_projects_own_mutants(project: Project) -> None:
    """Enough of them, of each patch, against the file that the patches change, and each another file."""
    index = load_index(project.patches / mutants.MUTANTS)
    assert len(index.mutants) >= 26
    assert {m.of for m in index.mutants} == set(project.matrix.defaults.patches)
    right = set()
    for name in project.matrix.defaults.patches:
        (file,) = load_patch(project.patches / name).pins[index.pin].files
        assert (file.path, file.pre_sha256) == (index.path, index.pre_sha256)
        right.add(file.post_sha256)
    assert not right & {m.post_sha256 for m in index.mutants}
    assert index.pin == project.matrix.defaults.pin


def test_their_patch_files_show_no_more_of_vllm_than_they_need(project: Project) -> None:
    for path in (project.patches / mutants.MUTANTS).glob("*.patch"):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not line.startswith("@@") or line.endswith("@@"), f"{path.name}: function context"


def test_each_keeps_its_patchs_promise(project: Project) -> None:
    index = load_index(project.patches / mutants.MUTANTS)
    sources = index.sources(project.patches / mutants.MUTANTS, project.patches)
    assert list(sources) == [m.name for m in index.mutants]
    for mutant in index.mutants:
        source = sources[mutant.name]
        assert source.keeps == load_patch(project.patches / mutant.of).keeps
        assert source.patch_file.name == f"{mutant.name}.patch"


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("schema = 1", "schema = 2", "schema"),
        ("schema = 1", "schema = 1\nodd = 2", "odd"),
        ("schema = 1", "schema = ", "not valid TOML"),
        ('name = "decline-always"', 'name = "../decline"', "name"),
        ('name = "decline-always"', 'name = "decline-inverted"', "two mutants have the name decline-inverted"),
        ('path = "vllm/v1/simple_kv_offload/manager.py"', 'path = "vllm/v1/other.py"', "path"),
        ('of = "decline-misaligned"\n', "", "of"),
    ],
)
def test_an_index_that_is_not_right(folder: Path, old: str, new: str, what: str) -> None:
    edit(folder, old, new)
    with pytest.raises(PatchError, match=r"mutants\.toml") as caught:
        load_index(folder)
    assert what in str(caught.value)


def test_two_mutants_that_are_one(folder: Path) -> None:
    first, second = load_index(folder).mutants[:2]
    edit(folder, second.post_sha256, first.post_sha256)
    with pytest.raises(PatchError, match="two mutants have the post_sha256"):
        load_index(folder)


def test_a_mutant_that_changes_nothing(folder: Path) -> None:
    index = load_index(folder)
    edit(folder, index.mutants[0].post_sha256, index.pre_sha256)
    with pytest.raises(PatchError, match="leaves the file as it is"):
        load_index(folder)


def test_a_patch_file_that_is_missing_or_in_no_list(folder: Path) -> None:
    (folder / "decline-always.patch").rename(folder / "another.patch")
    with pytest.raises(PatchError, match=r"decline-always\.patch is missing"):
        load_index(folder)
    shutil.copy(folder / "another.patch", folder / "decline-always.patch")
    with pytest.raises(PatchError, match=r"another\.patch is not in mutants\.toml"):
        load_index(folder)


def test_no_index(tmp_path: Path) -> None:
    with pytest.raises(PatchError, match="cannot be read"):
        load_index(tmp_path)


def test_narrowing(folder: Path) -> None:
    index = load_index(folder)
    assert [m.name for m in narrowed(index, "decline-alw").mutants] == ["decline-always"]
    assert narrowed(index, "") == index
    with pytest.raises(UsageError, match="'nosuch'"):
        narrowed(index, "nosuch")


# --- what kills -------------------------------------------------------------------------------------------------------


@pytest.fixture
def row(make_row: MakeRow) -> MakeRow:
    """A scheduler row of an arm; stock's expected failure is the default of stock's cases."""

    def make(arm: str, probe: str = CASE, status: str = "PASS", **changes: Any) -> ProbeRow:
        cell = {"tier": "scheduler", "arm": arm, "chunk": 64, "block": 16, "prompt": 81}
        return make_row(probe, status, cell=cell, **changes)

    return make


@pytest.fixture
def control_rows(row: MakeRow) -> list[ProbeRow]:
    rows = [row(STOCK, p, "FAIL", expected="FAIL") for p in PROBES]
    return rows + [row(a, p) for a in PATCHES for p in PROBES]


def outcome(controls: Sequence[ProbeRow], rows: Sequence[ProbeRow]) -> str:
    (fate,) = judged([*controls, *rows], ["mutant"])[1]
    return fate.outcome


@pytest.mark.parametrize("status", ["FAIL", "CRASH", "TIMEOUT", "UNSUPPORTED"])
def test_a_row_that_the_patches_pass_kills(row: MakeRow, control_rows: list[ProbeRow], status: str) -> None:
    rows = [row("mutant"), row("mutant", SWEEP, status, reason="x")]
    controls, (fate,) = judged([*control_rows, *rows], ["mutant"])
    assert (fate.outcome, fate.row) == ("killed", rows[1])
    assert exit_code(controls, [fate]) is ExitCode.OK
    assert outcome(control_rows, [rows[1], row("mutant", status="NOT_RUN")]) == "killed", (
        "what was not asked after it is no matter"
    )


@pytest.mark.parametrize("status", ["INFRA", "NOT_RUN"])
def test_a_state_that_was_not_established_kills_nothing(row: MakeRow, control_rows: list[ProbeRow], status: str) -> None:
    rows = [row("mutant"), row("mutant", SWEEP, status, reason="not-established: x")]
    controls, fates = judged([*control_rows, *rows], ["mutant"])
    assert fates[0].outcome == "undecided"
    assert exit_code(controls, fates) is ExitCode.INFRA


def test_a_child_that_ended_with_its_parent_says_nothing(row: MakeRow, control_rows: list[ProbeRow]) -> None:
    died = row("mutant", status="CRASH", reason=f"crash: the process ended {WITH_PARENT} before it was done")
    assert outcome(control_rows, [died]) == "undecided"


def test_a_failure_where_a_patch_fails_too_says_nothing(row: MakeRow, control_rows: list[ProbeRow]) -> None:
    failing = [r if r.id != row("two").id else row("two", status="FAIL") for r in control_rows]
    assert outcome(failing, [row("mutant", status="FAIL"), row("mutant", SWEEP)]) == "undecided"


def test_a_crash_where_stock_did_not_run_says_nothing(row: MakeRow, control_rows: list[ProbeRow]) -> None:
    refused = [row(STOCK, status="UNSUPPORTED"), *control_rows[1:]]
    assert outcome(refused, [row("mutant", status="CRASH"), row("mutant", SWEEP)]) == "undecided"


def test_a_bad_end_after_all_answers_kills(row: MakeRow, control_rows: list[ProbeRow]) -> None:
    rows = [*(row("mutant", p) for p in PROBES), row("mutant", "shutdown", "CRASH")]
    assert outcome(control_rows, rows) == "killed"
    assert outcome([*control_rows, row("one", "shutdown", "CRASH")], rows) == "undecided"


def test_a_survivor(row: MakeRow, control_rows: list[ProbeRow]) -> None:
    controls, fates = judged([*control_rows, *(row("mutant", p) for p in PROBES)], ["mutant"])
    assert fates[0].outcome == "survived"
    assert exit_code(controls, fates) is ExitCode.UNEXPECTED
    said = report(controls, fates, {"mutant": "one"})
    assert "0 of 1 killed" in said
    assert "1 survived: mutant" in said


def test_without_any_row_nothing_is_known(control_rows: list[ProbeRow]) -> None:
    assert outcome(control_rows, []) == "undecided"


# --- the controls -----------------------------------------------------------------------------------------------------


@pytest.fixture
def killed(row: MakeRow) -> list[ProbeRow]:
    return [row("mutant", status="FAIL", reason="unsound: x")]


def test_controls_as_they_must_be(control_rows: list[ProbeRow], killed: list[ProbeRow]) -> None:
    controls, fates = judged([*control_rows, *killed], ["mutant"])
    assert exit_code(controls, fates) is ExitCode.OK
    said = report(controls, fates, {"mutant": "one"})
    assert "1 of 1 killed" in said
    assert f"| mutant   | one        | killed | scheduler | {CASE} | unsound: x |" in said
    assert "stock fails 2 rows, each as expected; one, two pass every row" in said


@pytest.mark.parametrize(
    ("arm", "status", "expected", "code"),
    [
        ("two", "FAIL", "PASS", ExitCode.UNEXPECTED),
        ("two", "UNSUPPORTED", "PASS", ExitCode.UNEXPECTED),
        ("two", "CRASH", "PASS", ExitCode.UNEXPECTED),
        ("two", "INFRA", "PASS", ExitCode.INFRA),
        ("two", "NOT_RUN", "PASS", ExitCode.INFRA),
        (STOCK, "PASS", "FAIL", ExitCode.UNEXPECTED),
        (STOCK, "FAIL", "PASS", ExitCode.UNEXPECTED),
        (STOCK, "INFRA", "FAIL", ExitCode.INFRA),
    ],
)
def test_a_control_that_is_not(
    row: MakeRow, control_rows: list[ProbeRow], killed: list[ProbeRow], arm: str, status: str, expected: str, code: ExitCode
) -> None:
    odd = row(arm, SWEEP, status, expected=expected)
    controls, fates = judged([r if r.id != odd.id else odd for r in control_rows] + killed, ["mutant"])
    assert fates[0].outcome == "killed", "by the other row"
    assert exit_code(controls, fates) is code
    assert "CONTROLS NOT AS EXPECTED: 1 rows, first " in report(controls, fates, {})


def test_a_stock_that_fails_nowhere(row: MakeRow, control_rows: list[ProbeRow], killed: list[ProbeRow]) -> None:
    """Then the suite sees nothing, whatever it says of the mutants."""
    passing = [row(STOCK, p) for p in PROBES] + control_rows[2:]
    controls, fates = judged([*passing, *killed], ["mutant"])
    assert not controls.problems()
    assert exit_code(controls, fates) is ExitCode.UNEXPECTED
    assert "stock fails nowhere in the scheduler tier" in report(controls, fates, {})


def test_a_fault_of_the_release_neither_kills_nor_spoils_the_controls(row: MakeRow, control_rows: list[ProbeRow]) -> None:
    own = {"expected": "FAIL", "of_every_arm": True, "reason": "still-served: 40 tokens"}
    rows = [row(arm, "public-1-x", "FAIL", **own) for arm in (STOCK, *PATCHES, "mutant")]
    survivor = [row("mutant", p) for p in PROBES]
    controls, (fate,) = judged([*control_rows, *survivor, *rows], ["mutant"])
    assert not controls.problems()
    assert fate.outcome == "survived"
    assert "stock fails 2 rows, each as expected; one, two pass every other row" in report(controls, [fate], {})
    excused = [r.model_copy(update={"of_every_arm": False}) for r in rows]
    assert judged([*control_rows, *survivor, *excused], ["mutant"])[0].problems()
    refused = [r.model_copy(update={"status": "UNSUPPORTED", "expected": "PASS", "reason": "refused: x"}) for r in rows]
    controls, (fate,) = judged([*control_rows, *survivor, *refused], ["mutant"])
    assert (controls.problems(), fate.outcome) == ([], "survived")
    other = [r.model_copy(update={"reason": "not-run: x"}) for r in refused]
    assert judged([*control_rows, *survivor, *other], ["mutant"])[0].problems()
    # Alone it does not show that stock's own fault is seen.
    alone = [r for r in control_rows if r.cell["arm"] != STOCK]
    assert judged([*alone, *rows], ["mutant"])[0].blind() == ["scheduler"]


def test_nothing_asked_is_no_pass(control_rows: list[ProbeRow]) -> None:
    assert exit_code(Controls(control_rows), []) is ExitCode.NOTHING_RAN


# --- the run ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def own(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    root = tmp_path / "root"
    root.mkdir()
    shutil.copy(project.root / "matrix.toml", root)
    for name in ("patches", "conformance"):
        shutil.copytree(project.root / name, root / name)
    monkeypatch.setenv("KVMATRIX_HOME", str(tmp_path / "home"))
    return Project(root=root)


@pytest.fixture
def opened(own: Project) -> Callable[..., MutantSession]:
    def make(keyword: str = "", diffs: Sequence[str] = (), of: str = "") -> MutantSession:
        return MutantSession(own, keyword, diffs, of, Console(file=io.StringIO()), ["mutants"])

    return make


class Ran:
    """In place of the cells' processes: each arm's rows as told, and which cells were asked for."""

    def __init__(self, session: MutantSession, statuses: dict[tuple[str, str], str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, str]] = []
        self.statuses = statuses
        self.ctx = SimpleNamespace(until_failure=frozenset())
        monkeypatch.setattr(session, "open", lambda planned: self.ctx)
        monkeypatch.setattr(session, "run_cells", self.run)

    def run(self, cells: Sequence[Cell]) -> list[ProbeRow]:
        self.asked += [(c.tier, c.arm) for c in cells]
        return [self.row(c) for c in cells]

    def row(self, cell: Cell) -> ProbeRow:
        status = self.statuses.get((cell.tier, cell.arm), "FAIL" if cell.arm == STOCK else "PASS")
        expected = "FAIL" if cell.arm == STOCK else "PASS"
        fields = {"id": f"{cell.id}-{CASE}", "cell": cell.model_dump(), "status": status, "expected": expected}
        return ProbeRow(run="r", probe=CASE, **fields)


def test_only_what_survives_the_scheduler_tier_faces_the_engine(
    own: Project, opened: Callable[..., MutantSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened("decline-a")
    names = session.mutants
    assert len(names) > 3
    survivor, stubborn = names[:2]
    statuses = {("scheduler", n): "FAIL" for n in names[2:]} | {("llm", survivor): "FAIL"}
    ran = Ran(session, statuses, monkeypatch)
    controls, fates = mutants.run(session)
    arms = [STOCK, *own.matrix.defaults.patches]
    assert ran.asked == [("scheduler", a) for a in [*arms, *names]] + [("llm", a) for a in [*arms, survivor, stubborn]]
    assert ran.ctx.until_failure == frozenset(names), "a control is asked everything"
    assert {f.name: f.outcome for f in fates} == {n: "survived" if n == stubborn else "killed" for n in names}
    assert fates[0].row is not None
    assert fates[0].row.cell["tier"] == "llm"
    assert exit_code(controls, fates) is ExitCode.UNEXPECTED


def test_where_nothing_survives_no_engine_is_started(
    opened: Callable[..., MutantSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened("decline-always")
    ran = Ran(session, {("scheduler", "decline-always"): "FAIL"}, monkeypatch)
    controls, fates = mutants.run(session)
    assert {tier for tier, _ in ran.asked} == {"scheduler"}
    assert exit_code(controls, fates) is ExitCode.OK


def test_one_backend_and_mode_face_the_survivors(opened: Callable[..., MutantSession]) -> None:
    cells = opened().cells("llm", ["decline-always"])
    assert {(c.backend, c.mode, c.offload) for c in cells} == {("CPU_ATTN", "eager", "eager")}


def test_somebodys_diff_takes_the_mutants_place(
    own: Project, opened: Callable[..., MutantSession], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = load_index(own.patches / mutants.MUTANTS)
    old, new = "def lookup():\n    return 1\n", "def lookup():\n    return 2\n"

    def ensure(project: Project, pin: Pin, progress: object = None) -> SimpleNamespace:
        site = project.home / "sites" / pin.version
        (site / index.path).parent.mkdir(parents=True, exist_ok=True)
        (site / index.path).write_text(old, encoding="utf-8")
        return SimpleNamespace(site_packages=site, pin=pin)

    monkeypatch.setattr(envs, "ensure", ensure)
    monkeypatch.setattr(envs, "verify_install", lambda env: None)
    diff = tmp_path / "mine.diff"
    head = f"diff --git a/{index.path} b/{index.path}\n--- a/{index.path}\n+++ b/{index.path}\n@@ -1,2 +1,2 @@\n"
    diff.write_text(f"{head} def lookup():\n-    return 1\n+    return 2\n", encoding="utf-8")
    session = opened(diffs=[str(diff)], of="joint-lookup")
    session.plan()
    assert new != old
    assert session.mutants == ["mine"]
    assert session.controls == list(own.matrix.defaults.patches)
    assert session.promise == "all"
    assert [p.version for p in session.pins] == [index.pin]


def test_a_patch_of_the_project_is_no_mutant(opened: Callable[..., MutantSession]) -> None:
    with pytest.raises(UsageError, match="rebase-lookup is a patch of this project"):
        opened(diffs=["rebase-lookup"])
    with pytest.raises(UsageError, match="unknown fix 'nosuch'"):
        opened(diffs=["x.diff"], of="nosuch")


@pytest.mark.parametrize(("status", "code"), [("FAIL", ExitCode.OK), ("PASS", ExitCode.UNEXPECTED), ("INFRA", ExitCode.INFRA)])
def test_the_command(
    own: Project,
    row: MakeRow,
    control_rows: list[ProbeRow],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: str,
    code: ExitCode,
) -> None:
    monkeypatch.setenv("KVMATRIX_ROOT", str(own.root))
    monkeypatch.setattr(mutants, "run", lambda session: judged([*control_rows, row("mutant", status=status)], ["mutant"]))
    assert cli.main(["mutants", "-k", "always"]) == code
    assert f"{int(status == 'FAIL')} of 1 killed" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", ["-k nosuch", "--of joint-lookup", "--nonsense"])
def test_a_mistake_is_one_line(
    own: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str
) -> None:
    monkeypatch.setenv("KVMATRIX_ROOT", str(own.root))
    assert cli.main(["mutants", *arguments.split()]) == ExitCode.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvmatrix: error: ")


def test_such_a_run_qualifies_nothing(tmp_path: Path, run_row: RunRow) -> None:
    """It is found by its own name only."""
    end = EndRow(run=run_row.run, finished="x", exit_code=0, counts={}, seconds=1)
    with RowWriter(tmp_path / "runs" / run_row.run / "rows.jsonl") as writer:
        writer.write(run_row.model_copy(update={"suite": "mutants"}))
        writer.write(end)
    assert not list(newest_runs(tmp_path))
    assert not list(newest_runs(tmp_path, "conformance"))
    assert len(list(newest_runs(tmp_path, "mutants"))) == 1


def test_the_documentation_lists_every_mutant(project: Project) -> None:
    text = (project.root / "docs" / "mutants.md").read_text(encoding="utf-8")
    raw = tomllib.loads((project.patches / mutants.MUTANTS / "mutants.toml").read_text(encoding="utf-8"))
    for mutant in raw["mutants"]:
        assert f"| `{mutant['name']}` | {mutant['wrong']} |" in text
