"""Making patches and checking them: import a stranger's diff, make a patch from an edited copy, see that one is right.

What comes out is a folder as :mod:`kvmatrix.arms` reads it. Code of a patch is compiled here, never run.
"""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from kvmatrix.arms import Patch, PatchedFile, PinPatch, build_arms, load_patch
from kvmatrix.diffs import PACKAGE, Diff, Skipped, package_changes, read_diff, render
from kvmatrix.errors import InstallChangedError, PatchError, UsageError, one_line
from kvmatrix.patch_files import (
    PATCH_TOML,
    Files,
    Meta,
    apply,
    check_name,
    compile_error,
    hashed,
    patch_text,
    read_all,
    reverse_applies,
    save,
    slug_of,
    toml_of,
)

PinStatus = Literal["applied", "already applied", "does not apply", "target missing", "does not compile"]


@dataclass(frozen=True)
class PinResult:
    """How a diff fared on one pin."""

    pin: str
    status: PinStatus
    line: str


@dataclass(frozen=True)
class Imported:
    """A diff that became a patch folder."""

    name: str
    folder: Path
    sha256: str
    """Of the diff as it came."""
    results: tuple[PinResult, ...]
    skipped: tuple[Skipped, ...]
    written: bool
    """False where the folder had all of it already."""

    @property
    def pins(self) -> tuple[str, ...]:
        return tuple(r.pin for r in self.results if r.status == "applied")


@dataclass(frozen=True)
class NewPatch:
    """What :func:`new_patch` wrote."""

    name: str
    pin: str
    patch_file: Path
    files: tuple[PatchedFile, ...]
    created: bool
    """Whether the patch is new, not only its file for this pin."""


@dataclass(frozen=True)
class Check:
    """How a patch stands on one of its pins."""

    pin: str
    status: Literal["ok", "broken", "install changed", "no environment"]
    line: str


# --- import -----------------------------------------------------------------------------------------------------------


def import_patch(
    diff_path: Path,
    pins: Mapping[str, Path],
    target_root: Path,
    name: str | None = None,
    *,
    taken: Collection[str] = (),
    replace_other: bool = False,
) -> Imported:
    """Make a patch folder under ``target_root`` from a diff, for each of ``pins`` (version -> site-packages) it applies to.

    The name comes from the file's stem where none is given; ``taken`` are names that it must not have. The same diff again
    changes nothing, or adds pins; another diff under the same name is refused unless ``replace_other``.

    Raises:
        UsageError: the file cannot be read, no pin was given, or the name is not a usable one or is taken.
        PatchError: the diff is not one that can be carried, or applies to no pin: with each pin's reason.
        InstallChangedError: a pin's file is not the one that the same diff was imported for before.
    """
    if not pins:
        raise UsageError("no pin to apply the diff to: name one with --pin")
    slug = check_name(name) if name is not None else slug_of(diff_path)
    if slug in taken:
        raise UsageError(f"there is a patch {slug!r} already: give the diff another name")
    diff = read_diff(diff_path)
    kept, skipped = package_changes(diff)
    text = render(kept).encode()
    paths = tuple(dict.fromkeys(change.path for change in kept))
    tried = [_try_pin(text, paths, pin, site, diff_path) for pin, site in pins.items()]
    results = tuple(result for result, _ in tried)
    applied = {result.pin: files for result, files in tried if files}
    if not applied:
        raise PatchError(f"{diff_path} applies to no pin: " + "; ".join(f"{r.pin}: {r.line}" for r in results))
    folder = target_root / slug
    toml = _import_base(folder, diff, paths, skipped, text, replace_other)
    new = _entries_to_add(folder, toml, applied)
    if new:
        save(folder, toml, {pin: (text, files) for pin, files in new.items()})
        for stale in {f.name for f in folder.glob("*.patch")} - {p.patch for p in load_patch(folder).pins.values()}:
            (folder / stale).unlink()
    return Imported(slug, folder, diff.sha256, results, skipped, written=bool(new))


def _try_pin(
    text: bytes, paths: Sequence[str], pin: str, site: Path, shown: Path
) -> tuple[PinResult, tuple[PatchedFile, ...] | None]:
    missing = [path for path in paths if not (site / path).is_file()]
    if missing:
        return PinResult(pin, "target missing", f"vLLM {pin} has no {missing[0]}"), None
    before = read_all(site, paths)
    try:
        after = apply(text, paths, site, shown)
    except PatchError as e:
        if reverse_applies(text, before):
            return PinResult(pin, "already applied", "this pin has the change already"), None
        return PinResult(pin, "does not apply", str(e).removeprefix(f"{shown} does not apply: ")), None
    for path in paths:
        if after[path] == before[path]:
            return PinResult(pin, "does not apply", f"leaves {path} unchanged"), None
        reason = compile_error(path, after[path])
        if reason:
            return PinResult(pin, "does not compile", f"gives a {path} that does not compile: {reason}"), None
    return PinResult(pin, "applied", f"applies to {', '.join(paths)}"), hashed(before, after)


def _import_base(
    folder: Path, diff: Diff, paths: Sequence[str], skipped: Sequence[Skipped], text: bytes, replace_other: bool
) -> str:
    """The ``patch.toml`` to add pins to: the one that is there where it is of the same diff, else a new one without pins."""
    toml = folder / PATCH_TOML
    if toml.is_file():
        known = load_patch(folder).pins.values()
        if all((folder / p.patch).is_file() and (folder / p.patch).read_bytes() == text for p in known):
            return toml.read_bytes().decode()
        if not replace_other:
            raise UsageError(f"{folder} holds another diff of that name: give this one another name, or delete that folder")
    what = f"From {diff.path.name}, sha256 {diff.sha256}: {', '.join(paths)}."
    if skipped:
        what += " Left out: " + ", ".join(f"{s.path} ({s.reason})" for s in skipped) + "."
    title = diff.subject or f"Imported from {diff.path.name}"
    meta = Meta(title, what, "Not stated: imported from a diff.", "none", "its qualification is done", diff.author or "unknown")
    return toml_of(meta)


def _entries_to_add(
    folder: Path, toml: str, applied: Mapping[str, tuple[PatchedFile, ...]]
) -> dict[str, tuple[PatchedFile, ...]]:
    known = tomllib.loads(toml).get("pins", {})
    new = {}
    for pin, files in applied.items():
        if pin not in known:
            new[pin] = files
        elif known[pin]["files"] != [file.model_dump() for file in files]:
            raise InstallChangedError(
                f"{files[0].path} of the installed vLLM {pin} is not the one that {folder} was made for:"
                " the install was changed, remove its environment and run again"
            )
    return new


# --- new --------------------------------------------------------------------------------------------------------------


def new_patch(
    name: str,
    pin: str,
    site_packages: Path,
    edited: Path | Sequence[Path],
    patches_root: Path,
    meta: Meta | None = None,
    *,
    force: bool = False,
) -> NewPatch:
    """Make ``patches_root/name``, or its file for ``pin``, from an edited copy of the pin's files.

    ``edited`` is a tree with a ``vllm`` folder in it, whose .py files may be all of the package's or only some, or a list
    of files that each lie under such a folder. ``meta`` is needed for a patch that does not exist yet.

    Raises:
        UsageError: a name that is not usable; no ``meta`` for a new patch, or another one for an existing patch; the patch
            has a file for this pin and ``force`` is not set; ``edited`` cannot be read.
        PatchError: nothing was changed, a file is not in the pin or does not compile, or ``patch.toml`` is damaged.
    """
    folder = patches_root / check_name(name)
    known = load_patch(folder) if (folder / PATCH_TOML).is_file() else None
    toml = _toml_for(folder, known, meta)
    if known and pin in known.pins and not force:
        raise UsageError(f"patch {name!r} has a file for pin {pin} already: overwrite it with --force")
    after = _edited_tree(edited, site_packages, pin) if isinstance(edited, Path) else _edited_files(edited, site_packages, pin)
    before = read_all(site_packages, after)
    for path in after:
        _check_edit(path, before[path], after[path], pin)
    text = patch_text(before, after)
    file = folder / f"{pin}.patch"
    if apply(text, tuple(after), site_packages, file) != after:
        raise PatchError(f"git does not give the edited files back from their diff: nothing was written to {folder}")
    files = hashed(before, after)
    save(folder, toml, {pin: (text, files)})
    return NewPatch(name, pin, file, files, created=known is None)


def _toml_for(folder: Path, known: Patch | None, meta: Meta | None) -> str:
    if known is None:
        if meta is None:
            raise UsageError(f"patch {folder.name!r} is new: say its title, what, why, upstream, remove_when and author")
        blank = [field for field, value in asdict(meta).items() if not value.strip()]
        if blank:
            raise UsageError(f"patch {folder.name!r} is new: its {blank[0]} is empty")
        return toml_of(meta)
    changed = [f.name for f in fields(Meta) if meta and getattr(meta, f.name).strip() != getattr(known, f.name).strip()]
    if changed:
        raise UsageError(f"patch {folder.name!r} has another {changed[0]}: change it in its {PATCH_TOML}")
    return (folder / PATCH_TOML).read_bytes().decode()


def _edited_tree(tree: Path, site: Path, pin: str) -> Files:
    root = tree.parent if tree.name == PACKAGE and not (tree / PACKAGE).is_dir() else tree
    if not (root / PACKAGE).is_dir():
        raise UsageError(f"{tree} has no folder {PACKAGE}: name the folder that the edited package lies in, or list the files")
    changed: Files = {}
    for file in sorted((root / PACKAGE).rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if not (site / path).is_file():
            raise _not_in_pin(file, path, pin)
        data = file.read_bytes()
        if data != (site / path).read_bytes():
            changed[path] = data
    if not changed:
        raise PatchError(f"{tree} has no .py file that differs from vLLM {pin}: nothing to make a patch of")
    return changed


def _edited_files(files: Sequence[Path], site: Path, pin: str) -> Files:
    if not files:
        raise UsageError("no edited file was named")
    changed: Files = {}
    for file in files:
        if not file.is_file():
            raise UsageError(f"{file} is not a file")
        path = _path_in_package(file, site, pin)
        if path in changed:
            raise UsageError(f"{path} was named twice")
        changed[path] = file.read_bytes()
    return changed


def _path_in_package(file: Path, site: Path, pin: str) -> str:
    """The file's path from its ``vllm`` folder on; a checkout may have one ``vllm`` inside of another."""
    parts = file.absolute().parts
    starts = ["/".join(parts[n:]) for n, part in enumerate(parts[:-1]) if part == PACKAGE]
    found = next((path for path in starts if (site / path).is_file()), None)
    if not starts:
        raise PatchError(f"{file} lies under no folder {PACKAGE}: keep it at its place in the package, {PACKAGE}/…/{file.name}")
    if found is None:
        raise _not_in_pin(file, starts[-1], pin)
    return found


def _not_in_pin(file: Path, path: str, pin: str) -> PatchError:
    return PatchError(f"{file}: vLLM {pin} has no {path}: only files that it has can be changed")


def _check_edit(path: str, before: bytes, after: bytes, pin: str) -> None:
    if after == before:
        raise PatchError(f"{path} is the same as in vLLM {pin}: edit it first")
    if not path.endswith(".py"):
        raise PatchError(f"{path} is not a .py file: only those can be changed")
    if b"\r\n" in after and b"\r\n" not in before:
        raise PatchError(f"{path} has CRLF line ends, the pin's has LF: convert it")
    reason = compile_error(path, after)
    if reason:
        raise PatchError(f"the edited {path} does not compile: {reason}")


# --- check ------------------------------------------------------------------------------------------------------------


def check_patch(patches_root: Path, name: str, pins: Mapping[str, Path]) -> list[Check]:
    """Whether the patch gives what it says on each of its pins, judged by the very code that a run builds its arms with.

    ``pins`` are the site-packages that there are; a pin of the patch that has none is said to be unchecked.

    Raises:
        UsageError: there is no such patch.
        PatchError: its ``patch.toml`` is damaged.
    """
    patch = load_patch(patches_root / name)
    return [_check_pin(patches_root, name, pin, patch.pins[pin], pins.get(pin)) for pin in patch.pins]


def _check_pin(patches_root: Path, name: str, pin: str, pin_patch: PinPatch, site: Path | None) -> Check:
    if site is None:
        return Check(pin, "no environment", f"not checked: there is no environment of vLLM {pin} here")
    with tempfile.TemporaryDirectory(prefix="kvmatrix-check-") as work:
        try:
            build_arms({name: patches_root / name}, pin, site, Path(work))
        except PatchError as e:
            return Check(pin, "broken", one_line(e))
        except InstallChangedError as e:
            return Check(pin, "install changed", one_line(e))
    many = len(pin_patch.files)
    return Check(pin, "ok", f"applies, compiles, and gives {many} file{'s' * (many > 1)} with the recorded sha256")
