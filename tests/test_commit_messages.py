"""The parameter server's bytes: what is packed comes back, what doesn't fit is refused with its numbers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commhooks.commit_checkpoint import ShardFile
from commhooks.commit_messages import (
    AnswerHead,
    Direction,
    Done,
    GoBack,
    Gone,
    Hello,
    Numbers,
    PushHead,
    Stop,
    Tags,
    pack_control,
    unpack_control,
)
from commhooks.errors import ConfigError, ProtocolError

WORDS = st.integers(0, 2**32 - 1)


@given(st.tuples(WORDS, WORDS, WORDS, WORDS, st.integers(0, 2**64 - 1), WORDS, st.booleans()))
@settings(deadline=None)
def test_a_commits_header_comes_back(fields):
    assert PushHead.unpack(PushHead(*fields).pack()) == PushHead(*fields)


@given(st.tuples(WORDS, WORDS, WORDS, st.integers(-(2**63), 2**63 - 1), st.booleans(), WORDS))
@settings(deadline=None)
def test_an_answers_header_comes_back(fields):
    assert AnswerHead.unpack(AnswerHead(*fields).pack()) == AnswerHead(*fields)


@pytest.mark.parametrize(
    "message",
    [Hello(1, 2), Done(0, 0), Gone(2, "killed"), Direction(3, 0.5, None), GoBack(1), Stop("done"),
     Numbers(0, 1, 2, 0.1, 0.2, 0.3, 0.4, 1.5, 7)],
)  # fmt: skip
def test_a_control_message_comes_back(message):
    assert unpack_control(pack_control(message)) == message


@pytest.mark.parametrize(
    "text", [b"", b"[]", b'{"kind": "Nobody"}', b'{"kind": "Hello"}', b'{"worker": 1}', b"\xff"]
)
def test_what_is_no_control_message_is_refused(text):
    with pytest.raises(ProtocolError, match="control message"):
        unpack_control(text)


def test_a_header_of_another_length_is_refused_with_its_numbers():
    with pytest.raises(ProtocolError, match="header of 3 bytes; expected 29"):
        PushHead.unpack(b"abc")
    with pytest.raises(ProtocolError, match="header of 3 bytes; expected 25"):
        AnswerHead.unpack(b"abc")


def test_models_on_one_network_have_tags_of_their_own():
    tags = [tag for stream in range(50) for tag in Tags.of(stream)]
    assert len(set(tags)) == len(tags)


def test_a_checkpoint_comes_back_and_a_strange_one_is_refused(tmp_path):
    file = ShardFile(str(tmp_path / "shard"), 2, "abc")
    assert file.load() is None and file.path.name == "shard.rank2"
    assert ShardFile("a{rank}b", 3, "").path.name == "a3b"
    values = {4: np.arange(3, dtype=np.float32), 11: np.ones(2, np.float32)}
    file.save(values)
    file.save(values)
    again = file.load()
    assert list(again) == [4, 11] and all((again[i] == values[i]).all() for i in values)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["shard.rank2"]
    with pytest.raises(ConfigError, match="another model"):
        ShardFile(str(tmp_path / "shard"), 2, "other").load()
    file.path.write_bytes(b"half a file")
    with pytest.raises(ConfigError, match="can't be read"):
        file.load()
