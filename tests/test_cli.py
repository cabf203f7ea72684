"""The command as users meet it: one line on standard error for each mistake, and an exit code that tells them apart."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvmatrix import cli
from kvmatrix.config import Project
from kvmatrix.errors import ExitCode, KvmatrixError
from kvmatrix.records import EndRow, ProbeRow, RowWriter, RunRow
from kvmatrix.report import document

Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]


@pytest.fixture
def root(tmp_path: Path, project: Project) -> Path:
    """A project root of its own: the small files that commands read."""
    target = tmp_path / "root"
    target.mkdir()
    for name in ("matrix.toml", "pyproject.toml"):
        shutil.copy(project.root / name, target)
    for name in ("conformance", "perf", "patches", "envs"):
        shutil.copytree(project.root / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    return target


@pytest.fixture
def kvmatrix(root: Path, tmp_path: Path) -> Run:
    def run(*args: str, **variables: str) -> Done:
        environ = os.environ | {"KVMATRIX_ROOT": str(root), "KVMATRIX_HOME": str(tmp_path / "home"), **variables}
        command = [sys.executable, "-m", "kvmatrix.cli", *args]
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)

    return run


@pytest.fixture
def called(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The same as ``kvmatrix`` inside this process, where a start of Python costs nothing."""

    def run(*args: str) -> Done:
        monkeypatch.setenv("KVMATRIX_ROOT", str(root))
        monkeypatch.setenv("KVMATRIX_HOME", str(tmp_path / "home"))
        capsys.readouterr()
        code = cli.main(args)
        return subprocess.CompletedProcess(list(args), code, *capsys.readouterr())

    return run


def error_of(done: Done, code: ExitCode) -> str:
    """The one line that a command which failed must have printed."""
    assert done.returncode == code, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("kvmatrix: error: ")
    assert done.stdout == ""
    return lines[0]


@pytest.mark.parametrize(
    ("args", "named", "known"),
    [
        ("conformance --pin 0.1.0", "'0.1.0'", "0.32.0"),
        ("conformance --backend NOPE", "'NOPE'", "CPU_ATTN"),
        ("conformance --patch nosuch", "'nosuch'", "decline-misaligned"),
        ("conformance --nonsense", "--nonsense", "--help"),
    ],
)
def test_a_mistake_is_one_line(kvmatrix: Run, tmp_path: Path, args: str, named: str, known: str) -> None:
    line = error_of(kvmatrix(*args.split()), ExitCode.USAGE)
    assert named in line
    assert known in line
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("args", "named", "known"),
    [
        ("conformance --mode fast", "'fast'", "eager"),
        ("conformance --chunk 99", "99", "128"),
        ("conformance --chunk many", "'many'", "--help"),
        ("conformance --arm nosuch", "'nosuch'", "stock"),
        ("conformance --device tpu", "'tpu'", "host"),
        ("perf --backend NOPE", "'NOPE'", "CPU_ATTN"),
        ("perf --patch nosuch", "'nosuch'", "decline-misaligned"),
        ("cells --patch nosuch", "'nosuch'", "decline-misaligned"),
        ("lock 0.1.0", "'0.1.0'", "0.32.0"),
        ("env remove nosuch", "'nosuch'", "none"),
        ("env remove", "needs a name", "env list"),
        ("env sweep", "'sweep'", "build"),
        ("nosuch", "'nosuch'", "conformance"),
        ("", "COMMAND", "--help"),
    ],
)
def test_what_is_unknown_is_named(called: Run, tmp_path: Path, args: str, named: str, known: str) -> None:
    line = error_of(called(*args.split()), ExitCode.USAGE)
    assert named in line
    assert known in line
    assert not list((tmp_path / "home").rglob("*.jsonl"))


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda text: text.replace("[budgets]", "[budgets"), "not valid TOML"),
        (lambda text: text.replace("jobs = 2", "job = 2"), "budgets.job"),
        (lambda text: text.replace("prefix = 32", "prefix = 33"), "a multiple of block"),
    ],
    ids=["toml", "key", "geometry"],
)
def test_a_damaged_matrix(called: Run, root: Path, damage: Callable[[str], str], what: str) -> None:
    text = (root / "matrix.toml").read_text(encoding="utf-8")
    (root / "matrix.toml").write_text(damage(text), encoding="utf-8")
    assert damage(text) != text
    line = error_of(called("conformance"), ExitCode.USAGE)
    assert "matrix.toml" in line
    assert what in line


def test_a_device_that_is_not_here(called: Run) -> None:
    assert "cuda" in error_of(called("conformance", "--device", "cuda"), ExitCode.DEVICE)


def test_outside_of_a_project(called: Run, root: Path) -> None:
    (root / "matrix.toml").unlink()
    assert "no matrix.toml" in error_of(called("cells"), ExitCode.USAGE)


def test_a_damaged_patch_toml(called: Run, root: Path) -> None:
    (root / "patches" / "decline-misaligned" / "patch.toml").write_text("title = ", encoding="utf-8")
    assert "patch.toml" in error_of(called("conformance"), ExitCode.PATCH)


@pytest.mark.parametrize("command", ["conformance", "perf"])
def test_a_home_that_is_no_folder(kvmatrix: Run, tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    done = kvmatrix(command, KVMATRIX_HOME=str(tmp_path / "file"))
    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode == ExitCode.DISK
    assert done.stderr.splitlines()[-1].startswith("kvmatrix: error: ")


def test_cells_are_listed(kvmatrix: Run, project: Project) -> None:
    done = kvmatrix("cells", "--backend", "CPU_ATTN", "--mode", "eager", "--quick")
    assert done.returncode == ExitCode.OK
    cell = "0.32.0-host-CPU_ATTN-eager-c128-b32-p161-d32"
    assert done.stdout.splitlines() == [f"{cell}-{arm}" for arm in ("stock", *project.matrix.defaults.patches)]
    told = done.stderr.splitlines()
    assert told[0] == f"kvmatrix: {1 + len(project.matrix.defaults.patches)} cells"
    assert re.fullmatch(r"kvmatrix: \d+ of \d+ pairs of axis values, without .* with .* and others", told[1])


def test_a_selection_that_leaves_nothing(called: Run) -> None:
    assert "leaves no cell" in error_of(called("cells", "--backend", "TRITON_ATTN", "--chunk", "256"), ExitCode.USAGE)


def test_the_version_and_the_help(kvmatrix: Run) -> None:
    assert kvmatrix("--version").stdout.startswith("kvmatrix ")
    text = kvmatrix("--help").stdout
    assert all(command in text for command in cli.COMMANDS)


def test_environments_where_there_are_none(called: Run) -> None:
    done = called("env", "list")
    assert (done.returncode, done.stdout, done.stderr) == (ExitCode.OK, "", "")


def test_the_doctor(called: Run, project: Project) -> None:
    done = called("doctor")
    assert done.returncode == ExitCode.OK
    rows = [line for line in done.stdout.splitlines() if line.startswith("| 0.32.0")]
    assert len(rows) == len(project.matrix.pin("0.32.0", "host").backends) * len(project.matrix.axes.mode)
    assert "environment will be built on the first run" in done.stdout


# --- reports ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def finished_run(tmp_path: Path, run_row: RunRow, make_row: Callable[..., ProbeRow]) -> Path:
    """The row file of a finished run in the commands' home."""
    path = tmp_path / "home" / "runs" / run_row.run / "rows.jsonl"
    rows = [make_row("cold"), make_row("cold", cell={"arm": "fix"})]
    end = EndRow(run=run_row.run, finished="2026-01-01T00:01:00Z", exit_code=0, counts={"PASS": 2}, seconds=60.0)
    with RowWriter(path) as writer:
        for row in (run_row, *rows, end):
            writer.write(row)
    return path


def test_a_report_and_its_check(called: Run, kvmatrix: Run, finished_run: Path, root: Path) -> None:
    done = called("report")
    assert done.returncode == ExitCode.OK, done.stderr
    (tables,) = root.glob("results/0.32.0/host/fix/*/tables.md")
    assert tables.read_text(encoding="utf-8").strip() in done.stdout
    assert called("report", "--check").returncode == ExitCode.OK

    tables.write_text(tables.read_text(encoding="utf-8").replace("PASS", "FINE"), encoding="utf-8")
    tampered = kvmatrix("report", "--check")
    assert tampered.returncode == ExitCode.UNEXPECTED
    (line,) = tampered.stderr.splitlines()
    assert str(tables.relative_to(root)) in line

    document.write_tables(tables.parent)
    assert called("report", "--check").returncode == ExitCode.OK
    rows = tables.with_name("conformance.jsonl")
    rows.write_text(rows.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    assert "line 4" in error_of(called("report", "--check"), ExitCode.ROWS)


def test_a_report_without_a_run(called: Run) -> None:
    assert "nox -s conformance" in error_of(called("report"), ExitCode.NOTHING_RAN)


# --- exit codes -------------------------------------------------------------------------------------------------------


def test_exit_codes_are_distinct() -> None:
    assert len({int(code) for code in ExitCode.__members__.values()}) == len(ExitCode.__members__)
    kinds = KvmatrixError.__subclasses__()
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert ExitCode.OK not in {kind.code for kind in kinds}


def command_that_raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    def fail(*args: Any) -> int:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "cells", fail)
    return cli.main(["cells"])


@pytest.mark.parametrize("kind", KvmatrixError.__subclasses__(), ids=lambda k: k.__name__)
def test_an_error_on_one_line(
    kind: type[KvmatrixError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_that_raises(monkeypatch, kind("what is\n  wrong")) == kind.code
    assert capsys.readouterr().err == "kvmatrix: error: what is wrong\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_anywhere(number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_that_raises(monkeypatch, OSError(number, os.strerror(number), "/a/b/rows.jsonl")) == ExitCode.DISK
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvmatrix: error: {os.strerror(number)}: ")
    assert "rows.jsonl" in line
    assert "free space" in line


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_that_raises(monkeypatch, KeyboardInterrupt()) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "kvmatrix: interrupted\n"


@pytest.mark.parametrize("suite", ["conformance", "perf"])
def test_the_suites_say_how_they_are_run(root: Path, tmp_path: Path, suite: str) -> None:
    """pytest alone has no rows to look at: that must not look like a pass."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(root / suite)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"nox -s {suite}" in done.stderr
