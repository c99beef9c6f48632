"""A commit policy's name to its parts: worker policy, reply gate, scheduler, update rule.

Where in the flow: settings -> ``make_policy`` -> the parts that ``parameter_server``, ``adsp`` and ``simulate_commit`` run.

Invariants: every impossible setting is refused here, before anything starts.

Source: ADSP (AAAI 2020) and its baselines.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from commhooks.core.commit.adacomm import AdacommScheduler
from commhooks.core.commit.policy import (
    AnswerAtOnce,
    AnswerWhenRoundComplete,
    AnswerWithinStaleness,
    CommitBySteps,
    CommitByTimer,
    CommitEveryStep,
    ReplyGate,
    WorkerPolicy,
    check_positive,
)
from commhooks.core.commit.scheduler import CommitScheduler, IdleScheduler, Scheduler
from commhooks.core.commit.search import BoundedSearch, FixedRate, PaperSearch
from commhooks.core.commit.theory import largest_rate
from commhooks.core.commit.update import PlainAddition, UpdateRule
from commhooks.errors import ConfigError

POLICIES = ("adsp", "adsp-paper", "adacomm", "bsp", "fixed", "ssp")


@dataclass(frozen=True)
class CommitOptions:
    """Settings of all policies; each reads its own.

    Parameters
    ----------
    check_period_s : float
        ADSP: seconds between checkpoints; ADACOMM: between adaptations.
    commit_rate : float or None
        Commits per check period, not searched for. None: searched.
    local_steps : int
        ``fixed``: local steps between two commits (the published 40).
    staleness : int
        ``ssp``: steps that a worker may be ahead (the published 40).
    target_loss : float or None
        ``l*`` of the published reward.
    first_steps, trial_s : int or None, float or None
        ADACOMM: tau0 (None: tried out), and seconds per trial.
    epoch_periods : int
        Check periods between two searches.
    update : UpdateRule
        How the server adds a commit.
    """

    check_period_s: float = 60.0
    commit_rate: float | None = None
    local_steps: int = 40
    staleness: int = 40
    target_loss: float | None = None
    first_steps: int | None = None
    trial_s: float | None = None
    epoch_periods: int = 20
    update: UpdateRule = field(default_factory=PlainAddition)


@dataclass(frozen=True)
class CommitPolicy:
    """All parts of one policy; ``scheduler`` is stateful and belongs to one run."""

    name: str
    worker: WorkerPolicy
    gate: ReplyGate
    scheduler: Scheduler
    update: UpdateRule
    overlaps: bool


def make_policy(name: str, options: CommitOptions | None = None) -> CommitPolicy:
    """Build a policy by name.

    Raises
    ------
    ConfigError
        Unknown name, or an option out of its range.
    """
    chosen = options if options is not None else CommitOptions()
    check_options(chosen)
    worker, gate, scheduler = _parts(name, chosen)
    return CommitPolicy(name, worker, gate, scheduler, chosen.update, overlaps=name == "adsp")


def check_options(options: CommitOptions) -> None:
    """Raise ConfigError for an option out of its range."""
    check_positive("check period", options.check_period_s, "seconds")
    check_positive("local steps", options.local_steps, "steps")
    check_positive("staleness", options.staleness, "steps")
    check_positive("epoch", options.epoch_periods, "check periods")
    if options.commit_rate is not None:
        check_positive("commit rate", options.commit_rate, "commits per check period")


def check_rate(commit_rate: float, check_period_s: float, commit_s: float) -> None:
    """Refuse a rate that the bandwidth can't carry.

    Parameters
    ----------
    commit_s : float
        Seconds that one commit takes at the measured bandwidth.

    Raises
    ------
    ConfigError
        With the largest possible rate.
    """
    limit = largest_rate(check_period_s, commit_s)
    if commit_rate > limit:
        raise ConfigError(
            f"commit rate {commit_rate:g} per {check_period_s:g} s is beyond the bandwidth: one commit takes "
            f"{commit_s:.4g} s, so the largest possible rate is {limit:.4g}"
        )


def _parts(name: str, options: CommitOptions) -> tuple[WorkerPolicy, ReplyGate, Scheduler]:
    match name:
        case "adsp":
            return CommitByTimer(overlap=True), AnswerAtOnce(), _improved(options)
        case "adsp-paper":
            return CommitByTimer(), AnswerAtOnce(), _published(options)
        case "bsp":
            return CommitBySteps(1), AnswerWhenRoundComplete(), IdleScheduler()
        case "fixed":
            return CommitBySteps(options.local_steps), AnswerWhenRoundComplete(), IdleScheduler()
        case "ssp":
            s = options.staleness
            return CommitEveryStep(s), AnswerWithinStaleness(s), IdleScheduler()
        case "adacomm":
            scheduler = AdacommScheduler(options.check_period_s, options.first_steps, options.trial_s)
            return CommitBySteps(scheduler.steps), AnswerWhenRoundComplete(), scheduler
    raise ConfigError(f"unknown commit policy {name!r}; there are: {', '.join(POLICIES)}")


def _improved(options: CommitOptions) -> Scheduler:
    if options.commit_rate is not None:
        return CommitScheduler(options.check_period_s, FixedRate(options.commit_rate))
    return CommitScheduler(options.check_period_s, BoundedSearch(epoch_periods=options.epoch_periods))


def _published(options: CommitOptions) -> Scheduler:
    if options.commit_rate is not None:
        return CommitScheduler(options.check_period_s, FixedRate(options.commit_rate))
    search = PaperSearch(target_loss=options.target_loss, epoch_periods=options.epoch_periods)
    return CommitScheduler(options.check_period_s, search)
