"""The real engine on the host device, through the runner: small CPU_ATTN cells, and one engine in vLLM's own processes."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvmatrix import runner
from kvmatrix.arms import Arm, build_arms
from kvmatrix.cells import Cell, Selection, plan_cells
from kvmatrix.config import Level, Project
from kvmatrix.envs import PinEnv
from kvmatrix.errors import ExitCode
from kvmatrix.expectations import Expectations, is_problem
from kvmatrix.probes import SEVERAL
from kvmatrix.processes import ParentPool, parent_env
from kvmatrix.records import CellRow, ProbeRow, RowWriter
from kvmatrix.runner import Context, Progress, run_cells
from kvmatrix.session import exit_code

Rows = dict[tuple[str, str], ProbeRow]
"""By arm and probe."""
STOCK = "stock"
RED = ("mixed-misaligned", "follow-up", "mixed-head-gone")
"""Probes that fail on stock where the fault is, of those that have one request at a time."""
MANAGER = "vllm.v1.simple_kv_offload.manager"
ENGINE_TIMEOUT_S = 240


class Bench:
    """Runs cells with one preloaded parent for all runs, each with a row file of its own."""

    def __init__(self, project: Project, env: PinEnv, home: Path) -> None:
        self.project, self.env, self.home = project, env, home
        self.patch = project.matrix.defaults.patches[0]
        # What vLLM keeps about model classes costs another import of vLLM where it is missing.
        (project.home / "cache").mkdir(parents=True, exist_ok=True)
        (home / "cache").symlink_to(project.home / "cache")
        built = build_arms({self.patch: project.patches / self.patch}, env.pin.version, env.site_packages, home / "overlays")
        self.arms: dict[str, Arm] = {a.name: a for a in built}
        self.pool = ParentPool(home / "logs", project.matrix.budgets.preload_timeout_s)
        self._runs = itertools.count()

    def cells(self, level: Level = "quick") -> list[Cell]:
        selection = Selection(backends=("CPU_ATTN",), modes=("eager",), level=level)
        return plan_cells(self.project.matrix, selection, [STOCK, self.patch])

    def cells_with(self, layers: str) -> list[Cell]:
        """The cells of the first geometry of such a model."""
        selection = Selection(backends=("CPU_ATTN",), modes=("eager",), tiers=("llm",))
        cells = [c for c in plan_cells(self.project.matrix, selection, [STOCK, self.patch]) if c.layers == layers]
        return [c for c in cells if c.prompt == cells[0].prompt]

    def run(self, cells: Sequence[Cell]) -> tuple[list[ProbeRow], list[CellRow]]:
        name = f"run-{next(self._runs)}"
        folder = self.home / name
        with RowWriter(folder / "rows.jsonl") as writer:
            ctx = Context(
                matrix=self.project.matrix,
                run=name,
                folder=folder,
                home=self.home,
                envs={self.env.pin.version: self.env},
                arms={(self.env.pin.version, n): a for n, a in self.arms.items()},
                expectations=Expectations.load(self.project.root / "conformance" / "expectations"),
                writer=writer,
                pool=self.pool,
                compiler_reason=None,
                root=self.project.root,
            )
            rows = run_cells(cells, ctx, 2, Progress())
        lines = (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
        return rows, [CellRow.model_validate_json(line) for line in lines if '"kind":"cell"' in line]


@pytest.fixture(scope="module")
def bench(project: Project, pin_env: PinEnv, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(project, pin_env, tmp_path_factory.mktemp("engine"))
    yield made
    made.pool.close()


def by_name(rows: Sequence[ProbeRow]) -> Rows:
    return {(r.cell["arm"], r.probe): r for r in rows}


def shown(rows: Sequence[ProbeRow]) -> str:
    return "\n".join(f"{r.id}: {r.status} {r.reason}" for r in rows)


@pytest.fixture(scope="module")
def plain(bench: Bench) -> Rows:
    """Both arms of the CPU_ATTN eager cell, as a conformance run has them."""
    rows, cells = bench.run(bench.cells())
    assert [c.status for c in cells] == ["OK", "OK"], shown(rows)
    return by_name(rows)


@pytest.fixture
def with_copy_plan(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[ProbeRow]]:
    """The same cells whose processes have ``KVMATRIX_HOST_COPY`` in their environment."""

    def run(cells: Sequence[Cell] = (), **plan: int | bool) -> list[ProbeRow]:
        original = runner.cell_job

        def job(cell: Cell, ctx: Context) -> dict[str, object]:
            made = original(cell, ctx)
            return made | {"env": made["env"] | {"KVMATRIX_HOST_COPY": json.dumps(plan)}}

        monkeypatch.setattr(runner, "cell_job", job)
        return bench.run(cells or bench.cells())[0]

    return run


# --- what a conformance run shows -------------------------------------------------------------------------------------


def test_stock_fails_where_the_fault_is(plain: Rows) -> None:
    row = plain[STOCK, "mixed-misaligned"]
    assert (row.status, row.expected) == ("FAIL", "FAIL"), row.reason
    assert row.reason.startswith("wrong-output: ")
    assert row.tokens != row.cold_tokens
    assert row.max_logprob_error is not None
    assert row.max_logprob_error > 1
    assert row.external_hit_tokens == row.reuse_tokens, "the hit was claimed whole"


def test_the_patch_is_right_and_pays_with_the_hit(plain: Rows, bench: Bench) -> None:
    row = plain[bench.patch, "mixed-misaligned"]
    assert (row.status, row.expected) == ("PASS", "PASS"), row.reason
    assert row.tokens == row.cold_tokens == plain[STOCK, "mixed-misaligned"].cold_tokens
    assert (row.device_hit_tokens, row.external_hit_tokens) == (row.cell["prefix"], 0)


def test_everything_else_passes_on_both_arms(plain: Rows, project: Project) -> None:
    others = [r for (_, probe), r in plain.items() if probe not in RED]
    assert len(others) == 2 * (len(project.matrix.llm.probes) - len(SEVERAL) - len(RED))
    assert {r.status for r in others} == {"PASS"}, shown(others)
    assert exit_code(list(plain.values())) is ExitCode.OK
    for (_, probe), row in plain.items():
        if probe in ("pure-cpu-hit", "mixed-aligned"):
            assert row.external_hit_tokens == row.reuse_tokens
            assert row.loaded_blocks == row.needed_loads


def test_cold_is_what_transformers_answers(plain: Rows, project: Project, bench: Bench) -> None:
    for arm in (STOCK, bench.patch):
        error = plain[arm, "cold"].reference_error
        assert error is not None
        assert 0 < error <= project.matrix.tolerances["float32"].max_reference_error


def test_each_row_proves_what_ran(plain: Rows, bench: Bench) -> None:
    for (arm, _), row in plain.items():
        assert row.imported == bench.arms[arm].expected
        assert row.resolved["backend"] == "CPU_ATTN"
        assert set(row.resolved["kv_groups"]) == {"FullAttentionSpec", "ChunkedLocalAttentionSpec"}
    assert plain[STOCK, "cold"].imported != plain[bench.patch, "cold"].imported


def test_who_comes_after_a_corrupt_hit_is_served_it_too(plain: Rows, bench: Bench) -> None:
    row = plain[STOCK, "follow-up"]
    assert (row.status, row.expected) == ("FAIL", "FAIL"), row.reason
    assert (row.device_hit_tokens, row.external_hit_tokens, row.loaded_blocks) == (160, 0, 0), "nothing but the device's cache"
    assert row.tokens == plain[STOCK, "mixed-misaligned"].tokens != row.cold_tokens
    assert plain[bench.patch, "follow-up"].tokens == row.cold_tokens


def test_the_loss_of_any_group_is_noticed(plain: Rows, bench: Bench) -> None:
    for arm in (STOCK, bench.patch):
        damage = plain[arm, "corrupted-load"].detail["damage"]
        assert [d["group"] for d in damage] == [0, 1]
        assert all(d["lost"] == 1 and d["max_logprob_error"] > 0.5 for d in damage)


def test_cold_answers_were_compared(plain: Rows, bench: Bench) -> None:
    compared = sorted(plain[arm, "cold"].detail["agreement"]["cells"] for arm in (STOCK, bench.patch))
    assert compared == [0, 1]


@pytest.fixture(scope="module", params=["eager", "lazy", "disk"])
def several(bench: Bench, request: pytest.FixtureRequest) -> Rows:
    """Both arms of a cell with several requests at once, in each offload mode."""
    cells = [c for c in bench.cells("full") if c.several and c.chunk == 128 and c.layers == "cf" and c.dtype == "float32"]
    chosen = {(c.arm): c.model_copy(update={"offload": request.param}) for c in cells if c.hit_class == "corrupt"}
    rows, ended = bench.run(list(chosen.values()))
    assert [c.status for c in ended] == ["OK", "OK"], shown(rows)
    return by_name(rows)


def test_several_requests_at_once(several: Rows, bench: Bench) -> None:
    assert not [r.reason for r in several.values() if is_problem(r)], shown(list(several.values()))
    red = {probe for (arm, probe), r in several.items() if arm == STOCK and r.status == "FAIL"}
    assert red == {*RED, *SEVERAL}
    patched = {probe: r for (arm, probe), r in several.items() if arm == bench.patch}
    assert {r.status for r in patched.values()} == {"PASS"}
    assert [r["max_logprob_error"] < 0.005 for r in patched["batch"].detail["requests"]] == [True] * 4
    assert list(patched["preempted-loading"].detail["states"].values()) == [True, True]
    assert list(patched["abort-loading"].detail["states"].values()) == [True]
    stock = several[STOCK, "batch"].detail["requests"]
    assert [r["tokens"] == r["cold_tokens"] for r in stock] == [False, True, True, True], "the other three are right"


def test_nothing_is_left_of_a_disk_tier(several: Rows, bench: Bench) -> None:
    assert not list(bench.home.rglob("*.rank_*"))


def test_a_model_with_sliding_windows_is_a_control(bench: Bench) -> None:
    """Every arm keeps the whole hit of a prefix that ends inside the window, and no more blocks than the window needs."""
    rows, cells = bench.run(bench.cells_with("sf"))
    assert [c.status for c in cells] == ["OK", "OK"], shown(rows)
    assert {r.status for r in rows} == {"PASS"}, shown(rows)
    found = by_name(rows)
    for arm in (STOCK, bench.patch):
        row = found[arm, "mixed-misaligned"]
        assert set(row.resolved["kv_groups"]) == {"SlidingWindowSpec", "FullAttentionSpec"}
        assert (row.device_hit_tokens, row.external_hit_tokens) == (96, 64)
        assert row.loaded_blocks == row.needed_loads == 2 + 2
        assert found[arm, "pure-cpu-hit"].loaded_blocks == 5 + 3
        assert 0 < (found[arm, "cold"].reference_error or 0) <= bench.project.matrix.tolerances["float32"].max_reference_error


def test_two_chunk_sizes_in_one_model(bench: Bench) -> None:
    rows, cells = bench.run(bench.cells_with("cdf"))
    assert [c.status for c in cells] == ["OK", "OK"], shown(rows)
    assert not any(map(is_problem, rows)), shown(rows)
    found = by_name(rows)
    stock, patched = found[STOCK, "mixed-misaligned"], found[bench.patch, "mixed-misaligned"]
    assert stock.resolved["attention_chunk_size"] == [64, 128]
    assert (stock.status, patched.status) == ("FAIL", "PASS")
    assert (stock.max_logprob_error or 0) > 1
    assert 0 < (found[STOCK, "cold"].reference_error or 0) <= bench.project.matrix.tolerances["float32"].max_reference_error


def test_what_vllm_refuses_is_no_crash(bench: Bench) -> None:
    """There is no full-attention group, which an assertion without a message says."""
    rows, _ = bench.run(bench.cells_with("cc"))
    assert {(r.status, r.expected) for r in rows} == {("UNSUPPORTED", "UNSUPPORTED")}, shown(rows)
    assert rows[0].reason.startswith("refused: AssertionError: assert 0 <= self.fa_gidx")


def test_a_device_that_is_overwritten_directly(plain: Rows, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a forward pass takes seconds: the same verdicts, with a filler request for each time that it is emptied."""
    monkeypatch.setattr(runner, "is_slow", lambda cell: True)
    rows, cells = bench.run(bench.cells())
    assert {k: r.status for k, r in by_name(rows).items()} == {k: r.status for k, r in plain.items()}, shown(rows)
    assert {c.filler_requests for c in cells} == {2 + 1 + 1 + 1 + 1}, "two lost blocks, and four hits that were made"
    wrong = by_name(rows)[STOCK, "mixed-misaligned"]
    assert wrong.max_logprob_error != plain[STOCK, "mixed-misaligned"].max_logprob_error, (
        "what was not loaded holds other things"
    )


# --- copies that misbehave --------------------------------------------------------------------------------------------


def test_a_corrupted_load_turns_its_probe_red(with_copy_plan: Callable[..., list[ProbeRow]], bench: Bench) -> None:
    """Blocks of zeros, in all loads that an engine makes."""
    rows = with_copy_plan(zero_loads=1000)
    found = by_name(rows)
    for arm in (STOCK, bench.patch):
        row = found[arm, "pure-cpu-hit"]
        assert row.status == "FAIL", shown(rows)
        assert row.reason.startswith("wrong-output: ")
        assert is_problem(row)
        assert {found[arm, p].status for p in ("cold", "device-hit", "corrupted-load")} == {"PASS"}
    assert exit_code(rows) is ExitCode.UNEXPECTED


def test_a_corrupted_load_of_a_sliding_window(with_copy_plan: Callable[..., list[ProbeRow]], bench: Bench) -> None:
    found = by_name(with_copy_plan(bench.cells_with("sf"), zero_loads=1000))
    for arm in (STOCK, bench.patch):
        row = found[arm, "pure-cpu-hit"]
        assert row.status == "FAIL", shown(list(found.values()))
        assert (row.max_logprob_error or 0) > 1


def test_late_and_reordered_copies_change_nothing(with_copy_plan: Callable[..., list[ProbeRow]], plain: Rows) -> None:
    rows = with_copy_plan(hold_polls=3, delay_polls=2, reorder=True)
    assert not [r.reason for r in rows if is_problem(r)], shown(rows)
    assert {k: (r.status, r.tokens, r.cached_tokens) for k, r in by_name(rows).items()} == {
        k: (r.status, r.tokens, r.cached_tokens) for k, r in plain.items()
    }


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "unchanged"], ids=["empty", "without-effect"])
def test_a_patch_without_a_change_never_counts_as_one(
    copy_project: Callable[[], Path],
    borrow: Callable[[Path], Path],
    pin_env: PinEnv,
    tmp_path: Path,
    project: Project,
    text: str,
) -> None:
    root, patch = copy_project(), project.matrix.defaults.patches[0]
    file = root / "patches" / patch / f"{pin_env.pin.version}.patch"
    if text == "unchanged":
        file.write_text(_takes_a_line_out_and_puts_it_back(pin_env), encoding="utf-8")
    else:
        file.write_text("", encoding="utf-8")
    home = borrow(tmp_path / "home")
    command = [sys.executable, "-m", "kvmatrix.cli", "conformance", "--backend", "CPU_ATTN", "--mode", "eager"]
    environ = os.environ | {"KVMATRIX_ROOT": str(root), "KVMATRIX_HOME": str(home)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=ENGINE_TIMEOUT_S, check=False)
    assert done.returncode == ExitCode.PATCH == 10, done.stdout + done.stderr
    assert done.stderr.splitlines()[-1].startswith("kvmatrix: error: ")
    assert f"{patch}/{file.name}" in done.stderr
    assert not list(home.rglob("rows.jsonl"))
    assert str(root) not in (pin_env.site_packages / "kvmatrix.pth").read_text(encoding="utf-8"), "the shared one was linked"


def _takes_a_line_out_and_puts_it_back(env: PinEnv) -> str:
    path = MANAGER.replace(".", "/") + ".py"
    first = (env.site_packages / path).read_text(encoding="utf-8").splitlines()[0]
    return f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-{first}\n+{first}\n"


# --- vLLM's own processes ---------------------------------------------------------------------------------------------

SCRIPT = """
import json
import sys

from kvmatrix import checkpoint, overlay
from kvmatrix.engine import Engine, EngineConfig
from kvmatrix.probes import ProbeRunner


def main() -> None:
    job = json.loads(sys.argv[1])
    model = checkpoint.ensure(job["checkpoint"], job["checkpoints"])
    geometry, cell = job["geometry"], job["cell"]
    engine = Engine(
        EngineConfig(
            model=model,
            backend=cell["backend"],
            mode="eager",
            block_size=cell["block"],
            dtype="float32",
            max_model_len=geometry["max_model_len"],
            vocab_size=job["checkpoint"]["vocab_size"],
            num_gpu_blocks=geometry["num_gpu_blocks"],
            cpu_bytes=geometry["cpu_bytes"],
        )
    )
    state = engine.state()
    probes = ProbeRunner(engine, geometry, state["groups"])
    seen = list(probes.run(["pure-cpu-hit", "mixed-misaligned", "mixed-head-gone"], on_start=lambda name: None))
    here = {"imported": overlay.imported_digests(), "in_process": hasattr(engine.llm.llm_engine.engine_core, "engine_core")}
    copied = engine.worker_state()["copied_blocks"]
    print(json.dumps({"state": state["imported"], "here": here, "seen": seen, "copied": copied}), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
"""


def test_an_engine_core_in_a_process_of_its_own(bench: Bench, tmp_path: Path) -> None:
    """Spawned, not forked: only the environment can tell it which arm it is and what its device is."""
    cell = next(c for c in bench.cells() if c.arm == bench.patch)
    llm = bench.project.matrix.llm
    job = {
        "cell": cell.model_dump(),
        "checkpoints": str(bench.home / "checkpoints"),
        "checkpoint": {"chunk": cell.chunk, "layers": cell.layers, "vocab_size": llm.vocab_size},
        "geometry": runner.llm_geometry(cell.prompt, cell.prefix, cell.block, cell.kv_groups, llm.new_tokens)
        | {"slow": False, "seed": llm.seed, "cpu_bytes": llm.cpu_bytes},
    }
    script = tmp_path / "own_process.py"
    script.write_text(SCRIPT, encoding="utf-8")
    environ = os.environ | parent_env("host", cell.backend) | bench.env.variables
    environ |= {
        "KVMATRIX_OVERLAY": str(bench.arms[cell.arm].manifest),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
        "VLLM_CACHE_ROOT": str(bench.home / "cache" / bench.env.name / "vllm"),
        "TORCHDYNAMO_DISABLE": "1",
    }
    done = subprocess.run(
        [str(bench.env.python), str(script), json.dumps(job)],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=ENGINE_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"state"')))
    assert told["here"]["in_process"] is False
    assert told["state"] == bench.arms[cell.arm].expected
    pure, mixed, gone = told["seen"]
    assert pure["counters"]["external_hit_tokens"] == pure["plan"]["reuse_tokens"] > 0
    assert told["copied"]["load"] >= pure["counters"]["loaded_blocks"] > 0
    assert told["copied"]["store"] > 0
    assert mixed["counters"]["external_hit_tokens"] == gone["counters"]["external_hit_tokens"] == 0
    head = gone["plan"]["gone_blocks"]
    assert [any(group[:head]) for group in gone["cpu_blocks"]] == [False, False]
    assert all(all(group) for group in mixed["cpu_blocks"])
    assert gone["cpu_resident_tokens"] == 0 < mixed["cpu_resident_tokens"]
    for probe in told["seen"]:
        assert probe["tokens"] == probe["cold_tokens"]
        assert probe["max_logprob_error"] <= bench.project.matrix.tolerances["float32"].max_logprob_error


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_the_same_wherever_it_is_made(
    run_in_env: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = run_in_env(
        f"""
import hashlib, json, pathlib, torch
from kvmatrix import checkpoint
made = []
for cache, seed in (("one", 0), ("two", 0), ("two", 1)):
    torch.manual_seed(len(made))
    folder = checkpoint.ensure({{"chunk": 64, "seed": seed}}, {str(tmp_path)!r} + "/" + cache)
    weights = pathlib.Path(folder, "model.safetensors").read_bytes()
    made.append([pathlib.Path(folder).name, checkpoint.weights_sha256(folder), hashlib.sha256(weights).hexdigest()])
again = checkpoint.ensure({{"chunk": 64}}, {str(tmp_path)!r} + "/one")
print(json.dumps([made, pathlib.Path(again).name]))
"""
    )
    assert done.returncode == 0, done.stderr
    (one, two, other), again = json.loads(done.stdout.splitlines()[-1])
    assert one == two
    assert one[1] == one[2]
    assert one[0] == again
    assert other[0] != one[0]
    assert other[1] != one[1]
    assert not list(tmp_path.rglob(".making-*"))
