"""The loader: order of precedence, refusals that help, and the comparison between ranks."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commhooks.config import KNOBS, Config, compare_across_ranks
from commhooks.errors import ConfigError, Mismatch


def test_defaults_are_those_of_the_table():
    config = Config.load({}, {})
    assert config == Config()
    assert {row.name: getattr(config, row.name) for row in KNOBS} == {row.name: row.default for row in KNOBS}
    assert set(config.sources.values()) == {"default"}


def test_every_field_is_a_knob_and_every_default_is_valid():
    assert [row.name for row in KNOBS] == [
        f.name for f in dataclasses.fields(Config) if not f.name.startswith("_")
    ]
    for row in KNOBS:
        if row.default is not None:
            assert row.kind.parse(row.default) == row.default
        assert row.meaning and row.kind.form and row.kind.show(row.default)


def test_argument_beats_environment_beats_default():
    config = Config.load({"slice_numel": 7}, {"COMMHOOKS_SLICE_NUMEL": "9", "COMMHOOKS_PRIORITY": "fifo"})
    assert (config.slice_numel, config.priority, config.links) == (7, "fifo", "auto")
    sources = config.sources
    assert sources["slice_numel"] == "argument"
    assert sources["priority"] == "COMMHOOKS_PRIORITY"
    assert sources["links"] == "default"


def test_an_argument_of_none_is_not_given():
    assert Config.load({"priority": None}, {"COMMHOOKS_PRIORITY": "fifo"}).priority == "fifo"


@pytest.mark.parametrize("word", ["0", "off", "False", " no "])
def test_the_off_switch_beats_everything_even_nonsense(word):
    config = Config.load({"enabled": True, "nonsense": 1}, {"COMMHOOKS": word, "COMMHOOKS_NONSENSE": "1"})
    assert not config.enabled
    assert config.sources["enabled"] == "COMMHOOKS"


def test_a_switched_on_environment_does_not_beat_the_argument():
    assert not Config.load({"enabled": False}, {"COMMHOOKS": "1"}).enabled


@pytest.mark.parametrize(
    ("arguments", "environ", "wrong", "nearest"),
    [
        ({}, {"COMMHOOKS_SLICENUMEL": "1"}, "COMMHOOKS_SLICENUMEL", "COMMHOOKS_SLICE_NUMEL"),
        ({}, {"COMMHOOKS_TIMEOUT": "1"}, "COMMHOOKS_TIMEOUT", "COMMHOOKS_TIMEOUT_S"),
        ({"topologie": "uniform"}, {}, "topologie", "topology"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(arguments, environ, wrong, nearest):
    with pytest.raises(ConfigError) as caught:
        Config.load(arguments, environ)
    assert wrong in str(caught.value) and f"{nearest} " in str(caught.value)


def test_other_programs_variables_and_those_of_our_tools_are_left_alone():
    Config.load({}, {"COMMHOOKSX": "1", "PATH": "x", "COMMHOOKS_LAB": "nic:1,2"})


@pytest.mark.parametrize(
    ("name", "value", "form"),
    [
        ("COMMHOOKS_SLICE_NUMEL", "0", "a whole number from 1 to"),
        ("COMMHOOKS_SLICE_NUMEL", "1.5", "| auto (elements)"),
        ("COMMHOOKS_TIMEOUT_S", "nan", "from 0.1 to 86,400 (s)"),
        ("COMMHOOKS_TIMEOUT_S", "inf", "from 0.1"),
        ("COMMHOOKS_TIMEOUT_S", "soon", "from 0.1"),
        ("COMMHOOKS_OVERLAP", "sideways", "auto | backward | forward"),
        ("COMMHOOKS_CHECKSUM", "maybe", "on or off"),
        ("COMMHOOKS_TIMELINE", " ", "the path of a file"),
        ("COMMHOOKS", "perhaps", "on or off"),
    ],
)
def test_a_bad_value_is_refused_with_name_value_and_form(name, value, form):
    with pytest.raises(ConfigError) as caught:
        Config.load({}, {name: value})
    assert f"{name}={value!r}" in str(caught.value) and form in str(caught.value)


def test_arguments_come_in_their_own_types():
    config = Config.load(
        {"timeout_s": 5, "timeline": Path("a/b"), "checksum": True, "slice_numel": "auto"}, {}
    )
    assert (config.timeout_s, config.timeline, config.checksum, config.slice_numel) == (
        5.0,
        "a/b",
        True,
        None,
    )
    with pytest.raises(ConfigError, match="slice_numel=True"):
        Config.load({"slice_numel": True}, {})


@given(st.data())
def test_whatever_a_knob_shows_it_reads_back(data):
    row = data.draw(st.sampled_from([row for row in KNOBS if hasattr(row.kind, "low")]))
    number = data.draw(st.integers(1, 1000))
    shown = row.kind.show(row.kind.parse(number))
    assert row.kind.parse(shown) == number


def test_values_that_must_agree_survive_json_and_name_what_differs():
    mine = Config.load({}, {})
    other = Config.load({"slice_numel": 50_000, "timeout_s": 3}, {})
    compare_across_ranks([json.loads(json.dumps(c.must_agree())) for c in (mine, mine)])
    with pytest.raises(Mismatch) as caught:
        compare_across_ranks([c.must_agree() for c in (mine, mine, other)])
    text = str(caught.value)
    assert "slice_numel (COMMHOOKS_SLICE_NUMEL): rank 0 has None, rank 2 has 50000" in text
    assert "timeout_s" not in text  # it may differ


def test_a_rank_of_another_version_is_named():
    mine = Config().must_agree()
    with pytest.raises(Mismatch, match="newfangled .*rank 0 has no such field, rank 1 has 1"):
        compare_across_ranks([mine, {**mine, "newfangled": 1}])
