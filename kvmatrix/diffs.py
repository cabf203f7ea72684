"""Reading a stranger's diff: what it changes, and which part of that can become a patch.

A diff may be of a whole vLLM tree, plain or as mail from ``git format-patch``. Nothing in it is trusted: what is kept is
written anew by :func:`render`, so that git never sees a line that was not looked at here.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.errors import MessageError
from email.header import decode_header, make_header
from email.parser import HeaderParser
from pathlib import Path
from typing import Literal

from unidiff.errors import UnidiffParseError
from unidiff.patch import Hunk as ParsedHunk
from unidiff.patch import PatchedFile, PatchSet

from kvmatrix.errors import PatchError, UsageError

MAX_BYTES = 5_000_000
PACKAGE = "vllm"

Kind = Literal["modify", "add", "delete", "rename", "copy", "mode"]

_SYMLINK, _SUBMODULE = "120000", "160000"
_HUNK_HEADER = re.compile(r"^(@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@)")
_MAIL = re.compile(r"^From [0-9a-f]{7,64} \w{3} \w{3} |^(From|Subject|Date): ")
_MAIL_START = re.compile(r"^From [0-9a-f]{40,64} \w{3} \w{3} ")
_ENCODED_MAIL = re.compile(r"^Content-Transfer-Encoding: *(base64|quoted-printable)\s*$", re.IGNORECASE | re.MULTILINE)
_ESCAPE = re.compile(rb'\\([0-3][0-7]{2}|[abtnvfr"\\])')
_ESCAPES = {b"a": b"\a", b"b": b"\b", b"t": b"\t", b"n": b"\n", b"v": b"\v", b"f": b"\f", b"r": b"\r"}
_PREFIX = re.compile(r"^[abciow12]/")
_CARRIED = re.compile(r"[\w./-]+\.py")
_DAMAGE = {
    "Hunk is shorter": "a hunk is shorter than its header says: the diff was cut off or edited by hand",
    "Hunk is longer": "a hunk is longer than its header says: the diff was cut off or edited by hand",
    "Hunk diff line expected": "a hunk is shorter than its header says: the diff was cut off or edited by hand",
    "Unexpected hunk": "a hunk belongs to no file: its `---` and `+++` lines are missing",
    "Target without source": "a `+++` line does not go with the `---` or `diff --git` line before it",
}
_OUTSIDE = {
    ".buildkite": "CI settings",
    ".github": "CI settings",
    "benchmarks": "benchmarks are not in the package",
    "cmake": "build files: the pin's own build is used",
    "csrc": "compiled code: the pin's own build is used",
    "docs": "documentation",
    "examples": "examples are not in the package",
    "requirements": "dependencies: the pin's own are used",
    "tests": "tests are not in the package",
}


@dataclass(frozen=True)
class Hunk:
    """One hunk. ``lines`` are as in the diff, each with its sign and a line feed at its end."""

    old_start: int
    old_count: int
    new_start: int
    new_count: int
    header: str
    """``@@ … @@`` without the function context behind it."""
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"{self.header}\n{''.join(self.lines)}"


@dataclass(frozen=True)
class FileChange:
    """What a diff does to one file. Paths are without ``a/`` and ``b/``, None where the file does not exist."""

    old: str | None
    new: str | None
    kind: Kind
    modes: tuple[str | None, str | None] = (None, None)
    binary: bool = False
    hunks: tuple[Hunk, ...] = ()

    @property
    def path(self) -> str:
        return self.new or self.old or ""

    @property
    def symlink(self) -> bool:
        return _SYMLINK in self.modes

    @property
    def submodule(self) -> bool:
        return _SUBMODULE in self.modes

    @property
    def inside(self) -> bool:
        """Whether it touches the package, with either of its paths."""
        return any(p == PACKAGE or p.startswith(f"{PACKAGE}/") for p in (self.old, self.new) if p)


@dataclass(frozen=True)
class Diff:
    """A diff as it was read. ``subject`` and ``author`` are of the first mail, None for a plain diff."""

    path: Path
    data: bytes
    sha256: str
    subject: str | None
    author: str | None
    changes: tuple[FileChange, ...]


@dataclass(frozen=True)
class Skipped:
    """A file of the diff that is left out, and why."""

    path: str
    reason: str


def read_diff(path: Path) -> Diff:
    """Read a diff: plain (``git diff``), or one or several mails (``git format-patch``).

    Raises:
        UsageError: there is no such file, or it cannot be read.
        PatchError: too large, empty, not UTF-8 text with line feeds, holds no diff, or is damaged.
    """
    return parse_diff(_read(path), path)


def parse_diff(data: bytes, path: Path) -> Diff:
    """What :func:`read_diff` does, for a diff in memory; ``path`` is what messages call it.

    Raises:
        PatchError: as for :func:`read_diff`, but for the size.
    """
    text = _decode(path, data)
    lines = _without_prose(list(io.StringIO(text)))
    try:
        files = PatchSet(lines)
        changes = tuple(_change(file, lines) for file in files)
    except (UnidiffParseError, ValueError) as e:
        known = next((ours for theirs, ours in _DAMAGE.items() if str(e).startswith(theirs)), str(e))
        raise PatchError(f"{path} is damaged: {' '.join(known.split())}; make it again with `git diff`") from None
    if not changes:
        raise PatchError(f"{path} holds no diff: make it with `git diff` or `git format-patch`")
    subject, author = _mail_header(text)
    return Diff(path, data, hashlib.sha256(data).hexdigest(), subject, author, changes)


def package_changes(diff: Diff) -> tuple[tuple[FileChange, ...], tuple[Skipped, ...]]:
    """The changes that a patch can carry, and what is left out because it lies outside the package.

    Raises:
        PatchError: a path leaves its tree; something inside the package is not a change of an existing .py file; or
            nothing is inside.
    """
    kept, skipped = [], []
    for change in diff.changes:
        for path in (change.old, change.new):
            _check_path(diff.path, path)
        if change.inside and change.path.endswith(".md") and change.kind in ("modify", "add", "delete"):
            skipped.append(Skipped(change.path, "documentation"))
        elif change.inside:
            _check_carried(diff.path, change)
            kept.append(change)
        else:
            skipped.append(Skipped(change.path, _reason(change)))
    if not kept:
        raise PatchError(f"{diff.path} changes nothing inside the {PACKAGE} package: only {_some([s.path for s in skipped])}")
    return tuple(kept), tuple(skipped)


def render(kept: Sequence[FileChange]) -> str:
    """The diff of these changes alone, with ``a/`` and ``b/`` paths, without prose, ``index`` lines and function context."""
    parts = []
    for change in kept:
        path = change.path
        parts.append(f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n")
        parts += [hunk.text for hunk in change.hunks]
    return "".join(parts)


# --- reading ----------------------------------------------------------------------------------------------------------


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise UsageError(f"{path} is not a file: name a diff, as `git diff` or `git format-patch` writes it")
    try:
        with path.open("rb") as f:
            data = f.read(MAX_BYTES + 1)
    except OSError as e:
        raise UsageError(f"{path} cannot be read: {e.strerror}") from e
    if len(data) > MAX_BYTES:
        raise PatchError(f"{path} is larger than {MAX_BYTES // 1_000_000} MB: cut it down to the {PACKAGE} package's files")
    if not data.strip():
        raise PatchError(f"{path} is empty")
    return data


def _decode(path: Path, data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise PatchError(f"{path} is UTF-16 text, which some shells' `>` writes: make it with `git diff --output=FILE`")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise PatchError(f"{path} is not UTF-8 text: byte {e.start} is 0x{data[e.start]:02x}") from None
    if re.search(r"^(diff --git .*|@@ -\d.*)\r$", text, re.MULTILINE):
        raise PatchError(f"{path} has CRLF line ends: convert it to LF, or make it again without line end conversion")
    if re.search(r"^\x1b\[[\d;]*m", text, re.MULTILINE):
        raise PatchError(f"{path} holds terminal colours: make it with `git diff --no-color`")
    if re.search(r"^diff --(cc|combined) ", text, re.MULTILINE):
        raise PatchError(f"{path} is a merge's combined diff: make it against one parent, `git diff PARENT MERGE`")
    if _MAIL.match(text) and _ENCODED_MAIL.search(text.partition("\n\n")[0]):
        raise PatchError(f"{path} is a mail with an encoded body: take the diff as `git format-patch` wrote it")
    return text


def _without_prose(lines: list[str]) -> list[str]:
    """The lines, those of each mail's head and message emptied: a message may quote anything."""
    kept, prose = [], False
    for number, line in enumerate(lines):
        if _MAIL_START.match(line):
            prose = True
        elif line.startswith("diff --git ") or _starts_a_file(lines, number):
            prose = False
        kept.append("\n" if prose else line)
    return kept


def _mail_header(text: str) -> tuple[str | None, str | None]:
    """Subject without ``[PATCH …]``, and the author's name."""
    if not _MAIL.match(text):
        return None, None
    head = text.partition("\n\n")[0]
    message = HeaderParser().parsestr(re.sub(r"\AFrom [0-9a-f].*\n", "", head))
    subject, author = (_plain(message.get(name)) for name in ("Subject", "From"))
    if subject:
        subject = re.sub(r"^(\[[^\]]*PATCH[^\]]*\]\s*)+", "", subject)
    if author:
        author = re.sub(r"\s*<[^>]*>\s*$", "", author).strip('" ')
    return subject or None, author or None


def _plain(value: str | None) -> str:
    """A header's text on one line, decoded where it is encoded and this can be read."""
    text = str(value or "")
    with suppress(MessageError, LookupError, ValueError):
        text = str(make_header(decode_header(text)))
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _change(file: PatchedFile, lines: list[str]) -> FileChange:
    head = file.patch_info if file.patch_info and file.patch_info[0].startswith("diff --git ") else []
    old, new = _path(file.source_file), _path(file.target_file)
    modes = (file.source_mode, file.target_mode)
    kind: Kind = "modify"
    if old is None or new is None:
        kind = "add" if old is None else "delete"
    elif any(line.startswith("copy from ") for line in head):
        kind = "copy"
    elif old != new or any(line.startswith("rename from ") for line in head):
        kind = "rename"
    elif modes[0] != modes[1]:
        kind = "mode"
    hunks = tuple(_hunk(hunk, lines) for hunk in file)
    return FileChange(old, new, kind, modes, bool(file.is_binary_file), hunks)


def _path(name: str) -> str | None:
    """A path of the diff, unquoted and without ``a/`` or ``b/``; None for ``/dev/null``."""
    if len(name) > 1 and name.startswith('"') and name.endswith('"'):
        name = _unquoted(name[1:-1])
    return None if name == "/dev/null" else _PREFIX.sub("", name)


def _unquoted(name: str) -> str:
    """What git writes in quotes: bytes outside of ASCII and control characters as escapes."""
    raw = _ESCAPE.sub(lambda m: bytes([int(m[1], 8)]) if len(m[1]) == 3 else _ESCAPES.get(m[1], m[1]), name.encode())
    return raw.decode("utf-8", errors="replace")


def _hunk(parsed: ParsedHunk, lines: list[str]) -> Hunk:
    numbers = [line.diff_line_no for line in parsed if line.diff_line_no]
    if not numbers:
        raise ValueError("a hunk has no lines")
    first, end = numbers[0], numbers[-1]
    if end < len(lines) and lines[end].startswith("\\ "):
        end += 1
    _check_behind(lines, end)
    header = _HUNK_HEADER.match(lines[first - 2])
    assert header, "unidiff takes the lines right behind a header"
    body = tuple(line if line.endswith("\n") else f"{line}\n" for line in lines[first - 1 : end])
    return Hunk(parsed.source_start, parsed.source_length, parsed.target_start, parsed.target_length, header[1], body)


def _starts_a_file(lines: list[str], number: int) -> bool:
    return lines[number].startswith("--- ") and number + 1 < len(lines) and lines[number + 1].startswith("+++ ")


def _check_behind(lines: list[str], end: int) -> None:
    """Refuse a hunk that goes on behind the counts in its header: git would drop the rest without a word."""
    number = next((n for n in range(end, len(lines)) if lines[n].strip()), None)
    if number is None:
        return
    line = lines[number]
    if line[0] in "+- " and not _starts_a_file(lines, number) and line.rstrip("\n") not in ("-- ", "--"):
        raise ValueError(f"line {number + 1} is behind the end of its hunk, whose header counts fewer lines")


# --- what can be carried ----------------------------------------------------------------------------------------------


def _check_path(shown: Path, path: str | None) -> None:
    if path is None:
        return
    if "\\" in path or path.startswith("/") or re.match(r"[A-Za-z]:", path) or not path.isprintable():
        raise PatchError(f"{shown} names {path!r}: only plain paths inside the repository are read")
    if any(part in ("", ".", "..") for part in path.split("/")):
        raise PatchError(f"{shown} names {path!r}, which leaves its tree: only plain paths inside the repository are read")


def _check_carried(shown: Path, change: FileChange) -> None:
    """Refuse what an overlay of existing .py files cannot hold."""
    path = change.path
    does = {
        "add": f"adds {path}: put the new code into a file that the package has",
        "delete": f"deletes {path}: keep the file",
        "rename": f"renames {change.old} to {change.new}: keep the file where it is",
        "copy": f"copies {change.old} to {change.new}: put the new code into a file that the package has",
        "mode": f"changes the mode of {path} from {change.modes[0]} to {change.modes[1]}: leave it as it is",
    }
    if change.symlink:
        what = f"has a symbolic link, {path}: links are not followed"
    elif change.submodule:
        what = f"has a submodule, {path}: only files are carried"
    elif change.binary:
        what = f"changes the binary file {path}: only Python text is carried"
    elif change.kind in does:
        what = does[change.kind]
    elif not _CARRIED.fullmatch(path):
        what = f"changes {path}: files of the package that are not plainly named .py files cannot be carried"
    elif not change.hunks:
        what = f"names {path} but has no change of it: make it again with `git diff`"
    else:
        return
    raise PatchError(f"{shown} {what}")


def _reason(change: FileChange) -> str:
    reason = _OUTSIDE.get(change.path.partition("/")[0], f"outside the {PACKAGE} package")
    return f"{reason} (binary)" if change.binary else reason


def _some(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
