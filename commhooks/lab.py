"""``commhooks lab TOPOLOGY -- CMD``: run a command once per rank on an emulated cluster.

Where in the flow: a command, and ``Lab`` for tests and benches.  topology -> lab_network -> lab_namespaces (as root) ->
lab_ranks -> CMD with a launcher's variables set.

As root each rank has a network namespace of its own and every rate is the kernel's, so that any program is slowed the same
way.  Without root the lab tries a user namespace, where it is root; where that isn't permitted, ranks run on the loopback
interface and only commhooks' own links are paced (``COMMHOOKS_LAB_PACING``), which the lab says.

Invariants: rank 0's standard output is the lab's; all else goes to standard error; whatever ends a lab, a later one finds
nothing left behind (namespaces die with it or are swept).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

from commhooks import shell
from commhooks.core.topology import Topology
from commhooks.core.topology_readers import from_file_text, parse_topology
from commhooks.errors import CommhooksError, ConfigError, TopologyError
from commhooks.lab_control import Change, Control, ask, parse_change, resources_named
from commhooks.lab_environment import Place, pacing, variables
from commhooks.lab_namespaces import Namespaces, folder_for, sweep, unique_name
from commhooks.lab_network import Network, mbit_per_s, network_of
from commhooks.lab_ranks import Interrupted, RankCommand, Ranks, signals_interrupt, write_stderr
from commhooks.tables import aligned

CONTROL = "COMMHOOKS_LAB_CONTROL"  # path of the socket at which a rank may ask for another rate
_INNER = "COMMHOOKS_LAB_INNER"  # set for the lab that was started again inside a user namespace
_MASTER_PORT = 29500


@dataclass(frozen=True)
class Outcome:
    """What a run left behind.

    Attributes
    ----------
    exit_code : of the rank that failed first, else 0.
    stdout : rank 0's standard output.
    stderr : all the rest, each line with its rank.
    """

    exit_code: int
    stdout: str
    stderr: str


class Lab:
    """An emulated cluster: a context manager, or `open` and `close`.

    Parameters
    ----------
    topology : a topology string or the name of a file.
    emulate : make namespaces (needs root); False: loopback, only commhooks' own links are paced.

    Raises
    ------
    TopologyError
        The topology is malformed, or no network of NICs and shared cuts.
    MissingDependency
        On opening, when `ip` or `tc` isn't installed.

    Notes
    -----
    Use it from the main thread: the ranks are killed when the thread that started them ends.
    """

    def __init__(self, topology: str, *, emulate: bool = True) -> None:
        self.topology_text, topology_read = read_topology(topology)
        self.network: Network = network_of(topology_read)
        self.emulate = emulate
        self._name = unique_name()
        self._folder = folder_for(self._name)
        self._hosts_file = self._folder / "hosts"
        self._namespaces = Namespaces(self.network, self._name)
        self._control: Control | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.network.topology.world_size

    @property
    def namespaces(self) -> dict[int | None, str]:
        """The name of each rank's network namespace, and of the core's (key None)."""
        return dict(self._namespaces.names)

    def open(self) -> None:
        """Make the network (and sweep up what killed labs left behind)."""
        sweep()
        try:
            self._folder.mkdir(mode=0o700)
            self._control = Control(self._folder / "control", self.set_rate)
            if self.emulate:
                self._hosts_file.write_text(self._namespaces.hosts_text())
                self._namespaces.make()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill what still runs in the namespaces and remove them; may be called again."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self.emulate:
            self._namespaces.remove()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Lab:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def set_rate(self, resource: str, rate_mbit_per_s: float) -> list[str]:
        """Change rates while traffic flows.

        Parameters
        ----------
        resource : a resource's name (``rank3.up``, ``site0->site1``), a pattern (``rank3.*``), or ``wan`` for every shared cut.
        rate_mbit_per_s : the new rate of each.

        Returns
        -------
        list of str
            The resources that were changed.
        """
        found = resources_named(self.network, resource)
        if not self.emulate:
            raise ConfigError("without root there is no emulated network whose rates could be changed")
        for each in found:
            self._namespaces.set_rate(each, rate_mbit_per_s)
        return [each.name for each in found]

    def environment(self, rank: int, base: Mapping[str, str]) -> dict[str, str]:
        """The variables of one rank's process: `base` with a launcher's and our own set."""
        place = Place.emulated(self.network, rank, _MASTER_PORT) if self.emulate else self._on_loopback(rank)
        environ = variables(place, self.topology_text, base)
        if not self.emulate:
            environ["COMMHOOKS_LAB_PACING"] = json.dumps(pacing(self.network, rank))
            environ["COMMHOOKS_LINKS"] = (
                "tcp"  # ranks of one host would use its memory, which no pacing slows
            )
        if self._control is not None:
            environ[CONTROL] = str(self._control.path)
        return environ

    def _on_loopback(self, rank: int) -> Place:
        if not hasattr(self, "_port"):
            with socket.create_server(("127.0.0.1", 0)) as server:
                self._port: int = server.getsockname()[1]
        return Place.local(rank, self.world_size, self._port)

    def rank_commands(
        self, command: Sequence[str], environ: Mapping[str, str] | None = None
    ) -> list[RankCommand]:
        """What is started for each rank."""
        base = dict(os.environ if environ is None else environ)
        base["PATH"] = with_own_folder(base.get("PATH", os.defpath))
        _must_exist(command, base["PATH"])
        return [
            RankCommand(
                (*(self._namespaces.entering(rank, self._hosts_file) if self.emulate else ()), *command),
                self.environment(rank, base),
            )
            for rank in range(self.world_size)
        ]

    def run(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        changes: Sequence[Change] = (),
        timeout_s: float | None = None,
        grace_s: float = 30.0,
    ) -> Outcome:
        """Run a command once per rank, to the end; blocks.

        Parameters
        ----------
        command : program and arguments.
        environ : the environment to start from (default: this process's).
        changes : rates that change meanwhile.
        timeout_s : end everything after this time; the exit code is then 124.
        grace_s : how long the others may run on after a rank has failed.
        """
        stdout, stderr = bytearray(), bytearray()
        commands = self.rank_commands(command, environ)
        ranks = Ranks(commands, stderr.extend, stdout.extend, grace_s)
        code = self._conduct(ranks, changes, timeout_s)
        return Outcome(code, stdout.decode(errors="replace"), stderr.decode(errors="replace"))

    def run_through(
        self,
        command: Sequence[str],
        *,
        changes: Sequence[Change] = (),
        timeout_s: float | None = None,
        grace_s: float = 30.0,
    ) -> int:
        """Like `run`, but rank 0 writes to our standard output, the rest to our standard error; the exit code."""
        ranks = Ranks(self.rank_commands(command), write_stderr, None, grace_s)
        return self._conduct(ranks, changes, timeout_s)

    def _conduct(self, ranks: Ranks, changes: Sequence[Change], timeout_s: float | None) -> int:
        for change in changes:
            resources_named(self.network, change.resource)  # a wrong name is an error now, not in the middle
            ranks.at(change.after_s, partial(self._change, change))
        if self._control is not None:
            ranks.watch(self._control.descriptor, self._control.answer)
        try:
            return ranks.run(timeout_s)
        except Interrupted as interrupt:
            ranks.interrupt(interrupt.number)
            raise

    def _change(self, change: Change) -> None:
        names = self.set_rate(change.resource, change.mbit_per_s)
        text = f"after {change.after_s:g} s: {', '.join(names)} now {change.mbit_per_s:g} Mbit/s"
        write_stderr(f"commhooks lab: {text}\n".encode())


# --- Rates on demand ---------------------------------------------------------------------------------------------------


def set_rate(resource: str, rate_mbit_per_s: float) -> list[str]:
    """From inside a lab: change rates of the network that this process runs on; the names that were changed.

    Raises
    ------
    ConfigError
        This process isn't in a lab, or the lab refuses.
    """
    path = os.environ.get(CONTROL)
    if path is None:
        raise ConfigError(
            f"{CONTROL} isn't set: only a process that `commhooks lab` started can change its rates"
        )
    return ask(path, resource, rate_mbit_per_s)


# --- Inputs ------------------------------------------------------------------------------------------------------------


def read_topology(text: str) -> tuple[str, Topology]:
    """A topology from a string or a file's name, and the text to give to the ranks (a file's full path)."""
    path = Path(text)
    if ":" not in text and path.is_file():
        return str(path.resolve()), from_file_text(path.read_text(), text)
    if text == "uniform":
        raise TopologyError("topology 'uniform' has no rates; give the lab some, as in nic:800*4")
    return text, parse_topology(text)


def with_own_folder(path: str) -> str:
    """PATH with the folder of this interpreter in front, unless it is there: a rank runs the same Python as the lab."""
    own = str(Path(sys.executable).parent)
    return path if own in path.split(os.pathsep) else own + os.pathsep + path


def _must_exist(command: Sequence[str], path: str) -> None:
    if not command:
        raise ConfigError("no command; write it after --, as in commhooks lab nic:200,800 -- python train.py")
    if shutil.which(command[0], path=path) is None:
        raise ConfigError(f"there is no program {command[0]!r} to run (looked in {path})")


# --- The command -------------------------------------------------------------------------------------------------------


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What is ours, and the command after ``--``."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "%(prog)s [options] TOPOLOGY -- COMMAND ..."
    parser.add_argument(
        "topology", metavar="TOPOLOGY", help="nic:200,800,800,800, sites:4+4@200/1000, or a file"
    )
    parser.add_argument(
        "--json", action="store_true", help="with --show: as JSON (a command's output is never touched)"
    )
    parser.add_argument(
        "--show", action="store_true", help="print the network (with --json as JSON), run nothing"
    )
    parser.add_argument(
        "--loopback",
        action="store_true",
        help="emulate no network, as for a user who may not make namespaces",
    )
    parser.add_argument(
        "--change",
        action="append",
        default=[],
        metavar="T:RESOURCE=RATE",
        help="T seconds after the start RESOURCE has RATE Mbit/s (a name, a pattern such as 'rank2.*', or wan: all shared "
        "cuts); may be given several times",
    )
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="end everything after S seconds, exit code 124"
    )
    parser.add_argument(
        "--grace", type=float, default=30.0, metavar="S", help="time for the others after a rank failed (30)"
    )


def main(namespace: argparse.Namespace) -> int:
    """Run the command once per rank; the exit code of the rank that failed first."""
    changes = [parse_change(text) for text in namespace.change]
    emulate = (namespace.show or os.geteuid() == 0) and not namespace.loopback
    lab = Lab(namespace.topology, emulate=emulate)
    if namespace.show:
        print(_shown(lab.network, namespace.json))
        return 0
    _must_exist(namespace.rest, with_own_folder(os.environ.get("PATH", os.defpath)))
    if not emulate:
        if not namespace.loopback:
            _enter_user_namespace()
        write_stderr(_NO_NETWORK)
    sys.stdout.flush()
    with signals_interrupt():
        try:
            with lab:
                return lab.run_through(
                    namespace.rest, changes=changes, timeout_s=namespace.timeout, grace_s=namespace.grace
                )
        except Interrupted as interrupt:
            return 128 + interrupt.number


_NO_NETWORK = (
    b"commhooks lab: no network is emulated (that needs root, or a user namespace). Ranks run on the loopback interface;\n"
    b"commhooks lab: only commhooks' own links are paced. Plain DDP can't be slowed the same way, so compare\n"
    b"commhooks lab: with the bound (of_bound), not with the peer (speedup).\n"
)


def _shown(network: Network, as_json: bool) -> str:
    rates = {name: mbit_per_s(network.topology.capacity[name]) for name in network.buckets()}
    if as_json:
        interfaces = [
            {"rank": i.rank, "interface": i.name, "address": i.address, "up": i.up, "down": i.down}
            for i in network.interfaces
        ]
        return json.dumps([{"interfaces": interfaces, "mbit_per_s": rates, "wires": list(network.wires)}])
    rows = [
        (str(i.rank), i.name, i.address, *(f"{rates[n]:g}" if n in rates else "-" for n in (i.up, i.down)))
        for i in network.interfaces
    ]
    text = aligned(("rank", "interface", "address", "up", "down (Mbit/s)"), rows)
    return text + "".join(f"\n{name}: {rates[name]:g} Mbit/s, shared" for name in network.wires)


def _enter_user_namespace() -> None:
    """Start again as root of a user namespace of our own, if the kernel permits it; otherwise return."""
    if os.environ.get(_INNER):
        return
    with suppress(CommhooksError):
        unshare = [shell.find("unshare"), "--user", "--map-root-user", "--net", "--mount", "--"]
        # A private /run: `ip netns` keeps its names there, and they vanish with us.
        private = ["sh", "-c", 'mount -t tmpfs run /run && exec "$@"', "sh"]
        if shell.run([*unshare, *private, "true"], check=False).exit_code == 0:
            own = [sys.executable, "-m", "commhooks", *sys.argv[1:]]
            os.execve(unshare[0], [*unshare, *private, *own], {**os.environ, _INNER: "1"})
