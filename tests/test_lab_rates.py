"""The lab's rates, measured with plain sockets: what a rate-limited link carries, both ways at once, from the start.

A busy machine can only make a flow slower, so the best of a few tries counts; a flow that is too fast is never excused.
"""

import json
import os
import sys
from pathlib import Path

import pytest
from test_lab import needs_root

from commhooks.core.topology import payload_bytes_per_s
from commhooks.lab import Lab

TRANSFER = Path(__file__).parent / "lab_transfer.py"
TRIES = 6


def transfer(topology: str, *flows: str, seconds: float = 0.8) -> dict[str, dict]:
    """Steady goodput in Mbit/s and bytes of the first 10 ms of each flow."""
    with Lab(topology) as lab:
        addresses = [lab.network.fastest(rank).address for rank in range(lab.world_size)]
        environ = {**os.environ, "LAB_TEST_ADDRESSES": json.dumps(addresses), "LAB_TEST_CONGESTION": "cubic"}
        outcome = lab.run(
            [sys.executable, str(TRANSFER), str(seconds), *flows], environ=environ, timeout_s=60
        )
    assert outcome.exit_code == 0, outcome.stderr
    lines = [json.loads(line.split("] ", 1)[1]) for line in outcome.stderr.splitlines()]
    return {line["flow"]: line for line in lines}


@needs_root
@pytest.mark.parametrize(
    ("topology", "flows", "limits", "least"),
    [
        ("nic:100,100", ("0>1",), (100,), 0.99),
        ("nic:100,100", ("0>1", "1>0"), (100, 100), 0.985),  # the other way's acknowledgements take up to 1 %
        ("nic:200/50,200", ("1>0",), (50,), 0.99),
        ("nic:200/50,200", ("0>1",), (200,), 0.99),
        ("sites:1+1+1@80/300", ("0>1", "2>1"), (80, 80), 0.99),
        ("nic:100+200,100+200", ("1>0",), (200,), 0.99),  # the faster of two NICs
    ],
)
def test_a_link_carries_its_rate_less_the_headers(topology, flows, limits, least):
    expected = [payload_bytes_per_s(limit) * 8e-6 for limit in limits]
    best = 0.0
    for _ in range(TRIES):
        seen = transfer(topology, *flows)
        shares = [seen[flow]["mbit_per_s"] / limit for flow, limit in zip(flows, expected)]
        assert max(shares) < 1.01, (seen, expected)
        # 10 ms at the rate, one bucket, and what a late reader finds in the socket
        surplus = [
            seen[flow]["first_bytes"] - limit * 1e6 / 8 * 0.010 for flow, limit in zip(flows, expected)
        ]
        assert max(surplus) < 450_000, (seen, expected)
        best = max(best, min(shares))
        if best > least:
            return
    pytest.fail(f"at best {best:.4f} of the limit in {TRIES} tries; expected {least}")


@needs_root
def test_a_shared_cut_is_shared_and_a_slow_receiver_slows_its_senders():
    limit = payload_bytes_per_s(60) * 8e-6
    for topology, flows in (("sites:2+2@60/300", ("0>1", "2>3")), ("nic:60,300,300", ("1>0", "2>0"))):
        seen = transfer(topology, *flows, seconds=1.2)
        total = sum(flow["mbit_per_s"] for flow in seen.values())
        assert 0.8 * limit < total < 1.25 * limit, seen  # the flows don't end at the same moment
