"""Meeting the other ranks: equal settings, one secret, and one plan that everybody has proven.

Where in the flow: rendezvous -> **startup** -> engine.

Invariants: collective calls in one order; rank 0 plans, and its failure is everybody's; nothing is connected before settings
agree.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from commhooks import __version__, errors
from commhooks.bootstrap import Rendezvous
from commhooks.config import Config, compare_across_ranks
from commhooks.core.plan import Plan
from commhooks.core.topology import Topology
from commhooks.errors import CommhooksError
from commhooks.hosts import Home, Placement
from commhooks.links.tcp import tune


class Planned(NamedTuple):
    """A plan, and what it was made from.

    ``native_bytes_per_s`` is the predicted rate of the framework's own collective on the same network (0: unknown);
    ``topology`` is None when nothing is known of the network.
    """

    plan: Plan
    native_bytes_per_s: float
    topology: Topology | None


#: Given everybody's host labels, a collective and its root (or None), the plan.  Called on rank 0 only.
Planner = Callable[[Sequence[str], str, int | None], Planned]


@runtime_checkable
class Measuring(Protocol):
    """A planner that needs all ranks once, before its first plan."""

    def prepare(self, rendezvous: Rendezvous, placements: Sequence[Placement]) -> None:
        """Measure (collective); called before every plan, so it must remember."""


def make_home(
    rendezvous: Rendezvous, config: Config, interfaces: tuple[str, ...], rendezvous_host: str | None
) -> Home:
    """This rank's listeners.  What one rank lacks (an interface, a congestion control) is an error on all, at once."""
    home: Home | None = None
    failure: CommhooksError | None = None
    try:
        with socket.socket() as sock:
            tune(sock, config.tcp_congestion)
        home = Home(rendezvous.rank, config.links, interfaces, rendezvous_host)
    except CommhooksError as error:
        failure = error
    told = rendezvous.exchange("home", _told(failure))
    if failure is not None:
        raise failure
    for rank, other in enumerate(told):
        if other is not None:
            assert home is not None
            home.close()
            raise _as_told(other, rank)
    assert home is not None
    return home


def _told(error: Exception | None) -> list[str] | None:
    return None if error is None else [type(error).__name__, str(error)]


def _as_told(told: Sequence[str], rank: int) -> CommhooksError:
    """Another rank's failure, by its own kind where it is one of ours."""
    kind = getattr(errors, told[0], None)
    words = f"{told[1]} [reported by rank {rank}]"
    if isinstance(kind, type) and issubclass(kind, CommhooksError):
        return kind(words)
    return errors.RemoteError(f"{told[0]}: {words}")


def meet(rendezvous: Rendezvous, config: Config, home: Home) -> tuple[bytes, list[Placement]]:
    """Exchange settings and placements; rank 0 gives the job's secret."""
    offer = {
        "version": __version__,
        "config": config.must_agree(),
        "placement": home.placement.to_json(),
        "secret": secrets.token_hex(32) if rendezvous.rank == 0 else "",
    }
    offers = rendezvous.exchange("meet", offer)
    compare_across_ranks([{**o["config"], "version": o["version"]} for o in offers])
    placements = [Placement.from_json(o["placement"]) for o in offers]
    own = home.try_memory(placements)
    placements = [Placement.from_json(p) for p in rendezvous.exchange("memory", own.to_json())]
    return bytes.fromhex(offers[0]["secret"]), placements


def agree_on_plan(
    rendezvous: Rendezvous,
    planner: Planner,
    placements: Sequence[Placement],
    collective: str,
    root: int | None,
) -> Planned:
    """Rank 0 plans; everybody proves the plan and compares its digest.  Rank 0's failure is everybody's."""
    if isinstance(planner, Measuring):
        planner.prepare(rendezvous, placements)
    offer: dict[str, object] = {}
    failure: Exception | None = None
    if rendezvous.rank == 0:
        try:
            planned = planner([placement.host for placement in placements], collective, root)
            offer["plan"], offer["native_bytes_per_s"] = planned.plan.to_json(), planned.native_bytes_per_s
            offer["topology"] = planned.topology.to_json() if planned.topology is not None else None
        except Exception as error:
            failure = error
            offer["failure"] = _told(error)
    answer = rendezvous.exchange("plan", offer)[0]
    if failure is not None:
        raise failure
    if "failure" in answer:
        raise _as_told(answer["failure"], 0)
    plan = Plan.from_json(answer["plan"])
    plan.prove()
    known = answer["topology"]
    topology = Topology.from_json(known) if known is not None else None
    return Planned(plan, float(answer["native_bytes_per_s"]), topology)
