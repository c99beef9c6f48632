"""Other programs: find them, run them, start and end them by their process id.

Where in the flow: lab, benches and doctor -> **shell** -> the operating system.  The only module that starts processes.

Invariants: a missing program is an error that names the Debian package to install; a child never outlives this process
(the kernel kills it when the thread that started it ends, also when this process is killed hard); every child is the
leader of its own session, so that a signal to it reaches what it started and never this process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from commhooks.errors import CommhooksError, ConfigError, MissingDependency

PIPE = subprocess.PIPE
Child = subprocess.Popen

_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "c++": "g++", "cmake": "cmake"}
_SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")  # a user's PATH often lacks them
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Finished:
    """What a program that ran to its end left behind."""

    exit_code: int
    stdout: str
    stderr: str


def find(program: str, path: str | None = None) -> str:
    """Full path of a program, looked up in PATH and then in the system folders.

    Raises
    ------
    MissingDependency
        Naming the Debian package that has it.
    """
    folders = [path if path is not None else os.environ.get("PATH", os.defpath), *_SYSTEM_FOLDERS]
    found = shutil.which(program, path=os.pathsep.join(folders))
    if found is None:
        package = _PACKAGES.get(program, program)
        raise MissingDependency(
            f"the program {program!r} isn't installed; it is in Debian's package {package}: apt-get install {package}"
        )
    return found


def run(command: Sequence[str], stdin: str = "", timeout_s: float = 60.0, check: bool = True) -> Finished:
    """Run a program to its end and return what it wrote; blocks.

    Raises
    ------
    MissingDependency
        There is no such program.
    CommhooksError
        With `check`, when it fails or takes longer than `timeout_s`; the message has its words.
    """
    argv = [find(command[0]), *command[1:]]
    try:
        done = subprocess.run(
            argv, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise CommhooksError(f"`{' '.join(command)}` took longer than {timeout_s:g} s") from None
    if check and done.returncode != 0:
        words = (done.stderr or done.stdout).strip()
        raise CommhooksError(f"`{' '.join(command)}` ended with exit code {done.returncode}: {words}")
    return Finished(done.returncode, done.stdout, done.stderr)


def start(
    command: Sequence[str],
    environ: Mapping[str, str] | None = None,
    stdin: int | IO[bytes] | None = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
) -> Child[bytes]:
    """Start a program in a session of its own; it is killed when the calling thread ends.

    Call it from the main thread: the kernel's promise is bound to the thread, not to the process.

    Raises
    ------
    MissingDependency, ConfigError
        There is no such program, or it can't be executed.
    """
    argv = [find(command[0], None if environ is None else environ.get("PATH")), *command[1:]]
    try:
        return subprocess.Popen(
            argv,
            env=None if environ is None else dict(environ),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=_dies_with(os.getpid()),
        )
    except OSError as error:
        raise ConfigError(f"can't start {command[0]!r}: {error}") from error


def _dies_with(parent: int) -> Callable[[], None]:
    libc = ctypes.CDLL(None, use_errno=True)  # loaded here: after the fork nothing may be loaded

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died between fork and prctl
            os.kill(os.getpid(), signal.SIGKILL)

    return prepare


def collect(child: Child[bytes], timeout_s: float, grace_s: float = 10.0) -> Finished:
    """Read what a child writes to its end; one that takes longer is ended, with exit code 124, and so is an interrupted one."""
    try:
        stdout, stderr = child.communicate(timeout=timeout_s)
        code = exit_code(child)
    except subprocess.TimeoutExpired:
        terminate([child], grace_s)
        stdout, stderr = child.communicate()
        code = 124
    except BaseException:
        terminate([child], grace_s)
        raise
    return Finished(code, (stdout or b"").decode(errors="replace"), (stderr or b"").decode(errors="replace"))


def fork(work: Callable[[], object]) -> int:
    """Start a copy of this process that does `work` and ends: with code 0, with what it left by, or with 1 after an error.

    Call it from the main thread of a process that has no other: it copies only the calling one.  The copy shares whatever is
    loaded already, so many ranks need load it only once.

    Returns
    -------
    int
        The copy's process id; wait for it with ``os.waitpid``.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or the copy would write it again
    prepare = _dies_with(os.getpid())
    pid = os.fork()
    if pid == 0:
        _copy(prepare, work)
    return pid


def _copy(prepare: Callable[[], None], work: Callable[[], object]) -> None:
    """Never returns: the callers of the original process must not go on twice."""
    code = 1
    try:
        os.setsid()
        prepare()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        work()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        # As at the end of a script, but for taking the interpreter apart.
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
        os._exit(code)


def send(child: Child[bytes], number: signal.Signals) -> None:
    """Signal a child's whole session; nothing happens when it is gone."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)


def terminate(children: Iterable[Child[bytes]], grace_s: float = 5.0) -> None:
    """End children: ask (SIGTERM), wait up to `grace_s` for all of them together, then kill."""
    waiting = [child for child in children if child.poll() is None]
    for child in waiting:
        send(child, signal.SIGTERM)
        send(child, signal.SIGCONT)  # a stopped process hears nothing else
    deadline = time.monotonic() + grace_s
    for child in waiting:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, deadline - time.monotonic()))
    for child in waiting:
        send(child, signal.SIGKILL)
        child.wait()


def exit_code(child: Child[bytes]) -> int:
    """A child's exit code as a shell shows it: 128 + the number for one that a signal ended."""
    code = child.wait()
    return code if code >= 0 else 128 - code


def start_time(pid: int) -> int | None:
    """When a process started, in the kernel's ticks since boot: with the id it names a process for good.

    None when there is no such process.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The second field is the program's name in parentheses, and may hold anything.
            return int(file.read().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None
