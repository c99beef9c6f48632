"""Several traces as one: our ranks' files, and Horovod's own timeline beside them.

Where in the flow: files written with COMMHOOKS_TIMELINE and HOROVOD_TIMELINE -> **timeline_merge** -> one file for Perfetto.

Horovod counts microseconds from its start and tells when that was in its first record; ours are wall-clock times.  Horovod
makes a process of every tensor, with small numbers that ranks of ours have too.

Invariants: pure; an unfinished Horovod file (its job was killed) is read as far as it goes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from commhooks.errors import ConfigError

Event = dict[str, Any]
_START = "start_time_since_epoch_in_micros"
_HOROVOD_PID = 1_000_000  # above any rank


def merge(texts: Iterable[str]) -> list[Event]:
    """The events of all traces, in wall-clock microseconds.

    Raises
    ------
    ConfigError
        One of them isn't a trace.
    """
    merged: list[Event] = []
    for number, text in enumerate(texts):
        events = _events(text)
        start_us = next((e["args"][_START] for e in events if _START in e.get("args", {})), None)
        merged.extend(
            events if start_us is None else _horovods(events, start_us, _HOROVOD_PID * (number + 1))
        )
    return merged


def _events(text: str) -> list[Event]:
    closed = text.rstrip().rstrip(",")
    for attempt in (text, closed + "]", closed + "}]"):
        try:
            loaded = json.loads(attempt)
        except ValueError:
            continue
        events = loaded.get("traceEvents") if isinstance(loaded, dict) else loaded
        if isinstance(events, list) and all(isinstance(event, dict) for event in events):
            return [event for event in events if event]
    raise ConfigError(
        "not a trace in Chrome's format; expected a file of COMMHOOKS_TIMELINE or HOROVOD_TIMELINE"
    )


def _horovods(events: Iterable[Event], start_us: float, first_pid: int) -> Iterable[Event]:
    yield {"ph": "M", "name": "process_name", "pid": first_pid, "args": {"name": "Horovod"}}
    for event in events:
        if _START in event.get("args", {}):
            continue
        moved = {**event, "pid": first_pid + event.get("pid", 0)}
        if "ts" in event:
            moved["ts"] = event["ts"] + start_us
        yield moved
