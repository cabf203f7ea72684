"""Row files: what is written stays readable, and what is damaged is named by its line."""

from __future__ import annotations

import json
import math
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvmatrix.errors import DiskError, RowsError
from kvmatrix.qualified import newest_runs
from kvmatrix.records import (
    AnyRow,
    CellRow,
    EndRow,
    PerfRow,
    ProbeRow,
    Row,
    RowWriter,
    RunRow,
    last_attempts,
    new_run_id,
    read_rows,
)

RUN = "20260101T000000Z-abcd"
END = EndRow(run=RUN, finished="2026-01-01T00:01:00Z", exit_code=0, counts={"PASS": 1}, seconds=60.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / RUN / "rows.jsonl"


def write(path: Path, *rows: Row) -> None:
    with RowWriter(path) as writer:
        for row in rows:
            writer.write(row)


@contextmanager
def disk_full_at(size: int) -> Iterator[None]:
    """No file of this process can grow beyond ``size`` bytes: the write that would is cut short, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def damaged(path: Path) -> str:
    with pytest.raises(RowsError) as caught:
        read_rows(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_rows_come_back_as_they_were(
    path: Path, run_row: RunRow, make_row: Callable[..., ProbeRow], make_perf_row: Callable[..., PerfRow]
) -> None:
    probe = make_row(
        status="FAIL", expected="FAIL", reason="wrong-output: tokens [1] for [2]", tokens=[1], max_logprob_error=20.957
    )
    cell = CellRow(run=RUN, id="c", status="CRASH", isolation="fork", seconds=1.5, max_rss_kib=1024)
    written = [run_row, probe, cell, make_perf_row(), END]
    write(path, *written)
    assert read_rows(path) == written
    assert len(path.read_text(encoding="utf-8").splitlines()) == len(written)


def test_a_perf_row_of_the_first_form_is_read_and_says_what_to_do() -> None:
    old = {"run": RUN, "id": "lookup", "group": "lookup", "workload": "p81-d16", "geometry": {}, "status": "PASS"}
    old |= {"order": ["stock", "fix"], "seconds": {"stock": [2.0, 4.0], "fix": [1.0, 2.0]}, "answers": {"stock": {}}}
    row = PerfRow.model_validate(old)
    assert (row.status, row.seconds, row.order) == ("NOT_RUN", {}, [])
    assert "nox -s perf" in row.reason


@pytest.mark.parametrize("text", ["a\nb", "tab\there", "a\u2028b", "a\x85b", 'quote"s \\', "µs → ×", "\x0b\x0c\x1c"])
def test_any_text_comes_back(path: Path, run_row: RunRow, make_row: Callable[..., ProbeRow], text: str) -> None:
    row = make_row(reason=text)
    write(path, run_row, row)
    assert read_rows(path) == [run_row, row]


def test_an_error_that_is_no_number_comes_back(path: Path, run_row: RunRow, make_row: Callable[..., ProbeRow]) -> None:
    """Without one, a row would look as if nothing had been compared."""
    write(path, run_row, make_row(max_logprob_error=math.inf), make_row(max_logprob_error=math.nan))
    errors = [r.max_logprob_error for r in read_rows(path) if isinstance(r, ProbeRow)]
    assert errors[0] == math.inf
    assert errors[1] is not None
    assert math.isnan(errors[1])


def test_an_unknown_field_is_refused(make_row: Callable[..., ProbeRow]) -> None:
    with pytest.raises(ValueError, match="surprise"):
        make_row(surprise=1)


def test_every_row_is_on_the_disk_when_write_returns(path: Path, run_row: RunRow, make_row: Callable[..., ProbeRow]) -> None:
    with RowWriter(path) as writer:
        for count, row in enumerate([run_row, make_row(), make_row("device-hit")], 1):
            writer.write(row)
            assert len(read_rows(path)) == count


def test_a_file_is_never_written_over(path: Path, run_row: RunRow) -> None:
    write(path, run_row)
    with pytest.raises(DiskError, match="cannot write rows"):
        RowWriter(path)
    assert read_rows(path) == [run_row]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DiskError, match="cannot write rows"):
        RowWriter(tmp_path / "file" / "rows.jsonl")


def test_threads_do_not_mix_their_rows(path: Path, run_row: RunRow, make_row: Callable[..., ProbeRow]) -> None:
    with RowWriter(path) as writer:
        writer.write(run_row)
        rows = [make_row(f"probe-{i}", reason="x" * 500) for i in range(40)]

        def work(share: list[ProbeRow]) -> None:
            for row in share:
                writer.write(row)

        threads = [threading.Thread(target=work, args=(rows[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert sorted(r.probe for r in read_rows(path) if isinstance(r, ProbeRow)) == sorted(r.probe for r in rows)


# --- a full disk ------------------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_whole_rows(path: Path, run_row: RunRow, make_row: Callable[..., ProbeRow]) -> None:
    with RowWriter(path) as writer:
        writer.write(run_row)
        writer.write(make_row())
        with disk_full_at(path.stat().st_size + 100), pytest.raises(DiskError, match="free space") as caught:
            writer.write(make_row("device-hit"))
        assert "\n" not in str(caught.value)
        assert read_rows(path) == [run_row, make_row()]
    assert read_rows(path) == [run_row, make_row()], "closing the file wrote the rest of the row that did not fit"


def test_a_disk_that_stays_full(path: Path, run_row: RunRow, make_row: Callable[..., ProbeRow]) -> None:
    """The run's last row is tried as well, and then the file is closed."""
    with RowWriter(path) as writer:
        writer.write(run_row)
        with disk_full_at(path.stat().st_size):
            for row in (make_row(), END):
                with pytest.raises(DiskError):
                    writer.write(row)
            writer.close()
    assert read_rows(path) == [run_row]


def test_once_there_is_space_again_rows_are_written_whole(
    path: Path, run_row: RunRow, make_row: Callable[..., ProbeRow]
) -> None:
    with RowWriter(path) as writer:
        writer.write(run_row)
        with disk_full_at(path.stat().st_size + 100), pytest.raises(DiskError):
            writer.write(make_row())
        writer.write(END)
    assert read_rows(path) == [run_row, END]


# --- damaged files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def lines(path: Path, run_row: RunRow, make_row: Callable[..., ProbeRow]) -> list[str]:
    write(path, run_row, make_row(), END)
    return path.read_text(encoding="utf-8").splitlines(keepends=True)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("junk", ["not json\n", "\n", "[]\n", "17\n", "null\n", '{"row_schema": 1}\n', "\0\0\0\n"])
def test_a_damaged_line_is_named(path: Path, lines: list[str], number: int, junk: str) -> None:
    lines[number - 1] = junk
    path.write_text("".join(lines), encoding="utf-8")
    assert f"line {number}" in damaged(path)


@pytest.mark.parametrize("cut", [1, 2, 50])
def test_a_last_line_that_was_cut_off(path: Path, lines: list[str], cut: int) -> None:
    whole = "".join(lines)
    path.write_text(whole[: -cut - 1], encoding="utf-8")
    assert "line 3" in damaged(path)


def test_a_value_that_does_not_validate(path: Path, lines: list[str]) -> None:
    lines[1] = lines[1].replace('"status":"PASS"', '"status":"FINE"')
    path.write_text("".join(lines), encoding="utf-8")
    assert "line 2" in damaged(path)


@pytest.mark.parametrize("schema", [2, 0, None, "1"])
def test_another_schema_is_refused(path: Path, lines: list[str], schema: Any) -> None:
    lines[1] = json.dumps(json.loads(lines[1]) | {"row_schema": schema}) + "\n"
    path.write_text("".join(lines), encoding="utf-8")
    message = damaged(path)
    assert "line 2" in message
    assert "schema" in message


def test_an_unknown_kind_is_refused(path: Path, lines: list[str]) -> None:
    lines[1] = lines[1].replace('"kind":"probe"', '"kind":"guess"')
    path.write_text("".join(lines), encoding="utf-8")
    assert "line 2" in damaged(path)


def test_a_kind_that_is_no_text(path: Path, lines: list[str]) -> None:
    lines[1] = lines[1].replace('"kind":"probe"', '"kind":[1]')
    path.write_text("".join(lines), encoding="utf-8")
    assert "line 2" in damaged(path)


@pytest.mark.parametrize("data", [b"", b"\xff\xfe\n"], ids=["empty", "not-utf-8"])
def test_what_is_no_row_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "rows.jsonl").write_bytes(data)
    assert "rows.jsonl" in damaged(tmp_path / "rows.jsonl")


def test_a_missing_file(tmp_path: Path) -> None:
    assert "rows.jsonl" in damaged(tmp_path / "rows.jsonl")


def test_the_first_row_is_the_runs(path: Path, lines: list[str]) -> None:
    path.write_text("".join(lines[1:]), encoding="utf-8")
    assert "line 1" in damaged(path)


# --- attempts and runs ------------------------------------------------------------------------------------------------


def test_the_last_attempt_counts(make_row: Callable[..., ProbeRow]) -> None:
    first, other = make_row(status="INFRA"), make_row("device-hit")
    second = make_row(status="PASS", attempt=2)
    rows: list[AnyRow] = [first, other, second, END]
    assert last_attempts(rows) == [second, other]
    assert last_attempts(list(reversed(rows))) == [second, other]
    assert last_attempts([END]) == []


def test_run_ids_sort_by_time_and_differ() -> None:
    ids = [new_run_id() for _ in range(50)]
    assert len(set(ids)) > 45
    assert [i[:16] for i in ids] == sorted(i[:16] for i in ids)


def test_the_newest_run_that_came_to_its_end(tmp_path: Path, run_row: RunRow, make_row: Callable[..., ProbeRow]) -> None:
    def runs(name: str) -> Path:
        return tmp_path / "runs" / name / "rows.jsonl"

    write(runs("20260101T000000Z-0000"), run_row, make_row(), END)
    write(runs("20260102T000000Z-0000"), run_row.model_copy(update={"suite": "perf"}), END)
    write(runs("20260103T000000Z-0000"), run_row, make_row())
    runs("20260104T000000Z-0000").parent.mkdir()
    runs("20260104T000000Z-0000").write_text("damaged\n", encoding="utf-8")
    assert [p.parent.name for p, _ in newest_runs(tmp_path)] == ["20260102T000000Z-0000", "20260101T000000Z-0000"]
    assert [p.parent.name for p, _ in newest_runs(tmp_path, "conformance")] == ["20260101T000000Z-0000"]
