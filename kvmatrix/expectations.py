"""Expected failures and refusals, as data: ``conformance/expectations/*.toml``. What no entry names is expected to PASS."""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvmatrix.cells import Cell
from kvmatrix.errors import UsageError
from kvmatrix.records import ProbeRow, Status

EVERY_ARM = "*"
"""In place of an arm's name: a fault of the release that no patch of the lookup is about."""
UPSTREAM = "upstream"
"""The tier of vLLM's own tests (:mod:`kvmatrix.upstream`)."""
_OF_CELLS = ("probe", "hit_class", "backend", "mode", "chunk", "block", "layers")
"""Conditions that only a cell can meet."""


def today() -> datetime.date:
    """The day by which an entry has expired or has not, in UTC."""
    return datetime.datetime.now(datetime.UTC).date()


class Expectation(BaseModel):
    """One entry: rows whose facts match every given list are expected to end in ``status`` with a matching reason."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    status: Literal["FAIL", "UNSUPPORTED"]
    message: str
    """Regular expression that the row's reason must match."""
    why: str
    link: str
    expires: datetime.date = Field(strict=True)
    """The last day on which it excuses anything: a run on a later day that needs it is red."""
    arm: tuple[str, ...] = ()
    """Names, or ``*`` alone: every arm, as where there is none, which only an entry of a refusal may have."""
    tier: tuple[str, ...] = ()
    """``upstream``, alone, where the entry is about a test of vLLM's own."""
    probe: tuple[str, ...] = ()
    """Names, or patterns such as ``reuse-*``."""
    test: tuple[str, ...] = ()
    """Patterns of node ids of vLLM's own tests; a bracket is written ``[[]``."""
    hit_class: tuple[str, ...] = ()
    pin: tuple[str, ...] = ()
    device: tuple[str, ...] = ()
    backend: tuple[str, ...] = ()
    mode: tuple[str, ...] = ()
    chunk: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    layers: tuple[str, ...] = ()

    @field_validator("message")
    @classmethod
    def _compiles(cls, message: str) -> str:
        try:
            re.compile(message)
        except re.error as e:
            raise ValueError(f"not a regular expression: {e}") from e
        return message

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.status == "FAIL" and not self.arm:
            raise ValueError("an expected FAIL must name its arm")
        if EVERY_ARM in self.arm and len(self.arm) > 1:
            raise ValueError(f"arm {EVERY_ARM!r} stands alone: it is every arm")
        if UPSTREAM not in self.tier:
            if self.test:
                raise ValueError(f"test goes with tier = [{UPSTREAM!r}]: other tiers have probes")
        elif self.tier != (UPSTREAM,) or not self.test or any(getattr(self, axis) for axis in _OF_CELLS):
            raise ValueError(f"tier {UPSTREAM!r} stands alone and needs test: it has no {', '.join(_OF_CELLS)}")
        return self

    @property
    def of_every_arm(self) -> bool:
        """Whether it is about the release, whatever the arm."""
        return self.arm == (EVERY_ARM,)

    @property
    def about(self) -> str:
        """Which probes or tests it names, for a message."""
        return ", ".join(self.test or self.probe) or "any probe"

    def matches(self, cell: Cell, probe: str) -> bool:
        facts = cell.model_dump() | {"hit_class": cell.hit_class}
        named = not self.probe or any(fnmatchcase(probe, pattern) for pattern in self.probe)
        axes = ("tier", "pin", "device", "hit_class", "backend", "mode", "chunk", "block", "layers")
        return named and self._has_arm(cell.arm) and all(self._has(axis, facts[axis]) for axis in axes)

    def matches_test(self, pin: str, device: str, arm: str, nodeid: str) -> bool:
        """Whether it is about this one of vLLM's own tests on this arm."""
        named = any(fnmatchcase(nodeid, pattern) for pattern in self.test)
        return named and self._has_arm(arm) and self._has("pin", pin) and self._has("device", device)

    def _has(self, axis: str, value: object) -> bool:
        return not getattr(self, axis) or value in getattr(self, axis)

    def _has_arm(self, arm: str) -> bool:
        return not self.arm or self.of_every_arm or arm in self.arm


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
        return self._first(lambda entry: entry.matches(cell, probe))

    def find_test(self, pin: str, device: str, arm: str, nodeid: str) -> Expectation | None:
        return self._first(lambda entry: entry.matches_test(pin, device, arm, nodeid))

    def _first(self, matches: Callable[[Expectation], bool]) -> Expectation | None:
        for index, entry in enumerate(self.entries):
            if matches(entry):
                self._used.add(index)
                return entry
        return None

    def refusal(self, cell: Cell) -> str | None:
        """The regular expression of vLLM's reason, where an entry says that it refuses this cell whatever the probe."""
        entry = self.find(cell, "")
        return entry.message if entry and entry.status == "UNSUPPORTED" else None

    def unused(self, pins: Collection[str], upstream: bool = False) -> list[Expectation]:
        """Entries about ``pins`` that no row needed: stale, or misspelt. ``upstream``: of vLLM's own tests, else of cells."""
        left = (e for i, e in enumerate(self.entries) if i not in self._used)
        return [e for e in left if (UPSTREAM in e.tier) == upstream and (not e.pin or set(pins) & set(e.pin))]

    def expired(self) -> list[Expectation]:
        """Entries that a row needed and that have expired."""
        return [e for i, e in enumerate(self.entries) if i in self._used and e.expires < today()]


def stale_line(entry: Expectation) -> str:
    """What is said of an entry that matches nothing."""
    return f"expectation of {entry.status} for {entry.about} ({entry.why}) matches no row: remove it"


def expired_line(entry: Expectation) -> str:
    """What is said of an entry whose time is over."""
    return (
        f"expectation of {entry.status} for {entry.about} expired on {entry.expires}, so this run is red on purpose:"
        f" look again at {entry.link} ({entry.why}), then extend its date in conformance/expectations, or remove it"
    )


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
