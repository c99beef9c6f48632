"""GPU boxes: the built-in DGX machines, ``nvidia-smi topo -m``, and NCCL's topology XML.

Where in the flow: called by ``topology_readers``; gives a lossless ``Topology`` of one host.

Invariants: channel 0 is NVLink (a resource per link direction, or per GPU and direction behind an NVSwitch);
channel 1 is PCIe, where the source says how it is wired.

Sources: adjacency of the DGX-1 from Blink's figure 1 and ``nvidia-smi`` reports; link rates 23 and 19 GB/s per link
and direction are what Blink's and others' measurements show of the nominal 25 and 20.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from commhooks.core.topology import Resource, Route, Topology
from commhooks.errors import TopologyError

NVLINK_BYTES_PER_S = {"dgx-1p": 19e9, "dgx-1v": 23e9}
PCIE_BYTES_PER_S = 8e9  # what a PCIe ring moves in Blink's figures (5-9 GB/s)
BETWEEN_SOCKETS_BYTES_PER_S = 10e9
MAX_NVLINKS = 18  # of one GPU, as of Hopper; more towards all peers together means a switch
# Links of one DGX-1V pair; the DGX-1P has the same edges, one link each.
DGX1V_LINKS = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2,
    (2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip
_DGX1_SWITCH = [0, 0, 1, 1, 2, 2, 3, 3]  # PCIe switch of each GPU; two switches per socket


def dgx1(name: str) -> Topology:
    """``dgx-1p`` or ``dgx-1v``, with ``+pcie`` also its PCIe tree as channel 1."""
    model = name.removesuffix("+pcie")
    links = {pair: (n if model == "dgx-1v" else 1) for pair, n in DGX1V_LINKS.items()}
    wiring = _Wiring()
    wiring.add_links(links, NVLINK_BYTES_PER_S[model])
    if name.endswith("+pcie"):
        wiring.add_pcie(_DGX1_SWITCH, [s // 2 for s in _DGX1_SWITCH], [PCIE_BYTES_PER_S] * 8)
    return wiring.topology(name, 8)


def dgx2() -> Topology:
    """16 GPUs behind an NVSwitch: any to any, limited by each GPU's six links."""
    wiring = _Wiring()
    wiring.add_switch(range(16), 6 * NVLINK_BYTES_PER_S["dgx-1v"])
    return wiring.topology("dgx-2", 16)


class _Wiring:
    """Collects resources and routes of one box."""

    def __init__(self) -> None:
        self._capacity: dict[str, float] = {}
        self._routes: list[Route] = []

    def topology(self, name: str, world_size: int) -> Topology:
        resources = tuple(Resource(n, c) for n, c in self._capacity.items())
        return Topology(name, world_size, resources, tuple(self._routes), (name,) * world_size, lossless=True)

    def route(self, src: int, dst: int, channel: int, resources: Mapping[str, float]) -> None:
        self._capacity.update(resources)
        self._routes.append(Route(src, dst, channel, tuple(resources)))

    def add_links(self, links: Mapping[tuple[int, int], int], bytes_per_s: float) -> None:
        for (a, b), count in sorted(links.items()):
            for src, dst in ((a, b), (b, a)):
                self.route(src, dst, 0, {f"nvlink.{src}->{dst}": count * bytes_per_s})

    def add_switch(self, ranks: Sequence[int], bytes_per_s: float) -> None:
        for src in ranks:
            for dst in ranks:
                if src != dst:
                    self.route(src, dst, 0, {f"gpu{src}.up": bytes_per_s, f"gpu{dst}.down": bytes_per_s})

    def add_pcie(self, switch: Sequence[int], socket: Sequence[int], bytes_per_s: Sequence[float]) -> None:
        """PCIe as channel 1: a lane per GPU, a shared uplink per switch, one way between each two sockets."""
        for src in range(len(switch)):
            for dst in range(len(switch)):
                if src != dst:
                    self.route(src, dst, 1, _pcie_way(src, dst, switch, socket, bytes_per_s))


def _pcie_way(
    src: int, dst: int, switch: Sequence[int], socket: Sequence[int], bytes_per_s: Sequence[float]
) -> dict[str, float]:
    way = {f"gpu{src}.pcie.up": bytes_per_s[src]}
    if switch[src] != switch[dst]:
        way[f"pcie{switch[src]}.up"] = bytes_per_s[src]
        if socket[src] != socket[dst]:
            way[f"socket{socket[src]}->socket{socket[dst]}"] = BETWEEN_SOCKETS_BYTES_PER_S
        way[f"pcie{switch[dst]}.down"] = bytes_per_s[dst]
    way[f"gpu{dst}.pcie.down"] = bytes_per_s[dst]
    return way


# --- nvidia-smi topo -m --------------------------------------------------------------------------------------------

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines the header
_PATHS = ("PIX", "PXB", "PHB", "NODE", "SYS", "SOC", "QPI")


def from_nvidia_smi(text: str, name: str) -> Topology:
    """The matrix that ``nvidia-smi topo -m`` prints; NICs and affinities are passed over.

    Raises
    ------
    TopologyError
        Naming the line and the column.
    """
    cells = _smi_cells(_ESCAPES.sub("", text), name)
    size = 1 + max(a for a, _ in cells)
    links = {(a, b): int(c[2:]) for (a, b), c in cells.items() if a < b and c.startswith("NV")}
    per_gpu = [sum(n for pair, n in links.items() if gpu in pair) for gpu in range(size)]
    wiring = _Wiring()
    if links and len(set(links.values())) == 1 and max(per_gpu) > MAX_NVLINKS:
        wiring.add_switch(range(size), next(iter(links.values())) * NVLINK_BYTES_PER_S["dgx-1v"])
    else:
        wiring.add_links(links, NVLINK_BYTES_PER_S["dgx-1v"])
    if any(c in _PATHS for c in cells.values()):  # all NVLink: how PCIe is wired isn't told
        switch = _groups(size, lambda a, b: cells[a, b] in ("PIX", "PXB"))
        socket = _groups(size, lambda a, b: cells[a, b] in ("PIX", "PXB", "PHB", "NODE"))
        wiring.add_pcie(switch, socket, [PCIE_BYTES_PER_S] * size)
    return wiring.topology(name, size)


def _smi_cells(text: str, name: str) -> dict[tuple[int, int], str]:
    lines = text.splitlines()
    at = next(
        (i for i, line in enumerate(lines) if line.split()[:1] == ["GPU0"] and "X" not in line.split()), None
    )
    if at is None:
        raise TopologyError(
            f"{name}: no header line GPU0 GPU1 ...; expected the output of nvidia-smi topo -m"
        )
    columns = [word for word in lines[at].split() if re.fullmatch(r"GPU\d+", word)]
    cells: dict[tuple[int, int], str] = {}
    for number, line in enumerate(lines[at + 1 : at + 1 + len(columns)], start=at + 2):
        cells.update(_smi_row(line, number, len(columns), number - at - 2, name))
    if len({a for a, _ in cells}) < len(columns) and len(columns) > 1:
        raise TopologyError(f"{name}: line {len(lines)}: ends early; expected {len(columns)} rows of GPUs")
    return cells or {(0, 0): "X"}


def _smi_row(line: str, number: int, size: int, gpu: int, name: str) -> dict[tuple[int, int], str]:
    words = line.split()
    if words[:1] != [f"GPU{gpu}"] or len(words) < size + 1:
        raise TopologyError(f"{name}: line {number}: {line.strip()!r}; expected GPU{gpu} and {size} cells")
    row = {}
    for peer, cell in enumerate(words[1 : size + 1]):
        known = cell == "X" if peer == gpu else cell in _PATHS or re.fullmatch(r"NV[1-9]\d*", cell)
        if not known:
            raise TopologyError(
                f"{name}: line {number}: column GPU{peer} holds {cell!r}; expected NV1, NV2, ..., {', '.join(_PATHS)}"
                " (X on the diagonal)"
            )
        row[gpu, peer] = cell
    return row


def _groups(size: int, joined: Callable[[int, int], bool]) -> list[int]:
    """Number the classes of ranks that ``joined`` puts together (it is taken as transitive)."""
    group: list[int] = []
    for rank in range(size):
        first = next((r for r in range(rank) if joined(rank, r)), None)
        group.append(max(group, default=-1) + 1 if first is None else group[first])
    return group


# --- NCCL's XML ----------------------------------------------------------------------------------------------------

# NVLink rate of one link by compute capability, as NCCL's own model has it (bytes/s).
_SM_BYTES_PER_S = {60: 18e9, 70: 20e9, 72: 20e9, 80: 20e9, 86: 12e9, 90: 20.6e9}
_NVSWITCH_CLASS = "0x068000"


@dataclass(frozen=True)
class _Gpu:
    rank: int
    sm: int
    element: ET.Element
    way_up: tuple[tuple[str, float], ...]  # PCIe resources from the GPU up to its socket
    socket: str


def from_nccl_xml(text: str, name: str) -> Topology:
    """The file that ``NCCL_TOPO_DUMP_FILE`` writes and ``NCCL_TOPO_FILE`` reads.

    Raises
    ------
    TopologyError
        Naming the line, or the element and its attribute.
    """
    try:
        system = ET.fromstring(text)
    except ET.ParseError as error:
        raise TopologyError(f"{name}: line {error.position[0]}: {error}; not XML") from error
    if system.tag != "system":
        raise TopologyError(f"{name}: root element <{system.tag}>; expected NCCL's <system>")
    gpus = sorted(_xml_gpus(system, name), key=lambda g: g.rank)
    if not gpus or [g.rank for g in gpus] != list(range(len(gpus))):
        raise TopologyError(f"{name}: GPUs of ranks {[g.rank for g in gpus]}; expected 0, 1, ... each once")
    wiring = _Wiring()
    _xml_nvlinks(wiring, gpus, name)
    _xml_pcie(wiring, gpus)
    return wiring.topology(name, len(gpus))


def _xml_gpus(system: ET.Element, name: str) -> list[_Gpu]:
    found = []
    for i, cpu in enumerate(system.findall("cpu")):
        stack: list[tuple[ET.Element, tuple[tuple[str, float], ...]]] = [(cpu, ())]
        while stack:
            element, way = stack.pop()
            for child in element:
                if child.tag == "pci":
                    step = (_attribute(child, "busid", name), _pci_bytes_per_s(child))
                    stack.append((child, (step, *way)))
                elif child.tag == "gpu":
                    rank = _number(child, "rank" if "rank" in child.attrib else "dev", name)
                    found.append(
                        _Gpu(rank, _number(child, "sm", name), child, way, cpu.get("numaid", str(i)))
                    )
    return found


def _xml_nvlinks(wiring: _Wiring, gpus: Sequence[_Gpu], name: str) -> None:
    by_bus = {g.way_up[0][0]: g.rank for g in gpus if g.way_up}
    links: dict[tuple[int, int], int] = {}
    switched: dict[int, float] = {}
    rate = {g.rank: _SM_BYTES_PER_S.get(g.sm, _SM_BYTES_PER_S[90]) for g in gpus}
    for gpu in gpus:
        for link in gpu.element.findall("nvlink"):
            count, target = _number(link, "count", name), _attribute(link, "target", name)
            if link.get("tclass", "").lower() == _NVSWITCH_CLASS:
                switched[gpu.rank] = switched.get(gpu.rank, 0.0) + count * rate[gpu.rank]
            elif target in by_bus:
                links[gpu.rank, by_bus[target]] = links.get((gpu.rank, by_bus[target]), 0) + count
    for (src, dst), count in sorted(links.items()):
        wiring.route(src, dst, 0, {f"nvlink.{src}->{dst}": count * min(rate[src], rate[dst])})
    for src in sorted(switched):
        for dst in sorted(switched):
            if src != dst and (src, dst) not in links:
                wiring.route(src, dst, 0, {f"gpu{src}.up": switched[src], f"gpu{dst}.down": switched[dst]})


def _xml_pcie(wiring: _Wiring, gpus: Sequence[_Gpu]) -> None:
    for a in gpus:
        for b in gpus:
            if a is b or not (a.way_up and b.way_up):
                continue
            shared = {step[0] for step in a.way_up} & {step[0] for step in b.way_up}
            way = {f"pci.{bus}.up": c for bus, c in a.way_up if bus not in shared}
            if a.socket != b.socket:
                way[f"socket{a.socket}->socket{b.socket}"] = BETWEEN_SOCKETS_BYTES_PER_S
            way.update({f"pci.{bus}.down": c for bus, c in reversed(b.way_up) if bus not in shared})
            wiring.route(a.rank, b.rank, 1, way)


def _pci_bytes_per_s(pci: ET.Element) -> float:
    """Lanes x transfers, less the 128b/130b (8b/10b before PCIe 3) coding."""
    speed = re.match(r"\s*([\d.]+)", pci.get("link_speed", ""))
    width = pci.get("link_width", "")
    if speed is None or not width.isdecimal() or int(width) == 0:
        return PCIE_BYTES_PER_S
    transfers = float(speed[1]) * 1e9
    return transfers / 8 * int(width) * (128 / 130 if transfers >= 8e9 else 0.8)


def _attribute(element: ET.Element, field: str, name: str) -> str:
    value = element.get(field)
    if value is None:
        raise TopologyError(f"{name}: <{element.tag} {dict(element.attrib)}> lacks the attribute {field!r}")
    return value


def _number(element: ET.Element, field: str, name: str) -> int:
    value = _attribute(element, field, name)
    if not value.isdecimal():
        raise TopologyError(f"{name}: <{element.tag}> {field}={value!r}; expected a whole number")
    return int(value)
