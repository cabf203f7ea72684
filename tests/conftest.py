"""What several files need: made-up cells, rows and observations, bounded waiting, and the pin's environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvmatrix import envs
from kvmatrix.arms import Arm
from kvmatrix.cells import Cell
from kvmatrix.config import Project, find_project
from kvmatrix.envs import PinEnv
from kvmatrix.records import PerfRow, ProbeRow, RunRow

ROOT = Path(__file__).resolve().parents[1]
RUN = "20260101T000000Z-abcd"
MODULE = "vllm.v1.simple_kv_offload.manager"
SNIPPET_TIMEOUT_S = 120
SETTINGS = ("KVMATRIX_ROOT", "KVMATRIX_OVERLAY", "KVMATRIX_HOST_COPY")
QUIET = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


@pytest.fixture(autouse=True)
def _no_settings_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def project() -> Project:
    return find_project(ROOT)


@pytest.fixture
def until() -> Callable[..., None]:
    """Waits for a condition, and fails when it does not come true in time."""

    def wait(condition: Callable[[], bool], timeout: float = 20) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"not true within {timeout:g} s"
            time.sleep(0.01)

    return wait


# --- made-up facts ----------------------------------------------------------------------------------------------------


@pytest.fixture
def make_cell() -> Callable[..., Cell]:
    def make(**changes: Any) -> Cell:
        fields = {"tier": "llm", "pin": "0.32.0", "device": "host", "arm": "stock", "chunk": 128, "block": 32, "prompt": 161}
        if changes.get("tier", "llm") == "llm":
            fields |= {"backend": "CPU_ATTN", "mode": "eager", "prefix": 32}
        return Cell(**fields | changes)

    return make


@pytest.fixture
def make_row(make_cell: Callable[..., Cell]) -> Callable[..., ProbeRow]:
    """A probe row of ``make_cell``'s cell; ``cell`` changes that cell."""

    def make(probe: str = "cold", status: str = "PASS", cell: dict[str, Any] | None = None, **changes: Any) -> ProbeRow:
        of = make_cell(**cell or {})
        return ProbeRow(
            **{"run": RUN, "id": f"{of.id}-{probe}", "cell": of.model_dump(), "probe": probe, "status": status} | changes
        )

    return make


@pytest.fixture
def make_perf_row() -> Callable[..., PerfRow]:
    def make(**changes: Any) -> PerfRow:
        fields: dict[str, Any] = {
            "run": RUN,
            "id": "lookup",
            "group": "lookup",
            "workload": "p81-d16",
            "geometry": {"prompt": 81, "prefix": 16},
            "status": "PASS",
            "seconds": {"stock": [2.0, 4.0], "fix": [1.0, 2.0]},
            "answers": {"stock": {"external_tokens": 64}, "fix": {"external_tokens": 0}},
        }
        return PerfRow(**fields | changes)

    return make


@pytest.fixture
def run_row() -> RunRow:
    machine = {"cpu": "a CPU", "cores": 2, "memory_gib": 8.0, "architecture": "x86_64", "kernel": "6.1", "libc": "glibc 2.36"}
    facts = {
        "kvmatrix": "0.1.0",
        "machine": machine,
        "compiler": {"version": "g++ 12", "reason": None},
        "pins": {"0.32.0": {"device": "host", "torch": "2.13.0"}},
    }
    return RunRow(run=RUN, suite="conformance", started="2026-01-01T00:00:00Z", argv=[], facts=facts, planned=[])


@pytest.fixture
def arm() -> Arm:
    return Arm(name="fix", pin="0.32.0", manifest=Path("overlay.json"), patch_sha256="a" * 64, expected={MODULE: "b" * 64})


@pytest.fixture
def observe(arm: Arm) -> Callable[..., dict[str, Any]]:
    """What a child reports of a probe that went well; ``plan.x`` and ``counters.x`` change one nested fact."""
    plans = {
        "cold": (0, 0, 0, 0),
        "device-hit": (160, 160, 0, 0),
        "pure-cpu-hit": (0, 160, 160, 6),
        "mixed-aligned": (128, 160, 32, 2),
        "mixed-misaligned": (32, 160, 128, 5),
    }

    def make(probe: str = "mixed-misaligned", **changes: Any) -> dict[str, Any]:
        device, cpu, reuse, loads = plans[probe]
        observed: dict[str, Any] = {
            "probe": probe,
            "plan": {"device_tokens": device, "cpu_tokens": cpu, "reuse_tokens": reuse, "needed_loads": loads},
            "tokens": [7],
            "cold_tokens": [7],
            "max_logprob_error": 1e-6,
            "vocab_compared": 512,
            "cached_tokens": device + reuse,
            "counters": {
                "device_hit_tokens": device,
                "external_hit_tokens": reuse,
                "loaded_blocks": loads,
                "preemptions": 0,
            },
            "cpu_resident_tokens": cpu,
            "pending_hits": 0,
            "imported": arm.expected,
            "seconds": 0.1,
        }
        for name, value in changes.items():
            part, _, inner = name.partition("__")
            if inner:
                observed[part] = observed[part] | {inner: value}
            else:
                observed[part] = value
        return observed

    return make


@pytest.fixture
def engine_facts() -> Callable[..., dict[str, Any]]:
    """What an engine that is as ``make_cell`` asked says of itself; changes go to its ``state`` or ``worker`` part."""

    def make(worker: dict[str, Any] | None = None, **state: Any) -> dict[str, Any]:
        groups = [
            {"kind": "ChunkedLocalAttentionSpec", "block_size": 32, "attention_chunk_size": 128, "layers": ["0"]},
            {"kind": "FullAttentionSpec", "block_size": 32, "attention_chunk_size": None, "layers": ["1"]},
        ]
        return {
            "state": {
                "groups": groups,
                "num_gpu_blocks": 16,
                "block_size": 32,
                "cache_dtype": "auto",
                "dtype": "float32",
                "enforce_eager": True,
                "compilation_mode": "NONE",
                "cudagraph_mode": "NONE",
                "max_num_seqs": 4,
                "offload": {"mode": "eager"},
            }
            | state,
            "worker": {"backends": {"0": "CPU_ATTN", "1": "CPU_ATTN"}, "compiled": 0} | (worker or {}),
            "start_seconds": 1.0,
        }

    return make


# --- the pin's environment --------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def pin_env(project: Project) -> PinEnv:
    """The default pin's environment, with the real vLLM. Built when it is not there, which takes minutes."""
    defaults = project.matrix.defaults
    return envs.ensure(project, project.matrix.pin(defaults.pin, defaults.device), print)


@pytest.fixture(scope="session")
def borrow(pin_env: PinEnv) -> Callable[[Path], Path]:
    """Gives a folder the pin's environment by links, for use as ``KVMATRIX_HOME``.

    A run there leaves no rows among the user's own, and another project's root can be linked without touching theirs.
    """

    def make(home: Path) -> Path:
        target = home / "envs" / pin_env.name
        site_packages = target / pin_env.site_packages.relative_to(pin_env.path)
        site_packages.mkdir(parents=True)
        for entry in pin_env.site_packages.iterdir():
            if not entry.name.startswith("kvmatrix"):
                (site_packages / entry.name).symlink_to(entry)
        for name in ("bin", "lib/system", "pyvenv.cfg", envs.MARKER, envs.LOCK_COPY):
            if (pin_env.path / name).exists():
                (target / name).symlink_to(pin_env.path / name)
        return home

    return make


@pytest.fixture(scope="session")
def run_in_env(pin_env: PinEnv, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python code in the environment's interpreter; keyword arguments are variables, None unsets one."""
    work = tmp_path_factory.mktemp("in-env")

    def run(code: str, stdin: str = "", **variables: str | None) -> subprocess.CompletedProcess[str]:
        changes = {**dict.fromkeys(SETTINGS), **QUIET, **pin_env.variables, **variables}
        environ = {k: v for k, v in {**os.environ, **changes}.items() if v is not None}
        command = [str(pin_env.python), "-c", code]
        return subprocess.run(
            command, cwd=work, env=environ, input=stdin, capture_output=True, text=True, timeout=SNIPPET_TIMEOUT_S, check=False
        )

    return run


@pytest.fixture
def copy_project(tmp_path: Path) -> Callable[[], Path]:
    """A copy of the project without what is built, downloaded or published."""

    def copy() -> Path:
        target = tmp_path / "project"
        target.mkdir()
        for name in ("matrix.toml", "pyproject.toml"):
            shutil.copy(ROOT / name, target)
        for name in ("kvmatrix", "conformance", "perf", "patches", "envs"):
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        return target

    return copy
