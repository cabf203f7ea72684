"""Does the suite notice a wrong fix? Plausible ones, each a corruption of a real patch, run as arms and must all be killed.

A mutant is killed by a row that the real patches pass in the very same run. The scheduler tier comes first, up to the mutant's
first failure; the engine is started only for what survives that. Nothing is concluded where the controls (stock, which must
fail where it is known to, and the patches, which must pass everywhere) are not as expected.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator
from rich.console import Console

from kvmatrix.arms import LOOKUP, Arm, PatchedFile, Sha256, Source, build_sources, load_patch, read_patch_text
from kvmatrix.cells import STOCK, Cell, Selection, plan_cells
from kvmatrix.config import Project, Strict
from kvmatrix.envs import PinEnv
from kvmatrix.errors import ExitCode, PatchError, UsageError
from kvmatrix.expectations import is_problem
from kvmatrix.records import BROKEN, EXECUTED, ProbeRow, place
from kvmatrix.report.tables import table
from kvmatrix.runner import WITH_PARENT
from kvmatrix.session import Session, planned_ids

MUTANTS = "mutants"
"""Folder under ``patches/``, and the name of its index and of this suite's runs."""
BACKEND, MODE = "CPU_ATTN", "eager"
"""The engine that a survivor of the scheduler tier must face."""
REASON_WIDTH = 110
Place = tuple[str, str]


class Mutant(Strict):
    """One entry of ``mutants.toml``; its patch file is named after it."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,59}$")
    of: str
    """The patch that it is a corruption of, whose promise of reuse it must keep."""
    wrong: str = Field(min_length=1)
    """What is wrong with it, in a sentence."""
    post_sha256: str = Sha256


class Index(Strict):
    """``patches/mutants/mutants.toml``: all mutants of one pin's lookup."""

    schema_version: Literal[1] = Field(alias="schema")
    pin: str
    path: str = Field(pattern=f"^{LOOKUP}$")
    pre_sha256: str = Sha256
    mutants: tuple[Mutant, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _are_distinct(self) -> Index:
        for what in ("name", "post_sha256"):
            values = [getattr(m, what) for m in self.mutants]
            twice = next((v for v in values if values.count(v) > 1), None)
            if twice:
                raise ValueError(f"two mutants have the {what} {twice}")
        same = next((m.name for m in self.mutants if m.post_sha256 == self.pre_sha256), None)
        if same:
            raise ValueError(f"mutant {same} leaves the file as it is")
        return self

    def sources(self, folder: Path, patches: Path) -> dict[str, Source]:
        """Name -> what its arm is built from."""
        return {
            m.name: Source(
                folder / f"{m.name}.patch",
                (PatchedFile(path=self.path, pre_sha256=self.pre_sha256, post_sha256=m.post_sha256),),
                load_patch(patches / m.of).keeps,
            )
            for m in self.mutants
        }


def load_index(folder: Path) -> Index:
    """Read and validate ``mutants.toml``, and check that the patch files beside it are those that it names.

    Raises:
        PatchError: it is missing or does not validate, or a patch file is missing, damaged, or not listed.
    """
    path = folder / f"{MUTANTS}.toml"
    try:
        index = Index.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as e:
        raise PatchError(f"{path} cannot be read: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise PatchError(f"{path}: not valid TOML: {e}") from e
    except ValidationError as e:
        first = e.errors()[0]
        raise PatchError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from e
    for mutant in index.mutants:
        read_patch_text(folder / f"{mutant.name}.patch", {index.path})
    stray = sorted({p.stem for p in folder.glob("*.patch")} - {m.name for m in index.mutants})
    if stray:
        raise PatchError(f"{folder / stray[0]}.patch is not in {path.name}: enter it, or remove it")
    return index


def narrowed(index: Index, keyword: str) -> Index:
    """The mutants whose name has ``keyword`` in it.

    Raises:
        UsageError: there is none.
    """
    kept = tuple(m for m in index.mutants if keyword in m.name)
    if not kept:
        raise UsageError(f"no mutant's name has {keyword!r} in it: {MUTANTS}.toml lists {len(index.mutants)}")
    return index.model_copy(update={"mutants": kept})


# --- what the rows say ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fate:
    """What became of one mutant. ``row`` is the one that killed it, or the first that left it undecided."""

    name: str
    outcome: Literal["killed", "survived", "undecided"]
    row: ProbeRow | None = None


class Controls:
    """The rows of stock and of the real patches in this run: what a mutant is held against."""

    def __init__(self, rows: Iterable[ProbeRow]) -> None:
        self.rows = list(rows)
        patches = {r.cell["arm"] for r in self.rows} - {STOCK}
        passed = {a: {place(r) for r in self.rows if r.cell["arm"] == a and r.status == "PASS"} for a in patches}
        self.passed: set[Place] = set.intersection(*passed.values()) if passed else set()
        """Where every real patch passes."""
        self.ran: set[Place] = {place(r) for r in self.rows if r.cell["arm"] == STOCK and r.status in EXECUTED}
        """Where stock came to an answer."""
        self.ended_badly: set[Place] = {place(r) for r in self.rows if r.status in BROKEN}

    def problems(self) -> list[ProbeRow]:
        """Rows that are not as they must be: stock fails where it is known to and only there, the patches pass everywhere."""
        return [r for r in self.rows if is_problem(r) or not (r.status == self._due(r) or r.is_due_refusal)]

    @staticmethod
    def _due(row: ProbeRow) -> str:
        return row.expected if row.cell["arm"] == STOCK or row.is_releases_own else "PASS"

    def blind(self) -> list[str]:
        """Tiers in which stock, which is wrong, fails nowhere: there the suite sees nothing at all."""
        tiers = {r.cell["tier"] for r in self.rows}
        failing = [r for r in self.rows if r.cell["arm"] == STOCK and r.status == "FAIL" and not r.is_releases_own]
        return sorted(tiers - {r.cell["tier"] for r in failing})

    def kills(self, row: ProbeRow) -> bool:
        """Whether ``row`` of a mutant is one that a right patch would have passed."""
        if row.status == "FAIL":
            return place(row) in self.passed
        if row.status not in BROKEN or WITH_PARENT in row.reason:
            return False
        if row.probe == "shutdown":  # it has a row only where it went wrong
            return place(row) not in self.ended_badly
        return place(row) in self.passed & self.ran

    def fate(self, name: str, rows: Sequence[ProbeRow]) -> Fate:
        """What ``rows``, all of one mutant, say of it. A state that was not established kills nothing."""
        killer = next((r for r in rows if self.kills(r)), None)
        if killer is not None:
            return Fate(name, "killed", killer)
        unclear = next((r for r in rows if r.status != "PASS" and not (r.is_releases_own or r.is_due_refusal)), None)
        return Fate(name, "undecided" if unclear or not rows else "survived", unclear)


def exit_code(controls: Controls, fates: Sequence[Fate]) -> ExitCode:
    """0 only when every mutant is killed and every control is as it must be."""
    problems = controls.problems()
    if controls.blind() or any(r.status not in ("INFRA", "NOT_RUN") for r in problems):
        return ExitCode.UNEXPECTED
    if any(f.outcome == "survived" for f in fates):
        return ExitCode.UNEXPECTED
    if problems or any(f.outcome == "undecided" for f in fates):
        return ExitCode.INFRA
    return ExitCode.OK if fates else ExitCode.NOTHING_RAN


def report(controls: Controls, fates: Sequence[Fate], of: Mapping[str, str]) -> str:
    """A table with a line for each mutant, the sum, and what is to be said of the controls; ``of``: mutant -> patch."""
    body = [[f.name, of.get(f.name, ""), *_killer(f)] for f in fates]
    parts = [table(["mutant", "corrupts", "", "tier", "case", "reason"], body)]
    killed = sum(f.outcome == "killed" for f in fates)
    parts.append(f"{killed} of {len(fates)} killed")
    for outcome, word in (("survived", "survived"), ("undecided", "undecided, nothing is said of them")):
        names = [f.name for f in fates if f.outcome == outcome]
        parts += [f"{len(names)} {word}: {', '.join(names)}"] if names else []
    parts += [_controls_line(controls)]
    return "\n\n".join(parts)


def _killer(fate: Fate) -> list[str]:
    if fate.row is None:
        return [fate.outcome.upper(), "", "", "no row differs from what a right patch has"]
    row = fate.row
    reason = row.reason if len(row.reason) <= REASON_WIDTH else row.reason[: REASON_WIDTH - 1] + "…"
    word = "killed" if fate.outcome == "killed" else "UNDECIDED"
    return [word, row.cell["tier"], row.probe, reason if row.status == "FAIL" else f"{row.status}: {reason}"]


def _controls_line(controls: Controls) -> str:
    problems, blind = controls.problems(), controls.blind()
    if problems:
        first = problems[0]
        return f"CONTROLS NOT AS EXPECTED: {len(problems)} rows, first {first.id}: {first.status} {first.reason}".rstrip()
    if blind:
        return f"CONTROLS NOT AS EXPECTED: stock fails nowhere in the {', '.join(blind)} tier, so nothing would be seen there"
    own = {r.probe for r in controls.rows if r.is_releases_own or r.is_due_refusal}
    fails = sum(r.status == "FAIL" and r.probe not in own for r in controls.rows)
    patches = sorted({r.cell["arm"] for r in controls.rows} - {STOCK})
    every = "every other row" if own else "every row"
    return f"Controls of this run: stock fails {fails} rows, each as expected; {', '.join(patches)} pass {every}."


# --- the run ----------------------------------------------------------------------------------------------------------


class MutantSession(Session):
    """A run with the mutants as further arms beside stock and the real patches.

    Args:
        diffs: somebody's diffs, each a mutant in place of those of the index.
        of: the patch whose promise of reuse a diff must keep; empty: only what stock keeps.
    """

    def __init__(
        self, project: Project, keyword: str, diffs: Sequence[str], of: str, console: Console, argv: list[str]
    ) -> None:
        self.home_folder = project.patches / MUTANTS
        self.index = load_index(self.home_folder)
        if of and of not in (known := {m.of for m in self.index.mutants}):
            raise UsageError(f"unknown fix {of!r}: mutants are of {', '.join(sorted(known))}")
        selection = Selection(pins=(self.index.pin,), patches=tuple(diffs))
        super().__init__(project, selection, "mutants", console, argv)
        if self.named:
            raise UsageError(f"{self.named[0]} is a patch of this project, not a mutant: --patch takes a diff file")
        self.promise = load_patch(project.patches / of).keeps if of else "aligned"
        if not diffs:
            self.index = narrowed(self.index, keyword)
        self.controls = list(self.folders)
        self.of = {} if diffs else {m.name: m.of for m in self.index.mutants}
        """Mutant of the index -> the patch that it corrupts."""

    @property
    def mutants(self) -> list[str]:
        """Names of the arms that must be killed, from :meth:`plan` on."""
        return [a for a in self.folders if a not in self.controls] if self.diffs else list(self.of)

    def build_arms(self, pin: str, env: PinEnv) -> list[Arm]:
        built = super().build_arms(pin, env)
        if self.diffs:
            return [a if a.name in (STOCK, *self.controls) else a.model_copy(update={"keeps": self.promise}) for a in built]
        sources = self.index.sources(self.home_folder, self.project.patches)
        return [*built, *build_sources(sources, pin, env.site_packages, self.project.home / "overlays")[1:]]

    def cells(self, tier: str, mutants: Sequence[str]) -> list[Cell]:
        """A tier's cells: of the controls, then of ``mutants``."""
        pins = (self.index.pin,)
        engine = Selection(pins=pins, backends=(BACKEND,), modes=(MODE,), level="quick")
        selection = engine if tier == "llm" else Selection(pins=pins, tiers=(tier,))
        by_arm = plan_cells(self.project.matrix, selection, [STOCK, *self.controls, *mutants])
        order = [STOCK, *self.controls, *mutants]
        return sorted(by_arm, key=lambda c: order.index(c.arm))


def run(session: MutantSession) -> tuple[Controls, list[Fate]]:
    """Run the scheduler tier, and the engine for what it did not kill.

    Raises:
        KeyboardInterrupt: finished rows are kept.
        KvmatrixError: an environment, a patch or the row file is not right.
    """
    session.plan()
    names = session.mutants
    cells = session.cells("scheduler", names)
    ctx = session.open(planned_ids(cells, session.matrix))
    ctx.until_failure = frozenset(names)
    rows = session.run_cells(cells)
    controls, fates = judged(rows, names)
    left = [f.name for f in fates if f.outcome != "killed"]
    if left:
        rows += session.run_cells(session.cells("llm", left))
        controls, fates = judged(rows, names)
    return controls, fates


def judged(rows: Sequence[ProbeRow], names: Sequence[str]) -> tuple[Controls, list[Fate]]:
    """The controls among ``rows``, and the fate of each mutant in ``names``."""
    controls = Controls(r for r in rows if r.cell["arm"] not in names)
    return controls, [controls.fate(name, [r for r in rows if r.cell["arm"] == name]) for name in names]
