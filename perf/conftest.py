"""The suite is run by ``kvmatrix perf`` (``nox -s perf``), which takes the measurements that the benchmarks replay."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("kvmatrix-perf"):
        raise pytest.UsageError("run this suite with `nox -s perf` or `kvmatrix perf`, not with pytest alone")
