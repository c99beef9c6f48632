"""A trace tells what happened, loads as Chrome's format, and sums up."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from commhooks.core.exchange import SliceId
from commhooks.errors import ConfigError
from commhooks.timeline import Recorder, rank_path, read_spans, summarise


def test_slices_and_spans_come_back_from_the_file(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path / "deep" / "trace-{rank}.json"), 3)
    link = SimpleNamespace(peer=1, bytes_sent=10)
    first, second = SliceId(1, 0, 0, 0), SliceId(1, 0, 0, 1)
    recorder.name_layers(1, {7: "fc.weight"})
    for piece in (first, second):
        recorder.ready(piece, 7)
        recorder.queued(piece, link, 7)  # type: ignore[arg-type]
    for piece in (second, first):
        recorder.sent(piece, link)  # type: ignore[arg-type]
        recorder.done(piece)
    recorder.span("forward", "wait fc.weight", 1.0, 1.5, step=0)
    recorder.write()
    text = (tmp_path / "deep" / "trace-3.json").read_text()
    spans = read_spans(text)
    assert sorted((track, name) for track, name, _, _ in spans) == [
        ("forward", "wait fc.weight"),
        *[("link to rank 1", "fc.weight")] * 2,
        *[("slices", "fc.weight")] * 2,
    ]
    assert all(event.get("pid") == 3 for event in json.loads(text)["traceEvents"])
    rows = {(row.track, row.name): row for row in summarise(spans)}
    assert rows["link to rank 1", "(all)"].times == 2
    assert rows["forward", "wait fc.weight"].busy_s == pytest.approx(0.5)


def test_overlapping_time_is_busy_once() -> None:
    rows = summarise([("link a", "x", 0.0, 2.0), ("link a", "x", 1.0, 3.0), ("link a", "x", 5.0, 6.0)])
    assert [(row.name, row.busy_s) for row in rows] == [("(all)", 4.0), ("x", 4.0)]


def test_every_rank_has_a_file_of_its_own() -> None:
    assert rank_path("a/t.json", 0) == Path("a/t.json")
    assert rank_path("a/t.json", 2) == Path("a/t-rank2.json")
    assert rank_path("a/{rank}.json", 2) == Path("a/2.json")


@pytest.mark.parametrize("text", ["", "{}", "[1, 2]", '{"traceEvents": 7}'])
def test_what_is_no_trace_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a trace"):
        read_spans(text)
