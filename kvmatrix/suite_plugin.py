"""What both suites' pytest plug-ins share: the run begins before the first item, outside pytest's capturing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import pytest

from kvmatrix.errors import DISK_ERRNOS, DiskError, ExitCode, KvmatrixError


class SuitePlugin(ABC):
    """Turns what ends a run early into an exit code, and leaves pytest with nothing to report in that case."""

    def __init__(self) -> None:
        self.error: KvmatrixError | None = None
        self.interrupted = False

    @abstractmethod
    def begin(self, items: list[pytest.Item]) -> None:
        """Open the run for the collected items."""

    @abstractmethod
    def result(self) -> ExitCode:
        """The exit code that the rows give."""

    @property
    def exit_code(self) -> ExitCode:
        if self.interrupted:
            return ExitCode.INTERRUPTED
        return self.error.code if self.error else self.result()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Any:
        if session.config.option.collectonly or session.testsfailed:
            return (yield)
        capture: Any = session.config.pluginmanager.getplugin("capturemanager")
        try:
            with capture.global_and_fixture_disabled():
                self.begin(session.items)
        except KvmatrixError as e:
            self.error = e
        except OSError as e:
            if e.errno not in DISK_ERRNOS:
                raise
            self.error = DiskError(f"{e.strerror}: {e.filename}; free space, or set KVMATRIX_HOME to another folder")
        except KeyboardInterrupt:
            self.interrupted = True
        if self.error or self.interrupted:
            session.items.clear()
        return (yield)

    def pytest_keyboard_interrupt(self) -> None:
        self.interrupted = self.error is None
