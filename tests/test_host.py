"""The host device's parts, in the pin's own environment: the copy backend, the cache-write op and the plug-ins."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

RunInEnv = Callable[..., subprocess.CompletedProcess[str]]

# Two tiers of six blocks of four bytes in two layers. Device block i holds 10 + i, host block i holds 50 + i.
BACKEND = """
import time, torch
from kvmatrix.host.copy import HostCopyBackend

def tier(first):
    blocks = torch.arange(first, first + 6, dtype=torch.int8).repeat_interleave(4).reshape(6, 4)
    return {"a": blocks.clone(), "b": blocks.clone()}

gpu, cpu, events = tier(10), tier(50), []
backend = HostCopyBackend()
backend.init(gpu, cpu, torch.device("cpu"), None, None)

def launch(src, dst, is_store):
    backend.launch_copy(src, dst, is_store, len(events), events)
    wanted, end = len(events) + 1, time.monotonic() + 20
    while len(events) < wanted:
        assert time.monotonic() < end, "no event"
        time.sleep(0.001)
    return events[-1][1]

def done(event):
    end = time.monotonic() + 20
    while not event.query():
        assert time.monotonic() < end, "never done"

def shown(tier):
    assert all(torch.equal(tier["a"], layer) for layer in tier.values())
    assert torch.equal(tier["a"], tier["a"][:, :1].expand(6, 4))
    return tier["a"][:, 0].tolist()
"""

# Each scenario has a namespace of its own; what it binds to `out`, or its exception, comes back.
RUN_ALL = """
import json, os, sys
answers = {}
for name, scenario in json.loads(sys.stdin.read()).items():
    os.environ["KVMATRIX_HOST_COPY"] = json.dumps(scenario["plan"])
    space = {}
    try:
        exec(scenario["setup"] + scenario["code"], space)
        answers[name] = space["out"]
    except Exception as e:
        answers[name] = f"{type(e).__name__}: {e}"
    if "backend" in space:
        space["backend"].shutdown()
print(json.dumps(answers))
"""


@dataclass(frozen=True)
class Scenario:
    code: str
    expected: Any
    plan: dict[str, Any] = field(default_factory=dict)
    setup: str = BACKEND


TWO_STORES_INTO_ONE_BLOCK = """
first, load, second = launch([1], [0], True), launch([3], [5], False), launch([2], [0], True)
untouched = shown(gpu)[5]
done(first)
out = [untouched, shown(gpu)[5]]
done(second)
done(load)
out += [shown(cpu)[0], shown(gpu)[5]]
"""

SCENARIOS = {
    "blocks move between the tiers": Scenario(
        """
done(launch([1, 4], [0, 5], True))
done(launch([2], [3], False))
out = [shown(gpu), shown(cpu), backend.copied_blocks]
""",
        [[10, 11, 12, 52, 14, 15], [11, 51, 52, 53, 54, 14], {"load": 1, "store": 2}],
    ),
    "a held copy moves at its last poll and not before": Scenario(
        """
event = launch([1], [0], True)
out = [[shown(cpu)[0], event.query(), shown(cpu)[0]] for _ in range(4)]
""",
        [[50, False, 50], [50, False, 50], [50, True, 11], [11, True, 11]],
        {"hold_polls": 3},
    ),
    "a delayed event comes after its bytes": Scenario(
        """
event = launch([1], [0], True)
out = [shown(cpu)[0], *(event.query() for _ in range(4))]
""",
        [11, False, False, True, True],
        {"delay_polls": 2},
    ),
    "held and delayed": Scenario(
        """
event = launch([1], [0], True)
out = [[event.query(), shown(cpu)[0]] for _ in range(4)]
""",
        [[False, 50], [False, 11], [True, 11], [True, 11]],
        {"hold_polls": 2, "delay_polls": 1},
    ),
    "waiting for an event moves its bytes": Scenario(
        """
event = launch([1], [0], True)
event.synchronize()
out = shown(cpu)[0]
""",
        11,
        {"hold_polls": 1000},
    ),
    "held copies run in their order": Scenario(TWO_STORES_INTO_ONE_BLOCK, [15, 15, 12, 53], {"hold_polls": 1}),
    "reordered copies run newest first within their direction": Scenario(
        TWO_STORES_INTO_ONE_BLOCK, [15, 15, 11, 53], {"hold_polls": 1, "reorder": True}
    ),
    "the first loaded blocks arrive as zeros": Scenario(
        """
done(launch([1], [1], True))
done(launch([2, 3], [2, 3], False))
done(launch([4, 5], [4, 5], False))
out = [shown(gpu), shown(cpu)[1]]
""",
        [[10, 11, 0, 0, 0, 55], 11],
        {"zero_loads": 3},
    ),
    "a named block is lost at its next load, and once": Scenario(
        """
backend.loads.lose(3)
done(launch([1], [3], True))
done(launch([2, 3], [2, 3], False))
done(launch([3], [4], False))
out = [shown(gpu), backend.loads.lost_blocks]
""",
        [[10, 11, 52, 0, 11, 15], 1],
    ),
    "held loads wait, stores do not": Scenario(
        """
backend.loads.hold()
load, store = launch([2], [2], False), launch([1], [0], True)
done(store)
out = [load.query(), shown(gpu)[2], shown(cpu)[0]]
backend.loads.release()
done(load)
out += [shown(gpu)[2], launch([4], [4], False) is not None]
""",
        [False, 12, 11, 52, True],
    ),
    "who waits for a held load has it": Scenario(
        """
backend.loads.hold()
load = launch([2], [2], False)
load.synchronize()
out = [shown(gpu)[2], load.query()]
""",
        [52, True],
    ),
    "a plan with an unknown field is refused": Scenario(
        "", "ValueError: KVMATRIX_HOST_COPY: unknown field 'surprise'", {"surprise": 1}
    ),
    "a worker of any release gets the copy backend and no pinned memory": Scenario(
        """
import sys, types
from kvmatrix.host import copy

def fitted(**content):
    path, parent = "vllm.v1.simple_kv_offload.worker", None
    for name in ("vllm", "vllm.v1", "vllm.v1.simple_kv_offload", path):
        sys.modules[name] = types.ModuleType(name)
        if parent:
            setattr(parent, name.rpartition(".")[2], sys.modules[name])
        parent = sys.modules[name]
    vars(parent).update(content)
    copy.patch_worker()
    for name in ("vllm", "vllm.v1", "vllm.v1.simple_kv_offload", path):
        del sys.modules[name]
    assert parent.DmaCopyBackend is copy.HostCopyBackend
    return parent

old, new = fitted(is_pin_memory_available=lambda: True), fitted(PIN_MEMORY=True)
out = [old.is_pin_memory_available(), hasattr(old, "PIN_MEMORY"), new.PIN_MEMORY, hasattr(new, "is_pin_memory_available")]
""",
        [False, False, False, False],
        setup="",
    ),
    "kernels are not warmed up, in releases that would": Scenario(
        """
import sys, types
from types import SimpleNamespace
from kvmatrix.host import triton_cpu

class CpuPlatform:
    @classmethod
    def check_and_update_config(cls, vllm_config):
        vllm_config.checked_by.append(cls.__name__)

names = ("vllm", "vllm.platforms", "vllm.platforms.cpu")
before = {n: sys.modules.pop(n) for n in list(sys.modules) if n.partition(".")[0] == "vllm"}
for name in names:
    sys.modules[name] = types.ModuleType(name)
sys.modules["vllm.platforms.cpu"].CpuPlatform = CpuPlatform
triton_cpu.skip_kernel_warmup()
triton_cpu.skip_kernel_warmup()
for name in names:
    del sys.modules[name]
sys.modules.update(before)
kernels = [SimpleNamespace(enable_jit_warmup=True), SimpleNamespace(), None]
configs = [SimpleNamespace(checked_by=[], kernel_config=k) for k in kernels] + [SimpleNamespace(checked_by=[])]
for config in configs:
    CpuPlatform.check_and_update_config(config)
out = [vars(kernels[0]), vars(kernels[1]), [c.checked_by for c in configs]]
""",
        [{"enable_jit_warmup": False}, {}, [["CpuPlatform"]] * 4],
        setup="",
    ),
    "the cache-write op does what a plain loop does": Scenario(
        """
import torch
from kvmatrix.host import ops
ops.define_missing()
ops.define_missing()
torch.manual_seed(0)
blocks, size, heads, width, padded = 5, 16, 2, 8, 12
slots = torch.tensor([0, 79, -1, 17, 31, 32, -1, 5, 64])
key, value = (torch.randn(padded, heads, width) for _ in range(2))
got = [torch.zeros(blocks, size, heads, width) for _ in range(2)]
wanted = [torch.zeros_like(g) for g in got]
for source, cache in zip((key, value), wanted):
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            cache[slot // size, slot % size] = source[token]
one = torch.ones(1)
torch.ops._C_cache_ops.reshape_and_cache_flash(key, value, *got, slots, "auto", one, one)
out = [torch.equal(*pair) for pair in zip(got, wanted)] + [torch.equal(*got)]
""",
        [True, True, False],
        setup="",
    ),
    "the cache-write op does not quantise": Scenario(
        """
import torch
from kvmatrix.host import ops
ops.define_missing()
cache, one = torch.zeros(1, 16, 1, 8), torch.ones(1)
torch.ops._C_cache_ops.reshape_and_cache_flash(cache[0], cache[0], cache, cache, torch.tensor([0]), "fp8", one, one)
""",
        "ValueError: host reshape_and_cache_flash does not support kv_cache_dtype 'fp8'",
        setup="",
    ),
}


@pytest.fixture(scope="module")
def answers(run_in_env: RunInEnv) -> dict[str, Any]:
    """Of all scenarios, from one process: importing torch is what takes the time."""
    sent = {n: {"plan": s.plan, "setup": s.setup, "code": s.code} for n, s in SCENARIOS.items()}
    done = run_in_env(RUN_ALL, stdin=json.dumps(sent))
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_parts(answers: dict[str, Any], name: str) -> None:
    assert answers[name] == SCENARIOS[name].expected


def test_entry_points(run_in_env: RunInEnv) -> None:
    done = run_in_env("""
from importlib.metadata import entry_points
for group in ("vllm.platform_plugins", "vllm.general_plugins"):
    print(group, *(e.value for e in entry_points(group=group, name="kvmatrix")))
""")
    assert done.stdout.splitlines() == [
        "vllm.platform_plugins kvmatrix.plugin:platform",
        "vllm.general_plugins kvmatrix.plugin:general",
    ]


def test_the_plug_ins_change_nothing_where_there_is_a_gpu(run_in_env: RunInEnv) -> None:
    """And they do turn the same process into the host device once there is none: the check can fail."""
    done = run_in_env(
        """
import json, os, torch
gpu = True
torch.cuda.is_available = lambda: gpu
import triton.backends
from kvmatrix import plugin
plugin.platform()
import vllm.v1.simple_kv_offload.worker as worker
from vllm.platforms.cpu import CpuPlatform

def state():
    return [
        "cpu" in triton.backends.backends,
        worker.torch is torch,
        worker.DmaCopyBackend.__module__.partition(".")[0],
        CpuPlatform.get_attn_backend_cls.__module__.partition(".")[0],
        hasattr(torch.ops._C_cache_ops, "reshape_and_cache_flash"),
    ]

states = [state()]
plugin.general()
states.append(state())
gpu = False
plugin.platform()
del os.environ["TRITON_INTERPRET"]
plugin.general()
states.append(state())
print(json.dumps(states))
""",
        TRITON_INTERPRET="1",
        CUDA_VISIBLE_DEVICES=None,
    )
    assert done.returncode == 0, done.stderr
    before, with_gpu, without = json.loads(done.stdout.splitlines()[-1])
    assert with_gpu == before
    assert before[:4] == [False, True, "vllm", "vllm"]
    assert without[:3] == [True, False, "kvmatrix"]
