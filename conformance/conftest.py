"""The suite is run by ``kvmatrix conformance`` (``nox -s conformance``), which supplies the rows that the tests look at."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("kvmatrix-conformance"):
        raise pytest.UsageError("run this suite with `nox -s conformance` or `kvmatrix conformance`, not with pytest alone")
