"""What a release's wheel says about it, read from the file: nothing of it is installed, imported or run."""

from __future__ import annotations

import ast
import email.message
import email.parser
import hashlib
import re
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from kvmatrix import locks
from kvmatrix.errors import EnvironmentBuildError, UsageError

CONNECTOR = "vllm/v1/simple_kv_offload/manager.py"
REGISTRY = "vllm/v1/attention/backends/registry.py"
REGISTRY_ENUM = "AttentionBackendEnum"
SHOWN_RELEASES = 3


@dataclass(frozen=True)
class WheelFacts:
    """Facts of one vLLM wheel."""

    path: Path
    sha256: str
    requires_python: str
    torch: str
    """The release of torch that it requires, without a local part."""
    connector_sha256: str
    """Of the file whose lookup is qualified."""
    backends: tuple[str, ...]
    """Every attention backend of its registry, in the registry's order."""


def fetch(distribution: str, version: str, folder: Path, timeout_s: float, mixed_base: str = "") -> Path:
    """Download a release's wheel into ``folder`` and return its path.

    ``mixed_base``: the pin to name for a mixed build, should vLLM have the release and this distribution not.

    Raises:
        EnvironmentBuildError: there is no such release, with the newest that there are; or it cannot be had.
        DiskError: the disk is full.
    """
    try:
        # `===`: a build with a local version is another file.
        return locks.download(f"{distribution}==={version}", folder, timeout_s)
    except EnvironmentBuildError as e:
        raise EnvironmentBuildError(_why_absent(distribution, version, timeout_s, mixed_base) or str(e)) from e


def _why_absent(distribution: str, version: str, timeout_s: float, mixed_base: str) -> str:
    """Why a release cannot be had; empty where the indexes do have it, or have nothing to say."""
    known = locks.releases(distribution, timeout_s)
    if not known or version in known:
        return ""
    text = f"there is no wheel of {distribution} {version} for this machine: the newest are {', '.join(known[:SHOWN_RELEASES])}"
    if mixed_base and version in locks.releases("vllm", timeout_s):
        return f"{text}; vllm {version} is there, declare a mixed build of it with --extensions-of {mixed_base}"
    return text


def rocm_release(version: str, timeout_s: float) -> str:
    """The newest build of ``version`` for ROCm, with its local part.

    Raises:
        EnvironmentBuildError: the configured indexes have none.
    """
    for release in locks.releases("vllm", timeout_s):
        with suppress(InvalidVersion):
            found = Version(release)
            if found.public == version and (found.local or "").startswith("rocm"):
                return release
    raise EnvironmentBuildError(
        f"the configured indexes have no wheel of vllm {version} with a rocm local version:"
        " add one that does with PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS"
    )


def read_facts(wheel: Path) -> WheelFacts:
    """Facts of a vLLM wheel.

    Raises:
        EnvironmentBuildError: it is not a readable wheel, or does not say which torch it needs.
        UsageError: the release has no SimpleCPUOffloadConnector.
    """
    try:
        digest = sha256_of(wheel)
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())
            metadata = _metadata(archive)
            if CONNECTOR not in names:
                raise UsageError(f"{wheel.name} has no {CONNECTOR}: without SimpleCPUOffloadConnector nothing can be qualified")
            connector = hashlib.sha256(archive.read(CONNECTOR)).hexdigest()
            backends = _backends(archive.read(REGISTRY)) if REGISTRY in names else ()
    except (OSError, zipfile.BadZipFile, zlib.error, StopIteration, SyntaxError, ValueError) as e:
        raise EnvironmentBuildError(f"{wheel.name} is not a readable wheel: {e or 'it has no metadata'}") from e
    requires_python = str(metadata.get("Requires-Python") or "any")
    return WheelFacts(wheel, digest, requires_python, _torch(wheel, metadata), connector, backends)


def sha256_of(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def unpack_python(wheel: Path, folder: Path) -> Path:
    """Write the wheel's Python files under ``folder``, which then serves as site-packages for reading; returns it.

    Raises:
        EnvironmentBuildError: it is not a readable wheel.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                path = PurePosixPath(name)
                if path.parts[0] == "vllm" and path.suffix == ".py" and ".." not in path.parts:
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_bytes(archive.read(name))
    except (zipfile.BadZipFile, zlib.error) as e:
        raise EnvironmentBuildError(f"{wheel.name} is not a readable wheel: {e}") from e
    return folder


def _metadata(archive: zipfile.ZipFile) -> email.message.Message:
    name = next(n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
    return email.parser.BytesParser().parsebytes(archive.read(name))


def _backends(source: bytes) -> tuple[str, ...]:
    """The members of the registry's enumeration."""
    classes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef) and n.name == REGISTRY_ENUM]
    assigned = [node for found in classes for node in found.body if isinstance(node, ast.Assign)]
    return tuple(t.id for node in assigned for t in node.targets if isinstance(t, ast.Name) and t.id.isupper())


def _torch(wheel: Path, metadata: email.message.Message) -> str:
    for line in metadata.get_all("Requires-Dist") or ():
        with suppress(InvalidRequirement, InvalidVersion):
            requirement = Requirement(line)
            if canonicalize_name(requirement.name) != "torch":
                continue
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                exact = [s.version for s in requirement.specifier if s.operator == "=="]
                if exact:
                    return Version(exact[0]).public
    raise EnvironmentBuildError(f"{wheel.name} requires no one release of torch: a pin needs one")
