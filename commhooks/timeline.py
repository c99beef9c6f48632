"""The trace of a run: what every slice and every layer did when, in the format that Perfetto and Chrome load.

Where in the flow: beside the traffic (as its observer) and the deferred steps; `commhooks timeline` sums a file up.

Invariants: recording appends one tuple per event and nothing else (writing happens at the end); times are wall-clock
seconds, so that ranks' files can be loaded together; one file per rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from commhooks.core.exchange import SliceId
from commhooks.errors import ConfigError
from commhooks.links.base import Link
from commhooks.tables import aligned
from commhooks.timeline_merge import merge

Event = dict[str, Any]


class _Mark(NamedTuple):
    """One thing that happened to a slice."""

    what: str  # ready, queued, sent, done
    at_s: float
    slice: SliceId
    peer: int  # -1: none
    number: int  # priority, or bytes


class Span(NamedTuple):
    """Something that took time, on a named track."""

    track: str
    name: str
    start_s: float
    end_s: float
    step: int


class Recorder:
    """Collects events of one rank; an `Observer` of the engine's traffic.

    `span` may be called by any thread, the observer's methods come from the engine's.
    """

    def __init__(self, path: str, rank: int) -> None:
        self.path = rank_path(path, rank)
        self.rank = rank
        self._offset_s = time.time() - time.monotonic()
        self._marks: list[_Mark] = []
        self._spans: list[Span] = []
        self._layers: dict[tuple[int, int], str] = {}
        self._written = threading.Lock()

    # -- the observer ----------------------------------------------------------------------------------------------------

    def ready(self, slice_id: SliceId, priority: int) -> None:
        """The rank's own part is here."""
        self._marks.append(_Mark("ready", time.monotonic(), slice_id, -1, priority))

    def queued(self, slice_id: SliceId, link: Link, priority: int) -> None:
        """A frame of the slice was given to a link."""
        self._marks.append(_Mark("queued", time.monotonic(), slice_id, link.peer, priority))

    def sent(self, slice_id: SliceId, link: Link) -> None:
        """A frame of the slice has left its memory."""
        self._marks.append(_Mark("sent", time.monotonic(), slice_id, link.peer, link.bytes_sent))

    def done(self, slice_id: SliceId) -> None:
        """The slice holds its final value."""
        self._marks.append(_Mark("done", time.monotonic(), slice_id, -1, 0))

    # -- others ----------------------------------------------------------------------------------------------------------

    def name_layers(self, stream: int, names: Mapping[int, str]) -> None:
        """Names of a stream's layers, by priority."""
        self._layers.update({(stream, priority): name for priority, name in names.items()})

    def span(self, track: str, name: str, start_s: float, end_s: float, step: int) -> None:
        """Record something that took from `start_s` to `end_s` (``time.monotonic()``)."""
        self._spans.append(Span(track, name, start_s, end_s, step))

    def write(self) -> None:
        """Write the file (again, with all that has come since)."""
        with self._written:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("w") as file:
                json.dump({"traceEvents": list(self._events()), "displayTimeUnit": "ms"}, file)

    # -- trace events ----------------------------------------------------------------------------------------------------

    def _events(self) -> Iterator[Event]:
        yield {"ph": "M", "name": "process_name", "pid": self.rank, "args": {"name": f"rank {self.rank}"}}
        yield from self._slice_events()
        for span in self._spans:
            yield self._complete(span.track, span.name, span.start_s, span.end_s, {"step": span.step})

    def _slice_events(self) -> Iterator[Event]:
        """Per slice: from ready to done on its layer's track; per frame: from queued to sent on its link's track."""
        priorities: dict[SliceId, int] = {}
        ready: dict[SliceId, float] = {}
        queued: dict[tuple[SliceId, int], list[float]] = defaultdict(list)
        for mark in self._marks:
            args = {**mark.slice._asdict(), "priority": priorities.get(mark.slice, mark.number)}
            if mark.what == "ready":
                priorities[mark.slice] = mark.number
                ready[mark.slice] = mark.at_s
            elif mark.what == "queued":
                queued[mark.slice, mark.peer].append(mark.at_s)
            elif mark.what == "sent" and queued.get((mark.slice, mark.peer)):
                start_s = queued[mark.slice, mark.peer].pop(0)
                name = self._layer(mark.slice, args["priority"])
                yield from self._pair(f"link to rank {mark.peer}", name, start_s, mark.at_s, args)
            elif mark.what == "done" and mark.slice in ready:
                name = self._layer(mark.slice, args["priority"])
                yield from self._pair("slices", name, ready.pop(mark.slice), mark.at_s, args)

    def _layer(self, slice_id: SliceId, priority: int) -> str:
        return self._layers.get((slice_id.stream, priority), f"layer {priority}")

    def _us(self, at_s: float) -> float:
        return (at_s + self._offset_s) * 1e6

    def _pair(
        self, track: str, name: str, start_s: float, end_s: float, args: dict[str, Any]
    ) -> Iterator[Event]:
        """Spans of one track that overlap each other are a begin and an end with an id of their own."""
        ident = (
            "-".join(str(args[key]) for key in ("stream", "step", "bucket", "index")) + f"-{track}-{start_s}"
        )
        common = {"cat": track, "name": name, "id": ident, "pid": self.rank, "tid": 0}
        yield {**common, "ph": "b", "ts": self._us(start_s), "args": args}
        yield {**common, "ph": "e", "ts": self._us(end_s)}

    def _complete(self, track: str, name: str, start_s: float, end_s: float, args: dict[str, Any]) -> Event:
        return {
            "ph": "X",
            "cat": track,
            "name": name,
            "pid": self.rank,
            "tid": track,
            "ts": self._us(start_s),
            "dur": (end_s - start_s) * 1e6,
            "args": args,
        }


def rank_path(path: str, rank: int) -> Path:
    """Each rank's own file: `{rank}` in the name stands for it, otherwise ranks above 0 get ``-rankN`` before the ending."""
    if "{rank}" in path:
        return Path(path.replace("{rank}", str(rank)))
    plain = Path(path)
    return plain if rank == 0 else plain.with_name(f"{plain.stem}-rank{rank}{plain.suffix}")


# --- summing a file up --------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One line of a summary: what, how often, and seconds."""

    track: str
    name: str
    times: int
    median_s: float
    longest_s: float
    busy_s: float


def read_spans(text: str) -> list[tuple[str, str, float, float]]:
    """(track, name, start, end) in seconds of every span in a trace.

    Raises
    ------
    ConfigError
        Not a trace.
    """
    try:
        loaded = json.loads(text)
        events = loaded["traceEvents"] if isinstance(loaded, dict) else loaded
        return list(_spans_of(events))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"not a trace in Chrome's format: {error!r}") from error


def _spans_of(events: Iterable[Event]) -> Iterator[tuple[str, str, float, float]]:
    open_spans: dict[tuple[Any, Any, Any], Event] = {}
    for event in events:
        kind = event.get("ph")
        if kind == "X":
            start = event["ts"] / 1e6
            yield str(event.get("cat", "")), str(event["name"]), start, start + event.get("dur", 0.0) / 1e6
        elif kind == "b":
            open_spans[event.get("pid"), event["cat"], event["id"]] = event
        elif kind == "e":
            begin = open_spans.pop((event.get("pid"), event["cat"], event["id"]), None)
            if begin is not None:
                yield str(begin["cat"]), str(begin["name"]), begin["ts"] / 1e6, event["ts"] / 1e6


def summarise(spans: Iterable[tuple[str, str, float, float]]) -> list[Row]:
    """One row per track and name; links first as a whole (`busy_s` counts overlapping time once)."""
    groups: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for track, name, start, end in spans:
        groups[track, name].append((start, end))
        if track.startswith("link"):
            groups[track, "(all)"].append((start, end))
    return [
        Row(track, name, len(times), *_figures(times))
        for (track, name), times in sorted(
            groups.items(), key=lambda item: (item[0][0], item[0][1] != "(all)", item[0][1])
        )
    ]


def _figures(times: list[tuple[float, float]]) -> tuple[float, float, float]:
    lengths = [end - start for start, end in times]
    busy = 0.0
    reached = float("-inf")
    for start, end in sorted(times):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return statistics.median(lengths), max(lengths), busy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``commhooks timeline``."""
    parser.add_argument(
        "file", nargs="+", help="traces written with COMMHOOKS_TIMELINE (or HOROVOD_TIMELINE)"
    )
    parser.add_argument(
        "--merge", metavar="OUT", help="write one trace with everything, Horovod's timeline too"
    )


def main(namespace: argparse.Namespace) -> int:
    """``commhooks timeline FILE…``: per link and per layer, how often, how long, how busy."""
    paths = [Path(name) for name in namespace.file]
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"{path} is not a file; write a trace with COMMHOOKS_TIMELINE={path} first")
    text = paths[0].read_text()
    if namespace.merge or len(paths) > 1:
        text = json.dumps({"traceEvents": merge(path.read_text() for path in paths)})
    if namespace.merge:
        Path(namespace.merge).write_text(text)
    rows = summarise(read_spans(text))
    if namespace.json:
        print(json.dumps([row._asdict() for row in rows]))
        return 0
    cells = [
        (
            row.track,
            row.name,
            str(row.times),
            f"{row.median_s * 1e3:.2f}",
            f"{row.longest_s * 1e3:.2f}",
            f"{row.busy_s:.3f}",
        )
        for row in rows
    ]
    print(aligned(("track", "what", "count", "median ms", "longest ms", "busy s"), cells))
    return 0
