"""The main job in one command: train a small CNN on real digits over an uneven network, with plain DDP and with commhooks.

    python examples/demo.py                      # makes the network (four ranks, NICs of 200, 800, 800, 800 Mbit/s) and runs
    commhooks lab nic:200,800 -- python examples/demo.py        # on another network
    torchrun --nproc-per-node 2 examples/demo.py                # on a real one

Both runs start from the same parameters and see the same batches, so their losses must agree; only the times differ.
Prints a comparison and leaves ``out/demo.png`` (step time and link use over time) and ``out/demo-trace.json`` (open it in
https://ui.perfetto.dev).
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import commhooks
from commhooks import shell
from commhooks.bench.digits import load_digits
from commhooks.errors import MissingDependency

TOPOLOGY = "nic:200,800,800,800"
NAMES = ("plain DDP", "commhooks")
TARGETS = (
    0.99,
    0.98,
    0.97,
    0.95,
    0.9,
    0.8,
    0.5,
)  # the accuracies to compare at: the best that both runs reach


# --- What is trained ---------------------------------------------------------------------------------------------------


def model() -> nn.Module:
    """1.3 million parameters: 5.3 MB of gradients, which takes a 200 Mbit/s NIC far longer than two cores need to compute."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 16, 1024),
        nn.ReLU(),
        nn.Linear(1024, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )
    for layer in layers:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return layers


@dataclass
class Run:
    """One training run as seen by one rank; times are seconds on this machine's monotonic clock."""

    name: str
    steps: list[tuple[float, float]] = field(default_factory=list)  # start, end
    losses: list[float] = field(default_factory=list)
    accuracies: list[tuple[float, float]] = field(default_factory=list)  # training time so far, accuracy
    traffic: list[tuple[float, int, int]] = field(default_factory=list)  # when, bytes sent, bytes received
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def median_step_s(self) -> float:
        """The usual step, the first few (connections, bucket layout) left out."""
        durations = sorted(end - start for start, end in self.steps[3:] or self.steps)
        return durations[len(durations) // 2]

    def time_to(self, accuracy: float) -> float | None:
        """Training time until the held-out accuracy was first reached."""
        return next((time_s for time_s, reached in self.accuracies if reached >= accuracy), None)


def train(name: str, options: argparse.Namespace, progress: Progress) -> tuple[Run, torch.Tensor]:
    """Train from the same start; the run, and the final parameters as one vector."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    images, labels = torch.from_numpy(digits.train_x)[:, None], torch.from_numpy(digits.train_y)
    test_images, test_labels = torch.from_numpy(digits.test_x)[:, None], torch.from_numpy(digits.test_y)
    ddp = DDP(model())
    # The one line; `timeline` only for rank 0's part of the trace.
    handle = commhooks.register(ddp, timeline=engine_trace(options)) if name == "commhooks" else None
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.03, momentum=0.9)
    batches = torch.Generator().manual_seed(1)
    run, spent_s = Run(name), 0.0
    with Sampler(run.traffic):
        for step in range(options.steps):
            # The same batch order in both runs; each rank takes its share of it.
            chosen = torch.randint(len(labels), (options.batch * ranks,), generator=batches)[rank::ranks]
            dist.barrier()
            start = time.monotonic()
            optimizer.zero_grad()
            loss = cross_entropy(ddp(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            end = time.monotonic()
            run.steps.append((start, end))
            run.losses.append(float(loss.detach()))
            spent_s += end - start
            with torch.no_grad():
                right = (ddp.module(test_images).argmax(1) == test_labels).float().mean()
            run.accuracies.append((spent_s, float(right)))
            progress.show(f"{name}: step {step + 1}/{options.steps}, accuracy {float(right):.1%}")
    if handle is not None:
        run.stats = handle.stats()
        handle.finish()
    return run, torch.cat([p.detach().reshape(-1) for p in ddp.module.parameters()])


def engine_trace(options: argparse.Namespace) -> Path | None:
    """Where rank 0's engine writes what every slice did (when it ends); the other ranks record nothing."""
    return options.out / "engine-trace.json" if dist.get_rank() == 0 else None


class Sampler:
    """Reads the network interface's byte counters a few times per second while a run lasts."""

    def __init__(self, samples: list[tuple[float, int, int]], period_s: float = 0.05) -> None:
        self._samples, self._period_s = samples, period_s
        self._interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo").split(",")[0]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._stop.is_set():
            for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
                name, _, counters = line.partition(":")
                if name.strip() == self._interface:
                    received, sent = (int(counters.split()[at]) for at in (0, 8))
                    self._samples.append((time.monotonic(), sent, received))
            self._stop.wait(self._period_s)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class Progress:
    """A bar on a terminal; elsewhere a plain line now and then, on standard error."""

    def __init__(self, total: int, shown: bool) -> None:
        self._total, self._shown, self._done = total, shown, 0

    def show(self, text: str) -> None:
        """One more step is done."""
        self._done += 1
        if not self._shown:
            return
        if sys.stdout.isatty():  # under the lab, rank 0's standard output is the terminal itself
            filled = 30 * self._done // self._total
            end = "\r" if self._done < self._total else "\r\033[K"
            print(f"\r\033[K[{'#' * filled}{'.' * (30 - filled)}] {text}", end=end, flush=True)
        elif self._done * 10 // self._total > (self._done - 1) * 10 // self._total:
            print(f"{100 * self._done // self._total:3d} %  {text}", file=sys.stderr, flush=True)


# --- What is reported --------------------------------------------------------------------------------------------------


def report(runs: list[list[Run]], difference: float, emulated: bool) -> str:
    """The comparison in words."""
    plain, ours = (by_rank[0] for by_rank in runs)
    lines = [f"{'':14}{'step (median)':>16}{'training time':>16}{'final accuracy':>16}{'final loss':>12}"]
    for run in (plain, ours):
        spent, accuracy = run.accuracies[-1]
        step = f"{1000 * run.median_step_s:.0f} ms"
        lines.append(f"{run.name:14}{step:>16}{f'{spent:.1f} s':>16}{accuracy:>16.1%}{run.losses[-1]:>12.4f}")
    lines.append("")
    lines.append(f"speed-up per step: {plain.median_step_s / ours.median_step_s:.2f}x")
    for target in TARGETS:
        times = plain.time_to(target), ours.time_to(target)
        if times[0] is not None and times[1] is not None:
            lines.append(
                f"time to {target:.0%} accuracy: {times[0]:.1f} s with plain DDP, {times[1]:.1f} s with commhooks"
            )
            break
    lines.append(
        f"largest difference between the final parameters: {difference:.1e} (both add the same gradients in another order)"
    )
    if not emulated:
        lines.append(
            "note: no network was emulated (that needs root, or user namespaces, and ip and tc), so this is loopback: the "
            "speed-up on an uneven network is not shown here"
        )
    return "\n".join(lines)


def rates(run: Run, window_s: float = 1.0) -> tuple[list[float], list[float], list[float]]:
    """When (s since the run's first step), and Mbit/s sent and received, averaged over a window that holds some steps."""
    zero = run.steps[0][0]
    when, sent, received, last = [], [], [], 0
    for t0, s0, r0 in run.traffic:
        while last < len(run.traffic) and run.traffic[last][0] < t0 + window_s:
            last += 1
        if last == len(run.traffic):
            break
        t1, s1, r1 = run.traffic[last]
        when.append((t0 + t1) / 2 - zero)
        sent.append((s1 - s0) * 8e-6 / (t1 - t0))
        received.append((r1 - r0) * 8e-6 / (t1 - t0))
    return when, sent, received


def picture(path: Path, runs: list[list[Run]]) -> None:
    """Step times of both runs, and each rank's link use over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for by_rank, colour in zip(runs, ("tab:gray", "tab:blue")):
        run = by_rank[0]
        axes[0].plot([1000 * (end - start) for start, end in run.steps], color=colour, label=run.name)
        axes[0].axhline(1000 * run.median_step_s, color=colour, linestyle=":", linewidth=1)
    axes[0].set(title="Step time", xlabel="step", ylabel="ms", ylim=(0, None))
    axes[0].legend()
    last_s = max(by_rank[0].steps[-1][1] - by_rank[0].steps[0][0] for by_rank in runs)
    for axis, by_rank in zip(axes[1:], runs):
        for rank, run in enumerate(by_rank):
            when, sent, _ = rates(run)
            axis.plot(when, sent, label=f"rank {rank}", linewidth=1)
        axis.set(
            title=f"Sent with {by_rank[0].name}",
            xlabel="s",
            ylabel="Mbit/s",
            xlim=(0, last_s),
            ylim=(0, None),
        )
        axis.legend(loc="upper right", fontsize="small")
    top = max(axis.get_ylim()[1] for axis in axes[1:])
    for axis in axes[1:]:
        axis.set_ylim(0, top)
    figure.savefig(path, dpi=110)


def step_events(runs: list[list[Run]]) -> list[dict[str, Any]]:
    """Steps and link use of all ranks as Chrome trace events, in wall-clock time as the engine's are."""
    offset_s = time.time() - time.monotonic()
    events: list[dict[str, Any]] = []
    for rank in range(len(runs[0])):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for run in (by_rank[rank] for by_rank in runs):
            for number, (start, end) in enumerate(run.steps):
                span = {
                    "ts": (start + offset_s) * 1e6,
                    "dur": (end - start) * 1e6,
                    "pid": rank,
                    "tid": "steps",
                }
                events.append({"ph": "X", "name": run.name, "cat": "step", "args": {"step": number}, **span})
            zero = run.steps[0][0] + offset_s
            for when, sent, received in zip(*rates(run, 0.1)):
                use = {"sent": round(sent, 1), "received": round(received, 1)}
                events.append(
                    {"ph": "C", "name": "Mbit/s", "ts": (when + zero) * 1e6, "pid": rank, "args": use}
                )
    return events


class Trace:
    """The trace file: written when the process ends, because the engine's part comes only then."""

    def __init__(self, out: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self.path, self._engine = out / "demo-trace.json", out / "engine-trace.json"
        atexit.register(self._write)  # before the engine's own, so it runs after it

    def _write(self) -> None:
        if not self.events:
            return
        if self._engine.exists():
            self.events += json.loads(self._engine.read_text())["traceEvents"]
            self._engine.unlink()
        self.path.write_text(json.dumps({"traceEvents": self.events, "displayTimeUnit": "ms"}))


# --- The job -----------------------------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """One rank: both runs, then rank 0 reports for all."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    written = Trace(options.out)
    progress = Progress(len(NAMES) * options.steps, rank == 0)
    runs: list[list[Run]] = []
    finals: list[torch.Tensor] = []
    for name in NAMES:
        run, parameters = train(name, options, progress)
        gathered: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, asdict(run))
        runs.append([Run(**fields) for fields in gathered])
        finals.append(parameters)
    if rank == 0:
        difference = float((finals[0] - finals[1]).abs().max())
        options.out.mkdir(exist_ok=True)
        picture(options.out / "demo.png", runs)
        written.events = step_events(runs)
        emulated = os.environ.get("GLOO_SOCKET_IFNAME") != "lo"
        print(report(runs, difference, emulated))
        print(f"wrote {options.out / 'demo.png'} and {written.path} (for https://ui.perfetto.dev)")
    dist.destroy_process_group()


def launch(options: argparse.Namespace) -> None:
    """Become ``commhooks lab … -- python examples/demo.py``."""
    lab = [sys.executable, "-m", "commhooks", "lab", TOPOLOGY]
    try:
        shell.find("ip"), shell.find("tc")
    except MissingDependency as error:
        print(f"note: {error}; running on loopback instead of an emulated network", file=sys.stderr)
        lab.append("--loopback")
    own = [sys.executable, str(Path(__file__).resolve()), "--steps", str(options.steps)]
    own += ["--batch", str(options.batch), "--out", str(options.out)]
    print(f"two training runs of {options.steps} steps on {TOPOLOGY} Mbit/s", file=sys.stderr, flush=True)
    os.execv(sys.executable, [*lab, "--", *own])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="training steps of each run (60)")
    parser.add_argument("--batch", type=int, default=32, help="samples per rank and step (32)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for picture and trace (out)")
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options)
    else:
        launch(options)


if __name__ == "__main__":
    main()
