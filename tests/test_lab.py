"""The lab on the real kernel: what is made, what comes out, and that nothing is left behind."""

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from commhooks import lab as lab_module
from commhooks import shell
from commhooks.core.topology import payload_bytes_per_s
from commhooks.errors import CommhooksError, ConfigError, MissingDependency
from commhooks.lab import Change, Lab
from commhooks.lab_namespaces import stale, sweep

ROOT = Path(__file__).parent.parent


def _reason() -> str | None:
    if os.geteuid() != 0:
        return "emulating networks needs root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "emulating networks needs ip and tc (iproute2)"
    return None


needs_root = pytest.mark.skipif(_reason() is not None, reason=str(_reason()))


def lab_process(*arguments, **streams):
    """`commhooks lab …` as a process of its own."""
    command = [sys.executable, "-m", "commhooks", "lab", *arguments]
    return shell.start(
        command, environ=dict(os.environ), **{"stdout": shell.PIPE, "stderr": shell.PIPE, **streams}
    )


def finish(child):
    out, err = child.communicate(timeout=60)
    return child.returncode, out.decode(), err.decode()


def traces(pid: int) -> list[str]:
    """What a lab's process has left: namespaces, folders."""
    folders = (Path("/run/netns"), Path(tempfile.gettempdir()))
    return [str(path) for folder in folders for path in folder.glob(f"commhooks-lab-{pid}-*")]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


# --- Runs -------------------------------------------------------------------------------------------------------------


@needs_root
def test_standard_output_is_rank_0s_alone_and_all_else_is_prefixed():
    code = (
        "import os, sys; r = os.environ['RANK']; print('out', r); print('err', r, file=sys.stderr); "
        "sys.stdout.write('no newline')"
    )
    status, out, err = finish(lab_process("nic:100*3", "--", *python(code)))
    assert (status, out) == (0, "out 0\nno newline")
    expected = {"[rank 0] err 0"} | {
        f"[rank {r}] {text}" for r in (1, 2) for text in (f"out {r}", f"err {r}", "no newline")
    }
    assert set(err.splitlines()) == expected


@needs_root
def test_ranks_are_on_hosts_of_their_own_and_find_each_other():
    code = """
import os, socket
rank, at = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
names = sorted(name for _, name in socket.if_nameindex())
if rank == 0:
    server = socket.create_server(at)
    peers = [server.accept() for _ in range(2)]
    print(names, sorted(peer[1][0] for peer in peers), sorted(peer[0].recv(1) for peer in peers))
else:
    while True:
        try:
            peer = socket.create_connection(at)
            break
        except ConnectionRefusedError:
            pass
    peer.send(str(rank).encode())
"""
    with Lab("sites:1+1+1@50/100") as lab:
        outcome = lab.run(python(code), timeout_s=30)
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.stdout.split("] ")[0] == "['eth0', 'lo'"
    assert "['10.77.1.2', '10.77.2.3'] [b'1', b'2']" in outcome.stdout


@needs_root
def test_an_emulated_host_knows_its_own_name():
    """Gloo in Horovod looks its host's name up; on the real host that is loopback, where no other rank can connect."""
    code = "import socket; n = socket.gethostname(); print(n, socket.gethostbyname(n), socket.getfqdn('10.77.0.2'))"
    own_name = socket.gethostname()
    with Lab("nic:100*2") as lab:
        assert lab.run(python(code)).stdout == "host0 10.77.0.1 host1\n"
    assert socket.gethostname() == own_name and "10.77.0.1" not in Path("/etc/hosts").read_text()


@needs_root
def test_the_host_sees_nothing_of_it():
    before = shell.run(["ip", "-o", "link"]).stdout, shell.run(["ip", "route"]).stdout
    with Lab("sites:2+2@50/100") as lab:
        assert (shell.run(["ip", "-o", "link"]).stdout, shell.run(["ip", "route"]).stdout) == before
        assert all((Path("/run/netns") / name).exists() for name in lab.namespaces.values())
    assert traces(os.getpid()) == []


@needs_root
def test_the_exit_code_is_that_of_the_rank_that_failed_first():
    code = (
        "import os, sys, signal\nrank = os.environ['RANK']\n"
        "if rank == '1': sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\nsignal.pause()"
    )
    with Lab("nic:100*3") as lab:
        outcome = lab.run(python(code), grace_s=0.3, timeout_s=30)
        assert outcome.exit_code == 7
        assert "rank 1 ended with exit code 7; the others have 0.3 s to end" in outcome.stderr
        assert "ending ranks 0, 2" in outcome.stderr
        assert lab.run(python("import os; os.kill(os.getpid(), 9)")).exit_code == 137
        assert lab.run(["true"]).exit_code == 0
        assert lab.run(["sleep", "60"], timeout_s=0.3).exit_code == 124


@needs_root
def test_what_a_rank_leaves_running_is_killed_with_the_lab():
    code = "import os, signal\nif os.fork() == 0:\n    os.setsid()\n    print(os.getpid(), flush=True)\n    signal.pause()"
    with Lab("nic:100*2") as lab:
        left = int(lab.run(python(code), timeout_s=30).stdout)
        descriptor = os.pidfd_open(left)
    import select

    assert select.select([descriptor], [], [], 10.0)[0]
    os.close(descriptor)


@needs_root
def test_labs_run_side_by_side():
    code = "import os, sys; print(open('/proc/self/ns/net').fileno() and os.readlink('/proc/self/ns/net'))"
    with Lab("nic:100*2") as one, Lab("nic:100*2") as other:
        assert not set(one.namespaces.values()) & set(other.namespaces.values())
        seen = {lab.run(python(code)).stdout for lab in (one, other)}
    assert len(seen) == 2
    children = [lab_process("nic:50*2", "--", "true") for _ in range(2)]
    assert [finish(child)[0] for child in children] == [0, 0]


# --- Ends -------------------------------------------------------------------------------------------------------------

WAIT = "import os, signal\nprint('up', flush=True)\nwhile True: signal.pause()"


def started_lab(*arguments):
    child = lab_process("nic:100*2", *arguments, "--", *python(WAIT))
    assert child.stdout.readline() == b"up\n"
    return child


@needs_root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_lab_without_a_trace(number):
    child = started_lab()
    assert traces(child.pid)
    child.send_signal(number)
    child.send_signal(number)  # an impatient second one doesn't disturb the cleaning up
    assert finish(child)[0] == 128 + number
    assert traces(child.pid) == []


@needs_root
def test_the_next_lab_sweeps_up_after_one_that_was_killed():
    child = started_lab()
    child.kill()
    finish(child)
    assert traces(child.pid) and set(traces(child.pid)) <= set(stale())
    with Lab("nic:100*2"):
        assert traces(child.pid) == []
        assert not any(str(os.getpid()) in path for path in stale())  # and not the living
    assert sweep() == []


@needs_root
def test_a_network_that_cannot_be_made_leaves_nothing(monkeypatch):
    lab = Lab("nic:100*2")
    monkeypatch.setattr("commhooks.lab_network.BURST_S", 1e6)  # tc refuses such a bucket
    with pytest.raises(CommhooksError, match="tc -n"):
        lab.open()
    assert traces(os.getpid()) == []


def test_a_long_temporary_folder_is_no_obstacle(monkeypatch, tmp_path):
    deep = tmp_path / ("x" * 60) / ("y" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with Lab("nic:100*2", emulate=False) as lab:
        assert lab.run(["true"]).exit_code == 0
    assert list(deep.iterdir()) == []


# --- Rates while it runs -----------------------------------------------------------------------------------------------


def shown_rates(lab: Lab, rank: int | None) -> str:
    return shell.run(["tc", "-n", lab.namespaces[rank], "qdisc", "show"]).stdout


@needs_root
def test_rates_change_from_outside_by_time_and_from_inside():
    inside = (
        "import os\nfrom commhooks.lab import set_rate\n"
        "if os.environ['RANK'] == '0':\n"
        "    print(set_rate('rank1.up', 33))\n"
        "    try: set_rate('nothing', 1)\n"
        "    except ValueError as error: print('refused' if 'there are rank0.down' in str(error) else error)\n"
    )
    with Lab("nic:100*2") as lab:
        assert lab.set_rate("rank0.*", 55) == ["rank0.up", "rank0.down"]
        assert "rate 55Mbit" in shown_rates(lab, 0) and "rate 55Mbit" in shown_rates(lab, None)
        outcome = lab.run(python(inside), changes=[Change(0.0, "rank1.down", 44.0)], timeout_s=30)
        assert outcome.exit_code == 0, outcome.stderr
        assert outcome.stdout == "['rank1.up']\nrefused\n"
        assert "rate 33Mbit" in shown_rates(lab, 1) and "rate 44Mbit" in shown_rates(lab, None)
        with pytest.raises(ConfigError, match="above 0"):
            lab.set_rate("rank0.up", 0)


def test_rates_change_only_in_a_lab(monkeypatch):
    monkeypatch.delenv("COMMHOOKS_LAB_CONTROL", raising=False)
    with pytest.raises(ConfigError, match="only a process that `commhooks lab` started"):
        lab_module.set_rate("wan", 10)


# --- Refusals, and without root ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nic:100*2"], "no command; write it after --"),
        (["nic:100*2", "--", "no-such-program"], "there is no program 'no-such-program'"),
        (["nic:100*2", "--change", "1:wan=5", "--", "true"], "no resource of the lab is called 'wan'"),
        (["nic:100*2", "--change", "soon", "--", "true"], "SECONDS:RESOURCE=MBIT"),
        (["uniform", "--", "true"], "has no rates"),
        (["dgx-1v", "--", "true"], "isn't a network"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_made(arguments, words):
    child = lab_process(*arguments)
    status, out, err = finish(child)
    assert (status, out) == (2, "") and words in err
    assert traces(child.pid) == []


def test_missing_tools_are_named_with_their_package(monkeypatch):
    monkeypatch.setattr(shell, "_SYSTEM_FOLDERS", ())
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(MissingDependency, match="apt-get install iproute2"):
        Lab("nic:100*2").open()
    assert traces(os.getpid()) == []


def test_the_network_is_shown_without_being_made():
    status, out, _ = finish(lab_process("sites:1+1@20/100", "--show", "--json"))
    shown = json.loads(out)
    assert status == 0 and shown[0]["mbit_per_s"]["site0->site1"] == 20
    status, out, _ = finish(lab_process("nic:200,800", "--show"))
    assert status == 0 and "10.77.0.2" in out


def test_without_emulation_ranks_run_on_loopback_and_are_paced():
    code = (
        "import os, json; e = os.environ; print(e['GLOO_SOCKET_IFNAME'], e['MASTER_ADDR'], e['COMMHOOKS_LINKS'], "
        "sorted(json.loads(e['COMMHOOKS_LAB_PACING'])['pacing_bytes_per_s']))"
    )
    assert threading.current_thread() is threading.main_thread()
    with Lab("nic:100*3", emulate=False) as lab:
        outcome = lab.run(python(code))
        assert (outcome.exit_code, outcome.stdout) == (0, "lo 127.0.0.1 tcp ['1', '2']\n")
        with pytest.raises(ConfigError, match="without root"):
            lab.set_rate("rank0.up", 10)


@pytest.mark.parametrize("permitted", [True, False])
def test_a_user_without_root_gets_a_network_or_is_told(permitted):
    """As nobody: a user namespace of its own and then everything as with root, or loopback and the reason."""
    nobody = ["unshare", "--user", "--map-user=65534", "--map-group=65534"]
    if shell.run([*nobody, "true"], check=False).exit_code != 0:
        pytest.skip("user namespaces aren't permitted here")
    script = "echo $GLOO_SOCKET_IFNAME"
    lab = [sys.executable, "-m", "commhooks", "lab", "nic:100*2", "--", "sh", "-c", script]
    inner = [] if permitted else ["COMMHOOKS_LAB_INNER=1"]  # as if it had been tried
    done = shell.run([*nobody, "env", *inner, *lab])
    assert done.stdout == ("eth0\n" if permitted else "lo\n")
    assert ("Plain DDP can't be slowed the same way" in done.stderr) != permitted


def test_without_emulation_our_own_links_keep_to_the_rates():
    code = """
import time, torch, torch.distributed as dist, commhooks
dist.init_process_group("gloo")
tensor = torch.ones(250_000)
for _ in range(3):
    start = time.monotonic()
    commhooks.all_reduce(tensor)
    duration = time.monotonic() - start
print(duration)
dist.destroy_process_group()
"""
    with Lab("nic:40*2", emulate=False) as lab:
        outcome = lab.run(python(code), timeout_s=60)
    assert outcome.exit_code == 0, outcome.stderr
    assert float(outcome.stdout) > 0.9 * 1e6 / payload_bytes_per_s(40), (
        "1 MB each way at 40 Mbit/s takes 0.21 s"
    )
