"""Facts of a run: machine, versions and hashes. Nothing personal: no host or user names, and no paths."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import kvmatrix

RELEVANT_VARIABLES = ("OMP_NUM_THREADS", "CXX", "UV_TORCH_BACKEND", "KVMATRIX_INSTALLER", "KVMATRIX_HOST_COPY")


def machine_facts() -> dict[str, Any]:
    """CPU model, cores this process may use, memory in GiB, kernel and C library."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()).strip(),
    }


def run_facts(argv: list[str]) -> dict[str, Any]:
    """What every run row holds besides its pins' facts."""
    return {
        "kvmatrix": kvmatrix.__version__,
        "machine": machine_facts(),
        "compiler": compiler_facts(),
        "git": first_line(["git", "--version"]),
        "variables": {n: without_folders(os.environ[n]) for n in RELEVANT_VARIABLES if n in os.environ},
        "arguments": [without_folders(a) for a in argv],
    }


def compiler_facts() -> dict[str, Any]:
    """What torch.compile needs on a CPU: a C++ compiler and Python's headers; ``reason`` says what is missing."""
    compiler = os.environ.get("CXX") or "g++"
    found = shutil.which(compiler)
    headers = (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()
    version = first_line([found, "--version"]) if found else None
    reason = None
    if not found:
        reason = "no C++ compiler (g++) is installed"
    elif not headers:
        reason = "Python's C headers (Python.h, python3-dev) are not installed"
    return {"version": version, "reason": reason}


def first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next(iter(done.stdout.splitlines()), None)


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1) if match else platform.processor()


def without_folders(argument: str) -> str:
    """A command-line argument or a variable's value with every path cut to its last part."""
    option, sep, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    return option + sep + ":".join(part.rstrip("/").rsplit("/", 1)[-1] for part in value.split(":"))


def without_paths(text: str) -> str:
    """Prose with every absolute path cut to its last part."""
    return re.sub(r"(?<![\w.])(?:/[\w.@+~-]+)+/([\w.@+~-]+)", r"\1", text)
