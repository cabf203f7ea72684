"""Mixed builds: one release's Python files over another release's extensions, for a device that has no build of it.

The wheel of another device holds the same Python files. Unpacked beside links to the extensions of a build that is near
enough, they make a tree that runs in that build's environment: it is put in front of what is installed there. Nothing that
such a tree gives may be shown without saying so (:func:`sentence`).
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from kvmatrix.config import Pin
from kvmatrix.errors import EnvironmentBuildError

PACKAGE = "vllm/"
LOCAL_VERSION = {"host": "cpu"}
"""Device -> the label by which vLLM tells, from its distribution's version, what it was built for."""
_SOURCES = frozenset({".c", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".inl"})
"""What the wheel's own compilers would need on its own device."""
_ELF = b"\x7fELF"


def tree_name(pin: Pin, base: str) -> str:
    """Name of a mixed pin's tree over the environment named ``base``: another wheel or environment gives another one."""
    assert pin.mixed is not None
    digest = hashlib.sha256(f"{pin.mixed.wheel_sha256} {base}".encode()).hexdigest()
    return f"vllm-{pin.version}-{pin.device}-{digest[:12]}"


def sentence(pin: Pin, base_wheel_sha256: str) -> str:
    """What a mixed pin is made of, in one sentence."""
    assert pin.mixed is not None
    python = f"Python files of {pin.mixed.distribution} {pin.version} (wheel sha256 {pin.mixed.wheel_sha256[:16]})"
    native = f"extensions of {pin.distribution} {pin.mixed.base} (wheel sha256 {base_wheel_sha256[:16]})"
    return f"vLLM {pin.version} on {pin.device} is a mixed build: {python}, {native}"


def build(tree: Path, wheel: Path, pin: Pin, site_packages: Path, extensions: Mapping[str, str]) -> None:
    """Fill ``tree`` from ``wheel``, and link the ``extensions`` of the base that is installed in ``site_packages``.

    Every file is in the tree's own RECORD, with the digest that its wheel recorded: links to extensions as well.

    Args:
        extensions: path, relative to ``site_packages``, and sha256 as RECORD files write it.

    Raises:
        EnvironmentBuildError: the wheel is not the pinned one or is damaged, or there is no extension.
        OSError: the tree cannot be written.
    """
    assert pin.mixed is not None
    _check_sha256(wheel, pin.mixed.wheel_sha256)
    try:
        with zipfile.ZipFile(wheel) as archive:
            rows = _unpack(archive, tree)
            metadata = _metadata(archive, pin)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError) as e:
        raise EnvironmentBuildError(f"{wheel.name} is not a readable wheel: {e}") from e
    if not rows or not extensions:
        lacking = wheel.name if not rows else f"{pin.distribution} {pin.mixed.base}"
        raise EnvironmentBuildError(f"{lacking} holds no {'Python files' if not rows else 'extensions'} under {PACKAGE}")
    rows |= _link(tree, site_packages, extensions)
    _write_info(tree, f"{pin.mixed.distribution}-{_version(pin)}.dist-info", metadata, rows)


def extensions_of(rows: Mapping[str, str]) -> dict[str, str]:
    """Those of a distribution's RECORD ``rows`` (path -> digest) that are vLLM's extensions."""
    return {p: d for p, d in rows.items() if p.startswith(PACKAGE) and p.endswith(".so") and _stays_inside(p)}


def parse_record(text: str) -> dict[str, str]:
    """A RECORD file's path -> sha256 (urlsafe base64 without padding), of the files that have one."""
    rows = csv.reader(text.splitlines())
    return {row[0]: row[1].removeprefix("sha256=") for row in rows if row[1:] and row[1].startswith("sha256=")}


def _version(pin: Pin) -> str:
    return f"{pin.version}+{LOCAL_VERSION.get(pin.device, pin.device)}"


def _check_sha256(wheel: Path, pinned: str) -> None:
    with wheel.open("rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    if digest != pinned:
        raise EnvironmentBuildError(f"{wheel.name} has sha256 {digest[:16]}, matrix.toml pins {pinned[:16]}")


def _stays_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name


def _unpack(archive: zipfile.ZipFile, tree: Path) -> dict[str, str]:
    """Write the package's files that are not native code, each checked against the wheel's RECORD; path -> digest."""
    record = parse_record(archive.read(_member(archive, "RECORD")).decode("utf-8", errors="replace"))
    rows = {}
    for info in archive.infolist():
        name = info.filename
        if not _stays_inside(name):
            raise EnvironmentBuildError(f"the wheel's {name!r} would leave the folder: it is not unpacked")
        if info.is_dir() or not name.startswith(PACKAGE) or _is_native(archive, info):
            continue
        data = archive.read(info)
        rows[name] = _digest(data)
        if rows[name] != record.get(name):
            raise EnvironmentBuildError(f"{name} of the wheel is not what its RECORD says")
        # Written by hand: no link, mode or owner that the archive names is made.
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(data)
    return rows


def _is_native(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bool:
    """Whether a file is code of the wheel's own device: a library, a program, or sources for its compilers."""
    suffix = PurePosixPath(info.filename).suffix
    if suffix == ".so" or suffix in _SOURCES:
        return True
    with archive.open(info) as f:
        return f.read(len(_ELF)) == _ELF


def _member(archive: zipfile.ZipFile, name: str) -> str:
    found = next((n for n in archive.namelist() if re.fullmatch(rf"[^/]+\.dist-info/{name}", n)), None)
    if found is None:
        raise EnvironmentBuildError(f"the wheel has no {name}")
    return found


def _metadata(archive: zipfile.ZipFile, pin: Pin) -> bytes:
    """The wheel's METADATA with the version of the mixed build."""
    text = archive.read(_member(archive, "METADATA"))
    return re.sub(rb"^Version: .*$", f"Version: {_version(pin)}".encode(), text, count=1, flags=re.MULTILINE)


def _link(tree: Path, site_packages: Path, extensions: Mapping[str, str]) -> dict[str, str]:
    for name in extensions:
        link = tree / name
        link.parent.mkdir(parents=True, exist_ok=True)
        # Relative: the home may be moved as a whole.
        link.symlink_to(os.path.relpath(site_packages / name, link.parent))
    return dict(extensions)


def _write_info(tree: Path, info: str, metadata: bytes, rows: dict[str, str]) -> None:
    """Make the tree a distribution. Without entry points: the base's distribution has them already."""
    (tree / info).mkdir()
    files = {f"{info}/METADATA": metadata, f"{info}/INSTALLER": b"kvmatrix\n"}
    for name, data in files.items():
        (tree / name).write_bytes(data)
        rows = rows | {name: _digest(data)}
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerows([name, f"sha256={digest}", (tree / name).stat().st_size] for name, digest in sorted(rows.items()))
    lines.writerow([f"{info}/RECORD", "", ""])
    (tree / info / "RECORD").write_text(out.getvalue(), encoding="utf-8")


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
