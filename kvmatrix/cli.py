"""The ``kvmatrix`` command. Every error that a user can act on is one line on standard error and an exit code of its own."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from rich.console import Console

import kvmatrix
from kvmatrix import (
    doctor,
    envs,
    locks,
    mutants,
    pairs,
    patch_files,
    patch_port,
    patch_tools,
    pin_add,
    pin_status,
    upstream_source,
    upstream_verdict,
)
from kvmatrix.cells import Selection, selected_pins
from kvmatrix.config import Project, find_project
from kvmatrix.errors import DISK_ERRNOS, DiskError, ExitCode, KvmatrixError, NothingRanError, UsageError, one_line
from kvmatrix.expectations import Expectation, expired_line, stale_line
from kvmatrix.perf_plugin import PerfPlugin
from kvmatrix.pytest_plugin import ConformancePlugin
from kvmatrix.qualified import newest_runs
from kvmatrix.records import PerfRow, RunRow, last_attempts
from kvmatrix.report import document, plots
from kvmatrix.session import Session
from kvmatrix.upstream import UpstreamRun


class Parser(argparse.ArgumentParser):
    """Raises instead of printing a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; `{self.prog} --help` lists what there is")


def _add_pins_and_arms(to: argparse._ActionsContainer) -> None:
    to.add_argument("--pin", action="append", default=[], metavar="VERSION", help="vLLM release, such as 0.32.0, or all")
    to.add_argument("--device", default="", metavar="KIND", help="host, cuda or rocm")
    to.add_argument(
        "--patch", action="append", default=[], metavar="NAME|FILE", help="a folder under patches/, or a diff of a vLLM tree"
    )
    to.add_argument("--arm", action="append", default=[], metavar="NAME", help="stock, or a patch's name")


def _add_axes(parser: argparse.ArgumentParser) -> None:
    """Options that keep a part of the matrix; each may be given several times."""
    axes = parser.add_argument_group("keep only these cells of matrix.toml (each may be repeated)")
    _add_pins_and_arms(axes)
    axes.add_argument("--backend", action="append", default=[], metavar="NAME", help="attention backend, vLLM's name")
    axes.add_argument("--mode", action="append", default=[], metavar="MODE", help="eager or compiled")
    axes.add_argument("--chunk", action="append", default=[], type=int, metavar="TOKENS", help="attention chunk size")
    axes.add_argument("--block", action="append", default=[], type=int, metavar="TOKENS", help="KV-cache block size")
    axes.add_argument("--dtype", action="append", default=[], metavar="DTYPE", help="float32 or bfloat16")
    axes.add_argument("--offload", action="append", default=[], metavar="MODE", help="eager, lazy or disk")
    level = axes.add_mutually_exclusive_group()
    level.add_argument("--quick", dest="level", action="store_const", const="quick", help="the smallest geometries alone")
    level.add_argument("--full", dest="level", action="store_const", const="full", help="every geometry")
    axes.add_argument("--tier", action="append", default=[], metavar="TIER", help="scheduler or llm")


def _add_pytest(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-k", dest="keyword", default="", metavar="EXPR", help="pytest's -k: keep items by name")
    parser.add_argument("-v", dest="verbose", action="store_true", help="one line for each item")


def _selection(args: argparse.Namespace) -> Selection:
    return Selection(
        pins=tuple(args.pin),
        device=args.device,
        arms=tuple(args.arm),
        patches=tuple(args.patch),
        backends=tuple(args.backend),
        modes=tuple(args.mode),
        chunks=tuple(args.chunk),
        blocks=tuple(args.block),
        dtypes=tuple(args.dtype),
        offloads=tuple(args.offload),
        tiers=tuple(args.tier),
        level=args.level or "default",
        size=getattr(args, "size", ""),
    )


def build_parser() -> Parser:
    parser = Parser(prog="kvmatrix", description="Qualification matrix for vLLM's CPU KV-offload lookup.")
    parser.add_argument("--version", action="version", version=f"kvmatrix {kvmatrix.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    conformance = commands.add_parser("conformance", help="run the real engine, stock beside patched, and judge each probe")
    _add_axes(conformance)
    _add_pytest(conformance)
    perf = commands.add_parser("perf", help="measure what the patch costs, arms interleaved in one run")
    _add_axes(perf)
    _add_pytest(perf)
    perf.add_argument("--size", default="", metavar="NAME", help="model to measure: a size of matrix.toml (tiny, small)")
    _add_mutants(commands.add_parser("mutants", help="run plausible wrong fixes: the suite must kill every one"))
    _add_upstream(commands.add_parser("upstream", help="vLLM's own tests of the connector, from a checkout, against each arm"))
    cells = commands.add_parser("cells", help="list the cells that a run would have, without running them")
    _add_axes(cells)
    report = commands.add_parser("report", help="publish the newest run's rows and tables under results/")
    report.add_argument("--check", action="store_true", help="only verify that the published tables equal their rows")
    report.add_argument("--run", default="", metavar="ID", help="publish this conformance run, in place of the newest")
    commands.add_parser("doctor", help="say what this machine can run, and why the rest cannot")
    env = commands.add_parser("env", help="list, build or remove the pins' environments")
    env.add_argument("action", choices=["list", "build", "remove"])
    env.add_argument("name", nargs="?", default="", help="environment to remove, as `env list` shows it")
    _add_patch_commands(commands.add_parser("patch", help="make, check or port a patch under patches/"))
    _add_pin_commands(commands.add_parser("pin", help="add a vLLM release to the matrix, or say what is known about each"))
    lock = commands.add_parser("lock", help="resolve a pin's requirements lock again (needs uv)")
    lock.add_argument("version", help="the pin's vLLM release")
    lock.add_argument("--device", default="host")
    return parser


def _add_mutants(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-k", dest="keyword", default="", metavar="NAME", help="only mutants with this in their name")
    parser.add_argument("--patch", action="append", default=[], metavar="FILE", help="take somebody's diff for the mutant")
    parser.add_argument("--of", default="", metavar="PATCH", help="with --patch: the fix whose promise of reuse it must keep")


def _add_upstream(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", required=True, type=Path, metavar="PATH", help="a vLLM checkout of about the pin's release")
    _add_pins_and_arms(parser)
    parser.add_argument("--test", action="append", default=[], metavar="FILE", help="only this test file (may be repeated)")
    parser.add_argument("-k", dest="keyword", default="", metavar="EXPR", help="pytest's -k: keep tests by name")


def _add_patch_commands(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=Parser)
    new = actions.add_parser("new", help="make a patch from an edited copy of a pin's files, or add a pin to one")
    new.add_argument("name")
    new.add_argument("edited", nargs="+", type=Path, metavar="PATH", help="edited files, or one folder that holds vllm/")
    new.add_argument("--pin", required=True, metavar="VERSION", help="the pin whose files were edited")
    for name in ("title", "what", "why", "upstream", "remove-when", "author"):
        new.add_argument(f"--{name}", default="", metavar="TEXT", help="for a new patch: goes into its patch.toml")
    new.add_argument("--force", action="store_true", help="replace what the patch has for this pin")
    check = actions.add_parser("check", help="does each patch apply to each built environment, and give what it says")
    check.add_argument("names", nargs="*", metavar="NAME")
    refresh = actions.add_parser("refresh", help="port a patch from one pin to another, and show what is not certain")
    refresh.add_argument("name")
    refresh.add_argument("--from", dest="source", required=True, metavar="VERSION")
    refresh.add_argument("--to", dest="target", required=True, metavar="VERSION")
    refresh.add_argument("--force", action="store_true", help="replace what the patch has for the target")


def _add_pin_commands(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=Parser)
    add = actions.add_parser("add", help="lock a release, port the patches to it, run it where this machine can (needs uv)")
    add.add_argument("version", help="vLLM release, such as 0.32.0")
    add.add_argument("--device", default="", metavar="KIND", help="host, cuda or rocm; default: the matrix's")
    add.add_argument("--extensions-of", default="", metavar="PIN", help="mixed build: its Python files over a pin's extensions")
    status = actions.add_parser("status", help="whether each pin shows the fault, by its newest rows")
    status.add_argument("--json", action="store_true", help="for programs")


def _pytest_args(project: Project, suite: str, args: argparse.Namespace) -> list[str]:
    chosen = [str(project.root / suite), f"--rootdir={project.root}", "-p", "no:cacheprovider", "-q"]
    chosen += ["-o", "filterwarnings=default"]  # a warning of some library says nothing about the patch
    chosen += ["-v"] * (2 if args.verbose else 0)
    chosen += ["-k", args.keyword] if args.keyword else []
    return chosen


def run_conformance(project: Project, args: argparse.Namespace, argv: list[str]) -> int:
    console = Console(stderr=True)
    session = Session(project, _selection(args), "conformance", console, argv)
    plugin = ConformancePlugin(session, session.plan())
    try:
        status = pytest.main(
            [*_pytest_args(project, "conformance", args), "-rN"], plugins=[_Named("kvmatrix-conformance", plugin)]
        )
    finally:
        plugin.finish()
    rows = list(plugin.rows.values())
    if rows:
        mixed = [envs.mixed_sentence(e) for e in session.ctx.envs.values() if e.base] if session.ctx else []
        print("\n" + document.conformance_summary(rows, mixed) + "\n")
    _say_of_expectations(plugin.stale, plugin.expired)
    return _ended(plugin.error, plugin.exit_code, status, session)


def _say_of_expectations(stale: Sequence[Expectation], expired: Sequence[Expectation]) -> None:
    for line in [*map(stale_line, stale), *map(expired_line, expired)]:
        _say(line)


def run_perf(project: Project, args: argparse.Namespace, argv: list[str]) -> int:
    console = Console(stderr=True)
    if args.size and args.size not in project.matrix.perf.sizes:
        raise UsageError(f"unknown size {args.size!r}: known are {', '.join(project.matrix.perf.sizes)}")
    session = Session(project, _selection(args), "perf", console, argv)
    session.plan()
    plugin = PerfPlugin(session, console)
    chosen = _pytest_args(project, "perf", args)
    session.folder.mkdir(parents=True, exist_ok=True)
    chosen += ["-rN", f"--benchmark-json={session.folder / 'benchmark.json'}"]
    chosen += ["--benchmark-quiet", "--benchmark-disable-gc", "--benchmark-columns=min,median,iqr,rounds"]
    try:
        status = pytest.main(chosen, plugins=[_Named("kvmatrix-perf", plugin)])
    finally:
        plugin.finish()
    perf_rows = list(plugin.rows.values())
    if perf_rows:
        print("\n" + document.perf_summary(perf_rows) + "\n")
        _draw(perf_rows, session)
        _print_conformance_beside(project, plugin.pin)
    return _ended(plugin.error, plugin.exit_code, status, session)


def _draw(rows: Sequence[PerfRow], session: Session) -> None:
    folder = session.folder / "plots"
    try:
        folder.mkdir(exist_ok=True)
        drawn = plots.write_plots(rows, folder)
    except OSError as e:
        raise DiskError(f"cannot write the plots to {folder}: {e.strerror}") from e
    if drawn:
        _say(f"plots: {folder}")


def run_mutants(project: Project, args: argparse.Namespace, argv: list[str]) -> int:
    if args.of and not args.patch:
        raise UsageError("--of goes with --patch: what a mutant of this project corrupts is written in its index")
    session = mutants.MutantSession(project, args.keyword, args.patch, args.of, Console(stderr=True), argv)
    code = ExitCode.INTERRUPTED
    counts: list[str] = []
    try:
        controls, fates = mutants.run(session)
        counts = [f.outcome for f in fates]
        code = mutants.exit_code(controls, fates)
    except KvmatrixError as e:
        code = e.code
        raise
    finally:
        session.close(code, counts)
    print(f"\n{mutants.report(controls, fates, session.of)}\n")
    _say(f"rows: {session.rows_file}")
    return code


def _print_conformance_beside(project: Project, pin: str) -> None:
    """The newest conformance of the pin that was measured: no timing without what it is worth."""
    for _, rows in newest_runs(project.home, "conformance"):
        of_pin = [r for r in last_attempts(rows) if r.cell["pin"] == pin]
        if of_pin and document.is_whole(rows):
            assert isinstance(rows[0], RunRow)
            mixed = document.mixed_builds(rows[0], of_pin)
            print(f"Conformance run {rows[0].run}\n\n{document.conformance_summary(of_pin, mixed)}\n")
            return


class _Named:
    """Gives a plug-in object the name under which the suites' conftest files look for it."""

    def __init__(self, name: str, plugin: object) -> None:
        self.name = name
        self.plugin = plugin

    @pytest.hookimpl(tryfirst=True)
    def pytest_addoption(self, parser: object, pluginmanager: pytest.PytestPluginManager) -> None:
        pluginmanager.register(self.plugin, self.name)


def _ended(error: KvmatrixError | None, code: ExitCode, status: int, session: Session) -> int:
    """The command's exit code; pytest's own counts where the rows alone would say that all is well."""
    if error is not None:
        raise error
    if code is ExitCode.INTERRUPTED:
        _say(f"interrupted: the finished rows are in {session.rows_file}")
        return code
    if status == pytest.ExitCode.USAGE_ERROR:
        return ExitCode.USAGE
    if session.ctx is not None:
        _say(f"rows: {session.rows_file}")
    if code is ExitCode.OK and status == pytest.ExitCode.NO_TESTS_COLLECTED:
        code = ExitCode.NOTHING_RAN
    if code is ExitCode.NOTHING_RAN:
        _say("nothing was executed: a run without a result is not a pass")
    if code is ExitCode.OK and status != pytest.ExitCode.OK:
        return ExitCode.UNEXPECTED
    return code


def run_upstream(project: Project, args: argparse.Namespace, argv: list[str]) -> int:
    source = upstream_source.open_source(args.source, args.test)
    chosen = Selection(pins=tuple(args.pin), device=args.device, arms=tuple(args.arm), patches=tuple(args.patch))
    session = Session(project, chosen, "upstream", Console(stderr=True), argv)
    run = UpstreamRun(session, source, args.keyword, _say)
    try:
        code = run.run()
    finally:
        if run.rows:
            print("\n" + upstream_verdict.summary(run.rows) + "\n", flush=True)
            _say_of_expectations(run.stale, run.expired)
            _say(f"rows: {session.rows_file}")
    if code is ExitCode.NOTHING_RAN:
        _say("nothing was executed: a run without a result is not a pass")
    return code


def run_cells_list(project: Project, args: argparse.Namespace, argv: list[str]) -> int:
    selection = _selection(args)
    cells = Session(project, selection, "conformance", Console(stderr=True), argv).plan(build=False)
    for cell in cells:
        print(cell.id)
    _say(f"{len(cells)} cells")
    wanted = pairs.wanted(project.matrix.pairs)
    have = pairs.covered(cells, project.matrix.pairs)
    _say(f"{len(have)} of {len(wanted)} pairs of axis values{missing_pairs(wanted - have)}")
    return ExitCode.OK


def missing_pairs(missing: set[pairs.Pair]) -> str:
    return f", without {min(map(pairs.shown, missing))}" + (" and others" if len(missing) > 1 else "") if missing else ""


def run_report(project: Project, args: argparse.Namespace, argv: list[str]) -> int:
    if args.check:
        stale = document.stale_tables(project.results)
        for path in stale:
            _say(f"{path.relative_to(project.root)} is not what its rows give: run `nox -s report` and compare")
        if not stale and not any(project.results.glob(f"*/*/*/*/{document.TABLES}")):
            raise NothingRanError("results/ holds no published tables: run `nox -s report` first")
        return ExitCode.UNEXPECTED if stale else ExitCode.OK
    for path in document.publish(project.home, project.results, args.run):
        print(path.read_text(encoding="utf-8"))
        _say(f"written: {path.relative_to(project.root)}")
    return ExitCode.OK


def run_doctor(project: Project, args: argparse.Namespace, argv: list[str]) -> int:
    print(doctor.report(project))
    return ExitCode.OK


def run_env(project: Project, args: argparse.Namespace, argv: list[str]) -> int:
    if args.action == "list":
        for entry in envs.list_envs(project):
            print(f"{entry.name} ({entry.note})" if entry.note else entry.name)
    elif args.action == "remove":
        if not args.name:
            raise UsageError("env remove needs a name; `kvmatrix env list` shows them")
        envs.remove(project, args.name)
    else:
        for pin in selected_pins(project.matrix, Selection()):
            env = envs.ensure(project, pin, _say)
            envs.verify_install(env)
            print(env.path)
    return ExitCode.OK


def _site(project: Project, version: str) -> Path:
    env = envs.ensure(project, project.matrix.pin(version, project.matrix.defaults.device), _say)
    envs.verify_install(env)
    return env.site_packages


def run_patch(project: Project, args: argparse.Namespace, argv: list[str]) -> int:
    return {"new": _patch_new, "check": _patch_check, "refresh": _patch_refresh}[args.action](project, args)


def _patch_new(project: Project, args: argparse.Namespace) -> int:
    texts = {f: getattr(args, f) for f in ("title", "what", "why", "upstream", "remove_when", "author")}
    meta = patch_files.Meta(**texts) if any(texts.values()) else None
    edited = args.edited[0] if len(args.edited) == 1 and args.edited[0].is_dir() else args.edited
    site = _site(project, args.pin)
    made = patch_tools.new_patch(args.name, args.pin, site, edited, project.patches, meta, force=args.force)
    print(made.patch_file)
    return ExitCode.OK


def _patch_check(project: Project, args: argparse.Namespace) -> int:
    pins = [p for p in project.matrix.pins if p.device == "host" and envs.is_built(project, p)]
    sites = {p.version: envs.ensure(project, p).site_packages for p in pins}
    names = args.names or sorted(p.parent.name for p in project.patches.glob("*/patch.toml"))
    checks = [(name, c) for name in names for c in patch_tools.check_patch(project.patches, name, sites)]
    for name, check in checks:
        print(f"{name} on {check.pin}: {check.status}: {check.line}")
    statuses = {check.status for _, check in checks}
    if not statuses - {"no environment"}:
        raise NothingRanError("no patch could be checked: build an environment first, with `kvmatrix env build`")
    if "broken" in statuses:
        return ExitCode.PATCH
    return ExitCode.INSTALL_CHANGED if "install changed" in statuses else ExitCode.OK


def _patch_refresh(project: Project, args: argparse.Namespace) -> int:
    ported = patch_port.refresh_patch(
        project.patches,
        args.name,
        args.source,
        args.target,
        _site(project, args.source),
        _site(project, args.target),
        force=args.force,
        scratch=project.home / "refresh",
    )
    print(f"{ported.patch_file}: {ported.method}")
    for line in [*(h.line for h in ported.hunks), *(f"not certain: {u}" for u in ported.uncertain)]:
        print(f"  {line}")
    return ExitCode.OK


def run_lock(project: Project, args: argparse.Namespace, argv: list[str]) -> int:
    pin = project.matrix.pin(args.version, args.device)
    locks.regenerate(project, pin)
    print(pin.lock)
    return ExitCode.OK


def run_pin(project: Project, args: argparse.Namespace, argv: list[str]) -> int:
    if args.action == "status":
        found = pin_status.statuses(project)
        print(json.dumps(pin_status.as_json(found), indent=2) if args.json else pin_status.table(found))
        return ExitCode.OK
    device = args.device or project.matrix.defaults.device
    added = pin_add.add(project, args.version, device, args.extensions_of, _say, Console(stderr=True))
    print(added.summary())
    return ExitCode.OK


COMMANDS: dict[str, Callable[[Project, argparse.Namespace, list[str]], int]] = {
    "conformance": run_conformance,
    "perf": run_perf,
    "mutants": run_mutants,
    "upstream": run_upstream,
    "cells": run_cells_list,
    "report": run_report,
    "doctor": run_doctor,
    "env": run_env,
    "lock": run_lock,
    "patch": run_patch,
    "pin": run_pin,
}


def _say(text: str) -> None:
    print(f"kvmatrix: {text}", file=sys.stderr, flush=True)


def _interrupt(signum: int, frame: object) -> NoReturn:
    """A polite end, as nox or a job scheduler asks for it, is Ctrl-C: what was started is ended, rows are kept."""
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the return value is its exit code (see :class:`kvmatrix.errors.ExitCode`)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        args = build_parser().parse_args(arguments)
        return int(COMMANDS[args.command](find_project(), args, arguments))
    except KvmatrixError as e:
        _say(f"error: {one_line(e)}")
        return int(e.code)
    except KeyboardInterrupt:
        _say("interrupted")
        return int(ExitCode.INTERRUPTED)
    except OSError as e:
        if e.errno not in DISK_ERRNOS:
            raise
        _say(f"error: {e.strerror}: {e.filename}; free space, or set KVMATRIX_HOME to a folder that can be written")
        return int(ExitCode.DISK)


if __name__ == "__main__":
    sys.exit(main())
