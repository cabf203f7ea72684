"""One run: from options to a finished row file."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from kvmatrix import arms as arms_module
from kvmatrix import diffs, envs, facts, patch_tools
from kvmatrix.arms import Arm
from kvmatrix.cells import ALL, STOCK, Cell, Selection, plan_cells, selected_pins
from kvmatrix.config import Matrix, Pin, Project
from kvmatrix.errors import DeviceError, ExitCode, NothingRanError, UsageError
from kvmatrix.expectations import Expectations, is_problem
from kvmatrix.forkserver import NEVER_PRELOADED
from kvmatrix.processes import ParentPool
from kvmatrix.progress import RichProgress
from kvmatrix.records import BROKEN, EXECUTED, EndRow, ProbeRow, RowWriter, RunRow, new_run_id, place, utc_now
from kvmatrix.runner import Context, probe_id, probe_names, run_cells

Suite = Literal["conformance", "perf", "mutants", "upstream"]


class Session:
    """A run in progress: its environments, arms, row file and parents."""

    def __init__(self, project: Project, selection: Selection, suite: Suite, console: Console, argv: list[str]) -> None:
        self.project = project
        self.selection = selection
        self.console = console
        self.suite = suite
        self.argv = argv
        self.started = time.monotonic()
        self.matrix = project.matrix.at_level(selection.level)
        """What the selection's level has of ``matrix.toml``."""
        self.run = new_run_id()
        self.folder = project.home / "runs" / self.run
        self.diffs = [Path(p) for p in selection.patches if _is_diff(p)]
        self.named = [p for p in selection.patches if not _is_diff(p)]
        self.folders = {name: project.patches / name for name in self.named or project.matrix.defaults.patches}
        """Patch name -> its folder; a stranger's diff joins them in :meth:`plan`."""
        self.pins: list[Pin] = []
        """What is run, from :meth:`plan` on."""
        self._pins_of: dict[str, set[str]] = {}
        self.ctx: Context | None = None
        self._closed = False

    @property
    def arm_names(self) -> list[str]:
        return [STOCK, *self.folders]

    def arms_on(self, pin: str) -> list[str]:
        """The arms that ``pin`` has: a patch need not have a file for each, a stranger's diff need not apply to each."""
        return [a for a in self.arm_names if a == STOCK or pin in self._pins_of[a]]

    @property
    def rows_file(self) -> Path:
        return self.folder / "rows.jsonl"

    def plan(self, build: bool = True) -> list[Cell]:
        """The cells of the selection. Without ``build`` no environment is made for a diff: one that is there is looked at.

        Raises:
            UsageError: a value that the matrix does not have, or nothing is left.
            PatchError: a patch file that is damaged: that shows before minutes go into an environment.
        """
        self.pins = self._selected_pins()
        for name, folder in self.folders.items():
            self._pins_of[name] = set(arms_module.check_patch_files(folder).pins)
            self._say_where_missing(name)
        applied: set[str] = set()
        for diff in self.diffs:
            applied |= self._bring(diff, build)
        if self.diffs and not self.selection.pins:
            self.pins = [p for p in self.pins if p.version in applied]
        self._keep_one_pin_for_perf()
        selection = self.selection.model_copy(update={"pins": tuple(p.version for p in self.pins)})
        cells = plan_cells(self.matrix, selection, self.arm_names)
        kept = [c for c in cells if c.arm in self.arms_on(c.pin)]
        if not kept:
            arms = ", ".join(self.selection.arms)
            raise UsageError(f"the selection leaves no cell: {arms} has no file for the selected pins")
        return kept

    def _keep_one_pin_for_perf(self) -> None:
        if self.suite == "perf" and len(self.pins) > 1:
            self._say(f"performance is measured on one pin, here vLLM {self.pins[0].version}: choose it with --pin")
            del self.pins[1:]

    def _check_devices(self) -> None:
        for pin in self.pins:
            if pin.device != "host":
                raise DeviceError(f"device {pin.device} is not on this machine")

    def _selected_pins(self) -> list[Pin]:
        """A stranger's diff is tried on every pin that is not extended, unless pins are named."""
        if self.diffs and not self.selection.pins:
            return selected_pins(self.project.matrix, self.selection.model_copy(update={"pins": (ALL,)}))
        return selected_pins(self.project.matrix, self.selection)

    def _say_where_missing(self, name: str) -> None:
        """Say on which pins a patch has nothing.

        Raises:
            UsageError: it was named, and has nothing for any selected pin.
        """
        missing = [p.version for p in self.pins if p.version not in self._pins_of[name]]
        if not missing:
            return
        if name in self.named and len(missing) == len(self.pins):
            has = ", ".join(sorted(self._pins_of[name]))
            raise UsageError(f"patch {name!r} has no file for pin {', '.join(missing)}: it has {has}")
        self._say(f"{name} has no file for vLLM {', '.join(missing)}: it is no arm there")

    def _bring(self, diff: Path, build: bool) -> set[str]:
        """Make an arm of somebody's diff, for every selected pin that it applies to; these pins come back.

        Raises:
            NothingRanError: without ``build``, and no selected pin has an environment.
            PatchError: it is damaged, reaches outside the package, or applies to none of them.
        """
        diffs.package_changes(diffs.read_diff(diff))  # refused before minutes go into an environment
        if build:
            self._check_devices()
        looked_at = [p for p in self.pins if build or envs.is_built(self.project, p)]
        for pin in (p for p in self.pins if p not in looked_at):
            self._say(f"whether {diff.name} applies to vLLM {pin.version} shows when there is an environment of it")
        if not looked_at:
            raise NothingRanError(f"there is no environment to try {diff.name} on: `kvmatrix env build` makes one")
        pins = {p.version: envs.ensure(self.project, p, self._say) for p in looked_at}
        for env in pins.values():
            envs.verify_install(env)
        sites = {version: env.site_packages for version, env in pins.items()}
        imported = patch_tools.import_patch(
            diff, sites, self.project.home / "patches", taken=list(self.folders), replace_other=True
        )
        self._say(f"{diff.name} is the arm {imported.name}: code that is not ours, run only in the processes of its cells")
        for line in [*(f"{r.pin}: {r.line}" for r in imported.results), *(f"{s.path}: {s.reason}" for s in imported.skipped)]:
            self._say(f"  {line}")
        self.folders[imported.name] = imported.folder
        self._pins_of[imported.name] = set(imported.pins)
        return set(imported.pins)

    def open(self, planned: Sequence[str], more_facts: Mapping[str, Any] | None = None) -> Context:
        """Build or reuse the environments and arms, and start the row file; ``more_facts`` go into the run row.

        Raises:
            DeviceError: the selected device is not on this machine.
            KvmatrixError: an environment, a patch or the row file is not right.
        """
        matrix = self.matrix
        self._check_devices()
        ready: dict[str, envs.PinEnv] = {}
        ready_arms: dict[tuple[str, str], Arm] = {}
        for pin in self.pins:
            env = envs.ensure(self.project, pin, self._say)
            envs.verify_install(env)
            ready[pin.version] = env
            ready_arms |= {(pin.version, a.name): a for a in self.build_arms(pin.version, env)}
        run_facts = facts.run_facts(self.argv)
        expectations = Expectations.load(self.project.root / "conformance" / "expectations")
        writer = RowWriter(self.rows_file)
        self.ctx = Context(
            matrix=matrix,
            run=self.run,
            folder=self.folder,
            home=self.project.home,
            envs=ready,
            arms=ready_arms,
            expectations=expectations,
            writer=writer,
            pool=ParentPool(self.folder / "logs", matrix.budgets.preload_timeout_s, _can_preload(ready_arms.values())),
            compiler_reason=run_facts["compiler"]["reason"],
            root=self.project.root,
        )
        writer.write(
            RunRow(
                run=self.run,
                suite=self.suite,
                started=utc_now(),
                argv=run_facts["arguments"],
                facts=run_facts | dict(more_facts or {}) | {"pins": {v: _pin_facts(e) for v, e in ready.items()}},
                planned=list(planned),
            )
        )
        return self.ctx

    def build_arms(self, pin: str, env: envs.PinEnv) -> list[Arm]:
        """The arms that ``pin`` has, stock first; for errors see :func:`kvmatrix.arms.build_arms`."""
        folders = {name: folder for name, folder in self.folders.items() if name in self.arms_on(pin)}
        return arms_module.build_arms(folders, pin, env.site_packages, self.project.home / "overlays")

    def _say(self, text: str) -> None:
        elapsed = time.monotonic() - self.started
        self.console.print(f"{elapsed:5.0f} s  {text}", markup=False, highlight=False, soft_wrap=True)

    def run_cells(self, cells: Sequence[Cell]) -> list[ProbeRow]:
        assert self.ctx is not None
        jobs = self.project.matrix.budgets.jobs
        with RichProgress(self.console, cells, jobs) as progress:
            return run_cells(cells, self.ctx, jobs, progress)

    def close(self, exit_code: int, statuses: Sequence[str] = ()) -> None:
        """End the parents and write the last row; harmless when repeated."""
        if self._closed or self.ctx is None:
            return
        self._closed = True
        self.ctx.pool.close()
        self.ctx.writer.write(
            EndRow(
                run=self.run,
                finished=utc_now(),
                exit_code=exit_code,
                counts=dict(Counter(statuses)),
                seconds=round(time.monotonic() - self.started, 1),
            )
        )
        self.ctx.writer.close()


def _can_preload(arms: Iterable[Arm]) -> bool:
    """Whether a parent may import vLLM for all cells: not where an arm replaces a file that it would import."""
    return all(module == NEVER_PRELOADED for arm in arms for module in arm.expected)


def _is_diff(patch: str) -> bool:
    return patch.endswith((".diff", ".patch")) or "/" in patch


def planned_ids(cells: Sequence[Cell], matrix: Matrix) -> list[str]:
    return [probe_id(c, name) for c in cells for name in probe_names(c, matrix)]


def exit_code(rows: Sequence[ProbeRow], stale: int = 0) -> ExitCode:
    """The run's exit code from its rows; ``stale`` is the number of expectations that no row needed, or that have expired."""
    problems = [r for r in rows if is_problem(r)]
    if any(r.status in EXECUTED for r in problems) or stale or _refused_by_patch(rows):
        return ExitCode.UNEXPECTED
    if problems:
        return ExitCode.INFRA
    if not any(r.status in EXECUTED for r in rows):
        return ExitCode.NOTHING_RAN
    return ExitCode.OK


def _refused_by_patch(rows: Sequence[ProbeRow]) -> bool:
    """Whether a patched arm is refused, crashes or hangs where stock ran: then it is the patch that broke it."""
    ran = {place(r) for r in rows if r.cell["arm"] == STOCK and r.status in EXECUTED}
    return any(r.status in BROKEN and r.cell["arm"] != STOCK and place(r) in ran for r in rows)


def _pin_facts(env: envs.PinEnv) -> dict[str, Any]:
    return {
        "device": env.pin.device,
        "distribution": env.pin.distribution,
        "lock_sha256": env.lock_sha256,
        **({"mixed_build": envs.mixed_sentence(env)} if env.base else {}),
        "wheel_sha256": envs.wheel_sha256(env),
        **{k: v for k, v in env.facts.items() if k in ("torch", "python", "installer")},
    }
