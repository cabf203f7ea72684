"""Expected failures and refusals, as data: ``conformance/expectations/*.toml``. What no entry names is expected to PASS."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from kvmatrix.cells import Cell
from kvmatrix.errors import UsageError
from kvmatrix.records import ProbeRow, Status


class Expectation(BaseModel):
    """One entry: rows whose facts match every given list are expected to end in ``status`` with a matching reason."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    status: Literal["FAIL", "UNSUPPORTED"]
    message: str
    """Regular expression that the row's reason must match."""
    why: str
    link: str
    arm: tuple[str, ...] = ()
    tier: tuple[str, ...] = ()
    probe: tuple[str, ...] = ()
    """Names, or patterns such as ``reuse-*``."""
    hit_class: tuple[str, ...] = ()
    pin: tuple[str, ...] = ()
    device: tuple[str, ...] = ()
    backend: tuple[str, ...] = ()
    mode: tuple[str, ...] = ()
    chunk: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    layers: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _failures_name_their_arms(self) -> Expectation:
        if self.status == "FAIL" and not self.arm:
            raise ValueError("an expected FAIL must name its arm")
        return self

    @field_validator("message")
    @classmethod
    def _compiles(cls, message: str) -> str:
        try:
            re.compile(message)
        except re.error as e:
            raise ValueError(f"not a regular expression: {e}") from e
        return message

    def matches(self, cell: Cell, probe: str) -> bool:
        facts = cell.model_dump() | {"hit_class": cell.hit_class}
        axes = ("arm", "tier", "hit_class", "pin", "device", "backend", "mode", "chunk", "block", "layers")
        named = not self.probe or any(fnmatchcase(probe, pattern) for pattern in self.probe)
        return named and all(not getattr(self, axis) or facts[axis] in getattr(self, axis) for axis in axes)


class Expectations:
    """All entries of a folder; finds the one for a row, and the ones that no row needed."""

    def __init__(self, entries: Iterable[Expectation]) -> None:
        self.entries = list(entries)
        self._used: set[int] = set()

    @classmethod
    def load(cls, folder: Path) -> Expectations:
        """Read every ``*.toml`` in ``folder``.

        Raises:
            UsageError: a file is not valid TOML, or an entry has an unknown key or a bad value.
        """
        entries = []
        for path in sorted(folder.glob("*.toml")):
            try:
                raw = tomllib.loads(path.read_text(encoding="utf-8"))
                odd = sorted(raw.keys() - {"expect"})
                if odd:
                    raise UsageError(f"{path.name}: unknown key {odd[0]!r}: entries are [[expect]] tables")
                if not isinstance(raw.get("expect", []), list):
                    raise UsageError(f"{path.name}: expect must be [[expect]] tables")
                entries += [Expectation.model_validate(e) for e in raw.get("expect", [])]
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
                raise UsageError(f"{path.name} is not valid TOML: {e}") from e
            except ValidationError as e:
                first = e.errors()[0]
                raise UsageError(f"{path.name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from e
        return cls(entries)

    def find(self, cell: Cell, probe: str) -> Expectation | None:
        for index, entry in enumerate(self.entries):
            if entry.matches(cell, probe):
                self._used.add(index)
                return entry
        return None

    def refusal(self, cell: Cell) -> str | None:
        """The regular expression of vLLM's reason, where an entry says that it refuses this cell whatever the probe."""
        entry = self.find(cell, "")
        return entry.message if entry and entry.status == "UNSUPPORTED" else None

    def unused(self) -> list[Expectation]:
        """Entries that no :meth:`find` has matched: stale, or misspelt."""
        return [e for i, e in enumerate(self.entries) if i not in self._used]


def expected_status(entry: Expectation | None, status: Status, reason: str) -> Status:
    """The status expected of a row. With another reason than the entry's it is not the expected one: PASS is expected then."""
    if entry is None:
        return "PASS"
    if status == entry.status and not re.search(entry.message, reason):
        return "PASS"
    return entry.status


def is_problem(row: ProbeRow) -> bool:
    """Whether a row makes a run red: anything unexpected but what could not run here and says why."""
    if row.status == "UNSUPPORTED":
        # A refusal is vLLM's or the machine's word. Running something else than what was asked for is not.
        return row.reason.startswith("not-honoured: ")
    return row.status != "NOT_RUN" and not row.as_expected
