"""The world of a Horovod job as the reducers need it: who takes part, control plane, engine, and which way gradients go.

Where in the flow: ``commhooks.horovod`` -> **world** -> reducer (asks for a sender) -> engine or Horovod's all-reduce.

Horovod is launcher and control plane: JSON travels as ``uint8`` all-gathers, nothing is pickled.  The module
``horovod.torch`` is handed in: it is imported in one place only.

Invariants: one engine per process set and settings; after an elastic reset everything is made anew (engine, plan, step
counters); every choice that ranks must share is made from exchanged values.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from commhooks import adsp
from commhooks.config import Config
from commhooks.core.choice import Way
from commhooks.core.gates import SliceKey
from commhooks.engine import Engine, Surroundings
from commhooks.engine_exchange import EngineExchange
from commhooks.errors import CommError, CommTimeout
from commhooks.exchanges import SliceExchange
from commhooks.handle import Handle
from commhooks.horovod_native import POLL_S, HorovodSum, NativeSender
from commhooks.horovod_trees import TreesSender
from commhooks.messengers import EngineMessenger
from commhooks.native import OrderedExchange
from commhooks.parcels import Entry, Parcel
from commhooks.planning import Subgroup, planner_for
from commhooks.reduction import Sender
from commhooks.stall_watch import StallWatch, Store
from commhooks.startup import Planner
from commhooks.timeline import Recorder

log = logging.getLogger(__name__)

_SAMPLE_NUMEL = (
    2_000_000  # what `auto` tries both ways with: enough to be past the start-up, little enough to be quick
)
_SAMPLE_ROUNDS = 4
_NOISE = 0.05  # two times that close say nothing
_TREES_DTYPES = frozenset(("float16", "bfloat16", "float32", "float64", "complex64", "complex128"))


class HorovodRendezvous:
    """All-gathers of JSON through Horovod (the engine's ``Rendezvous``).

    Parameters
    ----------
    hvd : the module ``horovod.torch``
    process_set : who takes part
    timeout_s : how long to wait for a rank

    Raises
    ------
    CommTimeout
        From `exchange`: a rank didn't come.
    """

    def __init__(self, hvd: Any, process_set: Any, timeout_s: float = 300.0) -> None:
        self._hvd = hvd
        self._timeout_s = timeout_s
        self._process_set = process_set
        self.rank: int = process_set.rank()
        self.world_size: int = process_set.size()

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Every rank's value, in rank order; blocks until all have called."""
        content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        size = torch.tensor([content.numel()], dtype=torch.int64)
        # One at a time, so the names may come back; the process set keeps worlds apart.
        prefix = f"commhooks.exchange.{self._process_set.process_set_id}.{name}"
        sizes = self._gather(f"{prefix}.size", size).tolist()
        text = self._gather(f"{prefix}.json", content)
        return [json.loads(bytes(part.numpy())) for part in torch.split(text, sizes)]

    def _gather(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        handle = self._hvd.allgather_async(tensor, name=name, process_set=self._process_set)
        limit_s = time.monotonic() + self._timeout_s
        while not self._hvd.poll(handle):
            if time.monotonic() > limit_s:
                raise CommTimeout(
                    f"exchange {name!r}: not all of ranks {self._process_set.ranks} came within {self._timeout_s:g} s; every "
                    "rank must make and use its distributed optimizers in the same order (Horovod's log names the late one)"
                )
            time.sleep(POLL_S)
        return self._hvd.synchronize(handle)


class HorovodWorld:
    """See the module.

    Parameters
    ----------
    hvd : the module ``horovod.torch``
    process_set : who takes part
    config : settings of this process
    reduction : Horovod's keyword arguments: op, prescale_factor, postscale_factor
    surroundings : what the environment says about the network
    store : the launcher's key-value store, for reports of stalls; None without one
    token : gives another object after Horovod was initialised anew
    """

    def __init__(
        self,
        hvd: Any,
        process_set: Any,
        config: Config,
        reduction: dict[str, Any],
        surroundings: Surroundings,
        store: Store | None,
        token: Callable[[], object],
    ) -> None:
        self.token = token
        self._hvd = hvd
        self._process_set = process_set
        self._config = config
        self._reduction = reduction
        self._surroundings = surroundings
        self._store = store
        self._watch: StallWatch | None = None
        self._choice: tuple[object, bool] | None = None

    # -- what reducers call ---------------------------------------------------------------------------------------------

    @property
    def everyone(self) -> bool:
        """See ``World``."""
        return self._process_set.process_set_id == 0

    def exchange(self, name: str, value: Any) -> list[Any]:
        """See ``World``."""
        return self._rendezvous().exchange(name, value)

    def reduce_sparse(self, name: str, gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Horovod's all-gather of indices and values; the engine has no sparse path."""
        op = self._reduction["op"]
        name = f"commhooks.sparse.{name}"
        return self._hvd.sparse_allreduce_async(gradient, name, op, process_set=self._process_set)

    def open_sender(self, entries: Sequence[Entry], optimizer: str) -> Sender:
        """The sender that the settings (or, for ``auto``, a measurement) choose; collective."""
        prefix = self._prefix(optimizer)
        return (
            self._trees(optimizer, entries)
            if self.choose_trees(entries, optimizer)
            else self._native(prefix, optimizer)
        )

    def open_exchange(self, entries: Sequence[Entry], optimizer: str) -> SliceExchange:
        """The same for deferred steps (``model=``)."""
        prefix, config = self._prefix(optimizer), self._config
        rendezvous = self._rendezvous()
        if self.choose_trees(entries, optimizer):
            return EngineExchange(self._engine(), rendezvous, config.timeout_s)

        def issue(key: SliceKey, tensor: torch.Tensor) -> HorovodSum:
            return HorovodSum(self._hvd, f"{prefix}.{key.bucket}.{key.number}", tensor, self._process_set)

        return OrderedExchange(issue, rendezvous, config.slice_numel, config.priority, config.timeout_s)

    def train_by_commits(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Handle:
        """Commits instead of reduced gradients (``commit=``): an engine of its own, which knows every rank."""
        rendezvous = self._rendezvous()
        planner = self._planner(rendezvous.world_size)
        everybody = frozenset(range(rendezvous.world_size))
        engine = Engine.start(rendezvous, self._config, planner, self._surroundings, extra_peers=everybody)
        return adsp.attach(model, optimizer, EngineMessenger(engine), rendezvous, self._config)

    def watch(self, reporter: Any) -> None:
        """Report the stalls of one more reducer."""
        ranks = self._process_set.ranks or range(self._hvd.size())
        limit_s = min(self._config.heartbeat_s, self._config.timeout_s / 2)
        self._watch = _watch_for(self.token(), self._store, self._hvd.rank(), limit_s)
        self._watch.add(reporter, tuple(ranks))
        self._watch.start()

    def _rendezvous(self) -> HorovodRendezvous:
        return HorovodRendezvous(self._hvd, self._process_set, self._config.timeout_s)

    # -- which way ------------------------------------------------------------------------------------------------------

    def _prefix(self, optimizer: str) -> str:
        """In front of this optimizer's tensor names; a rank that joined later has counted fewer optimizers."""
        return f"commhooks.{max(self.exchange('number', int(optimizer.rpartition('#')[2])))}"

    def choose_trees(self, entries: Sequence[Entry], optimizer: str) -> bool:
        """Whether gradients go through our engine; decided once per world, on rank 0's word.  Collective."""
        if self._choice is None or self._choice[0] is not self.token():
            trees, reason = self._chosen(entries)
            trees = bool(self.exchange("way", trees)[0])
            self._choice = (self.token(), trees)
            if self._process_set.rank() == 0:
                way = "trees" if trees else "Horovod's all-reduce"
                log.info("commhooks is on: optimizer %s sends through %s (%s)", optimizer, way, reason)
        return self._choice[1]

    def _chosen(self, entries: Sequence[Entry]) -> tuple[bool, str]:
        schedule, why_not = self._config.schedule, self._why_not_trees(entries)
        if schedule != "auto":
            return schedule != "native", f"schedule={schedule}"
        if why_not:
            return False, why_not
        predicted = self._engine().predicted_choice()
        if predicted is not None:
            return predicted.way is Way.TREES, predicted.reason
        trees_s, native_s = self._sample(sum(entry.numel for entry in entries))
        reason = f"measured: trees {trees_s * 1e3:.1f} ms, Horovod {native_s * 1e3:.1f} ms"
        return trees_s <= native_s * (1 + _NOISE), reason

    # -- the two ways ---------------------------------------------------------------------------------------------------

    def _why_not_trees(self, entries: Sequence[Entry]) -> str:
        """Why the engine can't carry these gradients; empty when it can."""
        if self._reduction["op"] not in (self._hvd.Average, self._hvd.Sum):
            return "the engine sums and averages, op= asks for something else"
        strange = {entry.dtype for entry in entries} - _TREES_DTYPES
        return f"the engine can't sum {', '.join(sorted(strange))}" if strange else ""

    def _native(self, prefix: str, optimizer: str) -> NativeSender:
        reduction = {**self._reduction, "process_set": self._process_set}
        explain = functools.partial(self._explain, optimizer)
        return NativeSender(
            self._hvd, prefix, reduction, self._config.slice_numel, self._config.timeout_s, explain
        )

    def _trees(self, optimizer: str, entries: Sequence[Entry] = ()) -> TreesSender:
        average = self._reduction["op"] == self._hvd.Average
        before, after = self._reduction["prescale_factor"], self._reduction["postscale_factor"]
        names = [entry.name for entry in entries]
        return TreesSender(self._engine(), average, before, after, self._translate, optimizer, names)

    def _engine(self) -> Engine:
        key = (self._process_set.process_set_id, self._config)
        engine = _engines.get(key)
        if engine is None or engine[0] is not self.token():
            if engine is not None:
                engine[1].close()
            rendezvous = self._rendezvous()
            planner = self._planner(rendezvous.world_size)
            path = self._config.timeline
            timeline = Recorder(path, self._hvd.rank()) if path else None
            started = Engine.start(rendezvous, self._config, planner, self._surroundings, timeline)
            engine = _engines[key] = (self.token(), started)
        return engine[1]

    def _planner(self, world_size: int) -> Planner:
        subgroup = None if self.everyone else Subgroup(self._process_set.ranks, self._hvd.size())
        return planner_for(self._config, world_size, subgroup=subgroup)

    def _translate(self, error: CommError, words: str) -> Exception:
        """The engine's error, also as Horovod's: an elastic job then restores its state and starts the world anew."""
        kind, other = type(error), self._hvd.HorovodInternalError
        return type(kind.__name__, (kind, other), {"__module__": kind.__module__})(words)

    def _explain(self, optimizer: str) -> str:
        for reporter in list(self._watch.reporters if self._watch is not None else ()):
            state = reporter.progress()
            if self._watch is not None and state.optimizer == optimizer:
                return self._watch.explain(state, self._config.timeout_s)
        return f"optimizer {optimizer}: no answer from Horovod's all-reduce"

    # -- auto -----------------------------------------------------------------------------------------------------------

    def _sample(self, numel: int) -> list[float]:
        """Seconds that zeros take through the engine and through Horovod, on the slowest rank."""
        numel = min(_SAMPLE_NUMEL, max(1, numel))
        senders: list[Sender] = [self._trees("sample"), self._native("commhooks.sample", "sample")]
        taken: list[list[float]] = [[] for _ in senders]
        for turn in range(1 + _SAMPLE_ROUNDS):  # the first is warm-up: pages, Horovod's cache of names
            for sender, times in zip(senders, taken, strict=True):
                self.exchange("sample", turn)
                began_s = time.perf_counter()
                sender.send(Parcel(0, (0,), numel, 0), torch.zeros(numel), turn).wait()
                times.append(time.perf_counter() - began_s)
        own = [min(times[1:]) for times in taken]  # others' work on the machine only ever adds
        return [max(column) for column in zip(*self.exchange("sampled", own), strict=True)]


_watch: tuple[object, StallWatch] | None = None


def _watch_for(token: object, store: Store | None, rank: int, limit_s: float) -> StallWatch:
    """One watch for all optimizers, made anew with the world: what a rank tells is one entry in the store."""
    global _watch
    if _watch is None or _watch[0] is not token:
        if _watch is not None:
            _watch[1].close()
        _watch = (token, StallWatch(store, rank, limit_s))
    return _watch[1]


_engines: dict[tuple[int, Config], tuple[object, Engine]] = {}


def close_engines() -> None:
    """Close the engines of all worlds (before Horovod shuts down)."""
    for _, engine in _engines.values():
        engine.close()
    _engines.clear()
