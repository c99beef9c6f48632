"""Deferred steps against plain DDP, bit for bit, on two real ranks (the cases are in `deferred_cases`)."""

from __future__ import annotations

import deferred_cases
import harness
import pytest

# All cases share one launch: it has to last on a machine that is busy with other tests.
_LIMIT_S = 270.0


@pytest.fixture(scope="module")
def failures(request):
    """What went wrong in each case ("" for nothing)."""
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.function.__name__ == "test_case" and item.fspath == request.node.fspath
    ]
    return harness.run_cases(2, deferred_cases.run_case, names, limit_s=_LIMIT_S)


@pytest.mark.parametrize("name", deferred_cases.CASES)
def test_case(name, failures):
    assert not failures[name], failures[name]
