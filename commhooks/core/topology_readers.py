"""Readers: everything a user may write for a topology, turned into one.

Where in the flow: a string or a file's text (the shell reads the file) -> **here** -> ``topology.Topology``.

Strings (rates in Mbit/s, turned into payload bytes/s):

====================================  ===============================================================================
``uniform``                           equal NICs on one switch; as many ranks as the group has
``nic:200,800,800,800``               one NIC per rank on one switch; ``200/50`` up/down; ``800*3`` three of them;
                                      ``200+800`` two NICs in one host (two channels)
``sites:4+4@200/1000``                sites of 4 and 4 ranks, 200 between each pair of sites (per direction, shared),
                                      NICs of 1000; ranks dealt to the sites in turn, ``;block`` in blocks
``dgx-1p``, ``dgx-1v``, ``dgx-2``     NVLink boxes (Blink's figure 1); ``dgx-1v+pcie`` adds PCIe as channel 1
====================================  ===============================================================================

Files: our JSON (see ``topology``), the text of ``nvidia-smi topo -m``, and NCCL's topology XML (``topology_gpu``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from commhooks.core.topology import Path, Resource, Route, Topology, payload_bytes_per_s
from commhooks.core.topology_gpu import dgx1, dgx2, from_nccl_xml, from_nvidia_smi
from commhooks.errors import TopologyError

FORMS = (
    "uniform, nic:200,800,800,800 (also 200/50, 800*3, 200+800), sites:4+4@200/1000[;block], "
    "dgx-1p, dgx-1v, dgx-2, or the name of a file"
)
UNIFORM_MBIT_PER_S = 1000.0  # any number: on equal NICs the best trees don't depend on it
_RATE = re.compile(r"(\d+(?:\.\d+)?)(?:/(\d+(?:\.\d+)?))?")
_SITES = re.compile(r"(\d+(?:\+\d+)*)@(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)(;block)?")

Nic = tuple[float, float]  # up, down in bytes/s


def parse_topology(text: str, world_size: int | None = None) -> Topology:
    """The topology that a string names.

    Parameters
    ----------
    text
        One of the forms above, or a file's whole text (not its name: the shell reads files).
    world_size
        The number of ranks of the group; needed for ``uniform``, otherwise checked.

    Raises
    ------
    TopologyError
        For an unknown form, a rate that isn't positive, or another number of ranks than ``world_size``.
    """
    text = text.strip()
    if text == "uniform":
        if world_size is None:
            raise TopologyError(
                "topology 'uniform' has no number of ranks of its own; give one (--ranks 4, or nic:…)"
            )
        topology = nic_topology("uniform", [[_nic(UNIFORM_MBIT_PER_S)]] * world_size)
    elif text.startswith("nic:"):
        topology = nic_topology(text, _parse_nics(text))
    elif text.startswith("sites:"):
        topology = _parse_sites(text)
    elif text in ("dgx-1p", "dgx-1v", "dgx-1p+pcie", "dgx-1v+pcie"):
        topology = dgx1(text)
    elif text == "dgx-2":
        topology = dgx2()
    elif text[:1] in ("{", "<") or "\n" in text:
        topology = from_file_text(text, "topology file")
    else:
        raise TopologyError(f"topology {text!r} is not known; expected {FORMS}")
    if world_size is not None and topology.world_size != world_size:
        raise TopologyError(
            f"topology {topology.name!r} has {topology.world_size} ranks, the group {world_size}; they must be equal"
        )
    return topology


def from_file_text(text: str, name: str) -> Topology:
    """The topology that a file holds: our JSON, ``nvidia-smi topo -m``, or NCCL's XML, told apart by how it begins.

    Raises
    ------
    TopologyError
        Naming the file, the line and the field.
    """
    start = text.lstrip()[:1]
    if start == "<":
        return from_nccl_xml(text, name)
    if start == "{":
        return _from_json_text(text, name)
    if re.search(r"\bGPU0\b", text):
        return from_nvidia_smi(text, name)
    raise TopologyError(
        f"{name}: neither a topology in JSON, nor the output of nvidia-smi topo -m, nor NCCL's XML; begins {text[:40]!r}"
    )


# --- networks of NICs ----------------------------------------------------------------------------------------------


def nic_topology(
    name: str,
    nics: Sequence[Sequence[Nic]],
    sites: Sequence[int] | None = None,
    wan_bytes_per_s: float = 0.0,
    hosts: Sequence[str] | None = None,
) -> Topology:
    """NICs on one switch, or on one switch per site with a shared cut between each pair of sites.

    Parameters
    ----------
    nics
        For each rank its NICs, each (up, down) in bytes/s.  Channel c joins the two ranks' c-th NICs; a rank with
        fewer uses its last one for the rest.
    sites, wan_bytes_per_s
        For each rank its site, and the capacity of each direction between two sites.
    hosts
        For each rank its host's name.
    """
    ranks = range(len(nics))
    resources = [
        Resource(_nic_name(r, d, i), nic[d == "down"])
        for r in ranks
        for i, nic in enumerate(nics[r])
        for d in ("up", "down")
    ]
    site = list(sites) if sites is not None else [0] * len(nics)
    pairs = sorted({(site[a], site[b]) for a in ranks for b in ranks if site[a] != site[b]})
    resources += [Resource(_cut_name(a, b), wan_bytes_per_s) for a, b in pairs]
    routes = []
    for a in ranks:
        for b in ranks:
            cut = (_cut_name(site[a], site[b]),) if site[a] != site[b] else ()
            for c in range(max(len(nics[a]), len(nics[b])) if a != b else 0):
                up = _nic_name(a, "up", min(c, len(nics[a]) - 1))
                down = _nic_name(b, "down", min(c, len(nics[b]) - 1))
                routes.append(Route(a, b, c, (up, *cut, down)))
    names = tuple(hosts) if hosts is not None else tuple(f"host{r}" for r in ranks)
    return Topology(name, len(nics), tuple(resources), tuple(routes), names)


def _nic_name(rank: int, direction: str, index: int) -> str:
    return f"rank{rank}.{direction}" + (f".{index}" if index else "")


def _cut_name(src: int, dst: int) -> str:
    return f"site{src}->site{dst}"


def _nic(up_mbit_per_s: float, down_mbit_per_s: float | None = None) -> Nic:
    down = up_mbit_per_s if down_mbit_per_s is None else down_mbit_per_s
    return payload_bytes_per_s(up_mbit_per_s), payload_bytes_per_s(down)


def nic_rates(text: str) -> list[tuple[float, float]]:
    """Each rank's (up, down) in bytes/s, all of its NICs together, for a ``nic:…`` string of any number of ranks.

    A topology has a route per pair of ranks; with thousands of ranks these sums are all that can be afforded.
    """
    return [(sum(nic[0] for nic in nics), sum(nic[1] for nic in nics)) for nics in _parse_nics(text)]


def _parse_nics(text: str) -> list[list[Nic]]:
    ranks: list[list[Nic]] = []
    for item in text.removeprefix("nic:").split(","):
        rates, _, count = item.strip().partition("*")
        if count and not (count.isdecimal() and int(count) > 0):
            raise TopologyError(f"topology {text!r}: {item!r}; after * comes how many of them, as in 800*3")
        ranks += [[_parse_rate(rate, text) for rate in rates.split("+")]] * int(count or 1)
    return ranks


def _parse_rate(rate: str, text: str) -> Nic:
    match = _RATE.fullmatch(rate.strip())
    if match is None or float(match[1]) <= 0 or (match[2] is not None and float(match[2]) <= 0):
        raise TopologyError(
            f"topology {text!r}: rate {rate!r}; expected Mbit/s above 0, as in 200, 200/50 (up/down), 800*3, 200+800"
        )
    return _nic(float(match[1]), None if match[2] is None else float(match[2]))


def _parse_sites(text: str) -> Topology:
    match = _SITES.fullmatch(text.removeprefix("sites:"))
    if match is None:
        raise TopologyError(
            f"topology {text!r}: expected sites:SIZE+SIZE@WAN/NIC[;block], as in sites:4+4@200/1000"
        )
    sizes = [int(s) for s in match[1].split("+")]
    wan, nic = float(match[2]), float(match[3])
    if min(sizes) < 1 or wan <= 0 or nic <= 0:
        raise TopologyError(f"topology {text!r}: sizes and rates must be above 0")
    sites = _blocks(sizes) if match[4] else _dealt(sizes)
    return nic_topology(text, [[_nic(nic)]] * len(sites), sites, payload_bytes_per_s(wan))


def _blocks(sizes: Sequence[int]) -> list[int]:
    return [site for site, size in enumerate(sizes) for _ in range(size)]


def _dealt(sizes: Sequence[int]) -> list[int]:
    return [site for turn in range(max(sizes)) for site, size in enumerate(sizes) if turn < size]


# --- our JSON, with line numbers -----------------------------------------------------------------------------------


def _from_json_text(text: str, name: str) -> Topology:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise TopologyError(
            f"{name}: line {error.lineno} column {error.colno}: {error.msg}; not JSON"
        ) from error
    return Topology.from_json(fields, _where_in(text, name))


def _where_in(text: str, name: str) -> Callable[[Path], str]:
    """Words for a field's place: file, line, path."""

    def where(path: Path) -> str:
        line = text.count("\n", 0, _offset(text, path)) + 1
        field = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")
        return f"{name}: line {line}: " + (field or "topology")

    return where


def _offset(text: str, path: Path) -> int:
    """Where in ``text`` the value at ``path`` begins, or the nearest enclosing value that is there."""
    at = _skip(text, 0)
    for step in path:
        found = _member(text, at, step)
        if found is None:
            return at
        at = found
    return at


def _member(text: str, at: int, step: str | int) -> int | None:
    """Offset of an object's or a list's member, by walking over its elder siblings."""
    if text[at] not in ("{" if isinstance(step, str) else "["):
        return None
    decoder = json.JSONDecoder()
    at, index = _skip(text, at + 1), 0
    while text[at] not in "}]":
        key: str | int = index
        if isinstance(step, str):
            key, at = decoder.raw_decode(text, at)
            at = _skip(text, _skip(text, at) + 1)
        if key == step:
            return at
        at = _skip(text, decoder.raw_decode(text, at)[1])
        at = _skip(text, at + 1) if text[at] == "," else at
        index += 1
    return None


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
