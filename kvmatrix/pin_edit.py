"""Writing a pin into ``matrix.toml`` and into the lists of expected failures, and nothing else of either text."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import ValidationError

from kvmatrix.cells import Cell
from kvmatrix.config import Matrix, Pin
from kvmatrix.errors import KvmatrixError, UsageError
from kvmatrix.expectations import Expectation
from kvmatrix.records import ProbeRow

Places = dict[Path, list[int]]
"""Expectation file -> indexes of its entries."""


def pin_toml(pin: Pin) -> str:
    """A pin's entry, its defaults left out."""
    fields = pin.model_dump(exclude_defaults=True)
    mixed = fields.pop("mixed", None)
    lines = ["[[pins]]", *_lines(fields)]
    return "\n".join([*lines, *(["", "[pins.mixed]", *_lines(mixed)] if mixed else [])]) + "\n"


def _lines(fields: dict[str, Any]) -> list[str]:
    return [f"{k} = {tomlkit.item(list(v) if isinstance(v, tuple) else v).as_string()}" for k, v in fields.items()]


def add_pin(text: str, pin: Pin) -> str:
    """``text`` of a matrix file with ``pin`` behind its last one. Put in as text: a parser would move comments.

    Raises:
        UsageError: the pin is there already, or the text is not one that this can add to.
    """
    before = tomllib.loads(text)
    lines = text.splitlines(keepends=True)
    starts = [n for n, line in enumerate(lines) if re.match(r"\[\[pins\]\]|\[pins\.", line)]
    if not starts:
        raise UsageError("matrix.toml has no [[pins]] table to add the pin behind: edit it by hand")
    following = next((n for n in range(starts[-1] + 1, len(lines)) if re.match(r"\[+[\w\"']", lines[n])), len(lines))
    end = max(n for n in range(starts[-1], following) if lines[n].strip() and not lines[n].lstrip().startswith("#")) + 1
    lines[end - 1] = lines[end - 1].removesuffix("\n") + "\n"
    after = "".join([*lines[:end], "\n", pin_toml(pin), *lines[end:]])
    _check_added(before, after, pin)
    return after


def _check_added(before: dict[str, Any], text: str, pin: Pin) -> None:
    try:
        after = tomllib.loads(text)
        Matrix.model_validate(after)
    except (tomllib.TOMLDecodeError, ValidationError) as e:
        reason = e.errors()[0]["msg"] if isinstance(e, ValidationError) else str(e)
        raise UsageError(f"matrix.toml cannot take pin {pin.version}, edit it by hand: {reason}") from e
    added = after["pins"].pop()
    if after != before or Pin.model_validate(added) != pin:
        raise UsageError(f"matrix.toml cannot take pin {pin.version} behind its last one: edit it by hand")


# --- expected failures ------------------------------------------------------------------------------------------------


def explained(rows: Sequence[ProbeRow], files: Collection[Path]) -> Places:
    """Which entries of the expectation ``files`` describe what stock's ``rows`` of a new pin show.

    An entry does where it would match but for its pins, and every row that it would then match fails with its message.

    Raises:
        KvmatrixError: a failure that no entry describes, or only some of an entry's rows fail.
    """
    entries = [(path, index, entry) for path in files for index, entry in enumerate(_entries(path))]
    places: Places = {}
    for row in (r for r in rows if r.status == "FAIL"):
        found = next(((p, i, e) for p, i, e in entries if _describes(e, row)), None)
        if found is None:
            raise KvmatrixError(f"{row.id} fails as no entry of the expectations describes: {row.reason}")
        path, index, entry = found
        if entry.pin and index not in places.setdefault(path, []):
            places[path].append(index)
    for path, index, entry in entries:
        if index in places.get(path, ()):
            odd = [r for r in rows if _matches(entry, r) and r.status != "UNSUPPORTED" and not _describes(entry, r)]
            if odd:
                raise KvmatrixError(f"{odd[0].id} is {odd[0].status}, and other rows of the same expectation fail: {entry.why}")
    return places


def _entries(path: Path) -> list[Expectation]:
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    return [Expectation.model_validate(entry) for entry in raw.get("expect", [])]


def _matches(entry: Expectation, row: ProbeRow) -> bool:
    return entry.model_copy(update={"pin": ()}).matches(Cell.model_validate(row.cell), row.probe)


def _describes(entry: Expectation, row: ProbeRow) -> bool:
    return row.status == entry.status and _matches(entry, row) and bool(re.search(entry.message, row.reason))


def expect_on(text: str, indexes: Collection[int], version: str) -> str:
    """``text`` of an expectation file with ``version`` among the pins of these entries."""
    document = tomlkit.parse(text)
    for index in indexes:
        pins: Any = document["expect"][index]["pin"]
        if version not in pins:
            pins.append(version)
    return tomlkit.dumps(document)
