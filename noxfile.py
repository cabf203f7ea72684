"""Sessions of the project. `nox -s conformance perf` is the main job; arguments after `--` narrow it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["conformance", "perf"]

RED = 1
INTERRUPTED = 130


def kvmatrix(session: nox.Session, *args: str) -> None:
    """Run the `kvmatrix` command. Its exit code becomes nox's, so that scripts can tell the reasons apart."""
    session.install("-q", "-e", ".")
    command = [str(Path(session.bin) / "kvmatrix"), *args]
    session.log(" ".join(["kvmatrix", *args]))
    with subprocess.Popen(command) as process:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:
                continue  # the command has the signal too: it ends its cells and keeps its rows
    if code == RED:
        session.error(f"kvmatrix {args[0]}: not everything is as expected")
    if code:
        session.warn(f"kvmatrix {args[0]} ended with exit code {code}")
        sys.exit(code)


@nox.session(tags=["main"])
def conformance(session: nox.Session) -> None:
    """Stock vLLM beside the patched one, in the real engine: which gives wrong output, which is right."""
    kvmatrix(session, "conformance", *session.posargs)


@nox.session(tags=["main"])
def perf(session: nox.Session) -> None:
    """What the patch costs: the lookup call, and requests per class of cache hit, both arms in one run."""
    kvmatrix(session, "perf", *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Plausible wrong fixes: the suite must kill every one, and says which tier and case did."""
    kvmatrix(session, "mutants", *session.posargs)


@nox.session
def upstream(session: nox.Session) -> None:
    """vLLM's own tests of the connector, from a checkout (`-- --source PATH`), stock beside patched."""
    kvmatrix(session, "upstream", *session.posargs)


@nox.session
def report(session: nox.Session) -> None:
    """Write the newest run's tables and raw rows under results/; with `-- --check`, verify what is there."""
    kvmatrix(session, "report", *session.posargs)


@nox.session
def doctor(session: nox.Session) -> None:
    """Say what this machine can run, and why the rest cannot."""
    kvmatrix(session, "doctor", *session.posargs)


@nox.session(tags=["check"])
def tests(session: nox.Session) -> None:
    """The machinery's own tests, a real engine run among them; no GPU needed."""
    session.install("-q", "-e", ".[dev]")
    session.run("pytest", *session.posargs)


@nox.session(tags=["check"])
def lint(session: nox.Session) -> None:
    """ruff and mypy in strict mode."""
    session.install("-q", "-e", ".[dev]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
