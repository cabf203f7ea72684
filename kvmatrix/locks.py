"""Requirements locks of pins: how one is read, and how one is made again.

A lock is a pip requirements file in which every package is pinned with ``==`` and hashed. It holds the pin's vLLM
distribution and all that it and torch need, but not torch itself: torch is installed first, in the build that fits the
machine. A comment ``# wheel: FILE sha256:HEX`` says which of the distribution's hashes belongs to which file.
"""

from __future__ import annotations

import email.parser
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from kvmatrix.config import Pin, Project
from kvmatrix.errors import DiskError, EnvironmentBuildError, UsageError

TORCH_FAMILY = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})
CUDA_ONLY = ("nvidia-", "cuda-")
DISK_MESSAGES = ("No space left on device", "Disk quota exceeded")
"""What the installers print where the disk is full."""
MAX_REASON = 500

_ENTRY = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^\s;]+)"
    r"(?:\s*;\s*(?P<marker>\S.*?))?"
    r"(?P<hashes>(?:\s+--hash=sha256:[0-9a-f]{64})+)"
)
_WHEEL = re.compile(r"^# wheel: (?P<file>\S+\.whl) sha256:(?P<hex>[0-9a-f]{64})$", re.MULTILINE)
_ERROR = re.compile(r"(?:error:|\u00d7)\s*", re.IGNORECASE)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_REQUIREMENTS = "requirements.in"
# Machines for which a universal resolution is checked, in uv's words.
_MACHINES = {"x86_64": "x86_64-manylinux_2_28", "aarch64": "aarch64-manylinux_2_28"}

# pip's variable, uv's own for the same setting (the first is the one to set, any of them wins over pip's), and what uv
# puts between several values.
_PIP_TO_UV = (
    ("PIP_FIND_LINKS", ("UV_FIND_LINKS",), ","),
    ("PIP_INDEX_URL", ("UV_DEFAULT_INDEX", "UV_INDEX_URL"), ""),
    ("PIP_EXTRA_INDEX_URL", ("UV_INDEX", "UV_EXTRA_INDEX_URL"), " "),
    ("PIP_CERT", ("SSL_CERT_FILE",), ""),
    ("PIP_DEFAULT_TIMEOUT", ("UV_HTTP_TIMEOUT",), ""),
)


@dataclass(frozen=True)
class Locked:
    """One entry of a lock."""

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}" + (f" ; {self.marker}" if self.marker else "")


def parse(text: str) -> tuple[Locked, ...]:
    """The entries of a lock.

    Raises:
        EnvironmentBuildError: a line is anything but a package pinned with ``==`` and hashed (an option or a URL, say).
    """
    entries = []
    for line in _logical_lines(text):
        match = _ENTRY.fullmatch(line)
        if match is None:
            raise EnvironmentBuildError(f"the lock has {line[:80]!r}: only name==version with sha256 hashes is allowed")
        hashes = tuple(re.findall(r"sha256:([0-9a-f]{64})", match["hashes"]))
        entries.append(Locked(canonicalize_name(match["name"]), match["version"], match["marker"] or "", hashes))
    if not entries:
        raise EnvironmentBuildError("the lock is empty: make it again with `kvmatrix lock`")
    return tuple(entries)


def _logical_lines(text: str) -> Iterator[str]:
    for line in text.replace("\\\n", " ").splitlines():
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield " ".join(stripped.split())


def constraints(entries: Sequence[Locked]) -> str:
    """The lock's pins as a constraints file. Without hashes: one hashed line would ask for hashes of torch as well."""
    return "".join(f"{entry.requirement}\n" for entry in entries)


def wheel_sha256(text: str, distribution: str) -> str:
    """sha256 of the wheel that a lock installs for ``distribution`` on this machine.

    Several, sorted and joined by commas, where the lock does not tell them apart.

    Raises:
        EnvironmentBuildError: the lock is malformed or does not have the distribution.
    """
    name = canonicalize_name(distribution)
    hashes = {h for entry in parse(text) if entry.name == name for h in entry.hashes}
    if not hashes:
        raise EnvironmentBuildError(f"the lock does not have {distribution}: make it again with `kvmatrix lock`")
    named = {m["hex"]: m["file"] for m in _WHEEL.finditer(text) if m["hex"] in hashes}
    fitting = {h for h, file in named.items() if _fits_this_machine(file)} or hashes - named.keys() or hashes
    return ",".join(sorted(fitting))


def _fits_this_machine(wheel: str) -> bool:
    try:
        tags = parse_wheel_filename(wheel)[3]
    except InvalidWheelFilename:
        return False
    return not tags.isdisjoint(sys_tags())


def uv_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` with those of pip's settings that uv does not read, in uv's words; uv's own settings win."""
    result = dict(environ)
    for pip_name, uv_names, separator in _PIP_TO_UV:
        value = environ.get(pip_name, "").strip()
        if not value or any(environ.get(name) for name in uv_names):
            continue
        result[uv_names[0]] = separator.join(value.split()) if separator else value
        if pip_name == "PIP_EXTRA_INDEX_URL":
            # pip looks at all indexes at once; uv by default stays with the first that has the name.
            result.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
    return result


def reason(output: str) -> str:
    """What an installer's output says went wrong, on one line: its last error with the lines that explain it."""
    lines = [_ANSI.sub("", line).rstrip() for line in output.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("WARNING:", "[notice]", "hint:"))]
    starts = [i for i, line in enumerate(lines) if _ERROR.match(line.lstrip())]
    if not starts:
        return lines[-1].strip()[:MAX_REASON] if lines else "no output"
    first = _ERROR.sub("", lines[starts[-1]].strip(), count=1)
    rest = []
    for line in lines[starts[-1] + 1 :]:
        if not line[0].isspace():
            break
        rest.append(line)
    return " ".join(" ".join([first, *rest]).split())[:MAX_REASON]


def find_uv() -> str:
    """Path of the uv that locks are made with.

    Raises:
        EnvironmentBuildError: there is none.
    """
    uv = shutil.which("uv")
    if uv is None:
        raise EnvironmentBuildError("uv is not on PATH and a lock is made with it: install uv, then run again")
    return uv


def regenerate(
    project: Project,
    pin: Pin,
    progress: Callable[[str], None] = lambda _: None,
    upgrade: bool = False,
    *,
    wheel: Path | None = None,
    seed: str = "",
) -> Path:
    """Make ``pin``'s lock again with uv and return its path. What the present lock pins is kept where it still fits.

    ``upgrade``: take the newest of everything instead. ``wheel``: the distribution's wheel, where it is at hand already.
    ``seed``: another lock's text, which counts as the present one where there is none.

    Raises:
        EnvironmentBuildError: no uv, the wheel cannot be had, its requirements have no solution, or it takes longer
            than the matrix's ``install_timeout_s``.
        DiskError: the disk is full.
        UsageError: a mixed pin, which has no lock of its own.
    """
    if pin.mixed:
        raise UsageError(f"pin {pin.version} is a mixed build and uses the lock of {pin.base.version}: make that one again")
    uv = find_uv()
    target = project.root / pin.lock
    with tempfile.TemporaryDirectory(prefix="kvmatrix-lock-") as folder:
        work = _Workshop(Path(folder), uv, _python_floor(project), project.matrix.budgets.install_timeout_s)
        if wheel is None:
            progress(f"downloading {pin.distribution} {pin.version}")
            wheel = work.download(f"{pin.distribution}=={pin.version}")
        progress(f"resolving its requirements together with torch {pin.torch}")
        present = target.read_text(encoding="utf-8") if target.is_file() else seed
        if present and not upgrade:
            work.prefer(present)
        resolved = work.resolve([*requires(wheel), f"torch=={pin.torch}"])
        own = work.compile([f"{pin.distribution}=={pin.version}"], "--universal", "--no-deps", "--no-annotate")
        kept = _without_torch(resolved + own, any_cuda=pin.device == "host")
        text = _header(pin, wheel) + kept.replace(f"-r {_REQUIREMENTS}", pin.distribution)
    parse(text)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(target)
    return target


def requires(wheel: Path) -> list[str]:
    """The requirements that a wheel declares, without those of extras and without torch and its family.

    Raises:
        EnvironmentBuildError: the file is not a wheel, or a requirement is malformed.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
            metadata = email.parser.BytesParser().parsebytes(archive.read(name))
        declared = [Requirement(line) for line in metadata.get_all("Requires-Dist") or ()]
    except (OSError, zipfile.BadZipFile, StopIteration, InvalidRequirement) as e:
        raise EnvironmentBuildError(f"{wheel.name} is not a readable wheel: {e}") from e
    return [
        str(r)
        for r in declared
        if canonicalize_name(r.name) not in TORCH_FAMILY and "extra" not in re.findall(r"\w+", str(r.marker or ""))
    ]


def download_command(requirement: str, folder: Path, uv: str | None) -> list[str]:
    """The command that puts the one wheel of ``requirement`` into ``folder``. It is pip's: uv itself cannot download.

    Raises:
        EnvironmentBuildError: this interpreter has no pip, as in an environment that uv made, and no ``uv`` to borrow one.
    """
    options = ["--no-deps", "--only-binary=:all:", "--progress-bar=off", f"--dest={folder}"]
    return [*_pip(uv, f"{requirement} cannot be downloaded"), "download", *options, requirement]


def _pip(uv: str | None, failure: str) -> list[str]:
    if find_spec("pip"):
        python = [sys.executable]
    elif uv:
        python = [uv, "run", "--no-project", "--with=pip", f"--python={sys.executable}", "python"]
    else:
        raise EnvironmentBuildError(f"{failure}: this Python has no pip, and uv is not on PATH")
    return [*python, "-m", "pip"]


def download(requirement: str, folder: Path, timeout_s: float) -> Path:
    """Put the one wheel of ``requirement`` into ``folder`` and return its path.

    Raises:
        EnvironmentBuildError: there is none for this machine, or it cannot be had.
        DiskError: the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = download_command(requirement, folder, shutil.which("uv"))
    _run(command, folder, os.environ, timeout_s, f"{requirement} cannot be downloaded")
    return next(folder.glob("*.whl"))


def releases(distribution: str, timeout_s: float) -> tuple[str, ...]:
    """Versions of ``distribution`` with a wheel for this machine on the configured indexes, as pip lists them, newest first.

    Empty where there is none, or no index answers.

    Raises:
        EnvironmentBuildError: this interpreter has no pip, and there is no uv to borrow one.
    """
    command = [*_pip(shutil.which("uv"), f"releases of {distribution} cannot be listed"), "index", "versions"]
    try:
        out = _run([*command, "--only-binary=:all:", distribution], Path.cwd(), os.environ, timeout_s, "")
    except EnvironmentBuildError:
        return ()
    listed = re.search(r"^Available versions: (.+)$", out, re.MULTILINE)
    return tuple(listed[1].split(", ")) if listed else ()


def _python_floor(project: Project) -> str:
    """The lowest Python that the project supports: a lock serves it and all later ones."""
    text = (project.root / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(r">=\s*([\d.]+)", tomllib.loads(text)["project"]["requires-python"])
    if match is None:
        raise EnvironmentBuildError("pyproject.toml: requires-python has no lower bound")
    return match[1]


@dataclass(frozen=True)
class _Workshop:
    """A scratch folder and the two tools that work in it."""

    folder: Path
    uv: str
    python_version: str
    timeout_s: float

    def download(self, requirement: str) -> Path:
        wheels = self.folder / "wheels"
        self._run(download_command(requirement, wheels, self.uv), os.environ)
        return next(wheels.glob("*.whl"))

    def prefer(self, lock: str) -> None:
        (self.folder / "lock").write_text(lock, encoding="utf-8")

    def resolve(self, requirements: Sequence[str]) -> str:
        """A universal resolution to which nothing is missing on the machines that count.

        For a universal one uv reads the requirements of one wheel of each release, but some releases have wheels that
        differ: intel-openmp's for Linux needs a package that others do not.
        """
        resolved = self.compile(requirements, "--universal")
        known = {entry.name for entry in parse(resolved)}
        missing = []
        for machine, uv_platform in _MACHINES.items():
            (self.folder / "constraints").write_text(constraints(parse(resolved)), encoding="utf-8")
            found = self.compile(requirements, f"--python-platform={uv_platform}", "--constraints=constraints")
            only = f"sys_platform == 'linux' and platform_machine == '{machine}'"
            missing += [f"{e.name}=={e.version} ; {only}" for e in parse(found) if e.name not in known]
        if missing:
            self.prefer(resolved)
            resolved = self.compile([*requirements, *missing], "--universal")
        return resolved

    def compile(self, requirements: Sequence[str], *options: str) -> str:
        (self.folder / _REQUIREMENTS).write_text("".join(f"{r}\n" for r in requirements), encoding="utf-8")
        # Wheels at hand must not decide: the CPU build of torch does not require the triton of its CUDA build.
        environ = {k: v for k, v in os.environ.items() if k not in ("PIP_FIND_LINKS", "UV_FIND_LINKS")}
        environ = uv_environ(environ)
        environ.pop("UV_TORCH_BACKEND", None)
        options = (f"--python-version={self.python_version}", "--generate-hashes", *options)
        command = [self.uv, "pip", "compile", *options, "--no-header", "--no-progress", "--output-file=lock"]
        self._run([*command, _REQUIREMENTS], environ)
        return (self.folder / "lock").read_text(encoding="utf-8")

    def _run(self, command: list[str], environ: Mapping[str, str]) -> None:
        _run(command, self.folder, environ, self.timeout_s, "the lock could not be made")


def _run(command: list[str], folder: Path, environ: Mapping[str, str], timeout_s: float, failure: str) -> str:
    """Run a command and return its output; ``failure`` begins the line that says why it failed."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=True,
        )
    except subprocess.CalledProcessError as e:
        output = e.stdout + e.stderr
        if any(message in output for message in DISK_MESSAGES):
            where = "free some, or set KVMATRIX_HOME and TMPDIR to folders on another disk"
            raise DiskError(f"{failure}: no space left on the disk: {where}") from e
        raise EnvironmentBuildError(f"{failure}: {reason(output)}") from e
    except (subprocess.TimeoutExpired, OSError) as e:
        raise EnvironmentBuildError(f"{failure}: {e}") from e
    return done.stdout


def _without_torch(compiled: str, any_cuda: bool) -> str:
    """The blocks of uv's output sorted by name, less torch's family and what only a CUDA build of it needs.

    ``any_cuda``: nothing else needs a package of CUDA's. Where vLLM itself is a CUDA build, uv's notes on what each entry is
    there for decide.
    """
    blocks = re.split(r"^(?=[A-Za-z0-9])", compiled, flags=re.MULTILINE)
    named = sorted((canonicalize_name(block.partition("==")[0]), block) for block in blocks if "==" in block)
    cuda = [(name, block) for name, block in named if name.startswith(CUDA_ONLY)]
    left_out: set[str] = {str(name) for name in TORCH_FAMILY}
    for _ in cuda:  # as often as there can be links in a chain of what only torch needs
        left_out |= {name for name, block in cuda if any_cuda or _only_for(block, left_out)}
    return "".join(block for name, block in named if name not in left_out)


def _only_for(block: str, names: Set[str]) -> bool:
    """Whether uv's note on an entry, ``# via NAME`` or a list of names, has some of ``names`` and no other."""
    notes = re.findall(r"^[ \t]+#[ \t]*(?:via[ \t]+)?(?!via$)(\S.*)$", block, re.MULTILINE)
    return bool(notes) and {canonicalize_name(note) for note in notes} <= names


def _header(pin: Pin, wheel: Path) -> str:
    with wheel.open("rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    return (
        f"# Lock of the pin vLLM {pin.version} on {pin.device}: {pin.distribution} {pin.version} and what it needs,\n"
        f"# resolved together with torch {pin.torch} for every supported Python.\n"
        "# Not in it: torch and its family, which are installed first in the build that fits the machine, and what\n"
        "# only a CUDA build of torch needs. triton is in it: the same lock serves both builds.\n"
        "# Do not edit: `kvmatrix lock` makes it again from the wheel's own requirements (it needs uv).\n"
        f"# wheel: {wheel.name} sha256:{digest}\n"
    )
