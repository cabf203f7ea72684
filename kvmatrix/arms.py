"""Arms: ``stock`` and every patch, each an overlay of the files that differ. The install is only read.

A patch is a folder under ``patches/`` with ``patch.toml`` and one patch file a pin. It is applied with git's own apply to
copies of the target files; sha256 of each file before and after guard both ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvmatrix.cells import STOCK
from kvmatrix.config import Strict
from kvmatrix.errors import InstallChangedError, PatchError, UsageError
from kvmatrix.git import git

LOOKUP = "vllm/v1/simple_kv_offload/manager.py"
"""Where the lookup is that this project is about: every arm loads this file through its overlay."""
Sha256 = Field(pattern="^[0-9a-f]{64}$")
Keeps = Literal["aligned", "resident", "all"]
"""Reuse that a patch promises: of lookups with an aligned device prefix; also of those where the CPU tier holds all blocks from
the last common chunk boundary to the prefix's end; or of every lookup."""
_FORBIDDEN = {
    r"^(old|new|new file|deleted file) mode 120000|^index \S+ 120000": "links",
    r"^GIT binary patch|^Binary files ": "binary changes",
    r"^(rename|copy) (from|to) ": "renames or copies",
    r"^(new|deleted) file mode ": "added or removed files",
}


class PatchedFile(Strict):
    """One file that a patch changes: path relative to site-packages, sha256 before and after."""

    path: str
    pre_sha256: str = Sha256
    post_sha256: str = Sha256

    @field_validator("path")
    @classmethod
    def _inside_vllm(cls, path: str) -> str:
        parts = path.split("/")
        if not re.fullmatch(r"[\w./-]+\.py", path) or parts[0] != "vllm" or ".." in parts:
            raise ValueError("must be a .py file under vllm/")
        return path

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class PinPatch(Strict):
    patch: str = Field(pattern=r"^[\w.-]+\.patch$")
    files: tuple[PatchedFile, ...] = Field(min_length=1)


class Patch(Strict):
    """``patch.toml``: what the patch is, why, where it goes upstream, when it can go, and its files for each pin."""

    title: str
    what: str
    why: str
    upstream: str
    """Link to the upstream issue or pull request, or ``none``."""
    remove_when: str
    author: str
    keeps: Keeps = "aligned"
    """The reuse that it promises; less is a failure. Stock is held to ``aligned``, and so is what promises nothing."""
    pins: dict[str, PinPatch]


class Arm(BaseModel):
    """An arm ready to run: the overlay manifest that its processes load."""

    model_config = ConfigDict(frozen=True)

    name: str
    pin: str
    manifest: Path
    patch_sha256: str | None
    """sha256 of the patch file; None for stock."""
    expected: dict[str, str]
    """Module -> sha256 that a process of this arm must have imported."""
    keeps: Keeps = "aligned"
    """The reuse that its patch promises."""


def load_patch(folder: Path) -> Patch:
    """Read and validate a patch folder's ``patch.toml``.

    Raises:
        UsageError: there is no such patch.
        PatchError: the file does not validate.
    """
    path = folder / "patch.toml"
    try:
        return Patch.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        known = sorted(p.parent.name for p in folder.parent.glob("*/patch.toml"))
        raise UsageError(f"unknown patch {folder.name!r}: patches/ has {', '.join(known) or 'none'}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise PatchError(f"{path}: not valid TOML: {e}") from e
    except ValidationError as e:
        first = e.errors()[0]
        raise PatchError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from e


def check_patch_files(folder: Path) -> Patch:
    """Read a patch's ``patch.toml`` and each of its patch files, without any environment.

    Raises:
        UsageError: there is no such patch.
        PatchError: one of the files is damaged.
    """
    patch = load_patch(folder)
    for pin_patch in patch.pins.values():
        read_patch_text(folder / pin_patch.patch, {f.path for f in pin_patch.files})
    return patch


def build_arms(folders: Mapping[str, Path], pin: str, site_packages: Path, overlays: Path) -> list[Arm]:
    """Stock and the patches in ``folders`` (by name) for ``pin``, as overlays under ``overlays``.

    Stock gets an overlay too, of the untouched files: each arm then loads the same modules from source through the same
    finder, and each row's digest is of what was compiled.

    Raises:
        UsageError: an unknown patch, or one that has nothing for this pin.
        PatchError: a patch that is damaged, does not apply, or yields another file than it says.
        InstallChangedError: an installed file is not the one that the patch was written for.
    """
    loaded = {}
    for name, folder in folders.items():
        patch = load_patch(folder)
        if pin not in patch.pins:
            raise UsageError(f"patch {name!r} has no file for pin {pin}: it has {', '.join(patch.pins)}")
        own = patch.pins[pin]
        loaded[name] = Source(folder / own.patch, own.files, patch.keeps)
    return build_sources(loaded, pin, site_packages, overlays)


@dataclass(frozen=True)
class Source:
    """Where an arm comes from: a patch file, the files that it changes, and the reuse that it promises."""

    patch_file: Path
    files: tuple[PatchedFile, ...]
    keeps: Keeps = "aligned"


def build_sources(sources: Mapping[str, Source], pin: str, site_packages: Path, overlays: Path) -> list[Arm]:
    """Stock and the arms of ``sources`` (by name), in this order; see :func:`build_arms`.

    Raises:
        PatchError, InstallChangedError: as there.
    """
    files = {f.path: f for s in sources.values() for f in s.files}
    if not files:  # stock alone, too, says which lookup it ran
        files[LOOKUP] = _as_installed(site_packages, pin)
    for file in files.values():
        _check_installed(site_packages, file, pin)
    arms = [_stock(pin, list(files.values()), site_packages, overlays)]
    arms += [_patched(name, pin, source, list(files.values()), site_packages, overlays) for name, source in sources.items()]
    return arms


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _as_installed(site_packages: Path, pin: str) -> PatchedFile:
    try:
        digest = _sha256(site_packages / LOOKUP)
    except OSError:
        raise InstallChangedError(f"vLLM {pin} has no {LOOKUP}: there is no lookup of this connector to qualify") from None
    return PatchedFile(path=LOOKUP, pre_sha256=digest, post_sha256=digest)


def _check_installed(site_packages: Path, file: PatchedFile, pin: str) -> None:
    installed = site_packages / file.path
    if not installed.is_file():
        raise InstallChangedError(f"{file.path} is missing from the installed vLLM {pin}: remove its environment, run again")
    digest = _sha256(installed)
    if digest != file.pre_sha256:
        raise InstallChangedError(
            f"{file.path} of the installed vLLM {pin} has sha256 {digest[:16]}, the patch was written for"
            f" {file.pre_sha256[:16]}: the install was changed, remove its environment and run again"
        )


def _stock(pin: str, files: list[PatchedFile], site_packages: Path, overlays: Path) -> Arm:
    entries = [_entry(f, site_packages / f.path, f.pre_sha256) for f in files]
    return _write_arm(STOCK, pin, entries, None, overlays)


def _patched(name: str, pin: str, source: Source, files: list[PatchedFile], site_packages: Path, overlays: Path) -> Arm:
    patch_file = source.patch_file
    text = read_patch_text(patch_file, {f.path for f in source.files})
    tree = overlays / f"{pin}-{name}-{hashlib.sha256(text).hexdigest()[:16]}"
    with tempfile.TemporaryDirectory(prefix=".applying-", dir=_made(overlays)) as work:
        apply_patch(text, source.files, site_packages, Path(work), patch_file)
        for file in source.files:
            _check_applied(Path(work) / file.path, file, patch_file)
            target = tree / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(Path(work) / file.path, target)
    own = {f.path for f in source.files}
    entries = [
        _entry(f, tree / f.path, f.post_sha256) if f.path in own else _entry(f, site_packages / f.path, f.pre_sha256)
        for f in [*source.files, *(f for f in files if f.path not in own)]
    ]
    arm = _write_arm(name, pin, entries, hashlib.sha256(text).hexdigest(), overlays)
    return arm.model_copy(update={"keeps": source.keeps})


def read_patch_text(patch_file: Path, declared: set[str]) -> bytes:
    """The patch's bytes, after a check of what it would touch.

    Raises:
        PatchError: missing, empty, changes files that ``patch.toml`` does not declare, or holds links or binary hunks.
    """
    try:
        text = patch_file.read_bytes()
    except FileNotFoundError:
        raise PatchError(f"{patch_file} is missing") from None
    except OSError as e:
        raise PatchError(f"{patch_file} cannot be read: {e.strerror}") from e
    lines = text.decode("utf-8", errors="replace")
    for pattern, what in _FORBIDDEN.items():
        if re.search(pattern, lines, re.MULTILINE):
            raise PatchError(f"{patch_file} holds {what}: only changes of existing .py files are applied")
    touched = set(re.findall(r"^\+\+\+ b/(\S+)", lines, re.MULTILINE))
    if not touched:
        raise PatchError(f"{patch_file} changes nothing: it is empty or not a unified diff with a/ and b/ paths")
    if touched != declared:
        odd = sorted(touched ^ declared)[0]
        raise PatchError(f"{patch_file} and patch.toml do not name the same files: {odd}")
    return text


def apply_patch(text: bytes, files: tuple[PatchedFile, ...], site_packages: Path, work: Path, shown: Path) -> None:
    """Apply ``text`` with git to copies of ``files`` under ``work``.

    Raises:
        PatchError: git refuses, with git's own reason; or there is no git.
    """
    for file in files:
        copy = work / file.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(site_packages / file.path, copy)
    done = git(["apply", "-p1", "--whitespace=nowarn", "-"], work, text)
    if done.returncode:
        reason = " ".join(done.stderr.decode(errors="replace").split())
        raise PatchError(f"{shown} does not apply: {reason}")


def _check_applied(path: Path, file: PatchedFile, patch_file: Path) -> None:
    digest = _sha256(path)
    if digest == file.pre_sha256:
        raise PatchError(f"{patch_file} leaves {file.path} unchanged")
    if digest != file.post_sha256:
        raise PatchError(
            f"{patch_file} gives {file.path} sha256 {digest[:16]}, patch.toml says {file.post_sha256[:16]}:"
            " the patch was changed, or patch.toml is out of date"
        )
    try:
        compile(path.read_bytes(), str(file.path), "exec")
    except (SyntaxError, ValueError) as e:  # before Python 3.11.4 a null byte is a ValueError
        raise PatchError(f"{patch_file} gives a {file.path} that does not compile: {e}") from e


def _entry(file: PatchedFile, source: Path, post: str) -> dict[str, str]:
    return {
        "module": file.module,
        "path": file.path,
        "source": str(source),
        "pre_sha256": file.pre_sha256,
        "post_sha256": post,
    }


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write_arm(name: str, pin: str, entries: list[dict[str, str]], patch_sha256: str | None, overlays: Path) -> Arm:
    text = json.dumps({"arm": name, "pin": pin, "files": entries}, indent=1)
    # Named by content: a later run with other arms never changes a manifest that a running process reads.
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    manifest = _made(overlays) / f"{pin}-{name}-{digest}.json"
    scratch = manifest.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(manifest)
    return Arm(
        name=name,
        pin=pin,
        manifest=manifest,
        patch_sha256=patch_sha256,
        expected={e["module"]: e["post_sha256"] for e in entries},
    )
