"""The network as the planner sees it: ranks, resources with capacities, and routes.

Where in the flow: made by ``topology_readers`` (strings, files) or the probe -> **topology** -> ``treegen``.

The model: a *resource* is anything with a capacity (an NVLink direction, a NIC direction, a PCIe switch, a shared
uplink).  A *route* is one way from one rank to another, and names the resources that it loads; several routes
between the same pair are *channels*.  Link-limited, node-limited, shared-cut and multi-rail networks are all this.

Invariants: checked on construction, so that whoever holds a ``Topology`` holds a sound one (it may still be
disconnected, which is the packing's to say).  The digest doesn't depend on the name.

Names used by the built-in networks: ``rank3.up`` and ``rank3.down`` (a NIC's two directions; ``rank3.up.1`` for the
second NIC), ``site0->site1`` (a shared cut), ``nvlink.0->1``.

File format (JSON)::

    {"format": "commhooks-topology", "version": 1, "name": "...", "world_size": 2, "hosts": ["a", "b"],
     "resources": [{"name": "rank0.up", "bytes_per_s": 95000000.0}, ...],
     "routes": [{"src": 0, "dst": 1, "channel": 0, "resources": ["rank0.up", "rank1.down"]}, ...]}

``hosts`` (default: one per rank), ``channel`` (default 0) and ``lossless`` (default false: TCP, where flows that meet
at one NIC cost each other; true: NVLink and the like, where they don't) may be left out.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from commhooks.errors import TopologyError

FORMAT = "commhooks-topology"
VERSION = 1
Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Resource:
    """Something with a capacity, in payload bytes per second."""

    name: str
    bytes_per_s: float


@dataclass(frozen=True)
class Route:
    """One way from ``src`` to ``dst``, and the resources that it loads."""

    src: int
    dst: int
    channel: int
    resources: tuple[str, ...]


@dataclass(frozen=True)
class Topology:
    """Ranks, resources, routes.

    Parameters
    ----------
    name
        For people; not part of the digest.
    world_size
        Number of ranks.
    resources, routes
        See the module's docstring.
    hosts
        For each rank the name of its host.
    lossless
        Whether flows that share a resource share it without loss (NVLink), so that many neighbours cost nothing.

    Raises
    ------
    TopologyError
        On construction, for anything malformed; the message names the field.
    """

    name: str
    world_size: int
    resources: tuple[Resource, ...]
    routes: tuple[Route, ...]
    hosts: tuple[str, ...]
    lossless: bool = False

    def __post_init__(self) -> None:
        _validate(self, _field_name)

    @cached_property
    def capacity(self) -> dict[str, float]:
        """Bytes per second of each resource."""
        return {r.name: r.bytes_per_s for r in self.resources}

    @cached_property
    def route_of(self) -> dict[tuple[int, int, int], Route]:
        """The route of each (src, dst, channel)."""
        return {(r.src, r.dst, r.channel): r for r in self.routes}

    @property
    def channels(self) -> int:
        """One more than the highest channel number."""
        return 1 + max((r.channel for r in self.routes), default=0)

    def subset(self, ranks: Sequence[int]) -> Topology:
        """The network among ``ranks``, renumbered 0.. in the order given; unused resources are dropped.

        Raises
        ------
        TopologyError
            For a rank that isn't there or is named twice.
        """
        chosen = list(ranks)
        unknown = [r for r in chosen if not 0 <= r < self.world_size]
        if unknown or len(set(chosen)) != len(chosen) or not chosen:
            raise TopologyError(
                f"ranks {chosen} of topology {self.name!r}: expected different ranks of 0..{self.world_size - 1}"
                + (f"; it has no rank {unknown[0]}" if unknown else "")
            )
        number = {r: i for i, r in enumerate(chosen)}
        routes = tuple(
            Route(number[r.src], number[r.dst], r.channel, r.resources)
            for r in self.routes
            if r.src in number and r.dst in number
        )
        used = {name for route in routes for name in route.resources}
        return Topology(
            f"{self.name}[{','.join(map(str, chosen))}]",
            len(chosen),
            tuple(r for r in self.resources if r.name in used),
            routes,
            tuple(self.hosts[r] for r in chosen),
            self.lossless,
        )

    def digest(self) -> str:
        """A hash of everything but the name; equal on all ranks that see the same network."""
        fields = self.to_json()
        del fields["name"]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]

    def to_json(self) -> dict[str, Any]:
        """The file's content as JSON types."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "world_size": self.world_size,
            "lossless": self.lossless,
            "hosts": list(self.hosts),
            "resources": [{"name": r.name, "bytes_per_s": r.bytes_per_s} for r in self.resources],
            "routes": [
                {"src": r.src, "dst": r.dst, "channel": r.channel, "resources": list(r.resources)}
                for r in self.routes
            ],
        }

    @staticmethod
    def from_json(fields: Mapping[str, Any], where: Callable[[Path], str] | None = None) -> Topology:
        """Check and build what ``to_json`` writes.

        Parameters
        ----------
        fields
            The JSON object.
        where
            Turns a field's path into the words that begin an error message (a reader adds the line number).

        Raises
        ------
        TopologyError
            Naming the field, what it holds and what it should hold.
        """
        return _Reader(where or _field_name).topology(fields)


def payload_bytes_per_s(mbit_per_s: float) -> float:
    """Payload rate of TCP at a link rate in Mbit/s: 1448 bytes of each 1514-byte Ethernet frame."""
    return mbit_per_s * 1e6 / 8 * 1448 / 1514


def rate_text(bytes_per_s: float) -> str:
    """A rate for people: ``23.91 MB/s``, ``46 GB/s``."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.4g} {unit}"
    return f"{bytes_per_s:.4g} B/s"


def _field_name(path: Path) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.lstrip(".") or "topology"


def _validate(topology: Topology, where: Callable[[Path], str]) -> None:
    if topology.world_size < 1:
        raise TopologyError(f"{where(('world_size',))}: {topology.world_size}; expected at least 1 rank")
    if len(topology.hosts) != topology.world_size:
        raise TopologyError(
            f"{where(('hosts',))}: {len(topology.hosts)} names for {topology.world_size} ranks; expected one per rank"
        )
    names: set[str] = set()
    for i, resource in enumerate(topology.resources):
        _check_resource(resource, names, i, where)
    seen: set[tuple[int, int, int]] = set()
    for i, route in enumerate(topology.routes):
        _check_route(route, topology.world_size, names, seen, i, where)


def _check_resource(resource: Resource, names: set[str], at: int, where: Callable[[Path], str]) -> None:
    if resource.name in names:
        raise TopologyError(
            f"{where(('resources', at, 'name'))}: {resource.name!r} is there twice; names must differ"
        )
    if not (math.isfinite(resource.bytes_per_s) and resource.bytes_per_s >= 0):
        raise TopologyError(
            f"{where(('resources', at, 'bytes_per_s'))}: {resource.bytes_per_s} for {resource.name!r}; "
            "expected a finite rate >= 0 in bytes/s"
        )
    names.add(resource.name)


def _check_route(
    route: Route,
    world_size: int,
    names: set[str],
    seen: set[tuple[int, int, int]],
    at: int,
    where: Callable[[Path], str],
) -> None:
    for field, rank in (("src", route.src), ("dst", route.dst)):
        if not 0 <= rank < world_size:
            raise TopologyError(f"{where(('routes', at, field))}: rank {rank}; expected 0..{world_size - 1}")
    if route.src == route.dst:
        raise TopologyError(f"{where(('routes', at, 'dst'))}: a route from rank {route.src} to itself")
    if route.channel < 0:
        raise TopologyError(f"{where(('routes', at, 'channel'))}: {route.channel}; expected 0 or more")
    key = (route.src, route.dst, route.channel)
    if key in seen:
        raise TopologyError(
            f"{where(('routes', at))}: {route.src}->{route.dst} channel {route.channel} is there twice; "
            "a second way between the same ranks needs its own channel"
        )
    seen.add(key)
    unknown = [name for name in route.resources if name not in names]
    if unknown or not route.resources:
        raise TopologyError(
            f"{where(('routes', at, 'resources'))}: "
            + (
                f"no resource is called {unknown[0]!r}"
                if unknown
                else "empty; a route loads at least one resource"
            )
        )


class _Reader:
    """Turns untrusted JSON into a topology; every refusal names the field's path."""

    def __init__(self, where: Callable[[Path], str]) -> None:
        self._where = where

    def topology(self, fields: Any) -> Topology:
        if not isinstance(fields, Mapping):
            raise TopologyError(f"{self._where(())}: {_kind(fields)}; expected a JSON object")
        self._known(
            fields,
            (),
            ("format", "version", "name", "world_size", "lossless", "hosts", "resources", "routes"),
        )
        if fields.get("format", FORMAT) != FORMAT or fields.get("version", VERSION) != VERSION:
            raise TopologyError(
                f"{self._where(('format',))}: {fields.get('format')!r} version {fields.get('version')!r}; "
                f"expected {FORMAT!r} version {VERSION}"
            )
        world_size = self._get(fields, (), "world_size", int)
        hosts = self._get(fields, (), "hosts", list, [f"host{r}" for r in range(world_size)])
        resources = tuple(
            self._resource(r, i) for i, r in enumerate(self._get(fields, (), "resources", list))
        )
        routes = tuple(self._route(r, i) for i, r in enumerate(self._get(fields, (), "routes", list)))
        name = self._get(fields, (), "name", str, "file")
        lossless = self._get(fields, (), "lossless", bool, False)
        draft = Topology.__new__(Topology)  # validated below, with this reader's words for the place
        for field, value in zip(
            ("name", "world_size", "resources", "routes", "hosts", "lossless"),
            (name, world_size, resources, routes, tuple(map(str, hosts)), lossless),
            strict=True,
        ):
            object.__setattr__(draft, field, value)
        _validate(draft, self._where)
        return draft

    def _resource(self, fields: Any, at: int) -> Resource:
        path: Path = ("resources", at)
        self._known(fields, path, ("name", "bytes_per_s"))
        return Resource(
            self._get(fields, path, "name", str), float(self._get(fields, path, "bytes_per_s", float))
        )

    def _route(self, fields: Any, at: int) -> Route:
        path: Path = ("routes", at)
        self._known(fields, path, ("src", "dst", "channel", "resources"))
        names = self._get(fields, path, "resources", list)
        if not all(isinstance(n, str) for n in names):
            raise TopologyError(f"{self._where((*path, 'resources'))}: {names}; expected names of resources")
        return Route(
            self._get(fields, path, "src", int),
            self._get(fields, path, "dst", int),
            self._get(fields, path, "channel", int, 0),
            tuple(names),
        )

    def _known(self, fields: Any, path: Path, names: Iterable[str]) -> None:
        if not isinstance(fields, Mapping):
            raise TopologyError(f"{self._where(path)}: {_kind(fields)}; expected a JSON object")
        for name in fields:
            if name not in names:
                raise TopologyError(
                    f"{self._where((*path, name))}: unknown field; known are {', '.join(names)}"
                )

    def _get(self, fields: Mapping[str, Any], path: Path, name: str, kind: type, default: Any = None) -> Any:
        if name not in fields:
            if default is not None:
                return default
            raise TopologyError(f"{self._where((*path, name))}: missing; expected {_EXPECTED[kind]}")
        value = fields[name]
        allowed = (int, float) if kind is float else (kind,)
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
            raise TopologyError(f"{self._where((*path, name))}: {_kind(value)}; expected {_EXPECTED[kind]}")
        return value


_EXPECTED = {int: "a whole number", float: "a number", str: "a string", list: "a list", bool: "true or false"}


def _kind(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
