"""Programs are found, run, and ended by id; missing ones are named with their package."""

import os
import signal
import sys

import pytest

from commhooks import shell
from commhooks.errors import CommhooksError, ConfigError, MissingDependency


def test_a_missing_program_names_its_package():
    with pytest.raises(MissingDependency, match=r"'tc'.*iproute2: apt-get install iproute2"):
        shell._SYSTEM_FOLDERS, before = (), shell._SYSTEM_FOLDERS
        try:
            shell.find("tc", path="/nonexistent")
        finally:
            shell._SYSTEM_FOLDERS = before


def test_run_returns_what_was_written_and_says_what_failed():
    assert shell.run(["cat"], stdin="hello").stdout == "hello"
    with pytest.raises(CommhooksError, match=r"exit code 3: no luck"):
        shell.run(["sh", "-c", "echo no luck >&2; exit 3"])
    assert shell.run(["sh", "-c", "exit 3"], check=False).exit_code == 3
    with pytest.raises(CommhooksError, match=r"longer than 0.1 s"):
        shell.run(["sleep", "60"], timeout_s=0.1)


def test_a_file_that_is_no_program_is_a_clear_error(tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("\x7fELF")
    broken.chmod(0o755)
    with pytest.raises(ConfigError, match="broken"):
        shell.start([str(broken)])


def test_terminate_asks_first_and_kills_the_deaf():
    polite = shell.start([sys.executable, "-c", "import signal; signal.pause()"])
    deaf = shell.start(
        [
            sys.executable,
            "-c",
            "import signal,sys; signal.signal(15, 1); print(flush=True); signal.pause()",
        ],
        stdout=shell.PIPE,
    )
    deaf.stdout.readline()  # it has switched its ears off
    shell.terminate([polite, deaf], grace_s=0.2)
    assert (shell.exit_code(polite), shell.exit_code(deaf)) == (128 + signal.SIGTERM, 128 + signal.SIGKILL)
    deaf.stdout.close()


def test_a_process_is_named_by_its_id_and_start():
    assert shell.start_time(os.getpid()) == shell.start_time(os.getpid()) > 0
    child = shell.start(["true"])
    child.wait()
    assert shell.start_time(child.pid) is None


def test_children_die_with_a_parent_that_is_killed():
    """Also when the parent has no chance to clean up."""
    code = (
        "import signal\nfrom commhooks import shell\n"
        "child = shell.start(['sleep', '600'])\nprint(child.pid, flush=True)\nsignal.pause()"
    )
    parent = shell.start([sys.executable, "-c", code], stdout=shell.PIPE)
    pid = int(parent.stdout.readline())
    descriptor = os.pidfd_open(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    import select

    assert select.select([descriptor], [], [], 10.0)[0], "the grandchild is still there"
    os.close(descriptor)


@pytest.mark.parametrize(
    ("ends", "code"),
    [("pass", 0), ("sys.exit(3)", 3), ("raise ValueError", 1), ("os.kill(os.getpid(), 9)", -9)],
)
def test_a_fork_ends_after_its_work_and_never_returns(ends, code):
    script = f"""
import atexit, os, sys
from commhooks import shell
print("before")
def work():
    atexit.register(print, "at the end")
    {ends}
pid = shell.fork(work)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = shell.run([sys.executable, "-c", script])
    lines = done.stdout.split("\n")
    assert lines == ["before", *(["at the end"] if code >= 0 else []), str(code), ""], done
