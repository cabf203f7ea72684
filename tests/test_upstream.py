"""vLLM's own tests as an arm's judge: made-up checkouts against a made-up install, in processes of this interpreter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvmatrix import cli, envs, installers, session, upstream, upstream_source
from kvmatrix.arms import Arm
from kvmatrix.config import Pin, Project
from kvmatrix.envs import PinEnv
from kvmatrix.errors import EnvironmentBuildError, ExitCode, InfraError, NothingRanError, UsageError
from kvmatrix.expectations import Expectations
from kvmatrix.patch_files import Meta
from kvmatrix.patch_tools import new_patch
from kvmatrix.processes import Job, JobTimeout
from kvmatrix.qualified import newest_runs
from kvmatrix.records import EndRow, RowWriter, RunRow, UpstreamRow, last_attempts, read_rows
from kvmatrix.report import document
from kvmatrix.runner import Context
from kvmatrix.upstream import ArmRun
from kvmatrix.upstream_source import FOLDER, MODEL, open_source
from kvmatrix.upstream_verdict import compare, exit_code, judge_collection, judge_test, missing, summary

ROOT = Path(__file__).resolve().parents[1]
PIN = "0.32.0"
TARGET = "vllm/v1/simple_kv_offload/manager.py"
MODULE = "vllm.v1.simple_kv_offload.manager"
STOCK_CODE, FIXED_CODE = "def lookup():\n    return 1\n", "def lookup():\n    return 2\n"
INSTALL = {
    "vllm/__init__.py": "",
    "vllm/plugins.py": "def load_general_plugins():\n    pass\n",
    "vllm/v1/__init__.py": "",
    "vllm/v1/simple_kv_offload/__init__.py": "",
    TARGET: STOCK_CODE,
}
IMPORT = f"from {MODULE} import lookup\n"
SCHEDULER = IMPORT + "def test_sound(): assert lookup() > 0\ndef test_of_the_fix(): assert lookup() == 2\n"
Row = UpstreamRow
Run = Callable[..., subprocess.CompletedProcess[str]]


class MadeUpEnv(PinEnv):
    @property
    def variables(self) -> dict[str, str]:
        return {"PYTHONPATH": os.pathsep.join([str(self.site_packages), str(ROOT)])}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.fixture
def checkout(tmp_path: Path) -> Callable[..., Path]:
    """A made-up checkout with these test files; its own package is not to be imported."""

    def make(conftest: str = "", **tests: str) -> Path:
        root = tmp_path / "checkout"
        packages = ["tests", "tests/v1", FOLDER]
        write(root, {f"{p}/__init__.py": "" for p in packages} | {"tests/conftest.py": conftest})
        write(root, {f"{FOLDER}/{name}.py": text for name, text in tests.items()})
        write(root, {"vllm/__init__.py": "raise ImportError('this is the checkout, not the install')\n"})
        write(root, {"pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['its_own']\naddopts = '--strict-markers'\n"})
        return root

    return make


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def run(
    tmp_path: Path, home: Path, project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """The command with a made-up install in place of the pin's environment, and the one patch ``fix``."""
    root, site = tmp_path / "root", tmp_path / "site"
    write(site, INSTALL)
    shutil.copytree(project.root / "envs", root / "envs")
    (root / "conformance" / "expectations").mkdir(parents=True)
    matrix = (project.root / "matrix.toml").read_text(encoding="utf-8")
    start, end = matrix.index("patches = ["), matrix.index("]", matrix.index("patches = ["))
    (root / "matrix.toml").write_text(matrix[:start] + 'patches = ["fix"' + matrix[end:], encoding="utf-8")
    monkeypatch.setenv("KVMATRIX_ROOT", str(root))
    monkeypatch.setenv("KVMATRIX_HOME", str(home))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)

    def ensure(project: Project, pin: Pin, progress: object = None) -> PinEnv:
        return MadeUpEnv(pin, tmp_path, Path(sys.executable), site, "d" * 64, {})

    monkeypatch.setattr(envs, "ensure", ensure)
    monkeypatch.setattr(envs, "verify_install", lambda env: None)
    monkeypatch.setattr(envs, "wheel_sha256", lambda env: "e" * 64)
    monkeypatch.setattr(upstream, "STAND_INS", "")  # they are of the real vLLM

    def go(*args: object, code: str = FIXED_CODE) -> subprocess.CompletedProcess[str]:
        write(tmp_path / "edited", {TARGET: code})
        meta = Meta("A title", "What it does.", "Why.", "none", "never", "somebody")
        new_patch("fix", PIN, site, tmp_path / "edited", root / "patches", meta, force=True)
        capsys.readouterr()
        exit_status = cli.main(["upstream", *map(str, args)])
        return subprocess.CompletedProcess([], exit_status, *capsys.readouterr())

    return go


def rows_of(home: Path) -> list[Row]:
    (path,) = home.glob("runs/*/rows.jsonl")
    return [r for r in read_rows(path) if isinstance(r, UpstreamRow)]


def statuses(rows: Sequence[Row], arm: str = "stock") -> dict[str, str]:
    return {r.nodeid.rpartition("::")[2]: r.status for r in rows if r.arm == arm}


def reason(rows: Sequence[Row], name: str, arm: str = "stock") -> str:
    return next(r.reason for r in rows if r.arm == arm and r.nodeid.endswith(name))


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_patch_that_mends_is_green(run: Run, home: Path, checkout: Callable[..., Path]) -> None:
    source = checkout(test_scheduler=SCHEDULER, test_kv_events=IMPORT + "def test_event(): pass\n")
    before = sorted(source.rglob("*"))
    done = run("--source", source)
    assert done.returncode == ExitCode.OK, done.stderr
    rows = rows_of(home)
    assert statuses(rows) == {"test_event": "PASS", "test_sound": "PASS", "test_of_the_fix": "FAIL"}
    assert set(statuses(rows, "fix").values()) == {"PASS"}
    assert "scheduler + KV events: stock 2 passed 1 failed; fix 3 passed" in done.stdout
    assert "fix: 0 broken, 1 mended, 0 failing on stock too" in done.stdout
    assert reason(rows, "test_of_the_fix") == "assert 1 == 2"
    # Each arm's process had the arm's own file, and the checkout was only read.
    imported = {r.arm: set(r.imported.values()) for r in rows}
    assert len(imported["stock"] | imported["fix"]) == 2
    assert all(len(digests) == 1 for digests in imported.values())
    assert sorted(source.rglob("*")) == before


def test_what_a_patch_breaks_is_red(run: Run, home: Path, checkout: Callable[..., Path]) -> None:
    text = IMPORT + "def test_sound(): assert lookup() > 0\ndef test_hopeless(): assert not lookup()\n"
    done = run("--source", checkout(test_scheduler=text), code="def lookup():\n    return -1\n")
    assert done.returncode == ExitCode.UNEXPECTED
    assert "fix: 1 broken, 0 mended, 1 failing on stock too" in done.stdout
    assert f"- broken: {FOLDER}/test_scheduler.py::test_sound (FAIL: assert -1 > 0)" in done.stdout
    hopeless = f"- {FOLDER}/test_scheduler.py::test_hopeless (FAIL: assert not 1; fix: FAIL: assert not -1"
    assert hopeless in done.stdout


EXPECTED = """\
[[expect]]
status = "FAIL"
message = '^assert -1 > 0'
why = "this fix answers less, and is right"
link = "https://github.com/vllm-project/vllm/issues/1"
expires = 2099-12-31
tier = ["upstream"]
pin = ["0.32.0"]
arm = ["fix"]
test = ["*::test_sound"]
"""
LESS = "def lookup():\n    return -1\n"


@pytest.fixture
def expected(tmp_path: Path) -> Callable[[str], None]:
    """Writes the project's expectations."""

    def expect(text: str) -> None:
        write(tmp_path / "root" / "conformance" / "expectations", {"upstream.toml": text})

    return expect


def released(source: Path, version: str = PIN) -> Path:
    """The checkout as an unpacked source distribution."""
    write(source, {"PKG-INFO": f"Metadata-Version: 2.4\nName: vllm\nVersion: {version}\n"})
    return source


def test_an_expected_failure_is_not_red(
    run: Run, home: Path, checkout: Callable[..., Path], expected: Callable[[str], None]
) -> None:
    expected(EXPECTED)
    done = run("--source", released(checkout(test_scheduler=IMPORT + "def test_sound(): assert lookup() > 0\n")), code=LESS)
    assert done.returncode == ExitCode.OK, done.stderr
    assert "fix: 0 broken, 1 failing as expected, 0 mended" in done.stdout
    assert f"- expected: {FOLDER}/test_scheduler.py::test_sound (FAIL: assert -1 > 0): this fix answers less" in done.stdout
    assert {(r.arm, r.status, r.expected) for r in rows_of(home)} == {("stock", "PASS", "PASS"), ("fix", "FAIL", "FAIL")}


@pytest.mark.parametrize(
    ("change", "version", "options", "code", "said"),
    [
        ((), PIN, {"code": FIXED_CODE}, ExitCode.UNEXPECTED, "PASSING UNEXPECTEDLY:\n- fix: tests/"),
        (("-1 > 0", "-2 > 0"), PIN, {}, ExitCode.UNEXPECTED, "fix: 1 broken"),
        (("::test_sound", "::test_gone"), PIN, {"code": FIXED_CODE}, ExitCode.UNEXPECTED, "matches no row: remove it"),
        (("2099-12-31", "2026-01-31"), PIN, {}, ExitCode.UNEXPECTED, "expired on 2026-01-31, so this run is red on purpose"),
        # What is about tests that another release has, or that were not asked for, is not missed.
        (("::test_sound", "::test_gone"), "0.29.0", {"code": FIXED_CODE}, ExitCode.OK, ""),
        (("::test_sound", "::test_gone"), PIN, {"code": FIXED_CODE, "k": "sound"}, ExitCode.OK, ""),
    ],
    ids=["unexpected-pass", "another-reason", "matches-nothing", "expired", "another-release", "narrowed"],
)
def test_what_an_expectation_does_not_excuse(
    run: Run,
    checkout: Callable[..., Path],
    expected: Callable[[str], None],
    change: tuple[str, ...],
    version: str,
    options: dict[str, str],
    code: ExitCode,
    said: str,
) -> None:
    expected(EXPECTED.replace(*change) if change else EXPECTED)
    source = released(checkout(test_scheduler=IMPORT + "def test_sound(): assert lookup() > 0\n"), version)
    narrow = ["-k", options["k"]] if "k" in options else []
    done = run("--source", source, *narrow, code=options.get("code", LESS))
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    assert ("matches no row" in done.stderr) == ("matches no row" in said)


def test_a_patch_that_does_not_import_is_red(run: Run, home: Path, checkout: Callable[..., Path]) -> None:
    done = run("--source", checkout(test_scheduler=SCHEDULER), code="def other():\n    return 1\n")
    assert done.returncode == ExitCode.UNEXPECTED
    assert statuses(rows_of(home), "fix") == {f"{FOLDER}/test_scheduler.py": "FAIL"}
    assert "cannot import name 'lookup'" in reason(rows_of(home), "test_scheduler.py", "fix")


def test_a_crash_costs_no_other_test(run: Run, home: Path, checkout: Callable[..., Path]) -> None:
    text = "import os, signal\ndef test_a(): pass\ndef test_b(): os.kill(os.getpid(), signal.SIGKILL)\ndef test_c(): pass\n"
    done = run("--source", checkout(test_scheduler=text), "--arm", "stock")
    assert statuses(rows_of(home)) == {"test_a": "PASS", "test_b": "CRASH", "test_c": "PASS"}
    assert reason(rows_of(home), "test_b") == "crash: the process ended by signal 9 during this test"
    assert done.returncode == ExitCode.OK  # stock's, and nothing of a patch's


def test_what_cannot_run_here_says_why(run: Run, home: Path, checkout: Callable[..., Path]) -> None:
    text = """
import pytest
@pytest.mark.skip("Requires CUDA or ROCm")
def test_skipped(): pass
def test_module(): import nowhere_to_be_found
def test_fixture(nobody_has_it): pass
@pytest.mark.xfail(reason="upstream knows")
def test_known(): assert False
@pytest.fixture
def untidy():
    yield
    assert 0
def test_untidy(untidy): pass
def test_settings(pytestconfig): assert "its_own" in pytestconfig.getini("markers")
"""
    whole = "import pytest\npytest.skip('Requires a GPU', allow_module_level=True)\n"
    run("--source", checkout(test_scheduler=text, test_worker=whole, test_metrics="import not_there\n"), "--arm", "stock")
    rows = rows_of(home)
    assert {name: s for name, s in statuses(rows).items() if s != "UNSUPPORTED"} == {
        "test_known": "PASS",
        "test_settings": "PASS",
        "test_untidy": "FAIL",
    }
    assert reason(rows, "test_skipped") == "skipped: Requires CUDA or ROCm"
    assert reason(rows, "test_worker.py") == "skipped: Requires a GPU"
    assert reason(rows, "test_module") == "module: ModuleNotFoundError: No module named 'nowhere_to_be_found'"
    assert reason(rows, "test_metrics.py") == "module: ModuleNotFoundError: No module named 'not_there'"
    assert reason(rows, "test_fixture").startswith("fixture: fixture 'nobody_has_it' not found")
    assert reason(rows, "test_untidy").startswith("teardown: ")
    assert reason(rows, "test_known") == "xfailed: upstream knows"


@pytest.mark.parametrize(
    ("conftest", "why"),
    [
        ("import sys\nsys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != 'OverlayFinder']\n", "wrong-arm: "),
        ("import sys\nsys.modules['vllm'].__file__ = '/elsewhere/vllm/__init__.py'\n", "wrong-vllm: "),
    ],
)
def test_another_file_than_the_arms_is_infra(
    run: Run, home: Path, checkout: Callable[..., Path], conftest: str, why: str
) -> None:
    done = run("--source", checkout(conftest, test_scheduler=SCHEDULER), "--arm", "fix")
    assert done.returncode == ExitCode.INFRA
    assert all(r.status == "INFRA" and r.reason.startswith(why) for r in rows_of(home))
    assert "said nothing:" in done.stdout


def test_a_release_that_does_not_fit_is_infra(run: Run, home: Path, checkout: Callable[..., Path]) -> None:
    done = run("--source", checkout(test_scheduler=f"from {MODULE} import of_another_release\n"))
    assert done.returncode == ExitCode.INFRA
    assert statuses(rows_of(home)) == statuses(rows_of(home), "fix") == {f"{FOLDER}/test_scheduler.py": "INFRA"}
    assert "cannot import name 'of_another_release'" in reason(rows_of(home), "test_scheduler.py")


def test_a_conftest_that_does_not_load_is_infra(run: Run, home: Path, checkout: Callable[..., Path]) -> None:
    done = run("--source", checkout("import not_there\n", test_scheduler=SCHEDULER), "--arm", "stock")
    assert done.returncode == ExitCode.INFRA
    assert reason(rows_of(home), "conftest.py") == "conftest: ModuleNotFoundError: No module named 'not_there'"


def test_narrowing(run: Run, home: Path, checkout: Callable[..., Path]) -> None:
    source = checkout(test_scheduler=SCHEDULER, test_kv_events="def test_event(): pass\n")
    run("--source", source, "--arm", "stock", "--test", "test_scheduler.py", "-k", "sound")
    assert statuses(rows_of(home)) == {"test_sound": "PASS"}


def test_nothing_collected_is_no_pass(run: Run, home: Path, checkout: Callable[..., Path]) -> None:
    done = run("--source", checkout(test_scheduler=SCHEDULER), "-k", "no_such_test")
    assert done.returncode == ExitCode.NOTHING_RAN
    assert rows_of(home) == []
    assert "not a pass" in done.stderr


def test_a_keyword_that_pytest_refuses(run: Run, checkout: Callable[..., Path]) -> None:
    done = run("--source", checkout(test_scheduler=SCHEDULER), "-k", "a and and b")
    assert done.returncode == ExitCode.USAGE
    assert "-k" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("path", "more", "named"),
    [("nowhere", [], "no such folder"), ("", [], FOLDER), ("checkout", ["--test", "test_gone.py"], "test_scheduler.py")],
)
def test_bad_input_is_one_line(
    run: Run, home: Path, checkout: Callable[..., Path], tmp_path: Path, path: str, more: list[str], named: str
) -> None:
    checkout(test_scheduler=SCHEDULER)
    done = run("--source", tmp_path / path, *more)
    assert done.returncode == ExitCode.USAGE
    assert len(done.stderr.splitlines()) == 1
    assert named in done.stderr
    assert not home.exists()


def test_source_is_required(run: Run) -> None:
    assert run().returncode == ExitCode.USAGE


def test_a_stranger_cannot_reach_outside_the_tests(checkout: Callable[..., Path]) -> None:
    with pytest.raises(UsageError):
        open_source(checkout(), ["vllm/__init__.py"])


def test_ctrl_c_keeps_what_is_finished(
    run: Run, home: Path, checkout: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Job] = []
    receive = Job.receive

    def interrupted(job: Job, timeout: float) -> dict[str, Any] | None:
        message = receive(job, timeout)
        if message and message.get("nodeid", "").endswith("test_waits"):
            seen.append(job)
            raise KeyboardInterrupt
        return message

    monkeypatch.setattr(Job, "receive", interrupted)
    text = "import threading\ndef test_a(): pass\ndef test_waits(): threading.Event().wait(60)\n"
    done = run("--source", checkout(test_scheduler=text))
    assert done.returncode == ExitCode.INTERRUPTED
    assert statuses(rows_of(home)) == {"test_a": "PASS"}
    assert seen[0].ended.is_set()
    with pytest.raises(ProcessLookupError):
        os.kill(seen[0].pid, 0)
    (path,) = home.glob("runs/*/rows.jsonl")
    assert isinstance(end := read_rows(path)[-1], EndRow)
    assert end.exit_code == ExitCode.INTERRUPTED


def test_reports_do_not_take_it_for_theirs(run: Run, home: Path, checkout: Callable[..., Path], tmp_path: Path) -> None:
    run("--source", checkout(test_scheduler=SCHEDULER), "--arm", "stock")
    assert list(newest_runs(home, "conformance")) == []
    ((_, rows),) = newest_runs(home, "upstream")
    assert last_attempts(rows) == []
    assert isinstance(rows[0], RunRow)
    assert rows[0].facts["source"]["targets"] == [FOLDER]
    assert str(tmp_path) not in rows[0].model_dump_json()
    with pytest.raises(NothingRanError):
        document.publish(home, tmp_path / "results")


def test_without_a_preloaded_parent_too_vllm_is_the_installed_one(
    run: Run, home: Path, checkout: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_can_preload", lambda arms: False)
    run("--source", checkout(test_scheduler=SCHEDULER), "--arm", "stock")
    assert statuses(rows_of(home)) == {"test_sound": "PASS", "test_of_the_fix": "FAIL"}


# --- one arm on scripted processes ------------------------------------------------------------------------------------

ARM = Arm(name="fix", pin=PIN, manifest=Path("fix.json"), patch_sha256="a" * 64, expected={MODULE: "c" * 64})
FILE = f"{FOLDER}/test_scheduler.py"
A, B = f"{FILE}::test_a", f"{FILE}::test_b"


class Scripted:
    """A parent that starts each script as a child: its messages, then how it ended; an exception among them is raised."""

    def __init__(self, *scripts: Any) -> None:
        self.scripts = list(scripts)
        self.sent: list[dict[str, Any]] = []
        self.killed = 0
        self.exit_code: int | None = -9
        self._messages: Iterator[Any] = iter(())

    def get(self, python: Path, env: dict[str, str]) -> Scripted:
        return self

    def start(self, job: dict[str, Any], log: Path) -> Scripted:
        self.sent.append(job)
        script = self.scripts.pop(0)
        if isinstance(script, Exception):
            raise script
        self._messages = iter(script)
        return self

    def receive(self, timeout: float) -> dict[str, Any] | None:
        message = next(self._messages, None)
        if isinstance(message, BaseException):
            raise message
        return message

    def kill(self) -> None:
        self.killed += 1

    def finish(self) -> None:
        pass


@pytest.fixture
def follow(project: Project, run_row: RunRow, tmp_path: Path, checkout: Callable[..., Path]) -> Callable[..., list[Row]]:
    def go(pool: Scripted, budget: float | None = None, stock: frozenset[str] = frozenset()) -> list[Row]:
        matrix = project.matrix
        if budget is not None:
            budgets = matrix.budgets.model_copy(update={"upstream_timeout_s": budget})
            matrix = matrix.model_copy(update={"budgets": budgets})
        env = PinEnv(matrix.pin(PIN, "host"), tmp_path, tmp_path / "python", Path("/site"), "d" * 64, {})
        with RowWriter(tmp_path / "run" / "rows.jsonl") as writer:
            writer.write(run_row)
            ctx = Context(
                matrix=matrix,
                run=run_row.run,
                folder=tmp_path / "run",
                home=tmp_path,
                envs={PIN: env},
                arms={(PIN, "fix"): ARM},
                expectations=Expectations([]),
                writer=writer,
                pool=pool,  # type: ignore[arg-type]
                compiler_reason=None,
                root=project.root,
            )
            source = open_source(checkout(test_scheduler=""), [])
            rows = ArmRun(ctx, ARM, source, {"cwd": "work"}, {}, stock).run()
        assert [r for r in read_rows(tmp_path / "run" / "rows.jsonl") if isinstance(r, UpstreamRow)] == rows
        return rows

    return go


def told(nodeid: str, **changes: Any) -> dict[str, Any]:
    return {
        "type": "test",
        "nodeid": nodeid,
        "outcome": "passed",
        "when": "",
        "text": "",
        "seconds": 0.1,
        "stand_ins": False,
        "imported": ARM.expected,
        "vllm": "/site/vllm/__init__.py",
    } | changes


COLLECTED = {"type": "collected", "nodeids": [A, B]}
DONE = {"type": "done"}


def begun(nodeid: str) -> dict[str, Any]:
    return {"type": "start", "nodeid": nodeid}


def test_a_test_that_hangs_is_ended_and_the_rest_goes_on(follow: Callable[..., list[Row]]) -> None:
    pool = Scripted([COLLECTED, begun(A), JobTimeout()], [COLLECTED, begun(B), told(B), DONE])
    rows = follow(pool)
    assert {r.nodeid: r.status for r in rows} == {A: "TIMEOUT", B: "PASS"}
    assert "300 s" in rows[0].reason
    assert pool.killed == 1
    assert [job["done"] for job in pool.sent] == [[], [A]]


def test_the_whole_budget_ends_the_arm(follow: Callable[..., list[Row]]) -> None:
    pool = Scripted([COLLECTED, begun(A), JobTimeout()])
    rows = follow(pool, budget=1e-9)
    assert {r.nodeid: r.status for r in rows} == {A: "TIMEOUT", B: "NOT_RUN"}
    assert exit_code(rows) is ExitCode.UNEXPECTED  # the patch hung, and stock was not run


def test_a_crash_outside_any_test_is_not_tried_again(follow: Callable[..., list[Row]]) -> None:
    pool = Scripted([COLLECTED, begun(A), told(A)])
    rows = follow(pool)
    assert {r.nodeid: r.status for r in rows} == {A: "PASS", FOLDER: "CRASH", B: "NOT_RUN"}
    assert "outside any test" in rows[1].reason
    assert len(pool.sent) == 1


def test_a_parent_that_cannot_start_is_infra(follow: Callable[..., list[Row]]) -> None:
    rows = follow(Scripted(InfraError("no answer")))
    assert [(r.nodeid, r.status) for r in rows] == [(FOLDER, "INFRA")]


def test_a_child_that_fails_before_it_collects_is_infra(follow: Callable[..., list[Row]]) -> None:
    rows = follow(Scripted([{"type": "error", "error": "OverlayError", "message": "no", "causes": []}]))
    assert [(r.status, r.reason) for r in rows] == [("INFRA", "child: OverlayError: no")]
    assert exit_code(rows) is ExitCode.INFRA


# --- statuses and the verdict -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("AssertionError: Torch not compiled with CUDA enabled", "gpu"),
        ("RuntimeError: Found no NVIDIA driver on your system. Please check", "gpu"),
        (
            "1 validation error for ModelConfig\n  Value error, Invalid repository ID or local directory specified: 'x/y'.",
            "model",
        ),
        ("OSError: We couldn't connect to 'https://a.hub' to load the files", "model"),
        ("ModuleNotFoundError: No module named 'cuda'", "module"),
        ("ModuleNotFoundError: No module named 'vllm.v1.gone'", ""),
        ("ModuleNotFoundError: No module named 'tests.gone'", ""),
        ("AssertionError: assert 1 == 2", ""),
        ("AssertionError: the model's answer mentions cuda", ""),
    ],
)
def test_what_is_missing(text: str, kind: str) -> None:
    assert missing(text).partition(":")[0] == kind


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("assert 80 == 16", "FAIL"),
        ("AttributeError: 'HostCopyBackend' object has no attribute '_lib'", "UNSUPPORTED"),
        ("AttributeError: module 'torch._C' has no attribute '_cuda_sleep'", "UNSUPPORTED"),
    ],
)
def test_a_stand_in_that_does_not_do_is_no_failure(text: str, status: str) -> None:
    message = told(A, outcome="failed", when="call", text=text, stand_ins=True)
    assert judge_test(message, ARM, "/site/vllm/").status == status


def test_a_reason_is_not_cut_at_a_colon() -> None:
    text = "AssertionError: Test0:\nMatched tokens:\t[1]\nand more"
    assert judge_test(told(A, outcome="failed", when="call", text=text), ARM, "/site/vllm/").reason == (
        "AssertionError: Test0: Matched tokens: [1]"
    )


def test_a_package_that_only_begins_alike_is_another_vllm() -> None:
    assert judge_test(told(A, vllm="/site/vllm-other/__init__.py"), ARM, "/site/vllm/").status == "INFRA"


def test_a_collection_error_is_the_patchs_where_stock_ran() -> None:
    message = {"outcome": "failed", "text": "ImportError: cannot import name 'x'"}
    assert judge_collection(message, ran_on_stock=False).status == "INFRA"
    assert judge_collection(message, ran_on_stock=True).status == "FAIL"


@pytest.fixture
def row() -> Callable[..., Row]:
    def make(arm: str, status: str, nodeid: str = A, why: str = "") -> Row:
        identity = {"id": f"{arm}-{nodeid}", "pin": PIN, "device": "host", "source": "f" * 40}
        return UpstreamRow(
            run="r",
            arm=arm,
            nodeid=nodeid,
            file=FILE,
            file_sha256="",
            status=status,
            reason=why,
            **identity,  # type: ignore[arg-type]
        )

    return make


@pytest.mark.parametrize(
    ("stock", "patch", "kind", "code"),
    [
        ("PASS", "PASS", "", ExitCode.OK),
        ("PASS", "FAIL", "broken", ExitCode.UNEXPECTED),
        ("PASS", "CRASH", "broken", ExitCode.UNEXPECTED),
        ("PASS", "TIMEOUT", "broken", ExitCode.UNEXPECTED),
        ("PASS", "UNSUPPORTED", "broken", ExitCode.UNEXPECTED),
        ("UNSUPPORTED", "FAIL", "broken", ExitCode.UNEXPECTED),
        ("FAIL", "PASS", "mended", ExitCode.OK),
        ("FAIL", "FAIL", "both_fail", ExitCode.OK),
        ("FAIL", "CRASH", "both_fail", ExitCode.OK),
        ("CRASH", "CRASH", "both_fail", ExitCode.INFRA),
        ("UNSUPPORTED", "UNSUPPORTED", "", ExitCode.NOTHING_RAN),
        ("PASS", "INFRA", "", ExitCode.INFRA),
        ("PASS", "NOT_RUN", "", ExitCode.INFRA),
    ],
)
def test_a_patch_beside_stock(row: Callable[..., Row], stock: str, patch: str, kind: str, code: ExitCode) -> None:
    rows = [row("stock", stock), row("fix", patch)]
    (found,) = compare(rows)
    assert [k for k in ("broken", "mended", "both_fail") if getattr(found, k)] == ([kind] if kind else [])
    assert exit_code(rows) is code


def test_an_expected_failure_beside_stock(row: Callable[..., Row]) -> None:
    known = row("fix", "FAIL").model_copy(update={"expected": "FAIL"})
    (found,) = compare([row("stock", "PASS"), known])
    assert (found.expected, found.broken) == ([known], [])
    assert exit_code([row("stock", "PASS"), known]) is ExitCode.OK
    assert exit_code([row("stock", "PASS"), known], stale=1) is ExitCode.UNEXPECTED
    crashed, passed = (known.model_copy(update={"status": status}) for status in ("CRASH", "PASS"))
    assert exit_code([row("stock", "PASS"), crashed]) is ExitCode.UNEXPECTED
    assert exit_code([row("stock", "PASS"), passed]) is ExitCode.UNEXPECTED
    assert exit_code([row("stock", "FAIL"), known]) is ExitCode.OK


def test_pins_are_compared_apart(row: Callable[..., Row]) -> None:
    older = row("stock", "FAIL").model_copy(update={"pin": "0.29.0"})
    assert compare([older, row("stock", "PASS"), row("fix", "FAIL")])[0].broken


def test_the_table_counts_each_file_and_arm(row: Callable[..., Row]) -> None:
    rows = [row(a, s, n) for a, s, n in [("stock", "FAIL", A), ("stock", "PASS", B), ("fix", "PASS", A), ("fix", "PASS", B)]]
    text = summary([*rows, row("fix", "UNSUPPORTED", f"{FILE}::test_c", "skipped: no GPU")])
    assert "| test_scheduler.py | 1 passed, 1 failed | 2 passed, 1 UNSUPPORTED |" in text
    assert "scheduler + KV events: stock 1 passed 1 failed; fix 2 passed 1 UNSUPPORTED" in text
    assert f"- {FILE}::test_c: skipped: no GPU" in text


# --- the checkout and what lies around it -----------------------------------------------------------------------------


def git(root: Path, *args: str) -> None:
    env = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    who = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
    subprocess.run(["git", *who, *args], cwd=root, env=env, check=True, capture_output=True, timeout=60)


def test_the_identity_of_a_checkout(checkout: Callable[..., Path]) -> None:
    root = checkout(test_scheduler=SCHEDULER)
    plain = open_source(root, [])
    assert plain.commit is None
    assert plain.identity == f"tests:{plain.tree_sha256}"
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "x")
    committed = open_source(root, [])
    assert committed.identity == committed.commit
    assert committed.tree_sha256 == plain.tree_sha256
    (root / FOLDER / "test_scheduler.py").write_text("", encoding="utf-8")
    changed = open_source(root, [])
    assert changed.commit == committed.commit
    assert changed.identity == f"tests:{changed.tree_sha256}" != plain.identity


def test_the_release_of_a_checkout(checkout: Callable[..., Path]) -> None:
    root = checkout(test_scheduler=SCHEDULER)
    assert open_source(root, []).version is None
    assert open_source(released(root), []).version == PIN
    write(root, {"PKG-INFO": "Metadata-Version: 2.4\nName: another\nVersion: 1.0\n"})
    assert open_source(root, []).version is None
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "x")
    assert open_source(root, []).version is None
    git(root, "tag", "v0.29.0")
    assert open_source(root, []).version == "0.29.0"
    (root / FOLDER / "test_scheduler.py").write_text("", encoding="utf-8")
    assert open_source(root, []).version is None  # changed: no release's tests


@pytest.mark.parametrize("settings", ["pyproject.toml", "pytest.ini"])
def test_the_tests_are_seen_without_the_package(checkout: Callable[..., Path], tmp_path: Path, settings: str) -> None:
    root = checkout(test_scheduler=SCHEDULER)
    if settings == "pytest.ini":
        (root / "pyproject.toml").unlink()
    assert upstream_source.make_view(open_source(root, []), tmp_path / "view") == settings
    assert sorted(p.name for p in (tmp_path / "view").iterdir()) == sorted([settings, "tests"])


def test_the_model_is_a_configuration_and_nothing_else(tmp_path: Path) -> None:
    variables = upstream_source.make_hub(tmp_path / "hub")
    assert variables["HF_HUB_OFFLINE"] == "1"
    files = sorted(p.name for p in Path(variables["HF_HUB_CACHE"]).rglob("*") if p.is_file())
    assert files == ["config.json", "main"]
    assert (Path(variables["HF_HUB_CACHE"]) / f"models--{MODEL.replace('/', '--')}" / "refs" / "main").is_file()


def test_only_known_needs_of_a_conftest_are_installed(checkout: Callable[..., Path], tmp_path: Path) -> None:
    source = open_source(checkout("from tblib import x\nimport somebodys_thing\n"), [])
    assert upstream_source.conftest_needs(source, tmp_path) == ["tblib"]
    (tmp_path / "tblib").mkdir()
    assert upstream_source.conftest_needs(source, tmp_path) == []


class Failing:
    def environ(self) -> dict[str, str]:
        return dict(os.environ)

    def install(self, python: Path) -> list[str]:
        return [sys.executable, "-c", "import sys; sys.exit('no such index')"]


class Filling(Failing):
    def install(self, python: Path) -> list[str]:
        code = "import sys, os; os.makedirs(sys.argv[sys.argv.index('--target') + 1] + '/tblib')"
        return [sys.executable, "-c", code]


def test_a_need_that_cannot_be_had_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installers, "choose", Failing)
    with pytest.raises(EnvironmentBuildError, match=r"tblib.*no such index"):
        upstream_source.install_needs(["tblib"], tmp_path, 60)
    assert list(tmp_path.iterdir()) == []


def test_a_need_is_installed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installers, "choose", Filling)
    (folder,) = upstream_source.install_needs(["tblib"], tmp_path, 60)
    assert (folder / "tblib").is_dir()
    monkeypatch.setattr(installers, "choose", Failing)
    assert upstream_source.install_needs(["tblib"], tmp_path, 60) == [folder]


STAND_IN = """
import sys, types
class Platform:
    def is_cpu(self): return True
    def is_cuda_alike(self): return False
here = Platform()
made = {
    "vllm": {}, "vllm.v1": {}, "vllm.v1.simple_kv_offload": {}, "vllm.v1.simple_kv_offload.copy_backend": {},
    "vllm.platforms": {"current_platform": here}, "vllm.plugins": {"load_general_plugins": lambda: None},
}
for name, fields in made.items():
    module = sys.modules[name] = types.ModuleType(name)
    module.__dict__.update(fields)
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
import torch
from kvmatrix.host import gpu_tests
from kvmatrix.host.copy import HostCopyBackend, HostEvent
stand_ins = gpu_tests.StandIns("tests.own.")
stand_ins.install()
def asks(module):
    space = {"__name__": module, "here": here}
    exec("answer = here.is_cuda_alike()", space)
    return space["answer"]
assert [asks("tests.own.test_worker"), asks("tests.utils"), asks("vllm.x")] == [True, False, False]
assert [stand_ins.wanted_by(m) for m in ("tests.own.test_worker", "tests.own.test_scheduler")] == [True, False]
assert sys.modules["vllm.v1.simple_kv_offload.copy_backend"].DmaCopyBackend is HostCopyBackend
event = torch.Event
with stand_ins.active():
    raw = torch.zeros(4, dtype=torch.int8, device="cuda", pin_memory=True)
    assert raw.device.type == "cpu" and not raw.is_pinned()
    assert raw.to("cuda:0").device.type == torch.ones(1, device=torch.device("cuda")).device.type == "cpu"
    assert torch.Event is HostEvent and torch.cuda.Stream(priority=torch.cuda.Stream.priority_range()[0])
assert torch.Event is event
try:
    torch.zeros(1, device="cuda")
except (AssertionError, RuntimeError):
    print("a GPU is asked for again")
"""


def test_the_host_stands_in_for_a_gpu_only_where_one_is_asked_for(run_in_env: Run) -> None:
    done = run_in_env(STAND_IN, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
    assert done.stdout == "a GPU is asked for again\n", done.stderr
