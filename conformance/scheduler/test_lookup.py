"""Scheduler tier: the real ``SimpleCPUOffloadScheduler``, real block pools and hashes, no model.

Each case asks for the lookup that follows a device prefix, lets the connector plan the load, and checks that attention
would find real KV wherever it looks, that no pin is left, and that lookups which were right keep their reuse. The stateful
tests run whole programs on the real ``Scheduler``, of which the lookup is a part; public reports do either.
"""

from kvmatrix.pytest_plugin import check
from kvmatrix.records import ProbeRow


def test_lookup(scheduler_row: ProbeRow) -> None:
    check(scheduler_row)
