"""What is known about each pin: whether stock vLLM shows the fault there, and which patches are qualified. From rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from packaging.utils import canonicalize_name

from kvmatrix import locks
from kvmatrix.arms import load_patch
from kvmatrix.cells import STOCK, Cell, Selection, plan_cells
from kvmatrix.config import Matrix, Pin, Project
from kvmatrix.errors import KvmatrixError, RowsError
from kvmatrix.patch_files import sha256
from kvmatrix.qualified import newest_runs
from kvmatrix.records import AnyRow, EndRow, ProbeRow, RunRow, last_attempts, read_rows
from kvmatrix.report import document, tables

State = Literal["affected", "fixed upstream", "unknown"]
MISALIGNED = "mixed-misaligned"


@dataclass(frozen=True)
class PinStatus:
    """What the rows say of one pin."""

    version: str
    device: str
    state: State
    run: str
    """Id of the run that shows the state; empty where none does."""
    date: str
    """When that run began, UTC."""
    patches: tuple[str, ...]
    """Patches whose newest run, with the very patch file that is there now, qualifies them."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Run:
    """A finished conformance run."""

    first: RunRow
    rows: list[ProbeRow]


def statuses(project: Project) -> list[PinStatus]:
    """The status of every pin, in the matrix file's order."""
    runs = sorted(_runs(project), key=lambda run: run.first.run, reverse=True)
    return [_status(project, pin, runs) for pin in project.matrix.pins]


def table(found: Iterable[PinStatus]) -> str:
    """A Markdown table of the statuses."""
    body = [
        [s.version, s.device, s.state, f"{s.run}, {s.date}" if s.run else "", ", ".join(s.patches), "; ".join(s.notes)]
        for s in found
    ]
    return tables.table(["vLLM", "device", "state", "evidence", "patches qualified", "notes"], body)


def as_json(found: Iterable[PinStatus]) -> list[dict[str, object]]:
    return [asdict(s) for s in found]


def state_of(rows: Iterable[ProbeRow]) -> State:
    """What one run's rows of a pin say about stock.

    A PASS of the misaligned mixed hit counts only in an engine: the row is then of a probe whose state was established.
    """
    stock = [r for r in rows if r.cell["arm"] == STOCK]
    if any(r.status == "FAIL" and not r.is_releases_own and _shows_the_fault(r) for r in stock):
        return "affected"
    if any(r.status == "PASS" and r.probe == MISALIGNED and r.cell["tier"] == "llm" for r in stock):
        return "fixed upstream"
    return "unknown"


def _shows_the_fault(row: ProbeRow) -> bool:
    if row.cell["tier"] == "scheduler":
        return row.reason.startswith("unsound: ")
    return row.probe == MISALIGNED and row.reason.startswith("wrong-output: ")


# --- which rows count -------------------------------------------------------------------------------------------------


def _runs(project: Project) -> Iterator[_Run]:
    """Finished conformance runs, published or of this machine, each once."""
    published = (path for path in sorted(project.results.glob("*/*/*/*/conformance.jsonl")))
    seen: set[str] = set()
    for rows in [*_readable(published), *(rows for _, rows in newest_runs(project.home, "conformance"))]:
        first = rows[0]
        if isinstance(first, RunRow) and isinstance(rows[-1], EndRow) and first.run not in seen:
            seen.add(first.run)
            yield _Run(first, last_attempts(rows))


def _readable(paths: Iterable[Path]) -> Iterator[list[AnyRow]]:
    """Row files that are whole: `nox -s report -- --check` is what finds the others."""
    for path in paths:
        try:
            yield read_rows(path)
        except RowsError:
            continue


def _rows_of(project: Project, pin: Pin, run: _Run) -> list[ProbeRow]:
    """The run's rows of ``pin``: of its device, of the wheel that it pins, and of cells that the matrix has."""
    facts = run.first.facts.get("pins", {}).get(pin.version)
    if not isinstance(facts, dict) or facts.get("device") != pin.device or not _same_wheel(project, pin, facts):
        return []
    known = _cells(project.matrix, pin)
    of_pin = [r for r in run.rows if (r.cell["pin"], r.cell["device"]) == (pin.version, pin.device)]
    return [r for r in of_pin if Cell.model_validate(r.cell | {"arm": STOCK}) in known]


def _cells(matrix: Matrix, pin: Pin) -> set[Cell]:
    return set(plan_cells(matrix, Selection(pins=(pin.version,), device=pin.device, level="full"), [STOCK]))


def _same_wheel(project: Project, pin: Pin, facts: Mapping[str, object]) -> bool:
    """Whether a run's wheel is one that the pin's lock has, for whatever machine."""
    ran = str(facts.get("wheel_sha256", ""))
    try:
        entries = locks.parse((project.root / pin.lock).read_text(encoding="utf-8"))
    except (OSError, KvmatrixError):
        return False
    pinned = {h for e in entries if e.name == canonicalize_name(pin.distribution) for h in e.hashes}
    if pin.mixed:
        return pin.mixed.wheel_sha256 in ran and any(h in ran for h in pinned)
    return bool(ran) and set(ran.split(",")) <= pinned


# --- one pin ----------------------------------------------------------------------------------------------------------


def _status(project: Project, pin: Pin, runs: list[_Run]) -> PinStatus:
    found = [(run, rows) for run in runs if (rows := _rows_of(project, pin, run))]
    state: State = "unknown"
    evidence = ("", "")
    for run, rows in found:
        if (state := state_of(rows)) != "unknown":
            evidence = (run.first.run, run.first.started)
            break
    patches = tuple(sorted(_qualified(project, pin, [rows for _, rows in found])))
    return PinStatus(pin.version, pin.device, state, *evidence, patches, tuple(_notes(project, pin, state)))


def _qualified(project: Project, pin: Pin, newest_first: list[list[ProbeRow]]) -> Iterator[str]:
    """Patches that their newest run on the pin qualifies. A run of another patch file says nothing about this one."""
    digests = _patch_digests(project, pin)
    judged: set[str] = set()
    for rows in newest_first:
        for name in {r.cell["arm"] for r in rows if r.patch_sha256 and r.patch_sha256 == digests.get(r.cell["arm"])} - judged:
            judged.add(name)
            if document.verdict(rows, name).startswith("QUALIFIED"):
                yield name


def _patch_digests(project: Project, pin: Pin) -> dict[str, str]:
    digests = {}
    for folder in sorted(p.parent for p in project.patches.glob("*/patch.toml")):
        try:
            pin_patch = load_patch(folder).pins.get(pin.version)
            if pin_patch is not None:
                digests[folder.name] = sha256((folder / pin_patch.patch).read_bytes())
        except (OSError, KvmatrixError):
            continue  # `kvmatrix patch check` says what is wrong with it
    return digests


def _notes(project: Project, pin: Pin, state: State) -> Iterator[str]:
    defaults = project.matrix.defaults
    if (pin.version, pin.device) == (defaults.pin, defaults.device):
        yield "default"
    if pin.mixed:
        yield f"mixed build over the extensions of {pin.mixed.base}"
    if pin.extended:
        yield "extended: run only when it is named"
    if state == "unknown":
        device = "" if pin.device == defaults.device else f" --device {pin.device}"
        where = "" if pin.device == "host" else f" on a machine with a {pin.device} device"
        yield f"run `nox -s conformance -- --pin {pin.version}{device}`{where}"
