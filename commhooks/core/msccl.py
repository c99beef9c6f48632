"""A plan as MSCCL-style XML, for GPU runtimes that execute such files.

Where in the flow: ``plan`` -> **here** -> ``commhooks plan --format msccl-xml``.

How a plan maps: the buffer is cut into chunks, each tree gets as many as its share says.  On every GPU there's one
thread block per tree and neighbour, on the tree's own channel, so that a block has one peer to send to and one to
receive from.  Its steps: receive-reduce (``rrc``) from a child, send (``s``) to the parent, receive (``r``) from the
parent, send to a child.  Where one block must wait for another's step it names it (``depid``, ``deps``).

Invariants: children are added in the plan's order; nothing is overwritten before it was sent on.  The tests run the
file in an interpreter that counts contributions.

Source: the format of msccl-tools and of the MSCCL interpreter in NCCL.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass, field

from commhooks.core.plan import Plan, TreeRoute
from commhooks.errors import ConfigError

COLLECTIVES = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
CHUNKS = 32  # to divide by the shares, per root


@dataclass(eq=False)
class _Step:
    kind: str
    buffer: str
    offset: int
    count: int
    after: _Step | None = None
    waited_for: bool = False
    block: int = -1
    number: int = -1


@dataclass(eq=False)
class _Block:
    peer: int
    channel: int
    steps: list[_Step] = field(default_factory=list)


def msccl_xml(plan: Plan, name: str = "commhooks", chunks: int = CHUNKS) -> str:
    """The XML text.

    Parameters
    ----------
    plan
        A proven plan of any collective but gather (MSCCL has none).
    chunks
        Into how many parts the bytes of each root are cut; more follow the shares more closely.

    Raises
    ------
    ConfigError
        For gather.
    """
    if plan.collective not in COLLECTIVES:
        raise ConfigError(f"msccl-xml: no {plan.collective} in that format; it has {', '.join(COLLECTIVES)}")
    ranges, total = chunk_ranges(plan, chunks)
    algo = ET.Element(
        "algo",
        name=name,
        nchannels=str(len(plan.pairs)),
        nchunksperloop=str(total),
        proto="Simple",
        ngpus=str(plan.world_size),
        coll=COLLECTIVES[plan.collective],
        inplace="1",
        outofplace="0",
    )
    own = total // plan.world_size
    inputs, outputs = {"all_gather": (own, total), "reduce_scatter": (total, own)}.get(
        plan.collective, (total, total)
    )
    for rank in range(plan.world_size):
        gpu = ET.SubElement(
            algo, "gpu", id=str(rank), i_chunks=str(inputs), o_chunks=str(outputs), s_chunks="0"
        )
        _write_blocks(gpu, _blocks(plan, rank, ranges))
    ET.indent(algo)
    return ET.tostring(algo, encoding="unicode") + "\n"


def chunk_ranges(plan: Plan, chunks: int) -> tuple[list[tuple[int, int]], int]:
    """For each tree its (first chunk, count), and the number of chunks; every tree gets at least one."""
    many = plan.collective in ("all_gather", "reduce_scatter")
    roots: list[int] = list(range(plan.world_size)) if many else [-1]
    trees = [[i for i, p in enumerate(plan.pairs) if not many or p.root == root] for root in roots]
    per_root = max(chunks // len(roots), *(len(t) for t in trees))
    ranges = [(0, 0)] * len(plan.pairs)
    for block, members in enumerate(trees):
        start = block * per_root
        counts = apportion([plan.shares[i] for i in members], per_root)
        for i, count in zip(members, counts, strict=True):
            ranges[i] = (start, count)
            start += count
    return ranges, per_root * len(roots)


def apportion(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers that sum to ``total``, at least 1 each, in proportion to ``shares`` (largest remainder)."""
    spare = total - len(shares)
    exact = [share / sum(shares) * spare for share in shares]
    counts = [1 + int(x) for x in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (int(exact[i]) - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def _blocks(plan: Plan, rank: int, ranges: Sequence[tuple[int, int]]) -> list[_Block]:
    buffer = "o" if plan.collective == "all_gather" else "i"
    blocks: list[_Block] = []
    for route in plan.routes(rank):
        offset, count = ranges[route.tree]
        blocks += _tree_blocks(route, buffer, offset, count)
    return [b for b in blocks if b.steps]


def _tree_blocks(route: TreeRoute, buffer: str, offset: int, count: int) -> list[_Block]:
    blocks: dict[int, _Block] = {}

    def step(kind: str, peer: int, after: _Step | None) -> _Step:
        made = _Step(kind, buffer, offset, count, after)
        blocks.setdefault(peer, _Block(peer, route.tree)).steps.append(made)
        return made

    last: _Step | None = None
    for child in route.reduce_children:
        last = step("rrc", child.rank, last)
    if route.reduce_parent is not None:
        last = step("s", route.reduce_parent.rank, last)
    if route.broadcast_parent is not None:
        last = step("r", route.broadcast_parent.rank, last)
    for child in route.broadcast_children:
        step("s", child.rank, last)
    return list(blocks.values())


def _write_blocks(gpu: ET.Element, blocks: Sequence[_Block]) -> None:
    for i, block in enumerate(blocks):
        for number, step in enumerate(block.steps):
            step.block, step.number = i, number
    for block in blocks:
        for step in block.steps:
            if step.after is not None and step.after.block != step.block:
                step.after.waited_for = True
    for i, block in enumerate(blocks):
        kinds = {step.kind for step in block.steps}
        sends, receives = "s" in kinds, bool(kinds - {"s"})
        element = ET.SubElement(
            gpu,
            "tb",
            id=str(i),
            send=str(block.peer if sends else -1),
            recv=str(block.peer if receives else -1),
            chan=str(block.channel),
        )
        for step in block.steps:
            _write_step(element, step)


def _write_step(block: ET.Element, step: _Step) -> None:
    other = step.after if step.after is not None and step.after.block != step.block else None
    ET.SubElement(
        block,
        "step",
        s=str(step.number),
        type=step.kind,
        srcbuf=step.buffer,
        srcoff=str(step.offset),
        dstbuf=step.buffer,
        dstoff=str(step.offset),
        cnt=str(step.count),
        depid=str(-1 if other is None else other.block),
        deps=str(-1 if other is None else other.number),
        hasdep=str(int(step.waited_for)),
    )
