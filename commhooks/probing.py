"""Measure the cluster: all ranks together run the flows that the survey asks for, and learn the same topology.

Where in the flow: planning (``topology=probe``) and ``commhooks probe`` -> **probing** -> ``core.survey`` (which flows),
``probe_flows`` (run them), ``probe_control`` (rank 0 conducts) -> ``core.inference`` -> topology.

A host takes part in the network's rounds by its lowest rank; its ranks then copy from each other's memory, all at once.

Invariants: collective; every rank gets the same topology or the same error; nothing stays open afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from commhooks import probe_cache
from commhooks.bootstrap import Rendezvous
from commhooks.config import Config
from commhooks.core.inference import Estimate, Flow, Rail, topology_of
from commhooks.core.survey import survey
from commhooks.core.topology import Topology
from commhooks.errors import CommError, CommhooksError, ConfigError
from commhooks.hosts import host_identity
from commhooks.links.shm import read_memory
from commhooks.probe_control import Wire, accept_all, as_json, connect, from_json, gather, tell
from commhooks.probe_flows import FlowRunner, Target

log = logging.getLogger(__name__)

LIMIT_S = 15.0  # for opening a round's connections; a busy machine may take seconds
DURATION_S = 0.22
RAMP_SHARE = 0.4
_RTTS = 12  # slow start and the first losses take about so many round trips
_LONGEST_RTT_S = 0.1
_TURNS = 4
_ENOUGH_BYTES = 500_000  # token buckets hold tens of kilobytes, and give them away whenever a flow has paused
_LONGEST_S = 1.0
_NEARLY = 1.3
_MEMORY_S = 0.1
_MEMORY_BYTES = 8 << 20
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Probe:
    """What was measured.

    Attributes
    ----------
    topology : the network inferred
    rates : for each channel the best rate seen from each host to each host, bytes/s (0: not tried)
    host_of : the host of each rank
    rounds, seconds : what it took
    cached : not measured now, but remembered
    """

    topology: Topology
    rates: tuple[tuple[tuple[float, ...], ...], ...]
    host_of: tuple[int, ...]
    rounds: int
    seconds: float
    cached: bool = False

    def to_json(self) -> dict[str, Any]:
        """For the other ranks and for ``--json``."""
        return {
            "topology": self.topology.to_json(),
            "rates_bytes_per_s": self.rates,
            "host_of": self.host_of,
            "rounds": self.rounds,
            "seconds": self.seconds,
        }

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Probe:
        rates = tuple(tuple(tuple(map(float, row)) for row in rail) for rail in fields["rates_bytes_per_s"])
        topology = Topology.from_json(fields["topology"])
        return Probe(
            topology, rates, tuple(fields["host_of"]), int(fields["rounds"]), float(fields["seconds"])
        )

    def between(self, src: int, dst: int) -> float:
        """The measured rate between two ranks, over all channels; 0 on one host or where no flow was tried."""
        here, there = self.host_of[src], self.host_of[dst]
        return 0.0 if here == there else sum(rail[here][there] for rail in self.rates)


@dataclass(frozen=True)
class Place:
    """What a rank tells the others first (travels as JSON)."""

    host: str
    hostname: str
    hardware: tuple[str, ...]
    addresses: tuple[tuple[str, int], ...]
    pid: int
    memory: int

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Place:
        addresses = tuple((str(a), int(p)) for a, p in fields["addresses"])
        return Place(**{**fields, "addresses": addresses, "hardware": tuple(fields["hardware"])})


def probe(
    rendezvous: Rendezvous,
    config: Config,
    addresses: Sequence[str],
    cache: Path | None = None,
    reuse: bool = True,
) -> Probe:
    """Measure the network between all ranks (collective; seconds).

    Parameters
    ----------
    rendezvous : the launcher's
    config : ``tcp_congestion`` and ``timeout_s`` are used
    addresses : this rank's own, one per channel
    cache : the folder in which rank 0 remembers results; None: nothing is remembered
    reuse : take what is remembered instead of measuring

    Raises
    ------
    TopologyError
        A rank can't be reached.
    PeerLost, CommTimeout
        A rank left, or is silent.
    ConfigError
        An address isn't this host's, or the ranks have different numbers of them.
    """
    with contextlib.ExitStack() as stack:
        failure: CommhooksError | None = None
        try:
            member = stack.enter_context(contextlib.closing(_Member(rendezvous.rank, config, addresses)))
            offer = {
                "place": member.place_json(),
                "secret": secrets.token_hex(32) if rendezvous.rank == 0 else "",
            }
        except CommhooksError as error:
            failure, offer = error, {"failed": as_json(error)}
        offers = rendezvous.exchange("probe", offer)
        _raise_any(offers, failure)
        places = [Place.from_json(each["place"]) for each in offers]
        _same_channels(places)
        name = _fingerprint(places)
        known = _remembered(cache, name) if reuse and rendezvous.rank == 0 else None
        known = rendezvous.exchange("probe cache", known)[0]
        if known is not None:
            return replace(Probe.from_json(known), cached=True)
        member.meet(places, bytes.fromhex(offers[0]["secret"]))
        found = _measured(rendezvous, member)
    if cache is not None and rendezvous.rank == 0:
        probe_cache.store(cache, name, found.to_json())
    return found


def _remembered(cache: Path | None, name: str) -> dict[str, Any] | None:
    known = probe_cache.load(cache, name) if cache is not None else None
    if known is None:
        return None
    try:
        return Probe.from_json(known).to_json()
    except (KeyError, TypeError, ValueError) as error:  # of another version
        log.warning("the cached topology %s doesn't fit (%s); measuring again", name, error)
        return None


def _fingerprint(places: Sequence[Place]) -> str:
    hosts = [place.host for place in places]
    return probe_cache.fingerprint(
        [
            [
                hosts.index(place.host),
                place.hostname,
                place.hardware,
                [address for address, _ in place.addresses],
            ]
            for place in places
        ]
    )


def _measured(rendezvous: Rendezvous, member: _Member) -> Probe:
    failure: CommhooksError | None = None
    answer: dict[str, Any] = {}
    try:
        member.connect()
    except CommhooksError as error:
        failure, answer = error, {"failed": as_json(error)}
    _raise_any(rendezvous.exchange("probe star", answer), failure)
    return member.conduct() if rendezvous.rank == 0 else member.follow()


def _raise_any(offers: Sequence[dict[str, Any]], own: CommhooksError | None) -> None:
    failed = [offer["failed"] for offer in offers if "failed" in offer]
    if failed:
        raise from_json(failed[0]) from own


def _same_channels(places: Sequence[Place]) -> None:
    for rank, place in enumerate(places):
        if len(place.addresses) != len(places[0].addresses):
            raise ConfigError(
                f"rank 0 has {len(places[0].addresses)} interfaces, rank {rank} has {len(place.addresses)}; name one per "
                "channel on every rank (one may be named twice): COMMHOOKS_INTERFACE=eth0,eth1"
            )


def _listen(rank: int, address: str) -> socket.socket:
    try:
        listener = socket.create_server((address, 0), backlog=256)
    except OSError as error:
        raise ConfigError(f"probe: rank {rank} can't listen at {address}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


class _Member:
    """One rank's part."""

    def __init__(self, rank: int, config: Config, addresses: Sequence[str]) -> None:
        self._rank = rank
        self._config = config
        self._limit_s = min(config.timeout_s, LIMIT_S)
        self._listeners = [_listen(rank, address) for address in addresses]
        self._memory = ctypes.create_string_buffer(secrets.token_bytes(4096) * 256, _MEMORY_BYTES)
        self._wires: dict[int, Wire] = {}
        self._flows: FlowRunner | None = None
        self._places: list[Place] = []
        self._secret = b""

    def place_json(self) -> dict[str, Any]:
        return {
            "host": host_identity(),
            "hostname": socket.gethostname(),
            "hardware": [
                probe_cache.hardware_address(listener.getsockname()[0]) for listener in self._listeners
            ],
            "addresses": [listener.getsockname()[:2] for listener in self._listeners],
            "pid": os.getpid(),
            "memory": ctypes.addressof(self._memory),
        }

    def meet(self, places: list[Place], secret: bytes) -> None:
        self._places, self._secret = places, secret
        addresses = [place.addresses for place in places]
        self._flows = FlowRunner(
            self._rank, self._listeners, addresses, secret, self._config.tcp_congestion, self._limit_s
        )

    def connect(self) -> None:
        places = self._places
        if self._rank == 0:
            self._wires = accept_all(self._listeners[0], len(places), self._secret, self._limit_s)
            return
        own = places[self._rank].addresses[0][0]
        self._wires[0] = connect(self._rank, places[0].addresses[0], own, self._secret, self._limit_s)

    def close(self) -> None:
        if self._flows is not None:
            self._flows.close()
        for wire in self._wires.values():
            wire.close()
        for listener in self._listeners:
            listener.close()

    # -- what rank 0 asks of everybody --------------------------------------------------------------------------------------

    def perform(self, order: dict[str, Any]) -> dict[str, Any]:
        """Do what rank 0 says; failures are answers."""
        assert self._flows is not None
        try:
            if order["do"] == "open":
                flows = [Target(*flow) for flow in order["flows"]]
                self._flows.open(order["number"], flows)
                return {}
            if order["do"] == "run":
                rates = self._flows.run(order["duration_s"], order["ramp_s"])
                return {"rates": {str(index): rate for index, rate in rates.items()}}
            return {"memory": self._copy_memory()}
        except CommhooksError as error:
            return {"failed": as_json(error)}

    def follow(self) -> Probe:
        """Every rank but 0: perform orders to the end."""
        wire = self._wires[0]
        while True:
            order = wire.receive(4 * self._limit_s)
            if order["do"] == "end":
                return Probe.from_json(order["probe"])
            if order["do"] == "fail":
                raise from_json(order["failed"])
            wire.send(self.perform(order))

    def _copy_memory(self) -> float:
        """Bytes per second that this rank copies from the next rank on its host."""
        here = self._places[self._rank]
        mates = [rank for rank, place in enumerate(self._places) if place.host == here.host]
        mate = self._places[mates[(mates.index(self._rank) + 1) % len(mates)]]
        target = memoryview(bytearray(_CHUNK_BYTES))
        began_s, copied = time.monotonic(), 0
        try:
            while time.monotonic() - began_s < _MEMORY_S:
                read_memory(mate.pid, mate.memory + copied % (_MEMORY_BYTES - _CHUNK_BYTES), target)
                copied += _CHUNK_BYTES
        except OSError as error:  # not permitted: then slices travel through a shared file, at a copy's speed
            log.debug("memory of process %d can't be read (%s); copying own memory instead", mate.pid, error)
            own = memoryview(self._memory).cast("B")
            while time.monotonic() - began_s < _MEMORY_S:
                target[:] = own[:_CHUNK_BYTES]
                copied += _CHUNK_BYTES
        return copied / (time.monotonic() - began_s)

    # -- rank 0 --------------------------------------------------------------------------------------------------------------

    def conduct(self) -> Probe:
        """Rank 0: run the survey; tell everybody the result, or the error."""
        try:
            found = _Conductor(self, self._places, self._ask, self._round_trip_s).probe()
        except CommhooksError as error:
            tell(list(self._wires.values()), {"do": "fail", "failed": as_json(error)})
            raise
        lost = tell(list(self._wires.values()), {"do": "end", "probe": found.to_json()})
        if lost:
            raise lost[0]
        return found

    def _ask(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        lost = tell(list(self._wires.values()), order)
        if lost:
            raise lost[0]
        return gather(self._wires, self.perform(order), 2 * self._limit_s)

    def _round_trip_s(self) -> float:
        return max((wire.round_trip_s() for wire in self._wires.values()), default=0.0)


class _Conductor:
    """Rank 0: from places to a topology."""

    def __init__(self, member: _Member, places: Sequence[Place], ask: Any, round_trip_s: Any) -> None:
        self._ask = ask
        self._round_trip_s = round_trip_s
        self._places = places
        names = sorted({place.host for place in places}, key=[place.host for place in places].index)
        self._host_of = [names.index(place.host) for place in places]
        self._leaders = [self._host_of.index(host) for host in range(len(names))]
        self._rounds = 0
        self._enough_s = 0.0  # what the slowest node so far needs

    def probe(self) -> Probe:
        began_s = time.monotonic()
        memory = self._memory()
        rails = [self._rail(channel) for channel in range(len(self._places[0].addresses))]
        topology = topology_of("probe", self._host_of, self._host_names(), rails, memory)
        seconds = time.monotonic() - began_s
        log.info("probe: %d rounds in %.1f s on %d hosts", self._rounds, seconds, len(self._leaders))
        rates = tuple(_matrix(rail.estimate, len(self._leaders)) for rail in rails)
        return Probe(topology, rates, tuple(self._host_of), self._rounds, seconds)

    def _host_names(self) -> list[str]:
        names = [self._places[leader].hostname for leader in self._leaders]
        return names if len(set(names)) == len(names) else [f"host{h}" for h in range(len(names))]

    def _memory(self) -> list[float]:
        totals = [0.0] * len(self._leaders)
        if len(self._leaders) < len(self._places):
            for host, answer in zip(self._host_of, self._ask({"do": "memory"}), strict=True):
                totals[host] += answer["memory"]
        return totals

    def _rail(self, channel: int) -> Rail:
        ports = tuple(self._places[leader].addresses[channel][0] for leader in self._leaders)
        steps = survey(len(self._leaders))
        try:
            flows = next(steps)
            while True:
                flows = steps.send(self._round(flows, channel))
        except StopIteration as end:
            return Rail(ports, end.value)

    def _round(self, flows: Sequence[Flow], channel: int) -> list[float]:
        """Run flows at the same time; their rates.

        Again, and longer, where so little came that a token bucket's burst would count, or nothing: a busy machine.
        """
        base_s = DURATION_S + _RTTS * min(self._round_trip_s(), _LONGEST_RTT_S)
        duration_s = max(base_s, self._enough_s)
        silent: list[Flow] = []
        for _ in range(_TURNS):
            rates = self._run(flows, channel, duration_s)
            silent = [flow for flow, rate in zip(flows, rates, strict=True) if rate <= 0.0]
            needed_s = 2 * duration_s if silent else _enough_s(flows, rates)
            if needed_s <= _NEARLY * duration_s:
                return rates
            if not silent:
                self._enough_s = needed_s
            duration_s = needed_s
        if not silent:
            return rates
        raise CommError(
            f"probe: no byte went from host {silent[0].src} to host {silent[0].dst} on channel {channel} in "
            f"{_TURNS} rounds, although they are connected; is the link overloaded, or a rank stopped?"
        )

    def _run(self, flows: Sequence[Flow], channel: int, duration_s: float) -> list[float]:
        self._rounds += 1
        targets = [(self._leaders[flow.src], self._leaders[flow.dst], channel) for flow in flows]
        self._ask({"do": "open", "number": self._rounds, "flows": targets})
        answers = self._ask({"do": "run", "duration_s": duration_s, "ramp_s": RAMP_SHARE * duration_s})
        by_index = {int(index): rate for answer in answers for index, rate in answer["rates"].items()}
        rates = [by_index[index] for index in range(len(flows))]
        if log.isEnabledFor(logging.DEBUG):
            words = ", ".join(f"{f.src}->{f.dst} {r * 8e-6:.0f}" for f, r in zip(flows, rates, strict=True))
            log.debug("probe: channel %d round %d: %s Mbit/s of payload", channel, self._rounds, words)
        return rates


def _enough_s(flows: Sequence[Flow], rates: Sequence[float]) -> float:
    """How long a round must be for the slowest node of it to carry enough in the part that counts."""
    sums: dict[tuple[str, int], float] = {}
    for flow, rate in zip(flows, rates, strict=True):
        for key in (("up", flow.src), ("down", flow.dst)):
            sums[key] = sums.get(key, 0.0) + rate
    return min(_LONGEST_S, _ENOUGH_BYTES / min(sums.values()) / (1 - RAMP_SHARE))


def _matrix(estimate: Estimate, hosts: int) -> tuple[tuple[float, ...], ...]:
    return tuple(
        tuple(estimate.rates.get(Flow(src, dst), 0.0) for dst in range(hosts)) for src in range(hosts)
    )
