"""The import finder: it serves the overlay's file or says in one line why not, and its digest is of what was compiled."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import py_compile
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmatrix import overlay
from kvmatrix.overlay import OverlayError

PACKAGE = "kvmatrix_overlay_fake"
MODULE = f"{PACKAGE}.part"
INSTALLED = b"VALUE = 'installed'\n"
OVERLAID = b"VALUE = 'overlaid!'\n"  # as long as INSTALLED


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Tree:
    """A fake installed package, and an overlay that replaces one of its modules."""

    def __init__(self, folder: Path) -> None:
        self.site = folder / "site"
        self.overlaid = folder / "overlay" / PACKAGE / "part.py"
        self.installed = self.site / PACKAGE / "part.py"
        for file, data in ((self.installed, INSTALLED), (self.overlaid, OVERLAID)):
            file.parent.mkdir(parents=True)
            file.write_bytes(data)
        (self.site / PACKAGE / "__init__.py").write_bytes(b"")
        (self.site / PACKAGE / "other.py").write_bytes(b"VALUE = 'other'\n")
        self.manifest_file = folder / "manifest.json"

    def manifest(self, arm: str = "fix", **changes: str) -> str:
        entry = {
            "module": MODULE,
            "path": f"{PACKAGE}/part.py",
            "source": str(self.overlaid),
            "pre_sha256": sha256(INSTALLED),
            "post_sha256": sha256(OVERLAID),
        }
        self.manifest_file.write_text(json.dumps({"arm": arm, "files": [entry | changes]}), encoding="utf-8")
        return str(self.manifest_file)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tree]:
    made = Tree(tmp_path)
    monkeypatch.syspath_prepend(made.site)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield made
    for name in [n for n in sys.modules if n.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def value(module: str = MODULE) -> Any:
    return importlib.import_module(module).VALUE


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(OverlayError) as caught:
        action()
    text = str(caught.value)
    assert text
    assert "\n" not in text
    return text


def test_the_overlays_file_is_served_and_nothing_else(tree: Tree) -> None:
    finder = overlay.install(tree.manifest())
    assert finder is overlay.active()
    assert value() == "overlaid!"
    assert value(f"{PACKAGE}.other") == "other"
    assert tree.installed.read_bytes() == INSTALLED


def test_the_digest_is_of_what_was_compiled(tree: Tree) -> None:
    overlay.install(tree.manifest())
    assert overlay.imported_digests() == {}
    importlib.import_module(MODULE)
    # What the file holds afterwards does not matter any more.
    tree.overlaid.write_bytes(b"VALUE = 'changed later'\n")
    assert overlay.imported_digests() == {MODULE: sha256(OVERLAID)}


def test_without_an_overlay_nothing_is_installed(tree: Tree) -> None:
    before = list(sys.meta_path)
    assert overlay.install() is None
    assert sys.meta_path == before
    assert overlay.active() is None
    assert overlay.imported_digests() == {}
    assert value() == "installed"


def test_an_overlay_file_that_was_changed(tree: Tree) -> None:
    overlay.install(tree.manifest())
    tree.overlaid.write_bytes(OVERLAID + b"#\n")
    text = refused(value)
    assert sha256(OVERLAID)[:16] in text
    assert sha256(OVERLAID + b"#\n")[:16] in text
    assert MODULE not in sys.modules


def test_an_installed_file_that_is_not_the_one_it_was_made_for(tree: Tree) -> None:
    tree.installed.write_bytes(b"VALUE = 'another version'\n")
    overlay.install(tree.manifest())
    text = refused(value)
    assert sha256(INSTALLED)[:16] in text
    assert f"{PACKAGE}/part.py" in text


def test_an_installed_file_that_is_missing(tree: Tree) -> None:
    tree.installed.unlink()
    overlay.install(tree.manifest())
    assert "not installed" in refused(value)


def test_an_overlay_file_that_is_missing(tree: Tree) -> None:
    overlay.install(tree.manifest())
    tree.overlaid.unlink()
    with pytest.raises((OverlayError, FileNotFoundError)):
        value()


def test_a_module_that_was_imported_before(tree: Tree) -> None:
    assert value() == "installed"
    text = refused(lambda: overlay.install(tree.manifest()))
    assert MODULE in text
    assert overlay.active() is None


def test_installing_twice_is_harmless(tree: Tree) -> None:
    first = overlay.install(tree.manifest())
    importlib.import_module(MODULE)
    assert overlay.install(tree.manifest()) is first
    assert sum(isinstance(f, overlay.OverlayFinder) for f in sys.meta_path) == 1


def test_a_second_overlay_is_refused(tree: Tree) -> None:
    first = overlay.install(tree.manifest("one"))
    text = refused(lambda: overlay.install(tree.manifest("two", post_sha256="0" * 64)))
    assert "'one'" in text
    assert overlay.active() is first


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"arm": "x"}',
        '{"arm": "x", "files": {}}',
        '{"arm": "x", "files": ["y"]}',
        '{"arm": "x", "files": [{}]}',
    ],
    ids=["empty", "cut-off", "list", "no-arm", "no-files", "files-not-a-list", "file-not-an-object", "file-without-module"],
)
def test_a_damaged_manifest(tree: Tree, text: str) -> None:
    tree.manifest_file.write_text(text, encoding="utf-8")
    assert str(tree.manifest_file) in refused(lambda: overlay.install(str(tree.manifest_file)))
    assert overlay.active() is None


def test_a_missing_manifest(tree: Tree) -> None:
    assert "nowhere.json" in refused(lambda: overlay.install(str(tree.manifest_file.with_name("nowhere.json"))))


@pytest.mark.parametrize("stock", [True, False], ids=["stock", "patched"])
def test_a_stale_byte_code_file_is_not_used(tree: Tree, stock: bool) -> None:
    """The trap: a .pyc of other content whose recorded size and time are those of the source."""
    source = tree.installed if stock else tree.overlaid
    truth = source.read_bytes()
    lie = truth.replace(b"VALUE = '", b"VALUE = 'X")[: len(truth) - 2] + b"'\n"
    assert len(lie) == len(truth)
    source.write_bytes(lie)
    os.utime(source, (1_000_000_000, 1_000_000_000))
    py_compile.compile(str(source), doraise=True)
    source.write_bytes(truth)
    os.utime(source, (1_000_000_000, 1_000_000_000))

    namespace = source.parent.parent
    plain = f"import sys; sys.path.insert(0, {str(namespace)!r}); import {MODULE} as m; print(m.VALUE)"
    done = subprocess.run([sys.executable, "-c", plain], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("X"), "the trap is not set"

    overlay.install(tree.manifest(source=str(source), post_sha256=sha256(truth)))
    assert value() == ("installed" if stock else "overlaid!")
    assert overlay.imported_digests() == {MODULE: sha256(truth)}


def test_no_byte_code_is_written(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    overlay.install(tree.manifest())
    importlib.import_module(MODULE)
    assert [p.name for p in tree.overlaid.parent.iterdir()] == ["part.py"]


def test_a_package_keeps_its_own_submodules(tree: Tree) -> None:
    """A patch may change an ``__init__.py``: the guard must look at that file, and its submodules must still be found."""
    sub = tree.site / PACKAGE / "sub"
    sub.mkdir()
    (sub / "__init__.py").write_bytes(INSTALLED)
    (sub / "leaf.py").write_bytes(b"VALUE = 'leaf'\n")
    overlay.install(tree.manifest(module=f"{PACKAGE}.sub", path=f"{PACKAGE}/sub/__init__.py"))
    assert value(f"{PACKAGE}.sub") == "overlaid!"
    assert value(f"{PACKAGE}.sub.leaf") == "leaf"


def test_a_child_process_inherits_it(tree: Tree) -> None:
    """By the variable alone, down to a grandchild."""
    show = f"from kvmatrix import overlay; overlay.install(); import {MODULE} as m"
    show += "; print(m.VALUE, *overlay.imported_digests().values())"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {show!r}], check=True)"
    environ = os.environ | {overlay.ENV_VAR: tree.manifest(), "PYTHONPATH": str(tree.site)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["overlaid!", sha256(OVERLAID)], done.stderr


def test_the_environment_installs_it_at_interpreter_start(tree: Tree, run_in_env: Callable[..., Any]) -> None:
    code = f"import {MODULE} as m; from kvmatrix import overlay; print(m.VALUE, overlay.active().arm)"
    done = run_in_env(code, KVMATRIX_OVERLAY=tree.manifest(), PYTHONPATH=str(tree.site))
    assert done.stdout.split() == ["overlaid!", "fix"], done.stderr
    assert run_in_env(f"import {MODULE} as m; print(m.VALUE)", PYTHONPATH=str(tree.site)).stdout.split() == ["installed"]
