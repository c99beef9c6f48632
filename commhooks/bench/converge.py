"""``commhooks bench converge``: commit policies, plain DDP and post-local SGD by the time they need to the same loss.

Where in the flow: a command -> launch (the ranks) -> **converge** (which run, in which order) -> converge_run (one run).

Algorithm:
(1) measure what one exchange of the whole model costs here: commits of all ranks at once, each waited for;
(2) the fast step is that divided by ``--exchange-steps``; ``--speeds`` gives each rank's step in units of it;
(3) for each seed all policies in turn, so that what changes slowly changes all of them;
(4) figures are medians over the seeds, with minimum and maximum beside them.

Invariants: one loss threshold, one learning rate, one batch size, one model for all policies; what a search costs is part of
its time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from commhooks.bench import launch
from commhooks.bench.harness import positive_numbers, pyplot, render
from commhooks.core.commit.catalog import POLICIES, CommitOptions
from commhooks.errors import ConfigError

LOCAL_STEPS = (5, 10, 20, 40)
"""``fixed`` is swept over these; the best one is the row's."""

MEASURED_STEPS = 40

RECORDS_PER_FAST_STEP = 0.34
SPARE = 1.25
"""The fast step must be this much longer than its computation, or it can't be kept."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--speeds", default="1,1,3", help="seconds per step of each rank, relative (1,1,3)")
    parser.add_argument(
        "--exchange-steps", type=float, default=1.0, help="an exchange costs this many fast steps (1)"
    )
    parser.add_argument(
        "--policies", default="adsp,adsp-paper,bsp,fixed,adacomm,ssp", help="also: ddp, postlocal"
    )
    parser.add_argument("--seeds", type=int, default=1, help="runs of each policy (1); figures are medians")
    parser.add_argument("--first-seed", type=int, default=0, help="the first run's seed (0)")
    parser.add_argument("--target-loss", type=float, default=0.15, help="held-out loss to reach (0.15)")
    parser.add_argument("--learning-rate", type=float, help="of all policies (0.05; --virtual: 0.3)")
    parser.add_argument("--batch", type=int, help="samples per step and rank (16; --virtual: 32)")
    parser.add_argument(
        "--hidden", type=int, default=256, help="width of the linear layers: sets the model's size (256)"
    )
    parser.add_argument("--check-steps", type=float, help="check period in fast steps (60; --virtual: 50)")
    parser.add_argument("--local-steps", default="5,10,20,40", help="fixed: local steps to try (5,10,20,40)")
    parser.add_argument(
        "--longest-s", type=float, default=240.0, help="give a run up after this many seconds (240)"
    )
    parser.add_argument(
        "--virtual", action="store_true", help="in virtual time, with a small CNN in numpy: needs no launcher"
    )
    parser.add_argument(
        "--heterogeneity", help="--virtual: degrees H to go through (1.45,2.0,2.6,3.2) instead of --speeds"
    )
    parser.add_argument("--workers", type=int, default=6, help="--heterogeneity: how many workers (6)")
    parser.add_argument(
        "--delay-steps",
        default="0",
        help="--virtual: extra delays per direction to go through, in fast steps (0)",
    )
    parser.add_argument("--plot", metavar="FILE", help="picture of loss against time")


def main(namespace: argparse.Namespace) -> int:
    """Run, and print on rank 0."""
    _fill_in(namespace)
    plan = _plan(namespace)
    if namespace.virtual:
        print(render(_virtual(plan, namespace), namespace.json))
        return 0
    if namespace.heterogeneity or namespace.delay_steps != "0":
        raise ConfigError("--heterogeneity and --delay-steps need --virtual; in the lab give --speeds")
    if not launch.launched():
        return launch.start_local(len(plan.speeds), ["bench", "converge", *_arguments(namespace)])
    with launch.process_group():
        rows = _bench(plan, namespace)
    if launch.rank() == 0:
        print(render(rows, namespace.json))
    return 0


def _fill_in(namespace: argparse.Namespace) -> None:
    """The two models' defaults: both far enough from the largest stable rate that local steps lose little."""
    real, virtual = (0.05, 16, 60.0), (0.3, 32, 50.0)
    for name, value in zip(("learning_rate", "batch", "check_steps"), virtual if namespace.virtual else real):
        if getattr(namespace, name) is None:
            setattr(namespace, name, value)


@dataclass(frozen=True)
class Plan:
    """What is asked for, checked."""

    speeds: tuple[float, ...]
    policies: tuple[str, ...]
    local_steps: tuple[int, ...]
    exchange_steps: float


def _plan(namespace: argparse.Namespace) -> Plan:
    speeds = positive_numbers("--speeds", namespace.speeds)
    policies = tuple(p.strip() for p in namespace.policies.split(",") if p.strip())
    known = (*POLICIES, "ddp", "postlocal")
    unknown = [p for p in policies if p not in known]
    if unknown or not policies:
        raise ConfigError(
            f"--policies {namespace.policies!r}: {unknown or 'nothing'}; there are: {', '.join(known)}"
        )
    if namespace.exchange_steps <= 0 or namespace.seeds < 1 or namespace.check_steps <= 0:
        raise ConfigError("--exchange-steps and --check-steps must be above 0, --seeds at least 1")
    steps = tuple(int(n) for n in positive_numbers("--local-steps", namespace.local_steps))
    return Plan(speeds, policies, steps, namespace.exchange_steps)


def _arguments(namespace: argparse.Namespace) -> list[str]:
    words = []
    for name in (
        "speeds", "exchange_steps", "policies", "seeds", "first_seed", "target_loss", "learning_rate", "batch", "hidden",
        "check_steps", "local_steps", "longest_s", "plot",
    ):  # fmt: skip
        value = getattr(namespace, name)
        words += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    return words + (["--json"] if namespace.json else [])


# --- All runs ----------------------------------------------------------------------------------------------------------


def _bench(plan: Plan, namespace: argparse.Namespace) -> list[dict[str, Any]]:
    import torch
    import torch.distributed as dist

    from commhooks.bench import converge_run as run
    from commhooks.bench.digits import load_digits

    torch.set_num_threads(1)
    if len(plan.speeds) != dist.get_world_size():
        raise ConfigError(f"--speeds gives {len(plan.speeds)} ranks, {dist.get_world_size()} were started")
    task = run.Task(
        digits=load_digits(),
        batch=namespace.batch,
        learning_rate=namespace.learning_rate,
        hidden=namespace.hidden,
        target_loss=namespace.target_loss,
        step_s=0.0,
        record_s=1.0,
        longest_s=namespace.longest_s,
        seed=0,
    )
    costs = _costs(task, plan)
    fast_s = costs.exchange_s / plan.exchange_steps
    if fast_s < SPARE * costs.compute_s:
        raise ConfigError(
            f"a step computes for {costs.compute_s * 1e3:.1f} ms, so with --exchange-steps {plan.exchange_steps:g} an exchange "
            f"of {costs.exchange_s * 1e3:.1f} ms is too short; give a larger --hidden or a smaller --exchange-steps"
        )
    task = replace(
        task,
        step_s=fast_s * plan.speeds[dist.get_rank()] / min(plan.speeds),
        record_s=fast_s / RECORDS_PER_FAST_STEP,
    )
    period_s = namespace.check_steps * fast_s
    results: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for seed in range(namespace.first_seed, namespace.first_seed + namespace.seeds):
        for policy, local_steps in _contenders(plan):
            row = _one(replace(task, seed=seed), policy, local_steps, period_s)
            results.setdefault((policy, local_steps), []).append(row)
            _say(f"seed {seed} {policy} {local_steps or ''}: {_brief(row)}")
    if namespace.plot and dist.get_rank() == 0:
        _plot(results, namespace)
    fixed = {"fast_step_s": fast_s, "exchange_s": costs.exchange_s, "compute_s": costs.compute_s}
    return _rows(plan, results, namespace, fixed)


def _contenders(plan: Plan) -> list[tuple[str, int]]:
    pairs: list[tuple[str, int]] = []
    for policy in plan.policies:
        swept = policy in ("fixed", "postlocal")
        pairs += [(policy, steps) for steps in plan.local_steps] if swept else [(policy, 0)]
    return pairs


@dataclass(frozen=True)
class Costs:
    """Measured before the runs, on the slowest rank: an exchange of the whole model, and a step's computation."""

    exchange_s: float
    compute_s: float


def _costs(task: Any, plan: Plan) -> Costs:
    """An exchange is what it adds to the slowest rank's step, at the speeds of the runs (found in two rounds)."""
    from commhooks.bench import converge_run as run
    from commhooks.bench.harness import GlooEnsemble

    ensemble = GlooEnsemble()
    plain = run.Contender("postlocal", task, launch.settings(), CommitOptions(local_steps=1 << 30))
    compute_s = _median_step_s(plain)
    contender = run.Contender("bsp", task, replace(launch.settings(), commit="bsp"), CommitOptions())
    speed = plan.speeds[ensemble_rank()] / min(plan.speeds)
    step_s = 2.0 * compute_s * speed
    exchange_s = 0.0
    for _ in range(2):
        added = []
        for _ in range(MEASURED_STEPS):
            began_s = time.monotonic()
            contender.step(step_s)
            added.append(time.monotonic() - began_s - step_s)
        exchange_s = max(-ensemble.slowest(-statistics.median(added[5:])), 1e-4)
        step_s = exchange_s / plan.exchange_steps * speed
    contender.close()
    return Costs(exchange_s, compute_s)


def ensemble_rank() -> int:
    """This process's rank in the group."""
    import torch.distributed as dist

    return int(dist.get_rank())


def _median_step_s(contender: Any) -> float:
    """Of some steps without sleep, on the slowest rank."""
    from commhooks.bench.harness import GlooEnsemble

    durations = []
    for _ in range(MEASURED_STEPS):
        began_s = time.monotonic()
        contender.step(0.0)
        durations.append(time.monotonic() - began_s)
    return GlooEnsemble().slowest(statistics.median(durations))


def _one(task: Any, policy: str, local_steps: int, period_s: float) -> dict[str, Any]:
    import torch.distributed as dist

    from commhooks.bench import converge_run as run

    options = CommitOptions(
        check_period_s=period_s,
        local_steps=local_steps or 40,
        target_loss=task.target_loss,
        trial_s=period_s / 4,
    )
    config = replace(
        launch.settings(), commit=policy if policy in POLICIES else "none", check_period_s=period_s
    )
    contender = run.Contender(policy, task, config, options)
    record = run.train(contender, task)
    reached = run.find_target(record, task, contender.assemble)
    sums: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sums, (record.commits, record.nbytes, record.late_steps, len(record.step_times)))
    scheduler = record.stats.get("scheduler") or {}
    return {
        "time_s": reached.time_s,
        "steps": reached.steps,
        "waiting_share": reached.waiting_share,
        "loss": reached.loss,
        "accuracy": reached.accuracy,
        "commits": [s[0] for s in sums],
        "bytes": sum(s[1] for s in sums),
        "late_share": sum(s[2] for s in sums) / sum(s[3] for s in sums),
        "losses": reached.losses,
        "hook_share": (record.stats.get("worker") or {}).get("waiting_share", 0.0),
        "windows": scheduler.get("windows", []),
        "heterogeneity": scheduler.get("heterogeneity"),
        "implicit_momentum": scheduler.get("implicit_momentum"),
    }


def _say(text: str) -> None:
    if launch.rank() == 0:
        print(text, file=sys.stderr, flush=True)


def _brief(row: dict[str, Any]) -> str:
    time_text = "not reached" if row["time_s"] is None else f"{row['time_s']:.2f} s"
    rates = [round(w["rate"], 2) for w in row["windows"]][:12]
    return (
        f"{time_text}, {row['steps']} steps, commits {row['commits']}, waiting {row['waiting_share']:.1%}, "
        f"late steps {row['late_share']:.1%}, rank 0's hook {row['hook_share']:.1%}"
        + (f", rates {rates}, last: {row['windows'][-1]['reason']}" if rates else "")
    )


# --- Figures -----------------------------------------------------------------------------------------------------------


def _rows(
    plan: Plan,
    results: dict[tuple[str, int], list[dict[str, Any]]],
    namespace: argparse.Namespace,
    fixed: dict[str, float],
) -> list[dict[str, Any]]:
    case = f"speeds {namespace.speeds} exchange {namespace.exchange_steps:g}"
    rows = [_row(case, policy, steps, runs, namespace) for (policy, steps), runs in results.items()]
    best = [_best([r for r in rows if r["policy"] == policy]) for policy in plan.policies]
    bsp = next((r for r in best if r["policy"] == "bsp"), None)
    local = next((r for r in best if r["policy"] == "fixed"), None)
    for row in best:
        row["of_bsp"] = _ratio(row, bsp)
        row["of_best_fixed"] = _ratio(row, local)
        row.update({name: round(value, 6) for name, value in fixed.items()})
    return best


def _best(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fastest of a sweep; the other settings' times stand beside it."""
    best = min(rows, key=lambda r: (r["time_s"] is None, r["time_s"] or 0.0))
    if len(rows) > 1:
        best = {**best, "sweep": {str(r["local_steps"]): r["time_s"] for r in rows}}
    return best


def _row(
    case: str, policy: str, steps: int, runs: Sequence[dict[str, Any]], namespace: argparse.Namespace
) -> dict[str, Any]:
    times = [r["time_s"] for r in runs]
    missed = sum(t is None for t in times)
    known = [t for t in times if t is not None]
    # A run that missed the target counts as endless.
    median = statistics.median(sorted(known) + [float("inf")] * missed)
    middle = {
        name: statistics.median(r[name] for r in runs)
        for name in ("steps", "waiting_share", "bytes", "accuracy")
    }
    return {
        "case": case,
        "policy": policy,
        "target_loss": namespace.target_loss,
        "time_s": None if median == float("inf") else round(median, 4),
        "time_min_s": round(min(known), 4) if known else None,
        "time_max_s": round(max(known), 4) if known else None,
        "steps": int(middle["steps"]),
        "commits": int(statistics.median(sum(r["commits"]) for r in runs)),
        "waiting_share": round(middle["waiting_share"], 4),
        "bytes": int(middle["bytes"]),
        "accuracy": round(middle["accuracy"], 4),
        "seeds": len(runs),
        "missed": missed,
        "late_share": round(statistics.median(r["late_share"] for r in runs), 4),
        **({"local_steps": steps} if steps else {}),
    }


def _virtual(plan: Plan, namespace: argparse.Namespace) -> list[dict[str, Any]]:
    """All clusters asked for, one after the other."""
    from commhooks.bench import converge_virtual as virtual

    exchange_s = plan.exchange_steps
    delays = tuple(float(d) for d in namespace.delay_steps.split(","))
    clusters = []
    for delay_s in delays:
        if namespace.heterogeneity:
            degrees = positive_numbers("--heterogeneity", namespace.heterogeneity)
            clusters += [virtual.cluster_of(h, namespace.workers, exchange_s, delay_s) for h in degrees]
        else:
            clusters.append(
                virtual.Cluster(tuple(s / min(plan.speeds) for s in plan.speeds), exchange_s, delay_s)
            )
    rows = []
    for cluster in clusters:
        setting = virtual.Setting(
            cluster=cluster,
            policies=plan.policies,
            local_steps=plan.local_steps,
            seeds=range(namespace.first_seed, namespace.first_seed + namespace.seeds),
            learning_rate=namespace.learning_rate,
            batch=namespace.batch,
            target_loss=namespace.target_loss,
            check_steps=namespace.check_steps,
        )
        own = virtual.rows_of(setting)
        bsp = next((r for r in own if r["policy"] == "bsp"), None)
        local = next((r for r in own if r["policy"] == "fixed"), None)
        case = f"virtual {len(cluster.step_s)} workers exchange {exchange_s:g} delay {cluster.delay_s:g}"
        for row in own:
            rows.append(
                {"case": case, **row, "of_bsp": _ratio(row, bsp), "of_best_fixed": _ratio(row, local)}
            )
            _say(f"{case} H {row['heterogeneity']} {row['policy']}: {row['time_s']} s")
    return rows


def _ratio(row: dict[str, Any], base: dict[str, Any] | None) -> float | None:
    if base is None or not base["time_s"] or not row["time_s"]:
        return None
    return round(row["time_s"] / base["time_s"], 4)


def _plot(results: dict[tuple[str, int], list[dict[str, Any]]], namespace: argparse.Namespace) -> None:
    drawing = pyplot()
    figure, axes = drawing.subplots(figsize=(7, 4.5))
    for (policy, steps), runs in results.items():
        points = runs[0]["losses"]
        axes.plot(
            [t for t, _ in points], [loss for _, loss in points], label=f"{policy} {steps or ''}".strip()
        )
    axes.axhline(namespace.target_loss, color="grey", linewidth=0.8)
    axes.set(xlabel="seconds", ylabel="held-out loss", yscale="log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(namespace.plot, dpi=150)
