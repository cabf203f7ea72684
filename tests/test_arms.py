"""From a patch file to an overlay: what is refused, and that the installed files stay as they are."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvmatrix.arms import LOOKUP, Arm, apply_patch, build_arms, load_patch
from kvmatrix.config import Project
from kvmatrix.envs import PinEnv
from kvmatrix.errors import InstallChangedError, KvmatrixError, PatchError, UsageError

PIN = "9.9.9"
PATH = "vllm/v1/x.py"
OTHER = "vllm/v1/y.py"
BEFORE = "".join(f"line{i} = {i}\n" for i in range(20))
AFTER = BEFORE.replace("line9 = 9\n", "line9 = 'nine'\n")


def sha256(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def diff(before: str, after: str, path: str = PATH) -> str:
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"a/{path}", f"b/{path}")
    return f"diff --git a/{path} b/{path}\n" + "".join(lines)


class Workshop:
    """A fake install, a patches folder and an overlays folder."""

    def __init__(self, folder: Path) -> None:
        self.site, self.patches, self.overlays = folder / "site", folder / "patches", folder / "overlays"
        for path in (PATH, OTHER):
            file = self.site / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(BEFORE, encoding="utf-8")

    def patch(self, text: str | bytes, name: str = "fix", files: dict[str, tuple[str, str]] | None = None) -> Path:
        """Write a patch whose ``files`` (path -> sha256 before, after) default to the right ones for ``PATH``."""
        folder = self.patches / name
        folder.mkdir(parents=True)
        (folder / f"{PIN}.patch").write_bytes(text.encode() if isinstance(text, str) else text)
        toml = ['title = "t"', 'what = "w"', 'why = "y"', 'upstream = "none"', 'remove_when = "never"', 'author = "a"']
        toml += [f'[pins."{PIN}"]', f'patch = "{PIN}.patch"']
        for path, (pre, post) in (files or {PATH: (sha256(BEFORE), sha256(AFTER))}).items():
            toml += [f'[[pins."{PIN}".files]]', f'path = "{path}"', f'pre_sha256 = "{pre}"', f'post_sha256 = "{post}"']
        (folder / "patch.toml").write_text("\n".join(toml) + "\n", encoding="utf-8")
        return folder

    def build(self, *names: str, pin: str = PIN) -> list[Arm]:
        folders = {name: self.patches / name for name in names or ["fix"]}
        return build_arms(folders, pin, self.site, self.overlays)

    def refused(self, kind: type[KvmatrixError], *names: str, pin: str = PIN) -> str:
        with pytest.raises(kind) as caught:
            self.build(*names, pin=pin)
        text = str(caught.value)
        assert text
        assert "\n" not in text
        return text

    def state(self) -> dict[str, tuple[bytes, int]]:
        files = [p for p in self.site.rglob("*") if p.is_file()]
        return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in files}


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def overlaid(arm: Arm, path: str = PATH) -> bytes:
    entries = json.loads(arm.manifest.read_text(encoding="utf-8"))["files"]
    return Path(next(e["source"] for e in entries if e["path"] == path)).read_bytes()


def test_a_patch_becomes_an_overlay(shop: Workshop) -> None:
    before = shop.state()
    shop.patch(diff(BEFORE, AFTER))
    stock, fix = shop.build()
    assert (stock.name, fix.name) == ("stock", "fix")
    assert stock.expected == {"vllm.v1.x": sha256(BEFORE)}
    assert fix.expected == {"vllm.v1.x": sha256(AFTER)}
    assert overlaid(stock) == BEFORE.encode()
    assert overlaid(fix) == AFTER.encode()
    assert stock.patch_sha256 is None
    assert fix.patch_sha256 == sha256(diff(BEFORE, AFTER))
    assert shop.state() == before


def test_every_arm_lists_the_files_of_all_patches(shop: Workshop) -> None:
    """So stock and the patches load the same modules through the same finder."""
    shop.patch(diff(BEFORE, AFTER))
    shop.patch(diff(BEFORE, AFTER, OTHER), "fix2", {OTHER: (sha256(BEFORE), sha256(AFTER))})
    stock, fix, fix2 = shop.build("fix", "fix2")
    assert stock.expected == {"vllm.v1.x": sha256(BEFORE), "vllm.v1.y": sha256(BEFORE)}
    assert fix.expected == {"vllm.v1.x": sha256(AFTER), "vllm.v1.y": sha256(BEFORE)}
    assert fix2.expected == {"vllm.v1.x": sha256(BEFORE), "vllm.v1.y": sha256(AFTER)}


def test_stock_alone_still_says_which_lookup_it_ran(shop: Workshop) -> None:
    with pytest.raises(InstallChangedError, match="no lookup of this connector"):
        build_arms({}, PIN, shop.site, shop.overlays)
    (shop.site / LOOKUP).parent.mkdir(parents=True)
    (shop.site / LOOKUP).write_text(BEFORE, encoding="utf-8")
    (stock,) = build_arms({}, PIN, shop.site, shop.overlays)
    assert stock.expected == {"vllm.v1.simple_kv_offload.manager": sha256(BEFORE)}
    assert json.loads(stock.manifest.read_text(encoding="utf-8"))["files"][0]["source"] == str(shop.site / LOOKUP)


def test_building_again_gives_the_same(shop: Workshop) -> None:
    shop.patch(diff(BEFORE, AFTER))
    assert shop.build() == shop.build()
    assert not list(shop.overlays.glob(".applying-*"))


@pytest.mark.parametrize("text", ["", "\n", "no diff at all\n"], ids=["empty", "blank", "prose"])
def test_a_patch_that_is_empty(shop: Workshop, text: str) -> None:
    shop.patch(text)
    assert "changes nothing" in shop.refused(PatchError)


def test_a_patch_file_that_is_missing(shop: Workshop) -> None:
    (shop.patch("x") / f"{PIN}.patch").unlink()
    assert "missing" in shop.refused(PatchError)


def test_a_patch_that_is_damaged(shop: Workshop) -> None:
    shop.patch("".join(diff(BEFORE, AFTER).splitlines(True)[:-2]))
    assert "corrupt patch" in shop.refused(PatchError)


def test_a_patch_that_does_not_apply(shop: Workshop) -> None:
    shop.patch(diff(BEFORE.replace("line8", "other8"), AFTER.replace("line8", "other8")))
    text = shop.refused(PatchError)
    assert "does not apply" in text
    assert PATH in text


def test_a_patch_that_gives_the_same_file(shop: Workshop) -> None:
    shop.patch(diff(BEFORE, AFTER).replace("+line9 = 'nine'", "+line9 = 9"), files={PATH: (sha256(BEFORE), sha256(BEFORE))})
    assert "unchanged" in shop.refused(PatchError)


def test_a_patch_that_touches_a_file_it_does_not_declare(shop: Workshop) -> None:
    shop.patch(diff(BEFORE, AFTER) + diff(BEFORE, AFTER, OTHER))
    assert shop.refused(PatchError).endswith(f"do not name the same files: {OTHER}")


def test_a_patch_that_leaves_a_declared_file_alone(shop: Workshop) -> None:
    both = {p: (sha256(BEFORE), sha256(AFTER)) for p in (PATH, OTHER)}
    shop.patch(diff(BEFORE, AFTER), files=both)
    assert shop.refused(PatchError).endswith(f"do not name the same files: {OTHER}")


@pytest.mark.parametrize("path", ["vllm/../../out.py", "../out.py", "/etc/out.py", "torch/x.py", "vllm/x.so", "vllm"])
def test_a_declared_path_outside_of_vllm(shop: Workshop, path: str) -> None:
    shop.patch(diff(BEFORE, AFTER, path), files={path: (sha256(BEFORE), sha256(AFTER))})
    assert "under vllm/" in shop.refused(PatchError)


@pytest.mark.parametrize("path", ["vllm/../../out.py", "../out.py", "/etc/out.py"])
def test_a_patch_with_a_path_outside_of_its_folder(shop: Workshop, path: str, tmp_path: Path) -> None:
    """patch.toml says one thing, the patch another."""
    shop.patch(diff(BEFORE, AFTER) + diff("", "evil = 1\n", path))
    shop.refused(PatchError)
    assert not list(tmp_path.rglob("out.py"))


LINK = f"diff --git a/{PATH} b/{PATH}\nnew file mode 120000\n--- /dev/null\n+++ b/{PATH}\n@@ -0,0 +1 @@\n+/etc/passwd\n"
TYPE_CHANGE = f"diff --git a/{PATH} b/{PATH}\nold mode 100644\nnew mode 120000\n"
BINARY = (
    f"diff --git a/{PATH} b/{PATH}\nindex 1..2 100644\nGIT binary patch\nliteral 1\nIcmZQzfPg\n\nliteral 0\nHcmV?d00001\n\n"
)
RENAME = f"diff --git a/{OTHER} b/{PATH}\nsimilarity index 100%\nrename from {OTHER}\nrename to {PATH}\n"
ADDED = f"diff --git a/{PATH} b/{PATH}\nnew file mode 100644\n--- /dev/null\n+++ b/{PATH}\n@@ -0,0 +1 @@\n+x = 1\n"
DELETED = f"diff --git a/{PATH} b/{PATH}\ndeleted file mode 100644\n--- a/{PATH}\n+++ /dev/null\n@@ -1 +0,0 @@\n-x = 1\n"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (LINK, "links"),
        (TYPE_CHANGE, "links"),
        (BINARY, "binary"),
        (RENAME, "renames"),
        (ADDED, "added or removed"),
        (DELETED, "added or removed"),
    ],
    ids=["link", "type-change", "binary", "rename", "added", "deleted"],
)
def test_a_patch_with_more_than_changes_of_text(shop: Workshop, text: str, what: str) -> None:
    shop.patch(diff(BEFORE, AFTER) + text)
    assert what in shop.refused(PatchError)


def test_an_installed_file_that_is_not_the_patchs(shop: Workshop) -> None:
    shop.patch(diff(BEFORE, AFTER))
    (shop.site / PATH).write_text(BEFORE + "# edited\n", encoding="utf-8")
    text = shop.refused(InstallChangedError)
    assert PATH in text
    assert sha256(BEFORE)[:16] in text


def test_an_installed_file_that_is_missing(shop: Workshop) -> None:
    shop.patch(diff(BEFORE, AFTER))
    (shop.site / PATH).unlink()
    assert "missing" in shop.refused(InstallChangedError)


def test_a_patch_that_gives_another_file_than_it_says(shop: Workshop) -> None:
    shop.patch(diff(BEFORE, AFTER), files={PATH: (sha256(BEFORE), "0" * 64)})
    text = shop.refused(PatchError)
    assert sha256(AFTER)[:16] in text
    assert "0" * 16 in text


@pytest.mark.parametrize("bad", ["line9 = (\n", "line9 = '\0'\n"], ids=["syntax", "null-byte"])
def test_a_patch_whose_result_does_not_compile(shop: Workshop, bad: str) -> None:
    after = BEFORE.replace("line9 = 9\n", bad)
    shop.patch(diff(BEFORE, after), files={PATH: (sha256(BEFORE), sha256(after))})
    assert "does not compile" in shop.refused(PatchError)


def test_a_name_that_is_no_patch(shop: Workshop) -> None:
    shop.patch(diff(BEFORE, AFTER))
    text = shop.refused(UsageError, "nosuch")
    assert "'nosuch'" in text
    assert "fix" in text


def test_a_patch_that_has_nothing_for_the_pin(shop: Workshop) -> None:
    shop.patch(diff(BEFORE, AFTER))
    text = shop.refused(UsageError, pin="1.0.0")
    assert "1.0.0" in text
    assert PIN in text


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace(b'title = "t"', b'title = "t'),
        lambda text: text.replace(b'title = "t"\n', b""),
        lambda text: text + b'surprise = "key"\n',
        lambda text: text.replace(b'patch = "9', b'patch = "../9'),
        lambda text: text.replace(sha256(AFTER).encode(), b"12ab"),
        lambda text: text.replace(b'title = "t"', b'title = "\xff"'),
    ],
    ids=["toml", "no-title", "unknown-key", "patch-elsewhere", "short-hash", "not-utf-8"],
)
def test_a_patch_toml_that_does_not_validate(shop: Workshop, damage: Callable[[bytes], bytes]) -> None:
    file = shop.patch(diff(BEFORE, AFTER)) / "patch.toml"
    file.write_bytes(damage(file.read_bytes()))
    assert "patch.toml" in shop.refused(PatchError)


def test_no_git(shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.patch(diff(BEFORE, AFTER))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing-here"))
    assert "git is not installed" in shop.refused(PatchError)


def test_inside_of_a_surrounding_repository(shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There git would take the paths for its own repository's and skip them without a word."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, timeout=30)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    shop.patch(diff(BEFORE, AFTER))
    _, fix = shop.build()
    assert overlaid(fix) == AFTER.encode()


def test_the_users_git_settings_do_not_matter(shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = "[core]\n\tautocrlf = true\n\teol = crlf\n[apply]\n\twhitespace = error-all\n"
    (tmp_path / ".gitconfig").write_text(settings, encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    after = AFTER.replace("'nine'\n", "'nine'  \n")
    shop.patch(diff(BEFORE, after), files={PATH: (sha256(BEFORE), sha256(after))})
    _, fix = shop.build()
    assert overlaid(fix) == after.encode()


def test_the_install_is_only_read(shop: Workshop) -> None:
    """Also where a build goes wrong after the patch was applied."""
    before = shop.state()
    shop.patch(diff(BEFORE, AFTER), files={PATH: (sha256(BEFORE), "0" * 64)})
    shop.refused(PatchError)
    assert shop.state() == before
    assert not list(shop.overlays.rglob("*.py"))


def test_a_hard_linked_install_stays_as_it_is(shop: Workshop, tmp_path: Path) -> None:
    """Installers link files into the environment: a write through the copy would reach the cache behind it."""
    cache = tmp_path / "cache.py"
    os.link(shop.site / PATH, cache)
    shop.patch(diff(BEFORE, AFTER))
    shop.build()
    assert cache.read_text(encoding="utf-8") == BEFORE


def test_the_projects_own_patches_validate(project: Project) -> None:
    folders = [p.parent for p in project.patches.glob("*/patch.toml")]
    assert project.patches / project.matrix.defaults.patches[0] in folders
    for folder in folders:
        for pin in load_patch(folder).pins.values():
            assert (folder / pin.patch).is_file()


def test_the_projects_patch_gives_what_it_says_on_the_real_install(project: Project, pin_env: PinEnv, tmp_path: Path) -> None:
    name, version = project.matrix.defaults.patches[0], pin_env.pin.version
    patch = load_patch(project.patches / name).pins[version]
    installed = {f.path: (pin_env.site_packages / f.path).read_bytes() for f in patch.files}
    work = tmp_path / "work"
    text = (project.patches / name / patch.patch).read_bytes()
    apply_patch(text, patch.files, pin_env.site_packages, work, Path(name))
    for file in patch.files:
        assert sha256(installed[file.path]) == file.pre_sha256
        assert sha256((work / file.path).read_bytes()) == file.post_sha256
    stock, fix = build_arms({name: project.patches / name}, version, pin_env.site_packages, tmp_path / "overlays")
    assert stock.expected == {f.module: f.pre_sha256 for f in patch.files}
    assert fix.expected == {f.module: f.post_sha256 for f in patch.files}
    assert installed == {f.path: (pin_env.site_packages / f.path).read_bytes() for f in patch.files}
    shutil.rmtree(work)


@pytest.mark.parametrize("keeps", ["aligned", "resident", "all"])
def test_an_arm_has_its_patchs_promise(tmp_path: Path, keeps: str) -> None:
    shop = Workshop(tmp_path)
    toml = shop.patch(diff(BEFORE, AFTER)) / "patch.toml"
    toml.write_text(f'keeps = "{keeps}"\n' + toml.read_text(encoding="utf-8"), encoding="utf-8")
    stock, fix = shop.build()
    assert (stock.keeps, fix.keeps) == ("aligned", keeps)


def test_an_unknown_promise(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    toml = shop.patch(diff(BEFORE, AFTER)) / "patch.toml"
    toml.write_text('keeps = "everything"\n' + toml.read_text(encoding="utf-8"), encoding="utf-8")
    assert "keeps" in shop.refused(PatchError)
