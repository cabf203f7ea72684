"""From what pytest told to rows' statuses, from rows to what each patch broke or mended, and to a table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from tabulate import tabulate

from kvmatrix.arms import Arm
from kvmatrix.cells import STOCK
from kvmatrix.errors import ExitCode
from kvmatrix.judge import Verdict
from kvmatrix.records import EXECUTED, UpstreamRow

BAD = ("FAIL", "CRASH", "TIMEOUT")
REPORTED = ("test_scheduler.py", "test_kv_events.py")
"""The two files for which the fix's author reported counts."""

_MISSING = {
    "gpu": r"Torch not compiled with CUDA|No CUDA GPUs|no NVIDIA driver|NVIDIA driver on your system|No HIP GPUs"
    r"|accelerator device when none is available|libcuda|libcudart|libamdhip64|module 'torch\.cuda' has no attribute"
    r"|no attribute '_?cuda|'Host(?:CopyBackend|Event|Stream)' object has no attribute",
    "model": r"Invalid repository ID or local directory|LocalEntryNotFoundError|OfflineModeIsEnabled|outgoing traffic has been"
    r" disabled|couldn't connect to|not the path to a directory containing|Can't load the configuration of",
    "module": r"^(?:E\s+)?ModuleNotFoundError: No module named '(?!vllm\b|tests\b)",
    "fixture": r"^fixture '\w+' not found",
}
"""Kind of thing that is not there -> the words of a failure for want of it."""


def first_line(text: str) -> str:
    """The first line that says something; where it ends in a colon, with the next."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])[:400]


def missing(text: str) -> str:
    """``<kind>: <line>`` where a failure is for want of something that is not here; empty for any other failure."""
    for kind, pattern in _MISSING.items():
        for line in text.splitlines():
            if re.search(pattern, line):
                return f"{kind}: {first_line(line)}"
    return ""


def wrong_process(message: Mapping[str, Any], arm: Arm, package: str) -> str:
    """Why what a process told does not count: it ran another vLLM, or other files, than it was to. Empty when it counts."""
    if not str(message["vllm"]).startswith(package):
        return f"wrong-vllm: the tests imported {message['vllm'] or 'no vLLM'}, not the pin's"
    if message["imported"] != arm.expected:
        shown = ", ".join(f"{m.rsplit('.', 1)[-1]} {d[:12]}" for m, d in message["imported"].items()) or "nothing"
        return f"wrong-arm: the tests imported {shown}, not the files of arm {arm.name}"
    return ""


def judge_test(message: Mapping[str, Any], arm: Arm, package: str) -> Verdict:
    """Status of one test. ``package``: the folder of the vLLM that must have been imported, with its separator."""
    if problem := wrong_process(message, arm, package):
        return Verdict("INFRA", problem)
    text = message["text"]
    if message["outcome"] == "passed":
        return Verdict("PASS", first_line(text))
    if message["outcome"] == "skipped":
        return Verdict("UNSUPPORTED", f"skipped: {first_line(text)}")
    if lacking := missing(text):
        return Verdict("UNSUPPORTED", lacking)
    when = "" if message["when"] == "call" else f"{message['when']}: "
    return Verdict("FAIL", f"{when}{first_line(text)}")


def judge_collection(message: Mapping[str, Any], ran_on_stock: bool) -> Verdict:
    """Status of a file that was skipped whole or could not be collected; where stock ran it, it is the patch that broke it."""
    line = first_line(message["text"])
    if message["outcome"] == "skipped":
        return Verdict("UNSUPPORTED", f"skipped: {line}")
    if ran_on_stock:
        return Verdict("FAIL", f"collection: {line}")
    return Verdict("UNSUPPORTED", lacking) if (lacking := missing(message["text"])) else Verdict("INFRA", f"collection: {line}")


@dataclass
class Comparison:
    """One patch beside stock on one pin; each row is the patch's."""

    pin: str
    arm: str
    broken: list[UpstreamRow] = field(default_factory=list)
    """It fails, crashes, hangs or is refused, where stock did not: red."""
    expected: list[UpstreamRow] = field(default_factory=list)
    """It fails where stock did not, as an expectation says."""
    mended: list[UpstreamRow] = field(default_factory=list)
    both_fail: list[UpstreamRow] = field(default_factory=list)


def compare(rows: Sequence[UpstreamRow]) -> list[Comparison]:
    """Every patch of ``rows`` beside stock of its pin, test by test. Without a row of stock's a failure is the patch's own."""
    stock = {(r.pin, r.nodeid): r for r in rows if r.arm == STOCK}
    found: dict[tuple[str, str], Comparison] = {}
    for row in (r for r in rows if r.arm != STOCK):
        entry = found.setdefault((row.pin, row.arm), Comparison(row.pin, row.arm))
        beside = stock.get((row.pin, row.nodeid))
        if row.status in BAD:
            own = entry.expected if row.status == row.expected else entry.broken
            (entry.both_fail if beside is not None and beside.status in BAD else own).append(row)
        elif row.status == "UNSUPPORTED" and beside is not None and beside.status == "PASS":
            entry.broken.append(row)
        elif row.status == "PASS" and beside is not None and beside.status in BAD:
            entry.mended.append(row)
    return list(found.values())


def unexpected_passes(rows: Sequence[UpstreamRow]) -> list[UpstreamRow]:
    """Tests that pass where an expectation says that they fail."""
    return [r for r in rows if r.status == "PASS" and r.expected != "PASS"]


def exit_code(rows: Sequence[UpstreamRow], stale: int = 0) -> ExitCode:
    """The command's exit code from its rows. What fails on stock too says nothing against a patch.

    ``stale`` is the number of expectations that no test needed, or that have expired.
    """
    if any(c.broken for c in compare(rows)) or unexpected_passes(rows) or stale:
        return ExitCode.UNEXPECTED
    executed = any(r.status in EXECUTED for r in rows)
    if any(r.status in ("INFRA", "NOT_RUN") or (r.status in BAD and not executed) for r in rows):
        return ExitCode.INFRA
    return ExitCode.OK if executed else ExitCode.NOTHING_RAN


def counts(rows: Iterable[UpstreamRow]) -> str:
    """Such as ``110 passed, 2 failed``; other statuses by their own names."""
    words = {"PASS": "passed", "FAIL": "failed"}
    found = Counter(r.status for r in rows)
    order = ["PASS", "FAIL", *sorted(set(found) - set(EXECUTED))]
    return ", ".join(f"{found[s]} {words.get(s, s)}" for s in order if found[s])


def summary(rows: Sequence[UpstreamRow]) -> str:
    """The whole verdict as Markdown: counts per file and arm, the reported pair of files, and each patch's differences."""
    parts = []
    for pin in dict.fromkeys(r.pin for r in rows):
        of_pin = [r for r in rows if r.pin == pin]
        parts += [f"vLLM {pin}, its own tests of the connector from the checkout {_short(of_pin[0].source)}", _table(of_pin)]
        parts += [line for line in [_reported(of_pin)] if line]
        parts += [_difference(c) for c in compare(of_pin)]
        lists = (_passing(of_pin), _failing(of_pin), _listed("could not run here", of_pin, "UNSUPPORTED"), _infra(of_pin))
        parts += [text for text in lists if text]
    return "\n\n".join(parts)


def _short(source: str) -> str:
    kind, colon, digest = source.rpartition(":")
    return f"{kind}{colon}{digest[:12]}"


def _table(rows: Sequence[UpstreamRow]) -> str:
    arms = list(dict.fromkeys(r.arm for r in rows))
    files = sorted({r.file for r in rows})
    lines = [[PurePosixPath(f).name, *(counts(r for r in rows if (r.file, r.arm) == (f, a)) for a in arms)] for f in files]
    lines.append(["all", *(counts(r for r in rows if r.arm == a) for a in arms)])
    return tabulate(lines, headers=["file", *arms], tablefmt="github", disable_numparse=True)


def _reported(rows: Sequence[UpstreamRow]) -> str:
    of_files = [r for r in rows if PurePosixPath(r.file).name in REPORTED]
    arms = dict.fromkeys(r.arm for r in of_files)
    each = [f"{a} {counts(r for r in of_files if r.arm == a).replace(',', '')}" for a in arms]
    return f"scheduler + KV events: {'; '.join(each)}" if each else ""


def _difference(c: Comparison) -> str:
    known = f"{len(c.expected)} failing as expected, " if c.expected else ""
    lines = [f"{c.arm}: {len(c.broken)} broken, {known}{len(c.mended)} mended, {len(c.both_fail)} failing on stock too"]
    lines += [f"- broken: {r.nodeid} ({r.status}: {r.reason})" for r in c.broken]
    lines += [f"- expected: {r.nodeid} ({r.status}: {r.reason}): {r.expectation}" for r in c.expected]
    return "\n".join([*lines, *(f"- mended: {r.nodeid}" for r in c.mended)])


def _passing(rows: Sequence[UpstreamRow]) -> str:
    lines = [f"- {r.arm}: {r.nodeid}, {r.expected} was expected ({r.expectation})" for r in unexpected_passes(rows)]
    return "\n".join(["PASSING UNEXPECTEDLY:", *lines]) if lines else ""


def _failing(rows: Sequence[UpstreamRow]) -> str:
    """Each test that fails on stock, with stock's reason and what each patch has for another."""
    lines = []
    for row in (r for r in rows if r.arm == STOCK and r.status in BAD):
        others = [r for r in rows if r.nodeid == row.nodeid and (r.status, r.reason) != (row.status, row.reason)]
        beside = [f"; {r.arm}: {r.status}{f': {r.reason}' if r.reason else ''}" for r in others]
        where = ", on the host device's stand-ins for a GPU" if row.stand_ins else ""
        lines.append(f"- {row.nodeid} ({row.status}{where}: {row.reason}{''.join(beside)})")
    return "\n".join(["failing on stock:", *lines]) if lines else ""


def _listed(title: str, rows: Sequence[UpstreamRow], *statuses: str) -> str:
    """Reasons of ``statuses`` with how many tests have each; the first arm that has one stands for all."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.status in statuses and row.nodeid not in (known := reasons.setdefault(row.reason, [])):
            known.append(row.nodeid)
    lines = [f"- {ids[0]}{f' and {len(ids) - 1} more' if len(ids) > 1 else ''}: {why}" for why, ids in reasons.items()]
    return "\n".join([f"{title}:", *lines]) if lines else ""


def _infra(rows: Sequence[UpstreamRow]) -> str:
    return _listed("said nothing", rows, "INFRA", "NOT_RUN")
