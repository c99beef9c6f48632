"""The ``commhooks`` command: finds the subcommand's module, parses, runs it, turns our errors into one line.

Where in the flow: the outermost shell; each subcommand lives in a module of its own with

* ``add_arguments(parser)``, which declares its arguments (``--json`` is already there),
* ``main(namespace) -> int``, which does the work and returns the exit code,
* optionally ``split_arguments(arguments) -> (own, rest)`` for a command that hands arguments on: the second list
  arrives as ``namespace.rest``.

Invariants: only the chosen module is imported, so a broken or missing one never breaks the others.  Exit codes: 0 done,
1 done with a negative finding, 2 an error of ours or a usage error, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from commhooks import __version__
from commhooks.config import Config
from commhooks.errors import CommhooksError, ConfigError, MissingDependency
from commhooks.log import show_log


@dataclass(frozen=True)
class Command:
    """A subcommand: its name, the module that does it, and what it does."""

    name: str
    module: str
    does: str
    transparent: bool = False  # what it raises is the user's own: nothing is caught


@dataclass(frozen=True)
class Group:
    """A subcommand that only has subcommands."""

    name: str
    commands: tuple[Command, ...]
    does: str


BENCH = Group(
    "bench",
    (
        Command("allreduce", "commhooks.bench.allreduce", "all-reduce against the peers, in one run"),
        Command("train", "commhooks.bench.train", "training steps of replayed models against the peers"),
        Command("bandwidths", "commhooks.bench.bandwidths", "speed-up against bandwidth, beside P3's paper"),
        Command("converge", "commhooks.bench.converge", "commit policies: time to the same loss"),
        Command("plans", "commhooks.bench.plans", "packed trees against rings on the paper's machines"),
        Command("replan", "commhooks.bench.replan", "a network that changes while a model trains"),
        Command("faults", "commhooks.bench.faults", "how fast a dead or silent peer becomes an error"),
        Command("all", "commhooks.bench.suite", "everything above, with a report"),
    ),
    "side by side with the peers in one run",
)
COMMANDS: tuple[Command | Group, ...] = (
    Command("doctor", "commhooks.doctor", "check what this machine has and lacks"),
    Command("run", "commhooks.run", "run a training script with commhooks switched on", transparent=True),
    Command("probe", "commhooks.probe", "under a launcher: measure the cluster, write a topology file"),
    Command("plan", "commhooks.plan_command", "offline: the trees for a topology"),
    Command("lab", "commhooks.lab", "run a command once per rank on an emulated network"),
    BENCH,
    Command("simulate", "commhooks.simulate", "iteration time of a model on a topology, in virtual time"),
    Command("timeline", "commhooks.timeline", "sum up a trace file"),
    Command("env", "commhooks.env_command", "every setting, its value and where the value came from"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Returns
    -------
    int
        The exit code; usage errors leave through ``SystemExit(2)``, as argparse does.
    """
    path, command, rest = _find(list(sys.argv[1:] if arguments is None else arguments))
    if command.transparent:
        return _perform(path, command, rest)
    try:
        return _perform(path, command, rest)
    except CommhooksError as error:
        print(f"commhooks: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `commhooks … | head`: the reader has gone, and that is fine
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _perform(path: list[str], command: Command, rest: list[str]) -> int:
    module = _imported(command, " ".join(path))
    parser = _parser(path, command, module)
    own, handed_on = module.split_arguments(rest) if hasattr(module, "split_arguments") else (rest, None)
    namespace = parser.parse_args(own)
    if handed_on is not None:
        namespace.rest = handed_on
    _show_log()
    return int(module.main(namespace))


def _find(given: list[str]) -> tuple[list[str], Command, list[str]]:
    """Walk the table along the arguments; the words of the command, the command, and the arguments left over."""
    path, level = ["commhooks"], COMMANDS
    while True:
        parser = _menu(path, level)
        word = parser.parse_args(given[:1]).command
        entry = next(entry for entry in level if entry.name == word)
        path, given = [*path, word], given[1:]
        if isinstance(entry, Command):
            return path, entry, given
        level = entry.commands


def _menu(path: list[str], level: Sequence[Command | Group]) -> argparse.ArgumentParser:
    width = max(len(entry.name) for entry in level)
    parser = argparse.ArgumentParser(
        prog=" ".join(path),
        description="Sliced, prioritised gradients over trees packed for the network that is really there.",
        epilog="commands:\n" + "\n".join(f"  {entry.name:<{width}}  {entry.does}" for entry in level),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if len(path) == 1:
        parser.add_argument("--version", action="version", version=f"commhooks {__version__}")
    names = [entry.name for entry in level]
    parser.add_argument(
        "command", choices=names, metavar="COMMAND", help="one of the commands below; each has --help"
    )
    return parser


def _imported(command: Command, words: str) -> ModuleType:
    """The module of a command; a part of this package that isn't there is our error, any other lack is its own."""
    try:
        return importlib.import_module(command.module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if command.module != missing and not command.module.startswith(f"{missing}."):
            raise MissingDependency(
                f"`{words}` needs the package {missing}, which isn't installed"
            ) from error
        raise ConfigError(f"`{words}` isn't part of this installation (no module {command.module})") from None


def _parser(path: list[str], command: Command, module: ModuleType) -> argparse.ArgumentParser:
    # "resolve": a command that declares --json itself (with words of its own) replaces ours.
    parser = argparse.ArgumentParser(
        prog=" ".join(path), description=command.does, conflict_handler="resolve"
    )
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else on standard output")
    module.add_arguments(parser)
    return parser


def _show_log() -> None:
    # A bad setting must not keep `doctor` and `env` from showing it: the commands that use settings load them anyway.
    with contextlib.suppress(ConfigError):
        show_log(Config.load({}, os.environ).log_level, os.environ)


if __name__ == "__main__":
    sys.exit(main())
