"""Links in virtual time: the same contract as real ones, over capacities instead of sockets.

Where in the flow: in place of TCP and shared memory, for tests of the whole pipeline.

Model: a frame occupies every resource of its route for ``length / capacity`` seconds of each, starting when all of
them are free (store and forward, one frame at a time per resource); then it arrives after `latency_s`. Among frames
waiting for a resource the most urgent of each link goes first, links taking turns by who has waited longest.

Invariants: deterministic; time only moves in `run`; nothing is read from a clock.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence

from commhooks.links.base import Key, Link, LinkEvents, Payload, Region
from commhooks.links.frames import HEADER_BYTES, Header, Kind


class BytesPayload(Payload):
    """A private copy of what was sent."""

    def __init__(self, content: bytes) -> None:
        self._view = memoryview(content)
        self.nbytes = len(content)

    def view(self) -> memoryview:
        return self._view

    def read_into(self, offset: int, target: memoryview) -> None:
        target[:] = self._view[offset : offset + len(target)]

    def release(self) -> None: ...


class VirtualNetwork:
    """Resources with capacities, a clock, and the events to come.

    Parameters
    ----------
    bytes_per_s : capacity of each resource; routes may only use these
    latency_s : from the last byte sent to the arrival
    """

    def __init__(self, bytes_per_s: Mapping[str, float], latency_s: float = 0.0) -> None:
        self.now_s = 0.0
        self._capacity = dict(bytes_per_s)
        self._latency_s = latency_s
        self._free_at = dict.fromkeys(bytes_per_s, 0.0)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._senders: list[VirtualLink] = []

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Run `action` at a virtual time."""
        heapq.heappush(self._events, (time_s, next(self._order), action))

    def run(self, until_s: float = float("inf")) -> None:
        """Let time pass until nothing is left to happen, or until `until_s`."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._events)
            action()

    def connect(
        self,
        a: int,
        b: int,
        events_a: LinkEvents,
        events_b: LinkEvents,
        there: Sequence[str],
        back: Sequence[str],
        channel: int = 0,
    ) -> tuple[VirtualLink, VirtualLink]:
        """A pair of links between ranks `a` and `b`, with the resources that each direction uses."""
        link_a = VirtualLink(self, b, channel, events_a, tuple(there))
        link_b = VirtualLink(self, a, channel, events_b, tuple(back))
        link_a.other, link_b.other = link_b, link_a
        return link_a, link_b

    def _wait(self, link: VirtualLink) -> None:
        if link not in self._senders:
            self._senders.append(link)

    def _start_next(self) -> None:
        """Start every waiting frame whose resources are all free now."""
        for link in list(self._senders):
            if not link.waiting:
                self._senders.remove(link)
            elif all(self._free_at[name] <= self.now_s for name in link.route):
                self._senders.remove(link)
                self._start(link)

    def _start(self, link: VirtualLink) -> None:
        _, _, header, content, token = heapq.heappop(link.waiting)
        nbytes = HEADER_BYTES + len(content)
        longest_s = 0.0
        for name in link.route:
            duration_s = nbytes / self._capacity[name]
            self._free_at[name] = self.now_s + duration_s
            longest_s = max(longest_s, duration_s)
            self.at(self.now_s + duration_s, self._start_next)
        self._senders.append(link)
        link.bytes_sent += nbytes
        self.at(self.now_s + longest_s, lambda: link.left(token))
        self.at(self.now_s + longest_s + self._latency_s, lambda: link.other.arrive(header, content))


class VirtualLink(Link):
    """One end of a virtual connection."""

    kind = "virtual"

    def __init__(
        self, network: VirtualNetwork, peer: int, channel: int, events: LinkEvents, route: tuple[str, ...]
    ) -> None:
        super().__init__(peer, channel, events)
        self._network = network
        self.route = route
        self.other: VirtualLink = self
        self.waiting: list[tuple[Key, int, Header, bytes, object]] = []
        self._order = itertools.count()
        self._in_flight = 0
        self._closed = False

    def push(self, key: Key, header: Header, region: Region | None, token: object) -> None:
        if self._closed:
            return
        content = bytes(region.view) if region is not None else b""
        heapq.heappush(self.waiting, (key, next(self._order), header, content, token))
        self._in_flight += 1

    def flush(self) -> None:
        if self.waiting:
            self._network._wait(self)
            self._network.at(self._network.now_s, self._network._start_next)

    def left(self, token: object) -> None:
        """The frame's last byte has gone."""
        self._in_flight -= 1
        if token is not None and not self._closed:
            self.events.sent(self, token)

    def arrive(self, header: Header, content: bytes) -> None:
        """A frame comes in whole."""
        if self._closed:
            return
        self.bytes_received += HEADER_BYTES + len(content)
        target = self.events.target(self, header) if content else None
        if target is not None:
            target[:] = content
        payload = BytesPayload(content) if content and target is None else None
        if header.kind == Kind.GOODBYE:
            self.said_goodbye = True
        self.events.received(self, header, payload)

    said_goodbye = False

    def on_readable(self) -> None:
        """Arrivals come by themselves in virtual time."""

    def fileno(self) -> int:
        return -1

    @property
    def wants_write(self) -> bool:
        return False

    @property
    def idle(self) -> bool:
        return self._in_flight == 0

    def close(self) -> None:
        self._closed = True
        self.waiting.clear()
