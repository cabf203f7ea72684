"""What runs inside the pin's environment: pytest over the checkout's tests, with the arm's overlay, telling as it goes.

Fields of the job: ``view`` is the folder that holds the checkout's ``tests`` and nothing of its package, ``ini`` pytest's
settings in it, ``targets`` what is run there, ``keyword`` pytest's ``-k``, ``done`` the node ids not to run again, ``scratch``
the parent of the tests' temporary folders, ``tools`` the folders with pytest and what the tests' conftest needs, ``modules``
the arm's, imported before anything is collected, and ``stand_ins`` how the names of test modules begin that are given the host
device where they ask for a GPU (empty: none). Messages: see :mod:`kvmatrix.upstream_plugin`.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Send = Callable[[dict[str, Any]], None]


def run(job: dict[str, Any], send: Send) -> None:
    """Run the job's tests; the last message is ``{"type": "ended", "exit"}`` with pytest's exit status."""
    sys.dont_write_bytecode = True  # nothing is written into the user's checkout
    # Tools last: what the environment has itself is what vLLM's tests get.
    sys.path[:] = [job["view"], *sys.path, *job["tools"]]
    for module in job["modules"]:
        # A file that does not import shows where it is collected, with the whole traceback in the log.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    stand_ins = None
    if job["stand_ins"]:
        from kvmatrix.host.gpu_tests import StandIns

        stand_ins = StandIns(job["stand_ins"])
        stand_ins.install()
    import pytest

    from kvmatrix.upstream_plugin import Teller

    send({"type": "ready", "vllm": vllm_file(), "pytest": pytest.__version__})
    status = pytest.main(arguments(job), plugins=[Teller(job["done"], send, stand_ins)])
    send({"type": "ended", "exit": int(status)})


def arguments(job: dict[str, Any]) -> list[str]:
    """pytest's command line. The checkout's own pytest settings hold, for it is they that register its markers."""
    view = Path(job["view"])
    chosen = [f"--rootdir={view}", "-c", str(view / job["ini"]), "-p", "no:cacheprovider", "--import-mode=prepend"]
    chosen += ["--continue-on-collection-errors", "-q", "-rN", "--tb=short", f"--basetemp={job['scratch']}"]
    chosen += ["-o", "tmp_path_retention_policy=none"]
    chosen += ["-k", job["keyword"]] if job["keyword"] else []
    return chosen + [str(view / target) for target in job["targets"]]


def vllm_file() -> str:
    """Where the vLLM that this process imported lies; empty when it imported none."""
    return str(getattr(sys.modules.get("vllm"), "__file__", None) or "")
