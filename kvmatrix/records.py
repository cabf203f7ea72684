"""Rows: what was planned, what ran, what came of it. JSON lines, one file a run, each line written when its fact is known.

A line is flushed and synced before the next cell starts, so a crash, a full disk or Ctrl-C loses no finished row. Rows are
never changed: a second try is a second row with a higher ``attempt``.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import threading
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from kvmatrix.errors import DiskError, RowsError

SCHEMA = 1
Status = Literal["PASS", "FAIL", "CRASH", "TIMEOUT", "INFRA", "UNSUPPORTED", "NOT_RUN"]
EXECUTED = ("PASS", "FAIL")
BROKEN = ("CRASH", "TIMEOUT", "UNSUPPORTED")
"""What a patch is to blame for where stock was executed."""


class Row(BaseModel):
    # An error that is not a number must come back as one, and JSON has no word for it but a string.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")

    row_schema: int = SCHEMA
    run: str
    """Id of the run: UTC start time and four random hex digits."""


class RunRow(Row):
    """First line of a file."""

    kind: Literal["run"] = "run"
    suite: Literal["conformance", "perf", "mutants", "upstream"]
    started: str
    argv: list[str]
    facts: dict[str, Any]
    """Machine, device, versions and hashes; no names and no paths."""
    planned: list[str]
    """Ids of everything that the run means to report: a row for each must follow."""


class ProbeRow(Row):
    """One attempt at one probe of an LLM cell, or at one case of a scheduler cell."""

    kind: Literal["probe"] = "probe"
    id: str
    """``<cell id>-<probe>``."""
    cell: dict[str, Any]
    """The cell's axes."""
    probe: str
    attempt: int = 1
    status: Status
    expected: Status = "PASS"
    reason: str = ""
    """Why the status is not PASS: a code, a colon, and a sentence."""
    expectation: str = ""
    """Why another status than PASS is expected, from ``conformance/expectations``."""
    of_every_arm: bool = False
    """Whether that is a fault of the release's own, which no patch of the lookup is about."""
    patch_sha256: str | None = None
    imported: dict[str, str] = {}
    """Module -> sha256 of the source that the running engine really imported."""
    requested: dict[str, Any] = {}
    resolved: dict[str, Any] = {}
    """Read back from the engine; where it differs from ``requested`` the probe is not counted as run."""
    tokens: list[int] | None = None
    """Generated token ids."""
    cold_tokens: list[int] | None = None
    max_logprob_error: float | None = None
    """Against cold, over the whole vocabulary, in nats."""
    reference_error: float | None = None
    """Cold against transformers' Llama 4 on the same checkpoint, in nats."""
    cached_tokens: int | None = None
    device_hit_tokens: int | None = None
    external_hit_tokens: int | None = None
    reuse_tokens: int | None = None
    """External tokens that a lookup with nothing lost would return."""
    loaded_blocks: int | None = None
    needed_loads: int | None = None
    detail: dict[str, Any] = {}
    """What a probe saw besides: ``damage``, what the loss of a block of each group did; ``requests``, what each of several came
    to; ``states``, what was to be reached on the way; ``agreement``, of a cold answer with those of other cells before it."""
    sweep: dict[str, int | float | str] = {}
    """Sums over the geometries of a sweep (the fields of :class:`kvmatrix.reuse.Totals`), or over the programs of a stateful
    test (:func:`kvmatrix.stateful.run`)."""
    seconds: float | None = None
    log: str = ""
    """The child's log file, relative to the run's folder."""

    @property
    def as_expected(self) -> bool:
        return self.status == self.expected

    @property
    def is_releases_own(self) -> bool:
        """Whether it fails by a known fault of the release that has nothing to do with the arm: it says nothing of a patch."""
        return self.of_every_arm and self.status == "FAIL" and self.as_expected

    @property
    def is_due_refusal(self) -> bool:
        """Whether vLLM refuses it whatever the arm, and is known to: a model or geometry that is expected to be refused, or a
        public report that the release cannot be asked about. Nothing is missing then."""
        report = self.probe.startswith("public-") and self.reason.startswith("refused: ")
        return self.status == "UNSUPPORTED" and (report or self.expected == "UNSUPPORTED")


class CellRow(Row):
    """One attempt at one cell's process."""

    kind: Literal["cell"] = "cell"
    id: str
    attempt: int = 1
    status: Literal["OK", "CRASH", "TIMEOUT", "INFRA", "UNSUPPORTED", "NOT_RUN"]
    reason: str = ""
    isolation: Literal["fork", "process"]
    seconds: float
    max_rss_kib: int | None = None
    engine_start_s: float | None = None
    filler_requests: int | None = None


Blocks = dict[str, list[list[float]]]
"""Arm -> blocks of the run -> seconds of the rounds in it, in the order in which they were taken."""


class BenchRequest(BaseModel):
    """One measured request. Times are in seconds; the names of times are those of vLLM's own benchmark."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt_tokens: int
    output_tokens: int
    ttft: float
    """From the request's arrival to its first token."""
    itl: list[float]
    """Between one token and the next."""
    e2el: float
    """From the request's arrival to its last token."""
    reference_ttft: float | None = None
    """Of the same prompt where nothing is cached: cold in the same engine, of a conversation in an engine without offload."""
    prefix: int
    """Tokens that the device was meant to hold when the request came; -1 where that is not planned."""
    device_hit_tokens: int
    external_hit_tokens: int
    declined_tokens: int
    """Tokens that the CPU tier held behind the device's, in whole blocks of every group, and that were not served."""
    recomputed_tokens: int
    """Prompt tokens that were served by neither tier."""
    loaded_bytes: int
    """Bytes copied from the CPU tier for it, over all layers."""
    right: bool
    """Whether its tokens are those of the reference."""


class PerfRow(Row):
    """Timings of one workload on all arms: blocks of processes that are new in each, the arms interleaved inside a block."""

    kind: Literal["perf"] = "perf"
    id: str
    group: Literal["lookup", "generate", "ceiling", "break-even", "harness"]
    workload: str
    size: str = ""
    """Of the model: ``tiny``, ``small``, ``scout-shaped``, or a model's name."""
    geometry: dict[str, Any]
    status: Status
    reason: str = ""
    order: list[list[str]] = []
    """Per block, the arms of its rounds in the order in which they ran."""
    seconds: Blocks = {}
    """Nothing is left out. Of a lookup, of one call; of generation, of a whole request."""
    requests: dict[str, list[list[BenchRequest]]] = {}
    """Of generation: arm -> blocks -> measured requests."""
    answers: dict[str, Any] = {}
    """Arm -> what it answered. Of a lookup ``external_tokens``, and ``sound``: whether attention finds all of them."""
    instructions: dict[str, float] = {}
    """Arm -> machine instructions of one call, where they could be counted."""
    instructions_by: str = ""
    """What counted them, or why nothing could."""
    left_out: dict[str, str] = {}
    """Arm -> why it was not measured."""
    imported: dict[str, dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _of_another_form(cls, row: Any) -> Any:
        """A row of the first form, without blocks, stays readable; nothing can be told from it that today's tables tell."""
        if isinstance(row, dict) and any(isinstance(s, float) for rounds in row.get("seconds", {}).values() for s in rounds):
            kept = {k: v for k, v in row.items() if k not in ("seconds", "order", "answers")}
            return kept | {"status": "NOT_RUN", "reason": "old-form: measured without blocks; run `nox -s perf` again"}
        return row


class UpstreamRow(Row):
    """One test of vLLM's own with one arm; of a file that could not be collected, one row for the file."""

    kind: Literal["upstream"] = "upstream"
    id: str
    """``<pin>-<device>-upstream-<arm>-<nodeid>``."""
    pin: str
    device: str
    arm: str
    nodeid: str
    """pytest's own, relative to the checkout."""
    file: str
    file_sha256: str
    """Of the test file as it was when it ran."""
    source: str
    """The checkout: its commit, or where it is no git repository the digest of its test files."""
    status: Status
    reason: str = ""
    """First line of the failure, or why it could not run: a code, a colon, and the words of vLLM or of the test."""
    expected: Status = "PASS"
    expectation: str = ""
    """Why another status than PASS is expected, from ``conformance/expectations``."""
    stand_ins: bool = False
    """Whether the test asked for a GPU and was given the host device's stand-ins."""
    seconds: float | None = None
    patch_sha256: str | None = None
    imported: dict[str, str] = {}
    """Module -> sha256 of the source that the test's process really imported."""
    log: str = ""
    """The child's log file, relative to the run's folder."""


class EndRow(Row):
    """Last line of a run that came to its end, however it ended."""

    kind: Literal["end"] = "end"
    finished: str
    exit_code: int
    counts: dict[str, int]
    seconds: float


AnyRow = RunRow | ProbeRow | CellRow | PerfRow | UpstreamRow | EndRow
_KINDS: dict[str, type[Row]] = {
    "run": RunRow,
    "probe": ProbeRow,
    "cell": CellRow,
    "perf": PerfRow,
    "upstream": UpstreamRow,
    "end": EndRow,
}


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def new_run_id() -> str:
    return f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"


class RowWriter:
    """Appends rows to one run's file; safe to call from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._size = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: what could not be written must not be written later, at a place where it belongs no more.
            self._file = path.open("xb", buffering=0)
        except OSError as e:
            raise DiskError(f"cannot write rows to {path}: {e.strerror}") from e

    def write(self, row: Row) -> None:
        """Append ``row`` and sync it to the disk.

        Raises:
            DiskError: the disk is full or gone; rows written before are whole.
        """
        rest = memoryview(row.model_dump_json().encode() + b"\n")
        with self._lock:
            size = self._size
            try:
                while rest:
                    written = self._file.write(rest)
                    rest = rest[written:]
                    size += written or 0
                os.fsync(self._file.fileno())
                self._size = size
            except OSError as e:
                self._cut()
                raise DiskError(f"cannot write a row to {self.path}: {e.strerror}; free space and run again") from e

    def _cut(self) -> None:
        """Drop a half-written line, so that the file stays readable."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._file.fileno(), self._size)
            self._file.seek(self._size)

    def close(self) -> None:
        with self._lock:
            if not self._file.closed:
                with contextlib.suppress(OSError):
                    self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_rows(path: Path) -> list[AnyRow]:
    """All rows of a file.

    Raises:
        RowsError: names the line that is damaged, of an unknown kind or of a newer schema.
    """
    rows: list[AnyRow] = []
    try:
        lines = path.read_bytes().decode().removesuffix("\n").split("\n")  # splitlines knows more line ends than JSON
    except (OSError, UnicodeDecodeError) as e:
        raise RowsError(f"{path}: cannot be read as rows: {e}") from e
    for number, line in enumerate(lines, 1):
        rows.append(_parse(path, number, line))
    if not rows or not isinstance(rows[0], RunRow):
        raise RowsError(f"{path}: line 1 is not a run row: the file is damaged, or not a row file")
    return rows


def _parse(path: Path, number: int, line: str) -> AnyRow:
    where = f"{path}: line {number}"
    try:
        raw = json.loads(line)
        schema = raw.get("row_schema")
        if schema != SCHEMA:
            raise RowsError(f"{where} has row schema {schema!r}, this version reads {SCHEMA}: use a newer kvmatrix")
        return _KINDS[raw["kind"]].model_validate(raw)  # type: ignore[return-value]
    except (ValueError, KeyError, AttributeError, TypeError) as e:
        what = e.errors()[0]["msg"] if isinstance(e, ValidationError) else "not a row"
        raise RowsError(f"{where} is damaged ({what}): delete the line, or restore the file") from e


def place(row: ProbeRow) -> tuple[str, str]:
    """Where a row stands whatever its arm: the cell without it, and the probe."""
    return row.id.removesuffix(f"-{row.cell['arm']}-{row.probe}"), row.probe


def last_attempts(rows: list[AnyRow]) -> list[ProbeRow]:
    """The newest attempt of each probe, in the order of first appearance."""
    newest: dict[str, ProbeRow] = {}
    for row in rows:
        if isinstance(row, ProbeRow) and (row.id not in newest or row.attempt >= newest[row.id].attempt):
            newest[row.id] = row
    return list(newest.values())
