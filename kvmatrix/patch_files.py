"""A patch's files: their names and hashes, what git makes of them, and the ``patch.toml`` beside them."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import tomllib
import unicodedata
import warnings
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import tomlkit
from pydantic import ValidationError

from kvmatrix.arms import Patch, PatchedFile, apply_patch
from kvmatrix.cells import STOCK
from kvmatrix.errors import PatchError, UsageError, one_line
from kvmatrix.git import git

PATCH_TOML = "patch.toml"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,59}")
_FUNCTION_CONTEXT = re.compile(rb"^(@@ -\S+ \+\S+ @@).*$", re.MULTILINE)
_LONG_TEXT = 100
"""Characters from which on a text of ``patch.toml`` gets lines of its own."""
_UNCOMPILABLE = (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError)
"""What ``compile`` raises for source that it does not take; the last two for source that nests too deeply."""

Files = dict[str, bytes]
"""Content by path relative to site-packages."""


@dataclass(frozen=True)
class Meta:
    """The words of a ``patch.toml``; ``upstream`` is a link or ``none``."""

    title: str
    what: str
    why: str
    upstream: str
    remove_when: str
    author: str


def check_name(name: str) -> str:
    """The name, where a patch can have it.

    Raises:
        UsageError: it is ``stock``, or has other characters than lower case letters, digits and hyphens.
    """
    if name == STOCK:
        raise UsageError(f"{STOCK!r} is the untouched vLLM: give the patch another name")
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot be a patch's name: use up to 60 of a-z, 0-9 and -, not - first")
    return name


def slug_of(path: Path) -> str:
    plain = unicodedata.normalize("NFKD", path.stem).encode("ascii", "ignore").decode().lower()
    slug = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:60].rstrip("-")
    if not slug or slug == STOCK:
        raise UsageError(f"{path.name} gives no name for a patch: give one")
    return slug


# --- files and git ----------------------------------------------------------------------------------------------------


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_all(root: Path, paths: Collection[str]) -> Files:
    return {path: (root / path).read_bytes() for path in paths}


def write_all(root: Path, files: Files) -> None:
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


def hashed(before: Files, after: Files) -> tuple[PatchedFile, ...]:
    try:
        return tuple(PatchedFile(path=p, pre_sha256=sha256(before[p]), post_sha256=sha256(after[p])) for p in after)
    except ValidationError as e:
        raise PatchError(f"{e.errors()[0]['input']}: {e.errors()[0]['msg']}") from e


def compile_error(path: str, source: bytes) -> str | None:
    """Why the source does not compile; None where it does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(source, path, "exec", dont_inherit=True)
        except _UNCOMPILABLE as e:
            return one_line(e) or type(e).__name__
    return None


def apply(text: bytes, paths: Collection[str], site: Path, shown: Path) -> Files:
    unknown = "0" * 64
    files = tuple(PatchedFile(path=path, pre_sha256=unknown, post_sha256=unknown) for path in paths)
    with tempfile.TemporaryDirectory(prefix="kvmatrix-apply-") as work:
        apply_patch(text, files, site, Path(work), shown)
        return read_all(Path(work), paths)


def reverse_applies(text: bytes, before: Files) -> bool:
    with tempfile.TemporaryDirectory(prefix="kvmatrix-apply-") as work:
        write_all(Path(work), before)
        return git(["apply", "-p1", "-R", "--check", "--whitespace=nowarn", "-"], Path(work), text).returncode == 0


def patch_text(before: Files, after: Files) -> bytes:
    """The diff of both, with one line of context and no more of vLLM's text than that."""
    with tempfile.TemporaryDirectory(prefix="kvmatrix-diff-") as work:
        write_all(Path(work) / "a", before)
        write_all(Path(work) / "b", after)
        options = ["--no-index", "--no-prefix", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "-U1"]
        done = git(["diff", *options, "a", "b"], Path(work))
    if done.returncode != 1:
        raise PatchError(f"git cannot diff the files: {one_line(Exception(done.stderr.decode(errors='replace')))}")
    return _FUNCTION_CONTEXT.sub(rb"\1", done.stdout)


# --- patch.toml -------------------------------------------------------------------------------------------------------


def toml_of(meta: Meta) -> str:
    return "".join(f"{key} = {_toml_string(value.strip())}\n" for key, value in asdict(meta).items())


def _toml_string(value: str) -> str:
    if "\n" not in value and len(value) <= _LONG_TEXT:
        return tomlkit.item(value).as_string()
    # A line feed right behind the opening quotes is not part of the string, which tomlkit has no way to ask for.
    return '"""\n' + tomlkit.string(f"{value}\n", multiline=True).as_string().removeprefix('"""')


def _with_pin(toml: str, pin: str, files: tuple[PatchedFile, ...]) -> str:
    """``toml`` with the pin's entry put in, the rest of the text as it is."""
    document = tomlkit.parse(toml if toml.endswith("\n") else f"{toml}\n")
    entry = tomlkit.table()
    entry.add("patch", f"{pin}.patch")
    listed = tomlkit.aot()
    for file in files:
        table = tomlkit.table()
        for key, value in file.model_dump().items():
            table.add(key, value)
        listed.append(table)
    entry.add("files", listed)
    if "pins" not in document:
        document.add("pins", tomlkit.table(is_super_table=True))
    pins = document["pins"]
    assert isinstance(pins, dict)
    pins[pin] = entry
    return tomlkit.dumps(document)


def save(folder: Path, toml: str, pins: Mapping[str, tuple[bytes, tuple[PatchedFile, ...]]]) -> None:
    """Write the pins' patch files, then ``patch.toml``: a folder that was cut off has none, or the old one."""
    for pin, (_, files) in pins.items():
        toml = _with_pin(toml, pin, files)
    try:
        Patch.model_validate(tomllib.loads(toml))
    except (tomllib.TOMLDecodeError, ValidationError) as e:
        raise PatchError(f"{folder / PATCH_TOML} cannot take another pin, edit it by hand: {one_line(e)}") from e
    folder.mkdir(parents=True, exist_ok=True)
    for pin, (text, _) in pins.items():
        _replace(folder / f"{pin}.patch", text)
    _replace(folder / PATCH_TOML, toml.encode())


def _replace(path: Path, data: bytes) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    scratch.write_bytes(data)
    scratch.replace(path)
