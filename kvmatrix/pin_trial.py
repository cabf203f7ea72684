"""What a new pin shows when the real engine runs on it: the quick conformance, through the same session as any other run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kvmatrix.cells import STOCK, Cell, Selection
from kvmatrix.config import Pin, Project
from kvmatrix.errors import ExitCode, InfraError, KvmatrixError
from kvmatrix.expectations import is_problem
from kvmatrix.records import EXECUTED, ProbeRow, place
from kvmatrix.session import Session, exit_code, planned_ids

BACKEND, MODE = "CPU_ATTN", "eager"
"""Of the one LLM cell that is run beside the scheduler tier."""


@dataclass(frozen=True)
class Trial:
    """A finished run."""

    rows: tuple[ProbeRow, ...]
    rows_file: Path
    code: ExitCode

    @property
    def stock(self) -> list[ProbeRow]:
        return [r for r in self.rows if r.cell["arm"] == STOCK]


def run(project: Project, pin: Pin, patches: Sequence[str], console: Console, stock_only: bool = False) -> Trial:
    """Run the scheduler tier and one LLM cell of ``pin``: stock beside ``patches``, or alone.

    Alone it loads the files that the patches change through the same overlay, as it does beside them.

    Raises:
        KvmatrixError: the run cannot begin or go on. Its finished rows are kept, as after Ctrl-C.
    """
    arms = (STOCK,) if stock_only or not patches else ()
    selection = Selection(pins=(pin.version,), device=pin.device, arms=arms, patches=tuple(patches), level="quick")
    session = Session(project, selection, "conformance", console, _argv(selection))
    cells = [c for c in session.plan() if _is_quick(c)]
    rows: list[ProbeRow] = []
    code = ExitCode.INTERRUPTED
    try:
        session.open(planned_ids(cells, session.matrix))
        rows = session.run_cells(cells)
        code = exit_code(rows)
        if stock_only and code is ExitCode.UNEXPECTED:
            code = ExitCode.INFRA  # what is expected is only being found out: nothing to be published as a result
    except KvmatrixError as e:
        code = e.code
        raise
    finally:
        session.close(code, [r.status for r in rows])
    return Trial(tuple(rows), session.rows_file, code)


def _is_quick(cell: Cell) -> bool:
    return cell.tier == "scheduler" or (cell.backend, cell.mode) == (BACKEND, MODE)


def _argv(selection: Selection) -> list[str]:
    """The command that has the same cells."""
    axes = {"--pin": selection.pins, "--device": (selection.device,), "--patch": selection.patches, "--arm": selection.arms}
    chosen = [word for option, values in axes.items() for value in values for word in (option, value)]
    return ["conformance", *chosen, "--quick", "-k", f"scheduler or ({BACKEND} and {MODE})"]


def stores_nothing(trial: Trial) -> bool:
    """Whether stock's CPU tier was empty after the request that should have filled it.

    Up to 0.29.0 a request that ends in its prefill step stores nothing: such a release needs one more token.
    """
    empty = "not-established: the CPU tier holds 0 tokens, "
    return any(r.status == "INFRA" and r.reason.startswith(empty) for r in trial.stock)


def check_usable(trial: Trial) -> None:
    """Whether stock ran well enough to be compared with.

    Raises:
        InfraError: a probe of the engine did not run, or a lookup came to no answer.
    """
    rows = trial.stock
    odd = [r for r in rows if r.status not in EXECUTED and not (r.status == "UNSUPPORTED" and r.cell["tier"] == "scheduler")]
    if odd or not any(r.cell["tier"] == "llm" for r in rows):
        first = odd[0] if odd else None
        what = f"{first.id} is {first.status}: {first.reason}" if first else f"no {BACKEND} {MODE} cell ran"
        raise InfraError(f"stock cannot be judged on this release: {what}")


def faulty_patches(trial: Trial) -> dict[str, ProbeRow]:
    """Patches that do not do here what they should, each with its first such row."""
    ran = {place(r) for r in trial.stock if r.status in EXECUTED}
    rows = [r for r in trial.rows if r.cell["arm"] != STOCK]
    found: dict[str, ProbeRow] = {}
    for row in rows:
        if is_problem(row) or (row.status != "PASS" and not row.is_releases_own and place(row) in ran):
            found.setdefault(row.cell["arm"], row)
    return found
