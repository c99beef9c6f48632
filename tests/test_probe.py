"""The probe itself: ranks as threads on loopback (each pretending to be a host), and as processes in the lab."""

import json
import os
import socket
import sys
import threading

import pytest
from test_lab import needs_root

from commhooks import planning, probe_cache, probe_report, probing, shell
from commhooks.config import Config
from commhooks.core.inference import Flow
from commhooks.core.topology import payload_bytes_per_s
from commhooks.core.topology_readers import parse_topology
from commhooks.errors import CommError, CommTimeout, ConfigError, PeerLost, TopologyError
from commhooks.planning import NetworkPlanner
from commhooks.probe_control import Wire, as_json, from_json
from commhooks.probe_flows import rate_of
from commhooks.probing import Probe, probe

LOCAL = threading.local()


class Meeting:
    """A rendezvous of threads."""

    def __init__(self, world_size):
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size, timeout=30)
        self.values = {}

    def rank(self, number):
        return Member(self, number)


class Member:
    def __init__(self, meeting, rank):
        self.meeting, self.rank, self.world_size, self.turn = meeting, rank, meeting.world_size, 0

    def exchange(self, name, value):
        self.turn += 1
        self.meeting.values[self.turn, self.rank] = json.dumps(value)
        self.meeting.barrier.wait()
        return [json.loads(self.meeting.values[self.turn, rank]) for rank in range(self.world_size)]


@pytest.fixture
def hosts(monkeypatch):
    """Each thread names its own host; short rounds."""
    monkeypatch.setattr(probing, "host_identity", lambda: LOCAL.host)
    monkeypatch.setattr(probing, "DURATION_S", 0.03)
    monkeypatch.setattr(probing, "LIMIT_S", 5.0)
    monkeypatch.setattr(probing, "_TURNS", 8)  # threads of one interpreter on a busy machine


def together(names, function):
    """Call ``function(rendezvous)`` in one thread per host name; each one's result or exception."""
    meeting, ended = Meeting(len(names)), [None] * len(names)

    def run(rank):
        LOCAL.host = names[rank]
        try:
            ended[rank] = function(meeting.rank(rank))
        except BaseException as error:
            ended[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(names))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return ended


def measure(rendezvous, **more):
    return probe(rendezvous, Config(), ["127.0.0.1"], **more)


def test_all_ranks_learn_the_same_network(hosts):
    found = together(["a", "b", "a"], measure)
    assert all(isinstance(each, Probe) for each in found), found
    assert len({each.topology.digest() for each in found}) == 1
    topology = found[0].topology
    assert topology.route_of[0, 2, 0].resources == ("host0.memory",)
    assert topology.route_of[1, 2, 0].resources == ("rank1.up", "host0.down")
    assert all(rate > 1e6 for rate in topology.capacity.values())
    assert found[2].between(0, 1) > 0 and found[2].between(0, 2) == 0


def test_two_interfaces_are_two_channels(hosts):
    found = together(["a", "b"], lambda r: probe(r, Config(), ["127.0.0.1", "127.0.0.2"]))
    assert found[0].topology.channels == 2
    assert set(found[1].topology.capacity) == {
        f"rank{r}.{d}{n}" for r in (0, 1) for d in ("up", "down") for n in ("", ".1")
    }


def test_ranks_with_different_numbers_of_interfaces_are_told(hosts):
    found = together(["a", "b"], lambda r: probe(r, Config(), ["127.0.0.1", "127.0.0.2"][: r.rank + 1]))
    assert all(isinstance(error, ConfigError) and "rank 1 has 2" in str(error) for error in found), found


def test_an_address_that_is_not_ours_is_everybodys_error(hosts):
    found = together(["a", "b"], lambda r: probe(r, Config(), ["127.0.0.1" if r.rank == 0 else "192.0.2.7"]))
    assert all(
        isinstance(error, ConfigError) and "rank 1 can't listen at 192.0.2.7" in str(error) for error in found
    ), found


def test_a_rank_without_a_route_is_named_on_all_ranks(hosts, monkeypatch):
    """Rank 2 gives an address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()
    honest = probing._Member.place_json

    def place(self):
        return honest(self) | ({"addresses": [closed]} if self._rank == 2 else {})

    monkeypatch.setattr(probing._Member, "place_json", place)
    found = together(["a", "b", "c"], measure)
    assert all(isinstance(error, TopologyError) for error in found), found
    assert all(f"can't reach rank 2 (127.0.0.1:{closed[1]})" in str(error) for error in found), found
    assert len({str(error) for error in found}) == 1


def test_an_interrupted_rank_is_named_by_all_others(hosts, monkeypatch, tmp_path):
    plain = probing.FlowRunner.run

    def run(self, *words):
        if self._rank == 1:
            raise KeyboardInterrupt
        return plain(self, *words)

    monkeypatch.setattr(probing.FlowRunner, "run", run)
    found = together(["a", "b", "c"], lambda r: measure(r, cache=tmp_path))
    assert isinstance(found[1], KeyboardInterrupt)
    assert all(isinstance(found[rank], PeerLost) and "rank 1 left" in str(found[rank]) for rank in (0, 2)), (
        found
    )
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_rank_0_is_named_too(hosts, monkeypatch):
    monkeypatch.setattr(probing._Conductor, "probe", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    found = together(["a", "b"], measure)
    assert (
        isinstance(found[0], KeyboardInterrupt)
        and isinstance(found[1], PeerLost)
        and "rank 0" in str(found[1])
    )


def test_a_stranger_on_a_port_disturbs_nothing(hosts, monkeypatch):
    plain = probing._Member.connect

    def connect(self):
        if self._rank == 1:
            for place in self._places:
                stranger = socket.create_connection(place.addresses[0])
                stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" * 10)
                strangers.append(stranger)
        plain(self)

    strangers = []
    monkeypatch.setattr(probing._Member, "connect", connect)
    found = together(["a", "b"], measure)
    assert all(isinstance(each, Probe) for each in found), found
    for stranger in strangers:
        stranger.close()


def test_a_measured_cluster_is_remembered_by_its_fingerprint(hosts, monkeypatch, tmp_path):
    first = together(["a", "b"], lambda r: measure(r, cache=tmp_path))
    second = together(["a", "b"], lambda r: measure(r, cache=tmp_path))
    assert not first[0].cached and all(each.cached for each in second)
    assert second[1].topology == first[1].topology
    (path,) = tmp_path.iterdir()
    assert not together(["a", "b"], lambda r: measure(r, cache=tmp_path, reuse=False))[0].cached
    assert not together(["a", "a"], lambda r: measure(r, cache=tmp_path))[0].cached, "other hosts"
    path.write_text('{"topology": 7')
    assert not together(["a", "b"], lambda r: measure(r, cache=tmp_path))[0].cached, "half a file"
    path.write_text('{"topology": 7}')
    assert not together(["a", "b"], lambda r: measure(r, cache=tmp_path))[0].cached, "another version's file"


def test_files_are_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "topology.json"
    path.write_text("before")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        probe_cache.write_whole(path, b"after")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_old_and_many_files_are_forgotten(tmp_path):
    for number in range(probe_cache.MOST_FILES + 5):
        probe_cache.store(tmp_path, str(number), {})
    assert len(list(tmp_path.iterdir())) == probe_cache.MOST_FILES
    newest = tmp_path / f"{probe_cache.MOST_FILES + 4}.json"
    assert probe_cache.load(tmp_path, newest.stem) == {}
    os.utime(newest, (0, 0))
    assert probe_cache.load(tmp_path, newest.stem) is None


def test_only_the_second_part_of_a_flow_counts():
    # 100 bytes at once at the start (a token bucket), then 10 a second
    samples = [(0.1 * i, 100 + i) for i in range(1, 21)]
    assert rate_of(samples, 0.5, 1.5) == pytest.approx(10.0)
    assert rate_of([], 0.5, 1.5) == 0.0
    assert rate_of([(0.2, 5), (0.4, 9)], 0.5, 1.5) == pytest.approx(20.0), "better than nothing"


@pytest.mark.parametrize("error", [PeerLost("a"), TopologyError("b"), CommTimeout("c"), ConfigError("d")])
def test_errors_travel(error):
    there = from_json(json.loads(json.dumps(as_json(error))))
    assert type(there) is type(error) and str(there) == str(error)
    assert type(from_json({"kind": "os", "words": "x"})) is CommError


def test_a_silent_and_an_ended_rank_are_told_apart():
    one, other = socket.socketpair()
    wire = Wire(one, 3)
    with pytest.raises(CommTimeout, match="nothing from rank 3"):
        wire.receive(0.01)
    other.close()
    with pytest.raises(PeerLost, match="rank 3 left"):
        wire.receive(1.0)
    wire.close()


# --- topology=probe --------------------------------------------------------------------------------------------------


def failing(*_):
    raise TopologyError("rank 1 can't reach rank 0")


def test_a_failed_probe_stops_unless_the_fallback_is_asked_for(monkeypatch):
    monkeypatch.setattr(planning, "probe", failing)

    class Placed:
        tcp = (("127.0.0.1", 1),)

    for fallback in (False, True):
        config = Config.load({"topology": "probe", "probe_fallback": fallback}, {})
        planner = NetworkPlanner(config, 2, None)
        if not fallback:
            with pytest.raises(TopologyError):
                planner.prepare(Meeting(2).rank(0), [Placed, Placed])
        else:
            planner.prepare(Meeting(2).rank(0), [Placed, Placed])
            assert planner(["a", "b"], "all_reduce", None).topology is None


def test_what_was_measured_is_planned_for(monkeypatch):
    true = parse_topology("nic:200,800,800,800")
    found = Probe(true, ((((1.0,) * 4),) * 4,), (0, 1, 2, 3), 7, 1.0)
    monkeypatch.setattr(planning, "probe", lambda *_: found)

    class Placed:
        tcp = (("127.0.0.1", 1),)

    planner = NetworkPlanner(Config.load({"topology": "probe"}, {}), 4, None)
    planner.prepare(Meeting(4).rank(0), [Placed] * 4)
    planned = planner(list("abcd"), "all_reduce", None)
    assert planned.plan.bytes_per_s == pytest.approx(payload_bytes_per_s(200))
    assert planned.topology == true and 0 < planned.native_bytes_per_s < planned.plan.bytes_per_s


# --- what people see -------------------------------------------------------------------------------------------------


def shown():
    measured = parse_topology("nic:200,800,400,800")
    rate = [[0.0 if a == b else payload_bytes_per_s(min((200, 800, 400, 800)[a], (200, 800, 400, 800)[b])) for b in range(4)]
            for a in range(4)]  # fmt: skip
    return Probe(measured, (tuple(map(tuple, rate)),), (0, 1, 2, 3), 7, 1.5)


def test_measured_and_declared_stand_side_by_side():
    text = probe_report.text(shown(), parse_topology("nic:200,800,800,800"))
    assert "rank2.up    400.0     800.0     0.50 <--" in text
    assert "4 pairs of ranks differ" in text and "1->2: measured 400, declared 800" in text
    assert "worst link: rank 0 -> rank 1, 200.0 Mbit/s, because of rank0.up" in text
    assert "rank 1     200  .    400  800" in text
    assert "declared" not in probe_report.text(shown(), None)
    assert "every pair" in probe_report.text(shown(), shown().topology)


def test_the_same_for_programs():
    fields = json.loads(json.dumps(probe_report.as_json(shown(), parse_topology("nic:200,800,800,800"))))
    assert fields["worst"]["resource"] == "rank0.up" and len(fields["differing_pairs"]) == 4
    assert Probe.from_json({name: fields[name] for name in shown().to_json()}) == shown()


def test_two_channels_over_one_interface_are_no_faster():
    text = probe_report.matrix(Probe(parse_topology("nic:20+80,80,80"), (), (0, 1, 2), 1, 1.0))
    assert "rank 1     80  .   80" in text


def test_slow_cards_get_longer_rounds():
    flows = [Flow(0, 1), Flow(1, 0), Flow(0, 2)]
    assert probing._enough_s(flows, [2e6, 3e6, 2e6]) == pytest.approx(500_000 / 2e6 / 0.6)
    assert probing._enough_s(flows, [1.0, 3e6, 2e6]) == 1.0


def test_a_picture():
    assert probe_report.png(shown())[:4] == b"\x89PNG"


# --- real processes --------------------------------------------------------------------------------------------------


def lab(topology, *words, environ=None):
    command = [
        sys.executable,
        "-m",
        "commhooks",
        "lab",
        topology,
        "--",
        sys.executable,
        "-m",
        "commhooks",
        *words,
    ]
    child = shell.start(
        command, environ={**os.environ, **(environ or {})}, stdout=shell.PIPE, stderr=shell.PIPE
    )
    out, err = child.communicate(timeout=120)
    return child.returncode, out.decode(), err.decode()


@needs_root
def test_the_lab_is_found(tmp_path):
    true = parse_topology("nic:200,800,800,800")
    path, picture = tmp_path / "found.json", tmp_path / "found.png"
    for _ in range(3):  # on a busy machine a flow may be slower than its network
        code, out, err = lab(true.name, "probe", "--json", "--output", str(path), "--plot", str(picture),
                             environ={"XDG_CACHE_HOME": str(tmp_path)})  # fmt: skip
        assert code == 0, err
        fields = json.loads(out)
        found = fields["capacity_bytes_per_s"]
        assert set(found) == set(true.capacity)
        if all(found[name] == pytest.approx(rate, rel=0.10) for name, rate in true.capacity.items()):
            break
    else:
        pytest.fail(f"{found} is not {true.capacity}")
    assert fields["worst"]["resource"] in ("rank0.up", "rank0.down") and fields["declared"] == true.name
    assert parse_topology(path.read_text(), 4).capacity == found
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert len(list((tmp_path / "commhooks" / "topologies").iterdir())) in (1, 2, 3)


@needs_root
def test_two_interfaces_carry_more_than_the_better_one_ever_could(tmp_path):
    one = 2e6 * 4 / 3 / payload_bytes_per_s(80)  # three ranks on cards of 80 alone, at the physical limit
    for _ in range(3):
        code, out, err = lab("nic:20+80*3", "bench", "allreduce", "--mb", "2", "--rounds", "3", "--json")
        assert code == 0, err
        (row,) = json.loads(out)
        if row["commhooks_min_s"] < 0.9 * one:
            return
    pytest.fail(f"{row} is not below {one}")


@needs_root
def test_training_plans_for_what_it_measured(tmp_path):
    code, out, err = lab("nic:50,100,100", "bench", "allreduce", "--mb", "0.5", "--rounds", "1", "--json",
                         environ={"COMMHOOKS_TOPOLOGY": "probe", "XDG_CACHE_HOME": str(tmp_path)})  # fmt: skip
    assert code == 0 and len(json.loads(out)) == 1, err
    assert "network measured" in err and "because of rank0" in err
    assert "of the bound, which rank0" in err


def test_without_a_launcher_it_says_how():
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    child = shell.start([sys.executable, "-m", "commhooks", "probe"], environ=environ, stderr=shell.PIPE)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 2 and b"torchrun" in err and b"horovodrun" in err
