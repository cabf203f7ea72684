"""Preloaded parents and their children, as real processes of this interpreter.

A job imports torch, which here is a module made for the test: it does what the job's ``FAKE`` variable says.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmatrix.errors import InfraError
from kvmatrix.forkserver import PRELOAD_SCHEDULER
from kvmatrix.processes import COMMON_ENV, HOST_ENV, INTERPRETER_ENV, Job, JobTimeout, Parent, ParentPool, parent_env

Until = Callable[..., None]
LONG = 60
"""Seconds that no test waits out."""

TORCH = f"""
import json, os, signal, subprocess, sys, time
__version__ = os.environ.get("SHOWN", "fake")
act = os.environ.get("FAKE", "")
print("torch is here", flush=True)
def say(**facts):
    with open(os.environ["REPORT"] + ".tmp", "w") as f:
        json.dump(facts, f)
    os.rename(os.environ["REPORT"] + ".tmp", os.environ["REPORT"])
if act == "hang":
    say(pid=os.getpid())
    time.sleep({LONG})
elif act in ("hang with a child", "die and leave a child"):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep({LONG})"])
    say(pid=os.getpid(), child=child.pid)
    if act == "die and leave a child":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep({LONG})
elif act == "exit":
    os._exit(7)
elif act == "raise":
    try:
        raise OSError("the first reason")
    except OSError as e:
        raise ValueError("two\\nlines") from e
elif act == "assert":
    assert act == ""
elif act == "wait for a file":
    end = time.monotonic() + {LONG}
    while not os.path.exists(os.environ["REPORT"]) and time.monotonic() < end:
        time.sleep(0.01)
"""
PLUGINS = """
import os
def load_general_plugins():
    act = os.environ.get("PRELOAD", "")
    if act == "thread":
        import threading
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    elif act == "manager":
        import vllm.v1.simple_kv_offload.manager
    elif act == "hang":
        threading = __import__("threading")
        threading.Event().wait(60)
    elif act == "die":
        os._exit(3)
"""


@pytest.fixture
def fakes(tmp_path: Path) -> str:
    """The ``PYTHONPATH`` that has modules in place of torch, transformers and vllm."""
    files = {
        "torch/__init__.py": TORCH,
        "transformers/__init__.py": '__version__ = "fake"\n',
        "vllm/__init__.py": '__version__ = "fake"\n',
        "vllm/platforms.py": "current_platform = object()\n",
        "vllm/plugins.py": PLUGINS,
        "vllm/v1/__init__.py": "",
        "vllm/v1/simple_kv_offload/__init__.py": "",
        "vllm/v1/simple_kv_offload/manager.py": "",
    }
    for name, text in files.items():
        path = tmp_path / "fakes" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return os.pathsep.join(filter(None, [str(tmp_path / "fakes"), os.environ.get("PYTHONPATH")]))


@pytest.fixture
def new_parent(fakes: str, tmp_path: Path) -> Iterator[Callable[..., Parent]]:
    started: list[Parent] = []

    def make(preload: bool = False, **variables: str) -> Parent:
        env = {"PYTHONPATH": fakes, **variables}
        parent = Parent(Path(sys.executable), env, tmp_path / f"parent-{len(started)}.log", preload=preload)
        started.append(parent)
        return parent

    yield make
    for parent in started:
        parent.close()


@pytest.fixture
def parent(new_parent: Callable[..., Parent]) -> Parent:
    made = new_parent()
    made.wait_ready(20)
    return made


@pytest.fixture
def start(tmp_path: Path, until: Until) -> Iterator[Callable[..., tuple[Job, dict[str, int]]]]:
    """Starts a job that does ``act``; what it reported of itself comes back once it has, where ``reports``."""
    count = iter(range(100))
    jobs: list[Job] = []

    def begin(parent: Parent, act: str, reports: bool = False, **job: Any) -> tuple[Job, dict[str, int]]:
        name = f"job-{next(count)}"
        report = tmp_path / f"{name}.json"
        env = {"FAKE": act, "REPORT": str(report), **job.pop("env", {})}
        started = parent.start({"kind": "facts", "cwd": str(tmp_path / "work"), "env": env, **job}, tmp_path / f"{name}.log")
        jobs.append(started)
        if reports:
            until(report.exists)
        return started, json.loads(report.read_text(encoding="utf-8")) if reports else {}

    yield begin
    for job in jobs:
        job.finish(timeout=0)


def gone(pid: int) -> bool:
    """Whether ``pid`` runs no more; one that nobody waited for yet counts as gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def ended(job: Job) -> list[dict[str, Any]]:
    """All messages of a job to its end."""
    messages = list(job.messages(20))
    job.finish()
    return messages


# --- jobs that end by themselves --------------------------------------------------------------------------------------


def test_a_job_to_its_end(parent: Parent, start: Callable[..., Any], tmp_path: Path) -> None:
    job, _ = start(parent, "")
    facts, done = ended(job)
    assert facts["type"] == "facts"
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert done == {"type": "done"}
    assert job.exit_code == 0
    assert job.max_rss_kib is not None
    assert job.max_rss_kib > 1000
    assert "torch is here" in (tmp_path / "job-0.log").read_text(encoding="utf-8")
    assert gone(job.pid)


def test_jobs_side_by_side(parent: Parent, start: Callable[..., Any]) -> None:
    jobs = [start(parent, "", env={"SHOWN": f"number {i}"})[0] for i in range(4)]
    for i, job in reversed(list(enumerate(jobs))):
        assert ended(job)[0]["torch"] == f"number {i}"
        assert job.exit_code == 0


def test_an_unknown_kind_of_job(parent: Parent, start: Callable[..., Any]) -> None:
    job, _ = start(parent, "", kind="nosuch")
    (error,) = ended(job)
    assert (error["type"], error["error"]) == ("error", "KeyError")
    assert "nosuch" in error["message"]
    assert job.exit_code == 1


def test_a_job_that_raises(parent: Parent, start: Callable[..., Any], tmp_path: Path) -> None:
    job, _ = start(parent, "raise")
    (error,) = ended(job)
    assert (error["error"], error["message"]) == ("ValueError", "two lines")
    assert error["causes"] == ["OSError: the first reason"]
    assert job.exit_code == 1
    assert "Traceback" in (tmp_path / "job-0.log").read_text(encoding="utf-8")


def test_an_assertion_without_a_message_says_its_line(parent: Parent, start: Callable[..., Any]) -> None:
    job, _ = start(parent, "assert")
    (error,) = ended(job)
    assert (error["error"], error["message"]) == ("AssertionError", 'assert act == ""')


def test_a_job_that_exits_on_its_own(parent: Parent, start: Callable[..., Any]) -> None:
    job, _ = start(parent, "exit")
    assert ended(job) == []
    assert job.exit_code == 7


def test_a_job_whose_overlay_cannot_be_loaded(parent: Parent, start: Callable[..., Any], tmp_path: Path) -> None:
    job, _ = start(parent, "", env={"KVMATRIX_OVERLAY": str(tmp_path / "nowhere.json")})
    (error,) = ended(job)
    assert error["error"] == "OverlayError"


# --- jobs that are ended ----------------------------------------------------------------------------------------------


def test_a_child_that_is_killed(parent: Parent, start: Callable[..., Any]) -> None:
    job, facts = start(parent, "hang", reports=True)
    assert facts["pid"] == job.pid
    os.kill(job.pid, signal.SIGKILL)
    assert ended(job) == []
    assert job.exit_code == -signal.SIGKILL
    assert parent.alive


def test_a_job_that_is_too_slow_ends_with_all_it_started(parent: Parent, start: Callable[..., Any], until: Until) -> None:
    job, facts = start(parent, "hang with a child", reports=True)
    with pytest.raises(JobTimeout):
        list(job.messages(0.2))
    assert not gone(facts["child"])
    job.kill()
    job.finish()
    assert job.exit_code == -signal.SIGKILL
    until(lambda: gone(facts["pid"]) and gone(facts["child"]))


def test_a_job_that_died_leaves_nothing_behind(parent: Parent, start: Callable[..., Any], until: Until) -> None:
    """Killed for lack of memory, say, in the middle of a compilation by processes of its own."""
    job, facts = start(parent, "die and leave a child", reports=True)
    assert ended(job) == []
    assert job.exit_code == -signal.SIGKILL
    until(lambda: gone(facts["child"]), 5)


def test_finishing_ends_a_job_that_does_not(parent: Parent, start: Callable[..., Any]) -> None:
    job, facts = start(parent, "hang", reports=True)
    job.finish(timeout=0.2)
    assert job.exit_code == -signal.SIGKILL
    assert gone(facts["pid"])


def test_killing_twice_is_harmless(parent: Parent, start: Callable[..., Any]) -> None:
    job, _ = start(parent, "hang", reports=True)
    job.kill()
    job.kill()
    assert job.exit_code == -signal.SIGKILL


def test_a_job_that_nobody_listens_to_disturbs_no_other(parent: Parent, start: Callable[..., Any], tmp_path: Path) -> None:
    """Its channel is closed before it has sent what it found."""
    other, _ = start(parent, "hang", reports=True)
    job, _ = start(parent, "wait for a file")
    job.channel.close()
    (tmp_path / "job-1.json").touch()
    assert job.ended.wait(20)
    assert job.exit_code == 1
    after, _ = start(parent, "")
    assert len(ended(after)) == 2
    assert not gone(other.pid)
    assert not other.ended.is_set()


# --- parents ----------------------------------------------------------------------------------------------------------


def test_a_parent_that_is_killed(parent: Parent, start: Callable[..., Any], until: Until) -> None:
    job, facts = start(parent, "hang with a child", reports=True)
    os.kill(parent.process.pid, signal.SIGKILL)
    until(lambda: not parent.alive)
    with pytest.raises(InfraError, match="preloaded parent"):
        start(parent, "")
    assert ended(job) == []
    assert job.ended.is_set()
    assert job.exit_code is None
    until(lambda: gone(facts["pid"]), 5)
    until(lambda: gone(facts["child"]), 5)


def test_closing_ends_everything(parent: Parent, start: Callable[..., Any], until: Until) -> None:
    jobs = [start(parent, "hang with a child", reports=True) for _ in range(2)]
    parent.close()
    assert not parent.alive
    assert all(job.ended.is_set() for job, _ in jobs)
    until(lambda: all(gone(pid) for _, facts in jobs for pid in facts.values()), 5)
    with pytest.raises(InfraError):
        start(parent, "")


ORCHESTRATOR = """
import sys, time
from pathlib import Path
from kvmatrix.processes import Parent
folder, path = Path(sys.argv[1]), sys.argv[2]
parent = Parent(Path(sys.executable), {"PYTHONPATH": path}, folder / "parent.log", preload=False)
parent.wait_ready(20)
env = {"FAKE": "hang", "REPORT": str(folder / "orphan.json")}
job = parent.start({"kind": "facts", "cwd": str(folder), "env": env}, folder / "orphan.log")
print(parent.process.pid, job.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("frozen", [False, True], ids=["alone", "with-its-parent"])
def test_an_orchestrator_that_is_killed_leaves_nothing_behind(fakes: str, tmp_path: Path, until: Until, frozen: bool) -> None:
    """With a parent that cannot notice, the children have only the kernel to tell them."""
    command = [sys.executable, "-c", ORCHESTRATOR, str(tmp_path), fakes]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as orchestrator:
        assert orchestrator.stdout is not None
        parent, child = map(int, orchestrator.stdout.readline().split())
        until((tmp_path / "orphan.json").exists)
        if frozen:
            os.kill(parent, signal.SIGSTOP)
        orchestrator.kill()
        orchestrator.wait(timeout=20)
        if frozen:
            assert not gone(child)
            os.kill(parent, signal.SIGKILL)
        until(lambda: gone(parent) and gone(child), 5)


def test_closing_twice_is_harmless(parent: Parent) -> None:
    parent.close()
    parent.close()
    assert not parent.alive


@pytest.mark.parametrize(
    ("act", "reason"),
    [("thread", "2 threads"), ("manager", "imported the offload manager"), ("die", "ended while it imported")],
)
def test_a_parent_that_must_not_be_forked(new_parent: Callable[..., Parent], act: str, reason: str) -> None:
    with pytest.raises(InfraError, match=reason):
        new_parent(preload=True, PRELOAD=act).wait_ready(20)


def test_a_parent_that_takes_too_long(new_parent: Callable[..., Parent]) -> None:
    slow = new_parent(preload=True, PRELOAD="hang")
    with pytest.raises(InfraError, match=r"not ready after 0\.2 s"):
        slow.wait_ready(0.2)
    started = time.monotonic()
    slow.close()
    assert not slow.alive
    assert time.monotonic() - started < 5, "nothing is lost with a parent that still imports: Ctrl-C must not wait for it"


def test_what_could_not_be_preloaded_is_reported(new_parent: Callable[..., Parent]) -> None:
    made = new_parent(preload=True)
    made.wait_ready(20)
    assert made.ready is not None
    assert "vllm.entrypoints.llm" in made.ready["missing"]


def test_variables_reach_the_jobs(
    new_parent: Callable[..., Parent], start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The caller's own as well; but an overlay is a job's, never its parent's."""
    monkeypatch.setenv("SHOWN", "from the caller")
    monkeypatch.setenv("KVMATRIX_OVERLAY", str(tmp_path / "nowhere.json"))
    made = new_parent()
    made.wait_ready(20)
    assert ended(start(made, "")[0])[0]["torch"] == "from the caller"
    assert ended(start(made, "", env={"SHOWN": "from the job"})[0])[0]["torch"] == "from the job"


def test_the_variables_of_a_parent() -> None:
    assert parent_env("host", "CPU_ATTN") == COMMON_ENV | HOST_ENV
    assert parent_env("host", "TRITON_ATTN") == COMMON_ENV | HOST_ENV | INTERPRETER_ENV
    assert parent_env("cuda", "TRITON_ATTN") == COMMON_ENV
    assert COMMON_ENV["OMP_NUM_THREADS"] == "1"


# --- the pool ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ParentPool]:
    made = ParentPool(tmp_path / "logs", 20)
    yield made
    made.close()


def test_a_pool_reuses_its_parents(pool: ParentPool, fakes: str) -> None:
    env = {"PYTHONPATH": fakes}
    first = pool.get(Path(sys.executable), env)
    assert pool.get(Path(sys.executable), dict(env)) is first
    assert pool.get(Path(sys.executable), env | {"OTHER": "1"}) is not first


def test_a_parent_under_another_command(pool: ParentPool, fakes: str) -> None:
    """It is a parent of its own, and imports only what the scheduler harness needs."""
    env = {"PYTHONPATH": fakes}
    plain, under = pool.get(Path(sys.executable), env), pool.get(Path(sys.executable), env, ["nice", "-n", "1"])
    assert under is not plain
    assert pool.get(Path(sys.executable), env, ["nice", "-n", "1"]) is under
    assert os.getpriority(os.PRIO_PROCESS, under.process.pid) == os.getpriority(os.PRIO_PROCESS, plain.process.pid) + 1
    assert plain.ready is not None
    assert under.ready is not None
    assert set(plain.ready["missing"]) >= {"vllm.v1.engine.core"}
    assert set(under.ready["missing"]) == set(PRELOAD_SCHEDULER)


def test_a_pool_replaces_a_parent_that_died(pool: ParentPool, fakes: str, until: Until) -> None:
    env = {"PYTHONPATH": fakes}
    first = pool.get(Path(sys.executable), env)
    os.kill(first.process.pid, signal.SIGKILL)
    until(lambda: not first.alive)
    second = pool.get(Path(sys.executable), env)
    assert second is not first
    assert second.alive


def test_a_closed_pool(pool: ParentPool, fakes: str) -> None:
    env = {"PYTHONPATH": fakes}
    parents = [pool.get(Path(sys.executable), env), pool.launch(Path(sys.executable), env | {"OTHER": "1"})]
    pool.close()
    assert not any(p.alive for p in parents)
    with pytest.raises(InfraError, match="being ended"):
        pool.get(Path(sys.executable), env)
