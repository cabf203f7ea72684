"""A run's report as one Markdown document, and publishing it beside its raw rows under ``results/``."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from kvmatrix.errors import DiskError, NothingRanError
from kvmatrix.expectations import is_problem
from kvmatrix.qualified import newest_runs
from kvmatrix.records import EXECUTED, AnyRow, CellRow, EndRow, PerfRow, ProbeRow, RunRow, last_attempts, place, read_rows
from kvmatrix.report import perf_tables, plots, tables

TABLES = "tables.md"
MISALIGNED = "Misaligned mixed hit: the device prefix ends inside an attention chunk, the rest is in the CPU tier."
HEAD_GONE = "The same hit with the blocks before the prefix's end gone from the CPU tier; the device holds them."
REUSE = (
    "External tokens that are soundly served, of all that could be, over every small geometry; in brackets the same where the"
    " CPU tier also holds the blocks between the chunk boundary and the device prefix's end."
)
NULL_COPIES = (
    "Copies that a planned load aims at the device's null block, of all its copies; in brackets those of blocks that attention"
    " needs. The null block stands for what is out of every later token's sight: such a copy does no harm, and its transfer is"
    " wasted. Were the block needed, its KV would be lost and the hit unsound."
)


def verdict(rows: Sequence[ProbeRow], patch: str) -> str:
    """One line for a patch: qualified, not qualified, or incomplete, and why. Never better than its rows."""
    if patch == tables.STOCK:
        return stock_verdict(rows)
    own = [r for r in rows if r.cell["arm"] == patch]
    stock = [r for r in rows if r.cell["arm"] == tables.STOCK]
    passed = sum(r.status == "PASS" for r in own)
    reproduced = sum(r.status == "FAIL" and not is_problem(r) and not r.is_releases_own for r in stock)
    bad = [r for r in (*own, *stock) if is_problem(r)]
    missing = [r for r in (*own, *stock) if r.status in ("UNSUPPORTED", "NOT_RUN") and not r.is_due_refusal]
    right_itself = not reproduced and any(r.probe == "mixed-misaligned" and r.status == "PASS" for r in stock)
    of_stock = "stock of this release shows no fault" if right_itself else f"stock fails {reproduced} probes as expected"
    counted = f"{passed} of {len(own)} probes PASS; {of_stock}"
    if apart := sum(r.is_releases_own for r in own):
        counted += f"; {apart} fail on every arm by the release's own known faults"
    if refused := sum(r.is_due_refusal for r in own):
        counted += f"; {refused} are refused by vLLM, as expected"
    if bad:
        return f"NOT QUALIFIED: {len(bad)} rows are not as expected, first {bad[0].id} ({bad[0].status}). {counted}."
    if failing := [r for r in own if r.status == "FAIL" and not r.is_releases_own]:
        return f"NOT QUALIFIED: the patch fails {len(failing)} probes, though expected to, first {failing[0].id}. {counted}."
    if not passed or not (reproduced or right_itself):
        return f"INCOMPLETE: the fault was not reproduced on stock beside the patch. {counted}."
    if not any(r.cell["tier"] == "llm" and r.status == "PASS" for r in own):
        return f"INCOMPLETE: only the lookup was run, no engine. {counted}."
    right = {place(r) for r in own if r.status == "PASS" or r.is_releases_own}
    if open_ := [r for r in stock if r.status in EXECUTED and place(r) not in right]:
        return f"INCOMPLETE: the patch did not run where stock did, first {open_[0].id}. {counted}."
    if missing:
        return f"QUALIFIED where it ran; {len(missing)} rows did not run. {counted}."
    return f"QUALIFIED: {counted}."


def stock_verdict(rows: Sequence[ProbeRow]) -> str:
    """One line for the untouched vLLM: whether it shows the fault. Never better than its rows."""
    stock = [r for r in rows if r.cell["arm"] == tables.STOCK]
    passed, failed = (sum(r.status == status and not r.is_releases_own for r in stock) for status in EXECUTED)
    ran = f"{passed} of {len(stock)} probes PASS"
    if bad := [r for r in stock if is_problem(r)]:
        return f"UNEXPECTED: {len(bad)} rows of stock are not as expected, first {bad[0].id} ({bad[0].status}). {ran}."
    if failed:
        return f"AFFECTED: stock shows the fault: {failed} of {len(stock)} probes FAIL as expected, {passed} PASS."
    if not any(r.probe == "mixed-misaligned" and r.status == "PASS" for r in stock):
        return f"INCOMPLETE: no engine ran the misaligned mixed hit. {ran}."
    open_ = sum(r.status != "PASS" and not r.is_releases_own and not r.is_due_refusal for r in stock)
    if open_:
        return f"NOT AFFECTED where it ran: {open_} rows did not run. {ran}."
    return f"NOT AFFECTED: {ran} on stock: the fault is not in this release."


def pins_and_patches(rows: Sequence[ProbeRow]) -> list[tuple[str, str, str]]:
    """(pin, device, patch) of everything that the rows qualify; ``stock`` stands where a pin was run without any patch."""
    found = {(r.cell["pin"], r.cell["device"], r.cell["arm"]) for r in rows}
    patched = {(pin, device) for pin, device, arm in found if arm != tables.STOCK}
    return sorted((pin, device, arm) for pin, device, arm in found if arm != tables.STOCK or (pin, device) not in patched)


def mixed_builds(run: RunRow, rows: Sequence[ProbeRow]) -> list[str]:
    """A sentence for every pin of ``rows`` that is no build which anybody ships."""
    pins = {r.cell["pin"] for r in rows}
    return [f["mixed_build"] for pin, f in run.facts.get("pins", {}).items() if pin in pins and "mixed_build" in f]


def conformance_summary(rows: Sequence[ProbeRow], notes: Sequence[str] = ()) -> str:
    """What a run prints last: ``notes``, verdicts, what is not as expected, and the table of the misaligned mixed hit."""
    parts = list(notes)
    for pin, device, patch in pins_and_patches(rows):
        of_pin = [r for r in rows if (r.cell["pin"], r.cell["device"]) == (pin, device)]
        parts.append(f"{patch} on vLLM {pin}, {device} device: {verdict(of_pin, patch)}")
    if left_out := tables.left_out(rows):
        parts.append(left_out)
    if any(r.cell["tier"] == "scheduler" for r in rows):
        parts.append(tables.lookups(rows))
    if any(tables.is_sweep(r) for r in rows):
        parts.append(f"{REUSE}\n\n{tables.reuse(rows)}")
    if copies := tables.null_copies(rows):
        parts.append(f"{NULL_COPIES}\n\n{copies}")
    parts += tables.sweep_lines(rows)
    if any(r.probe == "mixed-head-gone" for r in rows):
        parts.append(f"{HEAD_GONE}\n\n{tables.qualification(rows, 'mixed-head-gone')}")
    if any(r.cell["tier"] == "llm" for r in rows):
        parts += [tables.probe_counts(rows), *tables.proofs(rows)]
    if any(r.probe == "mixed-misaligned" for r in rows):
        parts.append(f"{MISALIGNED}\n\n{tables.qualification(rows)}")
    return "\n\n".join(parts)


def perf_summary(rows: Sequence[PerfRow]) -> str:
    """What a perf run prints last: a sentence for each patch, the tables, and folded every figure of vLLM's benchmark."""
    parts = ["\n".join(f"- {line}" for line in perf_tables.verdict_lines(rows))]
    parts += [f"{title}\n\n{body}" for title, body in perf_tables.sections(rows)]
    if fields := perf_tables.all_fields(rows):
        parts.append(_folded("Every figure of vLLM's serving benchmark", fields))
    return "\n\n".join(filter(None, parts))


def document(conformance: list[AnyRow], perf: list[AnyRow] | None) -> str:
    """The whole report of a conformance run, and of the perf run beside it."""
    run = conformance[0]
    assert isinstance(run, RunRow)
    rows = last_attempts(conformance)
    titles = [f"vLLM {pin}, {device} device: {patch}" for pin, device, patch in pins_and_patches(rows)]
    parts = [f"# {'; '.join(titles) or 'stock alone'}"]
    for pin, device, patch in pins_and_patches(rows):
        parts.append(f"**{verdict([r for r in rows if (r.cell['pin'], r.cell['device']) == (pin, device)], patch)}**")
    parts += [f"**{sentence}.**" for sentence in mixed_builds(run, rows)]
    parts += [MISALIGNED, tables.qualification(rows)]
    if any(r.probe == "mixed-head-gone" for r in rows):
        parts += [HEAD_GONE, tables.qualification(rows, "mixed-head-gone")]
    parts += ["## Every probe, by class of hit", tables.probe_counts(rows), *tables.proofs(rows)]
    if left_out := tables.left_out(rows):
        parts += ["## Not run, or not as expected", left_out]
    parts += ["## Lookup, real scheduler, no model", tables.lookups(rows)]
    if any(tables.is_sweep(r) for r in rows):
        parts += ["## Reuse kept", *tables.sweep_lines(rows), REUSE, tables.reuse(rows)]
    if copies := tables.null_copies(rows):
        parts += ["## Copies to the null block", NULL_COPIES, copies]
    if perf is not None:
        measured = [r for r in perf if isinstance(r, PerfRow)]
        parts += ["## Performance", perf_summary(measured)]
        parts += [f"![{name.removesuffix('.svg')}]({name})" for name in plots.file_names(measured)]
    parts.append(_folded("All probes", tables.probes(rows)))
    parts.append(_folded("Machine, versions and hashes", _facts(conformance, perf)))
    return "\n\n".join(parts) + "\n"


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


def _facts(conformance: list[AnyRow], perf: list[AnyRow] | None) -> str:
    run, end = conformance[0], conformance[-1]
    assert isinstance(run, RunRow)
    machine = run.facts["machine"]
    body: list[list[object]] = [
        ["conformance run", f"{run.run}, {_took(end)}, exit code {_code(end)}"],
        ["CPU", f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"],
        ["kernel, C library", f"{machine['kernel']}, {machine['libc']}"],
        ["compiler", run.facts["compiler"]["version"] or run.facts["compiler"]["reason"]],
        ["kvmatrix", run.facts["kvmatrix"]],
    ]
    if perf is not None:
        body.append(["perf run", f"{perf[0].run}, {_took(perf[-1])}, exit code {_code(perf[-1])}"])
    for version, facts in run.facts["pins"].items():
        body += [[f"vLLM {version}: {key}", value] for key, value in facts.items()]
    for pin, device, patch in pins_and_patches(last_attempts(conformance)):
        own = next(r for r in last_attempts(conformance) if r.cell["arm"] == patch and r.cell["pin"] == pin)
        if patch != tables.STOCK:
            body.append([f"{patch} on {pin} ({device}): patch sha256", own.patch_sha256])
        body += [[f"{patch}: imported {module}", digest] for module, digest in own.imported.items()]
    rss = max((r.max_rss_kib or 0 for r in conformance if isinstance(r, CellRow)), default=0)
    body.append(["largest cell process", f"{rss / 1024:.0f} MiB resident"])
    body.append(["command", _command(run)])
    if perf is not None and isinstance(perf[0], RunRow):
        body.append(["command, performance", _command(perf[0])])
    return tables.table(["fact", "value"], body)


def _command(run: RunRow) -> str:
    suite, *arguments = run.argv or [run.suite]
    return f"`nox -s {suite}" + (f" -- {shlex.join(arguments)}`" if arguments else "`")


def _took(end: object) -> str:
    return f"{end.seconds:.0f} s" if isinstance(end, EndRow) else "did not end"


def _code(end: object) -> object:
    return end.exit_code if isinstance(end, EndRow) else "none"


def newest_pair(home: Path, run: str = "") -> tuple[Path, list[AnyRow], tuple[Path, list[AnyRow]] | None]:
    """The newest conformance run that came to its end (or the one with the id ``run``), and the newest perf run after it.

    Raises:
        NothingRanError: there is none.
    """
    whole = (f for f in newest_runs(home, "conformance", strict=True) if is_whole(f[1]))
    found = next((f for f in whole if run in ("", f[1][0].run)), None)
    if found is None:
        named = f" with the id {run}" if run else ""
        raise NothingRanError(f"no finished conformance run{named} on this machine: run `nox -s conformance` first")
    path, rows = found
    later = (f for f in newest_runs(home, "perf", strict=True) if f[1][0].run > rows[0].run and is_whole(f[1]))
    perf = next((f for f in later if _pins(f[1]) <= _pins(rows)), None)
    return path, rows, perf


def is_whole(rows: list[AnyRow]) -> bool:
    """Whether a run came to a result: not one that was interrupted, or that says nothing."""
    end = rows[-1]
    return isinstance(end, EndRow) and end.exit_code in (0, 1)


def _pins(rows: list[AnyRow]) -> set[str]:
    run = rows[0]
    assert isinstance(run, RunRow)
    return set(run.facts.get("pins", {}))


def publish(home: Path, results: Path, run: str = "") -> list[Path]:
    """Copy the newest runs' rows to ``results/<pin>/<device>/<patch>/<run>/`` and write their tables beside them.

    ``run``: the conformance run to publish, in place of the newest.

    Raises:
        NothingRanError: there is no finished run.
        DiskError: the folder cannot be written.
    """
    path, rows, perf = newest_pair(home, run)
    return publish_run(path, rows, perf[0] if perf else None, results)


def publish_run(path: Path, rows: list[AnyRow], perf: Path | None, results: Path) -> list[Path]:
    """Publish one conformance run, the row file ``path``, and the perf run beside it; its tables come back.

    Raises:
        DiskError: a folder cannot be written; none of them is left.
    """
    written = []
    with ExitStack() as undo:
        try:
            for pin, device, patch in pins_and_patches(last_attempts(rows)):
                folder = results / pin / device / patch / rows[0].run
                if not folder.exists():
                    undo.callback(_remove, folder, results)
                folder.mkdir(parents=True, exist_ok=True)
                _copy_rows(path, folder / "conformance.jsonl", pin, device, patch)
                if perf:
                    shutil.copyfile(perf, folder / "perf.jsonl")
                written.append(write_tables(folder))
        except OSError as e:
            raise DiskError(f"cannot write the report to {results}: {e.strerror}") from e
        undo.pop_all()
    return written


def _copy_rows(source: Path, target: Path, pin: str, device: str, patch: str) -> None:
    """Copy the rows of a pin's stock and ``patch``, and those about the run as a whole, each byte for byte."""
    with source.open("rb") as rows, target.open("wb") as kept:
        kept.writelines(line for line in rows if _is_of(json.loads(line), pin, device, (tables.STOCK, patch)))


def _is_of(row: dict[str, Any], pin: str, device: str, arms: Sequence[str]) -> bool:
    if row["kind"] == "probe":
        cell = row["cell"]
        return (cell["pin"], cell["device"]) == (pin, device) and cell["arm"] in arms
    if row["kind"] == "cell":
        name = str(row["id"])
        return name.startswith(f"{pin}-{device}-") and name.endswith(tuple(f"-{arm}" for arm in arms))
    return True


def _remove(folder: Path, results: Path) -> None:
    """Delete a published folder, and those above it that hold nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        for parent in folder.parents:
            if parent == results.parent:
                break
            parent.rmdir()


def tables_of(folder: Path) -> str:
    """The document of a published folder ``<pin>/<device>/<patch>/<run>``: its patch beside stock, from its rows.

    Raises:
        RowsError: a row file is damaged.
    """
    pin, device, patch = (folder.parents[i].name for i in (2, 1, 0))
    perf = folder / "perf.jsonl"
    rows = [
        r
        for r in read_rows(folder / "conformance.jsonl")
        if not isinstance(r, ProbeRow)
        or ((r.cell["pin"], r.cell["device"]) == (pin, device) and r.cell["arm"] in (tables.STOCK, patch))
    ]
    return document(rows, read_rows(perf) if perf.exists() else None)


def write_tables(folder: Path) -> Path:
    """Write the tables of a published folder, and the plots of the perf run in it."""
    target = folder / TABLES
    target.write_text(tables_of(folder), encoding="utf-8")
    perf = folder / "perf.jsonl"
    if perf.exists():
        plots.write_plots([r for r in read_rows(perf) if isinstance(r, PerfRow)], folder)
    return target


def stale_tables(results: Path) -> list[Path]:
    """Published tables that are not what their rows give, byte for byte."""
    folders = {p.parent for name in (TABLES, "conformance.jsonl") for p in results.glob(f"*/*/*/*/{name}")}
    return [f / TABLES for f in sorted(folders) if not _is_current(f)]


def _is_current(folder: Path) -> bool:
    target = folder / TABLES
    if not target.exists() or not (folder / "conformance.jsonl").exists():
        return False
    return target.read_bytes() == tables_of(folder).encode()
