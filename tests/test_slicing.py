"""Slices tile the buffer, respect the limit and never cross a layer."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from commhooks.core.plan import ring_plan, star_plan
from commhooks.core.slicing import Segment, equal_cuts, parts_of, slice_layout

segments = st.lists(
    st.builds(Segment, st.integers(0, 3000), st.integers(0, 50), st.integers(0, 5)), min_size=0, max_size=12
)


@given(segments, st.integers(1, 1000), st.integers(1, 5))
def test_slices_tile_the_buffer_within_layers(parts: list[Segment], limit: int, world_size: int) -> None:
    layout = slice_layout(parts, limit, star_plan(world_size).assign, world_size)
    assert layout.numel == sum(part.numel for part in parts)
    position = 0
    layer_of = [part.layer for part in parts for _ in range(part.numel)]
    for index, piece in enumerate(layout.slices):
        assert piece.index == index
        assert piece.start == position
        assert 0 < piece.numel <= limit
        assert len(set(layer_of[piece.start : piece.stop])) == 1
        assert 0 <= piece.tree < world_size
        position = piece.stop
    assert position == layout.numel


@given(st.integers(0, 50_000), st.integers(1, 9_000))
def test_equal_cuts_are_fewest_and_even(numel: int, limit: int) -> None:
    sizes = equal_cuts(numel, limit)
    assert sum(sizes) == numel
    assert len(sizes) == -(-numel // limit)
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_adjacent_parameters_of_a_layer_share_a_slice() -> None:
    layout = slice_layout(
        [Segment(300, 4, 4), Segment(20, 4, 4), Segment(20, 3, 3)], 1000, ring_plan(2).assign
    )
    assert [piece.numel for piece in layout.slices] == [320, 20]
    assert [piece.priority for piece in layout.slices] == [4, 3]


@given(segments, st.integers(1, 500), st.integers(1, 500), st.integers(1, 5))
def test_the_tree_of_an_element_does_not_depend_on_the_slice_size(
    parts: list[Segment], one: int, other: int, world_size: int
) -> None:
    assign = star_plan(world_size).assign
    trees = []
    for limit in (one, other):
        layout = slice_layout(parts, limit, assign, world_size)
        trees.append([piece.tree for piece in layout.slices for _ in range(piece.numel)])
    assert trees[0] == trees[1]


def test_a_small_buffer_is_spread_over_all_trees() -> None:
    layout = slice_layout([Segment(250_000, 0, 0)], 1 << 20, ring_plan(4).assign, 4)
    assert {piece.tree for piece in layout.slices} == {0, 1, 2, 3}


def test_the_digest_tells_cuts_apart_but_not_priorities() -> None:
    assign = ring_plan(2).assign
    one = slice_layout([Segment(300, 4, 4)], 100, assign)
    assert one.digest == slice_layout([Segment(300, 9, 4)], 100, assign).digest
    assert one.digest != slice_layout([Segment(300, 4, 4)], 150, assign).digest
    assert one.digest != slice_layout([Segment(301, 4, 4)], 100, assign).digest


def test_uneven_shares_are_served_exactly_enough():
    """Two cards, 200 + 800: the smallest share must not be off by half a block."""
    shares = (0.4, 0.4, 0.1, 0.1)
    plan = replace(star_plan(4), shares=shares)
    layout = slice_layout([Segment(6_250_000, 0, 0)], 25_000, plan.assign, parts_of(shares))
    carried = [sum(s.numel for s in layout.slices if s.tree == tree) / 6_250_000 for tree in range(4)]
    assert max(c / share for c, share in zip(carried, shares)) < 1.025
    assert parts_of((0.25,) * 4) == 4 and parts_of((1.0,)) == 1 and parts_of((1 - 1e-12, 1e-12)) == 64
