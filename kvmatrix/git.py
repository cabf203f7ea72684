"""The user's own git, apart from any repository around and from the user's settings."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kvmatrix.errors import PatchError

_GIT_TIMEOUT_S = 60


def git(arguments: Sequence[str], work: Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run git in ``work``, apart from any repository around it and from the user's settings and attributes.

    Raises:
        PatchError: there is no git, or it takes too long.
    """
    # A surrounding repository would make git read paths as its own and skip them silently; settings and attributes could
    # change line ends and white space.
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env |= {"GIT_CEILING_DIRECTORIES": str(work.resolve().parent), "LC_ALL": "C"}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"}
    settings = {"core.attributesFile": os.devnull, "core.abbrev": "7", "core.quotePath": "false"}
    command = ["git", *(part for key, value in settings.items() for part in ("-c", f"{key}={value}")), *arguments]
    try:
        return subprocess.run(command, cwd=work, env=env, input=stdin, capture_output=True, timeout=_GIT_TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise PatchError("git is not installed: it is needed to make and apply patches") from None
    except subprocess.TimeoutExpired:
        raise PatchError(f"git {arguments[0]} did not end within {_GIT_TIMEOUT_S} s") from None
