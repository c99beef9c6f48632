"""``commhooks doctor``: what this machine has and lacks, found by trying rather than by asking.

Where in the flow: a command; starts no engine and changes nothing (``--build-horovod`` apart).

Invariants: one finding per question; the exit code is 1 exactly when something *needed* is missing.  The trials that
need a second process come first: they fork, and a process that has loaded torch shouldn't.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from commhooks.config import Config
from commhooks.errors import ConfigError
from commhooks.hosts import interface_address
from commhooks.links.shm import read_memory
from commhooks.tables import aligned

OK, MISSING, OPTIONAL = "ok", "missing", "optional"
NEEDED_PACKAGES = ("numpy>=1.24", "scipy>=1.10", "networkx>=3.0", "torch>=2.1")
OPTIONAL_PACKAGES = (("matplotlib", "pictures"), ("sklearn", "the demo and the convergence benches"))
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Finding:
    """The answer to one question.

    Attributes
    ----------
    what : what was looked at.
    status : ``ok``, ``missing`` (needed), or ``optional`` (lacking, and most users can do without).
    seen : what is there.
    advice : what to do, empty when nothing is to be done.
    """

    what: str
    status: str
    seen: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--build-horovod",
        action="store_true",
        help="build and install Horovod 0.28.1 with our patches, nothing else",
    )


def main(namespace: argparse.Namespace) -> int:
    """Print the findings; 1 when something needed is missing."""
    if namespace.build_horovod:
        build_horovod(Path(__file__).parent.parent / "patches" / "build-horovod")
    findings = list(examine())
    if namespace.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print(aligned(("", "", ""), [(f.what, f.status, f.seen) for f in findings]).lstrip("\n"))
        print(*(f"\n{f.what}: {f.advice}" for f in findings if f.advice), sep="")
    return int(any(finding.status == MISSING for finding in findings))


def build_horovod(script: Path) -> None:
    """Become the build script, which belongs to the source tree and not to an installed package."""
    if not script.exists():
        raise ConfigError(
            f"there is no {script}: run this from a source tree that is installed with pip install -e ."
        )
    os.execv(sys.executable, [sys.executable, str(script)])


def examine() -> Iterator[Finding]:
    """All findings, in the order in which they are shown."""
    yield python()
    yield settings()
    yield peer_memory()
    yield shared_memory()
    yield namespaces()
    yield from (tool(name) for name in ("ip", "tc"))
    yield host_name(socket.gethostname(), resolve)
    yield interfaces()
    yield ports()
    yield congestion()
    yield from (package(requirement) for requirement in NEEDED_PACKAGES)
    yield gloo()
    yield from (optional_package(name, purpose) for name, purpose in OPTIONAL_PACKAGES)
    yield horovod()


# --- This process ------------------------------------------------------------------------------------------------------


def python() -> Finding:
    """The interpreter, and how many cores we may use."""
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", OK, f"{version}, {len(os.sched_getaffinity(0))} cores")


def settings() -> Finding:
    """Whether the environment's settings are valid, and which are set."""
    try:
        config = Config.load({}, os.environ)
    except ConfigError as error:
        return Finding("settings", MISSING, "invalid", str(error))
    if not config.enabled:
        return Finding("settings", OK, "COMMHOOKS=0: everything is switched off")
    return Finding(
        "settings",
        OK,
        ", ".join(name for name, source in config.sources.items() if source != "default") or "defaults",
    )


# --- Memory and namespaces: tried in a child -----------------------------------------------------------------------------


def in_child(trial: Callable[[], object]) -> bool:
    """Whether ``trial`` succeeds in a forked process; what it breaks there stays there."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            trial()
            code = 0
        finally:  # whatever was raised: this copy of the process must not go on
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def peer_memory() -> Finding:
    """Whether a process may read another one's memory in place."""
    secret = ctypes.create_string_buffer(os.urandom(32), 32)
    parent = os.getpid()

    def read() -> None:
        target = bytearray(32)
        read_memory(parent, ctypes.addressof(secret), memoryview(target))
        if bytes(target) != secret.raw:
            raise OSError("other bytes")

    if in_child(read):
        return Finding("process_vm_readv", OK, "a peer's memory can be read in place")
    advice = (
        "ranks on one host use shared memory instead; to permit it: --cap-add SYS_PTRACE, or ptrace_scope 0"
    )
    return Finding("process_vm_readv", OPTIONAL, "not permitted", advice)


def shared_memory() -> Finding:
    """A memory file without a name, the way between ranks of one host where memory can't be read in place."""
    try:
        os.close(os.memfd_create("commhooks-doctor", os.MFD_CLOEXEC))
    except (AttributeError, OSError) as error:
        return Finding(
            "shared memory", OPTIONAL, str(error), "let ranks on one host talk TCP: COMMHOOKS_LINKS=tcp"
        )
    return Finding("shared memory", OK, "memory files can be made")


def namespaces() -> Finding:
    """Whether we may make network namespaces, which the lab's emulated networks are made of."""

    def unshare() -> None:
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "unshare")

    if in_child(unshare):
        return Finding("network namespaces", OK, "can be made")
    return Finding(
        "network namespaces", OPTIONAL, "not permitted", "commhooks lab needs root to emulate networks"
    )


def tool(name: str) -> Finding:
    """A program that the lab starts."""
    if path := shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"):
        return Finding(name, OK, path)
    return Finding(name, OPTIONAL, "not found", "commhooks lab needs it: apt-get install iproute2")


# --- The network -------------------------------------------------------------------------------------------------------


def resolve(name: str) -> str | None:
    """The first address of a host name, as most programs would get it."""
    try:
        return str(socket.getaddrinfo(name, None, family=socket.AF_INET)[0][4][0])
    except OSError:
        return None


def host_name(name: str, lookup: Callable[[str], str | None]) -> Finding:
    """Whether other hosts could reach this one under the address that it gives itself."""
    address = lookup(name)
    if address is None:
        return Finding(
            "host name", OPTIONAL, f"{name} doesn't resolve", f"add it to /etc/hosts, or {_NAME_INTERFACE}"
        )
    if address.startswith("127."):
        advice = f"other hosts can't reach {address}: correct /etc/hosts, or {_NAME_INTERFACE}"
        return Finding("host name", OPTIONAL, f"{name} is {address}", advice)
    return Finding("host name", OK, f"{name} is {address}")


_NAME_INTERFACE = "set COMMHOOKS_INTERFACE and GLOO_SOCKET_IFNAME (one host alone needs neither)"


def interfaces() -> Finding:
    """The interfaces with an IPv4 address."""
    found = []
    for _, name in socket.if_nameindex():
        try:
            found.append(f"{name} {interface_address(name)}")
        except ConfigError:
            continue  # no IPv4 address
    if not found:
        return Finding("interfaces", MISSING, "none has an IPv4 address", "bring one up: ip link set lo up")
    return Finding("interfaces", OK, ", ".join(found))


def ports() -> Finding:
    """Whether we may listen and connect on this host."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
            return Finding("ports", OK, f"can listen and connect (tried port {server.getsockname()[1]})")
    except OSError as error:
        return Finding("ports", MISSING, str(error), "something forbids connections to 127.0.0.1")


def congestion() -> Finding:
    """The kernel's congestion controls; cubic has measured best for these flows."""
    try:
        names = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
        default = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    except OSError as error:
        return Finding("congestion control", OPTIONAL, str(error.strerror))
    seen = f"{default} (available: {', '.join(names)})"
    if "cubic" not in names:
        return Finding("congestion control", OPTIONAL, seen, "cubic measures better: modprobe tcp_cubic")
    return Finding("congestion control", OK, seen)


# --- Packages ----------------------------------------------------------------------------------------------------------


def package(requirement: str) -> Finding:
    """A package that we can't do without: its version, and whether it loads."""
    name, least = requirement.split(">=")
    try:
        importlib.import_module(name)
        version = metadata.version(name)
    except Exception as error:  # a broken installation can raise anything
        return Finding(name, MISSING, f"{type(error).__name__}: {error}", f"pip install '{requirement}'")
    if _numbers(version) < _numbers(least):
        return Finding(name, MISSING, version, f"pip install '{requirement}'")
    return Finding(name, OK, version)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])


def gloo() -> Finding:
    """Whether this torch has distributed training over Gloo."""
    try:
        import torch.distributed as dist

        there = dist.is_available() and dist.is_gloo_available()
    except Exception as error:  # torch's own finding says more
        return Finding("torch.distributed", MISSING, f"{type(error).__name__}: {error}")
    if not there:
        return Finding(
            "torch.distributed", MISSING, "built without Gloo", "install a build of torch with Gloo"
        )
    return Finding("torch.distributed", OK, "with Gloo")


def optional_package(name: str, purpose: str) -> Finding:
    """A package that only some commands use."""
    if importlib.util.find_spec(name) is None:
        return Finding(name, OPTIONAL, "not installed", f"for {purpose}: pip install 'commhooks[demo]'")
    return Finding(name, OK, f"for {purpose}")


def horovod() -> Finding:
    """Whether Horovod is there (its last release needs our patches to build)."""
    try:
        return Finding("horovod", OK, metadata.version("horovod"))
    except metadata.PackageNotFoundError:
        advice = "only Horovod scripts need it: commhooks doctor --build-horovod"
        return Finding("horovod", OPTIONAL, "not installed", advice)
