"""Parcels: every parameter in exactly one, the same on every rank, one dtype each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commhooks.errors import Mismatch
from commhooks.parcels import Entry, agree, digest, make_parcels

sizes = st.lists(st.tuples(st.integers(0, 30_000), st.sampled_from(["float32", "bfloat16"])), max_size=40)


def _entries(drawn):
    return [Entry(f"layer{i}.weight", (numel,), dtype) for i, (numel, dtype) in enumerate(drawn)]


@given(sizes, st.integers(0, 20_000), st.randoms(use_true_random=False))
def test_parcels_partition_the_parameters(drawn, small_numel, random):
    entries = _entries(drawn)
    chosen = [i for i in range(len(entries)) if random.random() < 0.3]
    cut = random.randint(0, len(chosen))
    groups = [chosen[:cut], chosen[cut:]]
    parcels = make_parcels(entries, groups, small_numel)
    assert sorted(i for parcel in parcels for i in parcel.members) == list(range(len(entries)))
    assert [parcel.index for parcel in parcels] == list(range(len(parcels)))
    for parcel in parcels:
        assert len({entries[i].dtype for i in parcel.members}) == 1
        assert parcel.numel == sum(entries[i].numel for i in parcel.members)
        assert parcel.priority == min(parcel.members)
        if len(parcel.members) > 1 and not set(parcel.members) & set(chosen):
            assert parcel.numel <= small_numel
    assert [parcel.priority for parcel in parcels] == sorted(parcel.priority for parcel in parcels)


def test_small_ones_are_gathered_across_large_ones():
    entries = [Entry("a", (3,), "float32"), Entry("big", (99,), "float32"), Entry("b", (4,), "float32")]
    assert [parcel.members for parcel in make_parcels(entries, small_numel=10)] == [(0, 2), (1,)]
    assert [parcel.members for parcel in make_parcels(entries, small_numel=0)] == [(0,), (1,), (2,)]


def test_a_group_stays_together_whatever_its_size():
    entries = [Entry(name, (99,), "float32") for name in "abc"]
    assert [parcel.members for parcel in make_parcels(entries, [[0, 2]], 10)] == [(0, 2), (1,)]


def test_agreement_takes_rank_0s_order():
    a, b = Entry("a", (2, 3), "float32"), Entry("b", (), "float32")
    assert agree([[a, b], [b, a]], "SGD #0") == (a, b)
    assert digest([a, b]) != digest([b, a])
    assert Entry.from_json(a.to_json()) == a and b.numel == 1


def test_disagreement_names_parameter_and_ranks():
    a, b = Entry("a", (2, 3), "float32"), Entry("b", (4,), "float32")
    with pytest.raises(
        Mismatch, match=r"SGD #0: parameter b is trainable on rank 0 and isn't there .* rank 1"
    ):
        agree([[a, b], [a]], "SGD #0")
    with pytest.raises(
        Mismatch, match=r"parameter a is float32 \[2, 3\] on rank 0 and float32 \[3, 2\] on rank 1"
    ):
        agree([[a], [Entry("a", (3, 2), "float32")]], "SGD #0")
