"""Porting a patch from one of its pins to another, and what about the port somebody should look at.

Code of a patch is parsed and compiled here, never run.
"""

from __future__ import annotations

import ast
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kvmatrix.arms import PinPatch, load_patch, read_patch_text
from kvmatrix.diffs import FileChange, Hunk, package_changes, parse_diff, render
from kvmatrix.errors import InstallChangedError, PatchError, UsageError, one_line
from kvmatrix.git import git
from kvmatrix.patch_files import PATCH_TOML, Files, apply, compile_error, hashed, patch_text, read_all, save, sha256, write_all

Method = Literal["apply", "merge"]

AROUND = "is changed by the patch, and differs"
"""In the doubt that a function around a hunk is not the same in both releases."""


@dataclass(frozen=True)
class HunkPort:
    """Where a hunk went: its first line in the old pin's stock file and in the new pin's."""

    path: str
    old_line: int
    new_line: int | None
    state: Literal["clean", "moved", "already there", "conflict"]

    @property
    def line(self) -> str:
        start = f"{self.path}: hunk at line {self.old_line}"
        if self.state == "moved" and self.new_line is not None:
            return f"{start} moved to line {self.new_line} ({self.new_line - self.old_line:+d})"
        known = {"clean": "is at the same line", "already there": "is in the new pin already, left out"}
        return f"{start} {known.get(self.state, 'conflicts')}"


@dataclass(frozen=True)
class Refreshed:
    """A patch's new file for another pin, and what somebody should look at before trusting it."""

    name: str
    from_pin: str
    to_pin: str
    patch_file: Path
    method: Method
    hunks: tuple[HunkPort, ...]
    uncertain: tuple[str, ...]


class PortConflictError(PatchError):
    """A three-way merge that needs a person; ``hunks`` says which part went over."""

    def __init__(self, message: str, hunks: tuple[HunkPort, ...], written: Path) -> None:
        super().__init__(message)
        self.hunks = hunks
        self.written = written
        """Folder with the merged files, conflict markers in them."""


@dataclass(frozen=True)
class _Port:
    """Everything that a port reads: the patch, and both pins' files."""

    name: str
    from_pin: str
    to_pin: str
    from_site: Path
    to_site: Path
    text: bytes
    changes: tuple[FileChange, ...]
    base: Files
    theirs: Files
    ours: Files

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self.base)

    @property
    def labels(self) -> tuple[str, str, str]:
        return f"vLLM {self.to_pin}", f"vLLM {self.from_pin}", f"{self.name} on vLLM {self.from_pin}"


def refresh_patch(
    patches_root: Path,
    name: str,
    from_pin: str,
    to_pin: str,
    from_site: Path,
    to_site: Path,
    *,
    force: bool = False,
    scratch: Path | None = None,
) -> Refreshed:
    """Port a patch from one of its pins to another: by git's apply as it is, else by a three-way merge.

    A clean port is no proof: ``uncertain`` of the answer lists hunks that moved, functions around a change that differ
    between the pins, and names that the change uses and the new pin's file lacks.

    Raises:
        UsageError: no such patch or pin of it; it has a file for ``to_pin`` and ``force`` is not set.
        PatchError: the patch is not right on ``from_pin``, ``to_pin`` lacks a file or has the change already, or the
            result does not compile.
        PortConflictError: the merge conflicts; the files with conflict markers are in a new folder (in ``scratch``).
        InstallChangedError: the installed file of ``from_pin`` is not the one that the patch was written for.
    """
    folder = patches_root / name
    port = _load_port(folder, from_pin, to_pin, from_site, to_site, force)
    merged, method, notes = _ported(port, scratch)
    hunks = _port_hunks(port, method)
    changed = tuple(path for path in port.paths if merged[path] != port.ours[path])
    if not changed:
        raise PatchError(f"vLLM {to_pin} has the change of {name!r} already: there is nothing to port")
    for path in changed:
        reason = compile_error(path, merged[path])
        if reason:
            raise PatchError(f"{name!r} ported to vLLM {to_pin} gives a {path} that does not compile: {reason}")
    before, after = _only(port.ours, changed), _only(merged, changed)
    text = patch_text(before, after)
    toml = (folder / PATCH_TOML).read_bytes().decode()
    save(folder, toml, {to_pin: (text, hashed(before, after))})
    uncertain = [hunk.line for hunk in hunks if hunk.state != "clean"] + notes
    for change in port.changes:
        uncertain += _doubts(port, change)
    return Refreshed(name, from_pin, to_pin, folder / f"{to_pin}.patch", method, hunks, tuple(dict.fromkeys(uncertain)))


def _load_port(folder: Path, from_pin: str, to_pin: str, from_site: Path, to_site: Path, force: bool) -> _Port:
    patch = load_patch(folder)
    if from_pin not in patch.pins:
        raise UsageError(f"patch {folder.name!r} has no file for pin {from_pin}: it has {', '.join(patch.pins)}")
    if from_pin == to_pin or (to_pin in patch.pins and not force):
        raise UsageError(f"patch {folder.name!r} has a file for pin {to_pin} already: overwrite it with --force")
    pin_patch = patch.pins[from_pin]
    file = folder / pin_patch.patch
    paths = tuple(f.path for f in pin_patch.files)
    text = read_patch_text(file, set(paths))
    for path in paths:
        if not (to_site / path).is_file():
            raise PatchError(f"vLLM {to_pin} has no {path}: write the patch for this pin by hand")
    base = _checked(from_site, pin_patch, from_pin)
    theirs = apply(text, paths, from_site, file)
    if any(sha256(theirs[f.path]) != f.post_sha256 for f in pin_patch.files):
        raise PatchError(f"{file} gives another file than {PATCH_TOML} says: put it right first, see `kvmatrix patch check`")
    # Not the file's own hunks: those of a series of mails would be counted from one another.
    changes, _ = package_changes(parse_diff(patch_text(base, theirs), file))
    ours = read_all(to_site, paths)
    return _Port(folder.name, from_pin, to_pin, from_site, to_site, text, changes, base, theirs, ours)


def _checked(site: Path, pin_patch: PinPatch, pin: str) -> Files:
    files: Files = {}
    for file in pin_patch.files:
        installed = site / file.path
        if not installed.is_file() or sha256(installed.read_bytes()) != file.pre_sha256:
            raise InstallChangedError(
                f"{file.path} of the installed vLLM {pin} is not the one that the patch was written for:"
                " remove its environment and run again"
            )
        files[file.path] = installed.read_bytes()
    return files


def _ported(port: _Port, scratch: Path | None) -> tuple[Files, Method, list[str]]:
    """The new pin's patched files, how they were made, and what is odd about it."""
    merges = {path: _merge(port.ours[path], port.base[path], port.theirs[path], port.labels) for path in port.paths}
    merged = {path: data for path, (data, _) in merges.items()}
    conflicts = {path: count for path, (_, count) in merges.items() if count}
    try:
        applied = apply(port.text, port.paths, port.to_site, Path(f"{port.name}/{port.from_pin}.patch"))
    except PatchError:
        if conflicts:
            raise _conflict(port, merged, list(conflicts), scratch) from None
        return merged, "merge", []
    if conflicts:
        return applied, "apply", [f"{path}: git applies the patch, but a three-way merge conflicts" for path in conflicts]
    # With one line of context git may take another place for the right one; the merge knows the whole old file.
    odd = [path for path in port.paths if applied[path] != merged[path]]
    note = "git's apply puts the patch elsewhere than a three-way merge, which was taken"
    return (merged, "merge", [f"{path}: {note}" for path in odd]) if odd else (applied, "apply", [])


def _conflict(port: _Port, merged: Files, paths: list[str], scratch: Path | None) -> PortConflictError:
    if scratch:
        scratch.mkdir(parents=True, exist_ok=True)
    # A new folder each time: what somebody is resolving in an earlier one stays.
    written = Path(tempfile.mkdtemp(prefix=f"{port.name}-{port.to_pin}-", dir=scratch))
    write_all(written, merged)
    where = "; ".join(f"{written / path} lines {', '.join(_conflict_ranges(merged[path], port.labels))}" for path in paths)
    return PortConflictError(
        f"patch {port.name!r} conflicts with vLLM {port.to_pin}: resolve {where}, then run"
        f" `kvmatrix patch new {port.name} --pin {port.to_pin} {written}`",
        _port_hunks(port, "merge"),
        written,
    )


def _conflict_ranges(merged: bytes, labels: tuple[str, str, str]) -> list[str]:
    opening, closing = f"<<<<<<< {labels[0]}".encode(), f">>>>>>> {labels[2]}".encode()
    ranges, start = [], 0
    for number, line in enumerate(merged.split(b"\n"), 1):
        if line == opening:
            start = number
        elif line == closing and start:
            ranges.append(f"{start}-{number}")
            start = 0
    return ranges


def _port_hunks(port: _Port, method: Method) -> tuple[HunkPort, ...]:
    return tuple(_port_hunk(port, change, hunk, method) for change in port.changes for hunk in change.hunks)


def _port_hunk(port: _Port, change: FileChange, hunk: Hunk, method: Method) -> HunkPort:
    """Where one hunk alone goes."""
    path = change.path
    single = render([replace(change, hunks=(hunk,))]).encode()
    shown = Path(f"{port.name}/{port.from_pin}.patch")
    theirs = apply(single, [path], port.from_site, shown)[path]
    result: bytes | None
    result, conflicts = _merge(port.ours[path], port.base[path], theirs, port.labels)
    if conflicts:
        result = _apply_or_none(single, path, port.to_site, shown) if method == "apply" else None
    if result is None:
        return HunkPort(path, hunk.old_start, None, "conflict")
    if result == port.ours[path]:
        return HunkPort(path, hunk.old_start, None, "already there")
    offset = _first_difference(port.ours[path], result) - _first_difference(port.base[path], theirs)
    return HunkPort(path, hunk.old_start, hunk.old_start + offset, "moved" if offset else "clean")


def _apply_or_none(text: bytes, path: str, site: Path, shown: Path) -> bytes | None:
    try:
        return apply(text, [path], site, shown)[path]
    except PatchError:
        return None


def _first_difference(before: bytes, after: bytes) -> int:
    old, new = before.split(b"\n"), after.split(b"\n")
    return next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))


def _merge(ours: bytes, base: bytes, theirs: bytes, labels: tuple[str, str, str]) -> tuple[bytes, int]:
    """git's three-way merge of one file: the result, and how many conflicts are in it."""
    with tempfile.TemporaryDirectory(prefix="kvmatrix-merge-") as work:
        write_all(Path(work), {"ours": ours, "base": base, "theirs": theirs})
        named = [part for label in labels for part in ("-L", label)]
        done = git(["merge-file", "-p", "-q", *named, "ours", "base", "theirs"], Path(work))
    if done.returncode > 127:
        raise PatchError(f"git cannot merge: {one_line(Exception(done.stderr.decode(errors='replace')))}")
    return done.stdout, done.returncode


def _only(files: Files, paths: Collection[str]) -> Files:
    return {path: files[path] for path in paths}


# --- what a port cannot prove -----------------------------------------------------------------------------------------


def _doubts(port: _Port, change: FileChange) -> Iterator[str]:
    """What of the new pin's file differs where the patch relies on it."""
    path = change.path
    old, new = _functions(port.base[path]), _functions(port.ours[path])
    for name in dict.fromkeys(_enclosing(hunk, old) for hunk in change.hunks):
        if name and name not in new:
            yield f"{path}: {name} is changed by the patch, and vLLM {port.to_pin} has no such function"
        elif name and [f.text for f in old[name]] != [f.text for f in new[name]]:
            yield f"{path}: {name} {AROUND} between vLLM {port.from_pin} and {port.to_pin}"
    lost = _names(port.theirs[path], _added_lines(change)) & _names(port.base[path]) - _names(port.ours[path])
    if lost:
        yield f"{path}: the patch uses {', '.join(sorted(lost))}, which vLLM {port.to_pin}'s file does not have"


@dataclass(frozen=True)
class _Function:
    start: int
    end: int
    text: str


def _functions(source: bytes) -> dict[str, list[_Function]]:
    """Functions and methods by qualified name, several where a name is defined again. Nested ones belong to their outer."""
    lines = source.decode("utf-8", errors="replace").split("\n")
    found: dict[str, list[_Function]] = defaultdict(list)
    for name, node in _defined(_parsed(source), ""):
        start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        end = node.end_lineno or node.lineno
        found[name].append(_Function(start, end, "\n".join(lines[start - 1 : end])))
    return dict(found)


def _parsed(source: bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def _defined(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from _defined(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.stmt | ast.excepthandler):
            yield from _defined(child, prefix)


def _enclosing(hunk: Hunk, functions: Mapping[str, list[_Function]]) -> str | None:
    """The function that the hunk changes, of the first of its changed lines that lies in one."""
    behind = hunk.old_start - 1 if hunk.old_count else hunk.old_start
    for line in hunk.lines:
        # An added line lies in a function where the lines on both of its sides do.
        first, last = (behind, behind + 1) if line[0] == "+" else (behind + 1, behind + 1)
        if line[0] in "+-":
            for name, same in functions.items():
                if any(f.start <= first and last <= f.end for f in same):
                    return name
        behind += line[0] not in "+\\"
    return None


def _added_lines(change: FileChange) -> set[int]:
    numbers = set()
    for hunk in change.hunks:
        number = hunk.new_start if hunk.new_count else hunk.new_start + 1
        for line in hunk.lines:
            if line[0] == "+":
                numbers.add(number)
            number += line[0] not in "-\\"
    return numbers


def _names(source: bytes, lines: set[int] | None = None) -> set[str]:
    """Identifiers that the code has, on these lines alone where they are given."""
    found: set[str] = set()
    for node in ast.walk(_parsed(source)):
        if lines is not None and getattr(node, "end_lineno", None) not in lines:
            continue
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.keyword | ast.arg) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found |= {node.name, node.asname or node.name}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
    return found
