"""Which flows to run next, to learn what the network is.

Where in the flow: probe -> **survey** (asks for rounds of flows, is sent their rates) -> ``inference``.

1. *Pairs*: every node sends to one and receives from one other; each round by another distance, so that after ``nodes - 1``
   rounds every pair has been seen.
2. *Alone*: flows that were slower than their ends, few at a time, the least slow first: a busy machine makes flows slow
   that the network doesn't.  Several slow ones in a row, and the rest is taken for slow.
3. *Fans*: each node to and from up to three others at once, groups of four side by side: what the node itself can do.
   Then alone with all others, where three could not fill it.
4. *Cuts*: nodes that are slow towards the same others are a site.  Between sites one flow alone, then as many as there are
   nodes; sites between which nothing is slow join, and the rest is measured again.

5. *Odd ones*: a node that seems somewhat slower than the fastest of its site gets one more turn, nearly alone.

A cut that single flows don't feel (wider than a node) shows only in the first rounds, where many flows meet in it: when nothing
is slow alone, the sites that those rounds suggest are tried, and must show clearly.

Invariants: pure; the rounds depend on the rates sent in only; their number grows linearly with the nodes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from commhooks.core.inference import (
    CLEAR_CUT,
    CUT,
    LEVEL,
    Estimate,
    Flow,
    Seen,
    best_rates,
    doubts,
    estimate,
    nics,
    sites_of,
)

MOST_DISTANCES = 16  # beyond 17 nodes not every pair is tried: a probe must stay short
FAN = 3
_REGROUPINGS = 3
_MUCH_SLOWER = 0.4
_ENOUGH_IN_A_ROW = 4
_FEWEST = 3  # between two or three nodes, too, one slow moment must not decide

#: Yields the flows of a round, is sent their rates in bytes/s, returns the estimate.
Survey = Generator[tuple[Flow, ...], Sequence[float], Estimate]
_Steps = Generator[tuple[Flow, ...], Sequence[float], None]


def survey(nodes: int) -> Survey:
    """Survey the network between `nodes` nodes."""
    seen: list[Seen] = []
    rounds = _distances(nodes)
    for turn in range(max(len(rounds), _FEWEST if rounds else 0)):
        yield from _run(rounds[turn % len(rounds)], seen)
    crowded = doubts(nodes, seen)
    slow: set[Flow] = set()
    yield from _alone(nodes, seen, slow, set())
    yield from _fans(nodes, sites_of(nodes, slow, strict=True), seen)
    yield from _alone(nodes, seen, slow, set(slow))  # of nodes that can do more than was thought
    site, believe = sites_of(nodes, slow, strict=True), CUT
    if not slow:
        site, believe = sites_of(nodes, crowded, strict=False), CLEAR_CUT
    for _ in range(_REGROUPINGS):
        yield from _cuts(site, seen)
        joined = _joined(estimate(nodes, seen, site, believe))
        if joined == site:
            break
        site = joined
    yield from _odd_ones(nodes, site, seen)
    return estimate(nodes, seen, site, believe)


def _run(flows: Sequence[Flow], seen: list[Seen]) -> _Steps:
    if flows:
        rates = yield tuple(flows)
        seen.append(Seen(tuple(flows), tuple(rates)))


def _distances(nodes: int) -> list[list[Flow]]:
    every = list(range(1, nodes))
    if len(every) > MOST_DISTANCES:
        # Evenly spread, the shortest and its way back among them.
        every = sorted({1 + round(i * (nodes - 2) / (MOST_DISTANCES - 1)) for i in range(MOST_DISTANCES)})
    return [[Flow(node, (node + distance) % nodes) for node in range(nodes)] for distance in every]


def _alone(nodes: int, seen: list[Seen], slow: set[Flow], tried: set[Flow]) -> _Steps:
    """Try doubtful flows few at a time; adds those to `slow` that stay so."""
    in_a_row = 0
    for _ in range(2 * nodes):
        left = _by_ratio(nodes, seen, doubts(nodes, seen) - tried)
        if not left:
            break
        chosen = _disjoint(left, max(1, nodes // 4))
        tried |= {*chosen}
        yield from _run(chosen, seen)
        still = doubts(nodes, seen) & {*chosen}
        slow |= still
        in_a_row = 0 if len(still) < len(chosen) else in_a_row + len(chosen)
        if in_a_row >= _ENOUGH_IN_A_ROW:
            slow |= doubts(nodes, seen) - tried
            break
    slow &= doubts(nodes, seen)


def _by_ratio(nodes: int, seen: Sequence[Seen], flows: set[Flow]) -> list[Flow]:
    """The flows that come nearest to what their ends can do first."""
    up, down = nics(nodes, seen)
    rates = best_rates(seen)
    return sorted(flows, key=lambda flow: (-rates[flow] / min(up[flow.src], down[flow.dst]), flow))


def _disjoint(flows: Sequence[Flow], most: int) -> list[Flow]:
    chosen: list[Flow] = []
    for flow in flows:
        if len(chosen) < most and not any({flow.src, flow.dst} & {*other} for other in chosen):
            chosen.append(flow)
    return chosen


def _fans(nodes: int, site: Sequence[int], seen: list[Seen]) -> _Steps:
    if nodes < 3:
        return
    leaves = _leaves(nodes, site)
    left = list(range(nodes))
    while left:
        busy: set[int] = set()
        flows: list[Flow] = []
        for node in list(left):
            if not busy & {node, *leaves[node]}:
                busy |= {node, *leaves[node]}
                flows += _fan(node, leaves[node])
                left.remove(node)
        yield from _run(flows, seen)
    for node in range(nodes):
        if len(leaves[node]) < nodes - 1 and not _full(nodes, node, leaves[node], seen):
            yield from _run(_fan(node, [other for other in range(nodes) if other != node]), seen)


def _fan(node: int, leaves: Sequence[int]) -> list[Flow]:
    return [Flow(node, leaf) for leaf in leaves] + [Flow(leaf, node) for leaf in leaves]


def _leaves(nodes: int, site: Sequence[int]) -> list[list[int]]:
    """Whom each node is tried with: groups of neighbours in its site first, so that fans can run side by side."""
    order = sorted(range(nodes), key=lambda node: (site[node], node))
    groups = [order[at : at + FAN + 1] for at in range(0, nodes, FAN + 1)]
    if len(groups) > 1 and len(groups[-1]) < 3:
        groups[-1] = order[-(FAN + 1) :]  # too few to fill a node: with some of the group before
    found: list[list[int]] = [[] for _ in range(nodes)]
    for group in groups:
        for node in group:
            found[node] = found[node] or [other for other in group if other != node]
    return found


def _full(nodes: int, node: int, leaves: Sequence[int], seen: Sequence[Seen]) -> bool:
    """Whether the leaves together could have carried more than the node did, both ways."""
    up, down = nics(nodes, seen)
    rates = best_rates(seen)
    could_take = sum(rates[Flow(node, leaf)] for leaf in leaves)
    could_give = sum(rates[Flow(leaf, node)] for leaf in leaves)
    return up[node] < CUT * could_take and down[node] < CUT * could_give


def _cuts(site: Sequence[int], seen: list[Seen]) -> _Steps:
    """Between each two sites: one flow alone, then one per node; disjoint pairs of sites side by side."""
    members = [[node for node, s in enumerate(site) if s == number] for number in range(max(site) + 1)]
    for matching in _matchings(len(members)):
        pairs = [
            (members[a], members[b])
            for a, b in matching
            if len(members[a]) + len(members[b]) > 2  # two nodes have met already
        ]
        for most in (1, len(site)):
            yield from _run([flow for a, b in pairs for flow in _crossing(a, b, most)], seen)


def _odd_ones(nodes: int, site: Sequence[int], seen: list[Seen]) -> _Steps:
    up, down = nics(nodes, seen)
    left: list[Flow] = []
    for node in range(nodes):
        mates = [other for other in range(nodes) if other != node and site[other] == site[node]]
        if mates:
            giver, taker = max(mates, key=lambda n: up[n]), max(mates, key=lambda n: down[n])
            left += [Flow(node, taker)] if _is_odd(up[node], up[giver]) else []
            left += [Flow(giver, node)] if _is_odd(down[node], down[taker]) else []
    while left:
        chosen = _disjoint(left, max(1, nodes // 4))
        left = [flow for flow in left if flow not in chosen]
        yield from _run(chosen, seen)


def _is_odd(rate: float, fastest: float) -> bool:
    # A card of another make is much slower, and slow flows are measured well; a processor that was late costs less.
    return _MUCH_SLOWER * fastest < rate < (1 - LEVEL) * fastest


def _crossing(one: Sequence[int], other: Sequence[int], most: int) -> list[Flow]:
    count = min(most, max(len(one), len(other)))
    there = [Flow(one[i % len(one)], other[i % len(other)]) for i in range(count)]
    return there + [Flow(flow.dst, flow.src) for flow in there]


def _matchings(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of 0..count-1, as rounds of disjoint ones (the circle method)."""
    if count < 2:
        return []
    even = count + count % 2
    rounds = []
    for turn in range(even - 1):
        ring = [0, *((i + turn) % (even - 1) + 1 for i in range(even - 1))]
        pairs = [(ring[i], ring[even - 1 - i]) for i in range(even // 2)]
        rounds.append([(min(p), max(p)) for p in pairs if max(p) < count])
    return rounds


def _joined(found: Estimate) -> tuple[int, ...]:
    """The same sites, those put together between which no flow is slow after all."""
    site = found.site
    apart = {frozenset(between) for between in found.cuts}
    apart |= {frozenset((site[flow.src], site[flow.dst])) for flow in found.paths}
    every = range(max(site) + 1)
    leader = list(every)
    for b in every:
        for a in range(b):
            others = [k for k in every if k not in (a, b)]
            alike = all((frozenset((a, k)) in apart) == (frozenset((b, k)) in apart) for k in others)
            if leader[b] == b and leader[a] == a and frozenset((a, b)) not in apart and alike:
                leader[b] = a
    merged = [leader[s] for s in site]
    order = sorted(set(merged))
    return tuple(order.index(s) for s in merged)
