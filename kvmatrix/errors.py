"""Errors that a user can act on, and the exit code of each.

Every command ends with one of these codes, through nox as well. A message is one line: what is wrong, then what to do.
"""

from __future__ import annotations

import errno
from enum import IntEnum

DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EEXIST, errno.EFBIG)
"""What a full, read-only or forbidden disk answers with."""


class ExitCode(IntEnum):
    OK = 0
    UNEXPECTED = 1
    """At least one row is not what was expected of it."""
    USAGE = 2
    """Unknown pin, patch, backend, axis value or argument; a matrix file that does not validate."""
    NOTHING_RAN = 3
    """No cell was executed: a run that proves nothing is not a pass."""
    PATCH = 10
    """A patch that is damaged, does not apply, or gives another file than it was written for."""
    ENVIRONMENT = 11
    """An environment could not be built: a missing wheel, no network, a broken interpreter."""
    INSTALL_CHANGED = 12
    """An installed vLLM file is not the one that its wheel ships."""
    DEVICE = 13
    """The requested device kind is not on this machine."""
    ROWS = 14
    """A row file is damaged."""
    DISK = 15
    """No space left on the disk, or a folder that cannot be written."""
    INFRA = 16
    """Cells did not establish their states, or their processes died: the run says nothing about the patch."""
    INTERRUPTED = 130
    """Ctrl-C. Finished rows are kept."""


class KvmatrixError(Exception):
    """Base of the errors that end a command with one line and an exit code of their own."""

    code = ExitCode.UNEXPECTED


class UsageError(KvmatrixError):
    code = ExitCode.USAGE


class NothingRanError(KvmatrixError):
    code = ExitCode.NOTHING_RAN


class PatchError(KvmatrixError):
    code = ExitCode.PATCH


class EnvironmentBuildError(KvmatrixError):
    code = ExitCode.ENVIRONMENT


class InstallChangedError(KvmatrixError):
    code = ExitCode.INSTALL_CHANGED


class DeviceError(KvmatrixError):
    code = ExitCode.DEVICE


class RowsError(KvmatrixError):
    code = ExitCode.ROWS


class DiskError(KvmatrixError):
    code = ExitCode.DISK


class InfraError(KvmatrixError):
    code = ExitCode.INFRA


def one_line(error: BaseException) -> str:
    """The error's text on one line."""
    return " ".join(str(error).split())
