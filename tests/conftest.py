"""What several files need: made-up cells, rows and observations, bounded waiting, and the pin's environment."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvmatrix import envs
from kvmatrix.arms import Arm, build_arms
from kvmatrix.cells import Cell
from kvmatrix.config import Project, find_project
from kvmatrix.envs import PinEnv
from kvmatrix.errors import KvmatrixError, PatchError
from kvmatrix.patch_files import Meta
from kvmatrix.patch_port import Refreshed, refresh_patch
from kvmatrix.patch_tools import Imported, import_patch, new_patch
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
            "geometry": {"prompt": 81, "prefix": 16, "groups": 2, "hit": True, "resolution": 0.01},
            "status": "PASS",
            "seconds": {"stock": [[2.0, 4.0], [2.0, 2.0]], "fix": [[1.0, 2.0], [1.0, 1.0]]},
            "answers": {"stock": {"external_tokens": 64, "sound": True}, "fix": {"external_tokens": 0, "sound": True}},
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
        "mixed-head-gone": (32, 0, 128, 5),
        "follow-up": (160, 0, 0, 0),
        "corrupted-load": (0, 160, 160, 6),
        "abort-loading": (32, 160, 128, 5),
        "batch": (160, 160, 320, 13),
        "preempted-loading": (32, 160, 288, 16),
    }
    one = {"tokens": [7], "cold_tokens": [7], "max_logprob_error": 1e-6}
    several = {
        "batch": [(32, 128, False), (0, 160, True), (128, 32, True), (0, 0, True)],
        "preempted-loading": [(32, 128, False), (0, 160, True)],
    }

    def make(probe: str = "mixed-misaligned", **changes: Any) -> dict[str, Any]:
        device, cpu, reuse, loads = plans[probe]
        planned = [dict(zip(("device_tokens", "reuse_tokens", "aligned"), r, strict=True)) for r in several.get(probe, ())]
        seen: dict[str, Any] = {"requests": [one | {"cached_tokens": r["device_tokens"] + r["reuse_tokens"]} for r in planned]}
        if probe == "corrupted-load":
            seen = {"damage": [{"group": g, "block": 0, "lost": 1, "tokens": [9], "max_logprob_error": 2.5} for g in (0, 1)]}
        if probe in ("abort-loading", "preempted-loading"):
            seen["states"] = {"a load was on its way": True}
        observed: dict[str, Any] = {
            "probe": probe,
            "plan": {
                "device_tokens": device,
                "cpu_tokens": cpu,
                "reuse_tokens": reuse,
                "needed_loads": loads,
                "gone_blocks": int(probe == "mixed-head-gone"),
                "preemptions": int(probe == "preempted-loading"),
                "requests": planned,
            },
            "tokens": [7],
            "cold_tokens": [7],
            "max_logprob_error": 1e-6,
            "vocab_compared": 512,
            "cached_tokens": device + reuse,
            "counters": {
                "device_hit_tokens": device,
                "external_hit_tokens": reuse,
                "loaded_blocks": loads,
                "preemptions": int(probe == "preempted-loading"),
            },
            "cpu_resident_tokens": cpu,
            "cpu_blocks": [
                [probe != "mixed-head-gone", True, True, True, True],
                [probe != "mixed-head-gone", False, True, True, True],
            ],
            "pending_hits": 0,
            "used_device_blocks": 0,
            "imported": arm.expected,
            "seconds": 0.1,
            "detail": seen,
            **({"logprobs": [[-1.0, -2.0]]} if probe == "cold" else {}),
        }
        for name, value in changes.items():
            part, _, inner = name.partition("__")
            if inner:
                observed[part] = observed[part] | {inner: value}
            else:
                observed[part] = value
        return observed

    return make


def kv_group(kind: str, **changes: Any) -> dict[str, Any]:
    """What an engine says of one KV group."""
    return {"kind": kind, "block_size": 32, "attention_chunk_size": None, "sliding_window": None, "layers": ["0"]} | changes


@pytest.fixture
def engine_facts() -> Callable[..., dict[str, Any]]:
    """What an engine that is as ``make_cell`` asked says of itself; changes go to its ``state`` or ``worker`` part."""

    def make(worker: dict[str, Any] | None = None, **state: Any) -> dict[str, Any]:
        groups = [
            kv_group("ChunkedLocalAttentionSpec", attention_chunk_size=128, layers=["0"]),
            kv_group("FullAttentionSpec", layers=["1"]),
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
            "weights_sha256": "e" * 64,
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


@pytest.fixture(scope="session")
def told_in_env(run_in_env: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., Any]:
    """As ``run_in_env``, without a GPU and with no other plug-in; the code's last line is JSON, and comes back."""

    def told(code: str, stdin: str = "", **variables: str | None) -> Any:
        done = run_in_env(code, stdin, CUDA_VISIBLE_DEVICES="", VLLM_PLUGINS="kvmatrix", **variables)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.strip().splitlines()[-1])

    return told


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


# --- patches on made-up installs --------------------------------------------------------------------------------------

PIN, OLD = "2.0.0", "1.0.0"
PATH, OTHER = "vllm/v1/x.py", "vllm/v1/y.py"
META = Meta("A title", "What it does.", "Why it is right.", "none", "never", "somebody")

BEFORE = """\
from vllm.config import (
    First,
    Second,
)


class Thing:
    def size(self, n):
        total = 0
        for i in range(n):
            total += self.step(i)
        return total

    def step(self, i):
        return i

    def last(self):
        self.done = True
        return self.groups
"""
AFTER = BEFORE.replace("    First,\n", "    Another,\n    First,\n").replace("return i\n", "return i + len(self.groups)\n")
ONE_LINE = BEFORE.replace("return i\n", "return 2 * i\n")


def sha256(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


class Bench:
    """Made-up installs of two pins, a folder for patches, one for edited copies and one for diffs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.patches, self.tree = folder, folder / "patches", folder / "tree"
        self.sites = {PIN: folder / "site-2", OLD: folder / "site-1"}
        for pin in self.sites:
            self.install(pin, BEFORE)
            self.install(pin, BEFORE, OTHER)

    def install(self, pin: str, text: str, path: str = PATH) -> None:
        self.write(self.sites[pin] / path, text)

    def edit(self, text: str, path: str = PATH) -> Path:
        return self.write(self.tree / path, text)

    @staticmethod
    def write(file: Path, text: str | bytes) -> Path:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        return file

    def diff(self, files: dict[str, tuple[str, str]], name: str = "my-fix.diff", head: str = "") -> Path:
        """A diff file as git writes it, of path -> texts before and after."""
        root = self.folder / "diff"
        for path, texts in files.items():
            for side, text in zip("ab", texts, strict=True):
                self.write(root / side / path, text)
        env = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CEILING_DIRECTORIES": str(self.folder)}
        command = ["git", "diff", "--no-index", "--no-prefix", "a", "b"]
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, check=False, timeout=30)
        return self.write(self.folder / name, head.encode() + done.stdout)

    def take(self, diff: Path | None = None, name: str | None = None, **options: object) -> Imported:
        return import_patch(diff or self.diff({PATH: (BEFORE, AFTER)}), self.sites, self.patches, name, **options)

    def new(self, text: str = AFTER, pin: str = PIN, name: str = "fix", meta: Meta | None = META, force: bool = False) -> Path:
        self.edit(text)
        return new_patch(name, pin, self.sites[pin], self.tree, self.patches, meta, force=force).patch_file

    def refresh(self, force: bool = False) -> Refreshed:
        scratch = self.folder / "scratch"
        return refresh_patch(self.patches, "fix", OLD, PIN, self.sites[OLD], self.sites[PIN], force=force, scratch=scratch)

    def patched(self, name: str, pin: str, path: str = PATH) -> str:
        """The file that a run of the patch would load."""
        arms = build_arms({name: self.patches / name}, pin, self.sites[pin], self.folder / "overlays")
        tree = next(p for p in (self.folder / "overlays").glob(f"{pin}-{name}-*") if p.is_dir())
        text = (tree / path).read_text(encoding="utf-8")
        assert arms[1].expected[path.removesuffix(".py").replace("/", ".")] == sha256(text)
        return text

    def state(self) -> dict[str, bytes]:
        return {str(p): p.read_bytes() for site in self.sites.values() for p in site.rglob("*") if p.is_file()}

    def written(self) -> dict[str, bytes]:
        return {str(p.relative_to(self.patches)): p.read_bytes() for p in self.patches.rglob("*") if p.is_file()}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def refused(call: Callable[[], object], kind: type[KvmatrixError] = PatchError) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value).code == kind.code
    assert "\n" not in str(caught.value)
    return str(caught.value)
