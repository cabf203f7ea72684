"""Which pins and arms a run has: patches that lack a pin, and a stranger's diff on every pin that it applies to."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from kvmatrix import envs
from kvmatrix.cells import STOCK, Cell, Selection
from kvmatrix.config import Pin, Project
from kvmatrix.errors import NothingRanError, UsageError
from kvmatrix.session import Session, Suite

TARGET = "vllm/v1/simple_kv_offload/manager.py"
OLD, NEW = "def lookup():\n    return 1\n", "def lookup():\n    return 2\n"
DIFF = f"""diff --git a/{TARGET} b/{TARGET}
--- a/{TARGET}
+++ b/{TARGET}
@@ -1,2 +1,2 @@
 def lookup():
-    return 1
+    return 2
"""
Open = Callable[..., Session]


@pytest.fixture
def own(tmp_path: Path, project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """The project with its patches' files and matrix, and a home of its own."""
    root = tmp_path / "root"
    root.mkdir()
    shutil.copy(project.root / "matrix.toml", root)
    for name in ("patches", "envs"):
        shutil.copytree(project.root / name, root / name)
    monkeypatch.setenv("KVMATRIX_HOME", str(tmp_path / "home"))
    return Project(root=root)


@pytest.fixture
def installed(own: Project, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Pin -> text of the file that the diff changes, in environments that cost nothing; those asked for are noted."""
    texts = {p.version: OLD for p in own.matrix.pins}

    def ensure(project: Project, pin: Pin, progress: object = None) -> SimpleNamespace:
        site = project.home / "sites" / pin.version
        (site / TARGET).parent.mkdir(parents=True, exist_ok=True)
        (site / TARGET).write_text(texts[pin.version], encoding="utf-8")
        return SimpleNamespace(site_packages=site, pin=pin)

    monkeypatch.setattr(envs, "ensure", ensure)
    monkeypatch.setattr(envs, "verify_install", lambda env: None)
    return texts


@pytest.fixture
def opened(own: Project) -> Open:
    def make(suite: Suite = "conformance", **selection: object) -> Session:
        console = Console(file=io.StringIO(), width=200)
        return Session(own, Selection.model_validate(selection), suite, console, [suite])

    return make


@pytest.fixture
def diff(tmp_path: Path) -> str:
    (tmp_path / "mine.diff").write_text(DIFF, encoding="utf-8")
    return str(tmp_path / "mine.diff")


def said(session: Session) -> str:
    assert isinstance(session.console.file, io.StringIO)
    return session.console.file.getvalue()


def arms(cells: list[Cell], pin: str) -> list[str]:
    return list(dict.fromkeys(c.arm for c in cells if c.pin == pin))


def drop_pin(project: Project, patch: str, pin: str) -> None:
    """Take a pin's entry out of a patch.toml."""
    path = project.patches / patch / "patch.toml"
    head, *entries = path.read_text(encoding="utf-8").split('\n[pins."')
    kept = [e for e in entries if not e.startswith(f'{pin}"]')]
    path.write_text('\n[pins."'.join([head, *kept]), encoding="utf-8")


def ordinary(project: Project) -> list[str]:
    return [p.version for p in project.matrix.pins if p.device == "host" and not p.extended]


def test_all_stands_for_every_pin_that_is_not_extended(own: Project, opened: Open) -> None:
    cells = opened(pins=("all",)).plan()
    assert list(dict.fromkeys(c.pin for c in cells)) == ordinary(own)


def test_a_default_patch_without_the_pin_is_no_arm_there(own: Project, opened: Open) -> None:
    drop_pin(own, "rebase-lookup", "0.29.0")
    session = opened(pins=("0.32.0", "0.29.0"))
    cells = session.plan()
    assert "rebase-lookup" in arms(cells, "0.32.0")
    assert arms(cells, "0.29.0") == [STOCK, *(p for p in own.matrix.defaults.patches if p != "rebase-lookup")]
    assert "rebase-lookup has no file for vLLM 0.29.0" in said(session)


def test_a_named_patch_without_any_selected_pin_is_refused(own: Project, opened: Open) -> None:
    drop_pin(own, "rebase-lookup", "0.29.0")
    with pytest.raises(UsageError, match=r"'rebase-lookup' has no file for pin 0\.29\.0: it has 0\."):
        opened(pins=("0.29.0",), patches=("rebase-lookup",)).plan()
    drop_pin(own, "rebase-lookup", "0.27.1")
    assert arms(opened(pins=("0.29.0", "0.32.0"), patches=("rebase-lookup",)).plan(), "0.29.0") == [STOCK]


def test_an_arm_that_no_selected_pin_has(own: Project, opened: Open) -> None:
    drop_pin(own, "rebase-lookup", "0.29.0")
    with pytest.raises(UsageError, match="leaves no cell: rebase-lookup"):
        opened(pins=("0.29.0",), arms=("rebase-lookup",)).plan()


def test_a_diff_is_an_arm_on_each_pin_that_it_applies_to(
    own: Project, installed: dict[str, str], opened: Open, diff: str
) -> None:
    installed["0.29.0"] = "nothing of the kind\n"
    session = opened(patches=(diff,))
    cells = session.plan()
    assert list(dict.fromkeys(c.pin for c in cells)) == [v for v in ordinary(own) if v != "0.29.0"]
    assert "mine" in arms(cells, "0.32.0")
    assert set(arms(cells, "0.32.0")) >= {STOCK, *own.matrix.defaults.patches}
    assert "0.29.0: " in said(session), "why it is left out"


def test_on_a_named_pin_that_it_does_not_apply_to_the_others_stay(installed: dict[str, str], opened: Open, diff: str) -> None:
    installed["0.29.0"] = NEW
    cells = opened(patches=(diff,), pins=("0.32.0", "0.29.0")).plan()
    assert "mine" in arms(cells, "0.32.0")
    assert "mine" not in arms(cells, "0.29.0")
    assert STOCK in arms(cells, "0.29.0")


def test_perf_measures_one_pin_and_says_which(installed: dict[str, str], opened: Open, diff: str) -> None:
    installed["0.32.0"] = NEW
    session = opened("perf", patches=(diff,))
    session.plan()
    assert len(session.pins) == 1
    assert session.pins[0].version != "0.32.0", "the diff does not apply there"
    assert f"measured on one pin, here vLLM {session.pins[0].version}" in said(session)


def test_without_build_no_environment_is_made(
    own: Project, installed: dict[str, str], opened: Open, diff: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    real = envs.ensure

    def ensure(project: Project, pin: Pin, progress: Callable[[str], None] = print) -> envs.PinEnv:
        made.append(pin.version)
        return real(project, pin, progress)

    monkeypatch.setattr(envs, "ensure", ensure)
    with pytest.raises(NothingRanError, match=r"no environment to try mine\.diff on"):
        opened(patches=(diff,)).plan(build=False)
    assert made == []
    built = own.matrix.pin("0.27.1", "host")
    monkeypatch.setattr(envs, "is_built", lambda project, pin: pin == built)
    cells = opened(patches=(diff,)).plan(build=False)
    assert made == ["0.27.1"]
    assert {c.pin for c in cells} == {"0.27.1"}
