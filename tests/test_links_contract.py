"""The contract every link keeps (`commhooks.links.base`).  A new kind of link adds one line to `KINDS`.

Real sockets and real memory: both ends live in this process, so "the peer's memory" is read from our own process id.
"""

from __future__ import annotations

import os
import random
import select
import socket
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from commhooks.errors import CommError, PeerLost, ProtocolError
from commhooks.links.base import Link, Payload, Region
from commhooks.links.frames import HEADER_BYTES, MAGIC, MAX_PAYLOAD_BYTES, Header, Kind, control, pack, unpack
from commhooks.links.shm import MemoryLink, SharedFileLink
from commhooks.links.tcp import TcpLink, tune
from commhooks.links.virtual import VirtualNetwork


class Owner:
    """Records what a link tells; answers `target` from a table."""

    def __init__(self) -> None:
        self.frames: list[tuple[Header, bytes | None]] = []
        self.sent_tokens: list[object] = []
        self.errors: list[CommError] = []
        self.targets: dict[int, memoryview] = {}
        self.keep = False
        self.kept: list[tuple[Header, Payload]] = []

    def target(self, link: Link, header: Header) -> memoryview | None:
        return self.targets.get(header.slice)

    def received(self, link: Link, header: Header, payload: Payload | None) -> None:
        if payload is None:
            into = self.targets.get(header.slice)
            self.frames.append((header, bytes(into) if into is not None and header.length else None))
            return
        if self.keep:
            self.kept.append((header, payload))
            return
        self.frames.append((header, content(payload)))
        payload.release()

    def sent(self, link: Link, token: object) -> None:
        self.sent_tokens.append(token)

    def failed(self, link: Link, error: CommError) -> None:
        self.errors.append(error)


def content(payload: Payload) -> bytes:
    target = bytearray(payload.nbytes)
    half = payload.nbytes // 2
    payload.read_into(0, memoryview(target)[:half])
    payload.read_into(half, memoryview(target)[half:])
    view = payload.view()
    assert view is None or bytes(view) == bytes(target)
    return bytes(target)


class Pair:
    """Two ends, their owners, and a way to let things happen."""

    def __init__(
        self, a: Link, b: Link, owner_a: Owner, owner_b: Owner, network: VirtualNetwork | None = None
    ) -> None:
        self.a, self.b, self.owner_a, self.owner_b = a, b, owner_a, owner_b
        self.network = network

    def pump(self, until: Callable[[], bool]) -> None:
        """Let both ends work until `until` holds (at most 20 s)."""
        if self.network is not None:
            for link in (self.a, self.b):
                link.flush()
            self.network.run()
            assert until(), "nothing is left to happen"
            return
        for _ in range(20_000):
            for link in (self.a, self.b):
                if link.fileno() >= 0:
                    link.flush()
            if until():
                return
            open_links = [link for link in (self.a, self.b) if link.fileno() >= 0]
            for ready in select.select(open_links, [], [], 0.001)[0]:
                ready.on_readable()
        raise AssertionError("the links got stuck")


def tcp_sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    for sock in (one, other):
        tune(sock)
    return one, other


def tcp_pair() -> Pair:
    one, other = tcp_sockets()
    owners = Owner(), Owner()
    return Pair(TcpLink(one, 1, 0, owners[0]), TcpLink(other, 0, 0, owners[1]), *owners)


def readv_pair() -> Pair:
    one, other = socket.socketpair()
    owners = Owner(), Owner()
    pid = os.getpid()
    return Pair(MemoryLink(one, 1, 0, owners[0], pid), MemoryLink(other, 0, 0, owners[1], pid), *owners)


def file_pair() -> Pair:
    one, other = socket.socketpair()
    owners = Owner(), Owner()
    size = 4 << 20
    a = SharedFileLink(one, 1, 0, owners[0], makes=False, half_bytes=size)
    b = SharedFileLink(other, 0, 0, owners[1], makes=True, half_bytes=size)
    return Pair(a, b, *owners)


def virtual_pair() -> Pair:
    network = VirtualNetwork({"there": 1e6, "back": 1e6}, latency_s=0.01)
    owners = Owner(), Owner()
    return Pair(*network.connect(0, 1, *owners, ["there"], ["back"]), *owners, network)


KINDS = {"tcp": tcp_pair, "readv": readv_pair, "file": file_pair, "virtual": virtual_pair}


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = KINDS[request.param]()
    yield made
    made.a.close()
    made.b.close()


def region(array: np.ndarray) -> Region:
    raw = array.view(np.uint8).reshape(-1)
    return Region(memoryview(raw), raw.ctypes.data)


def slice_header(index: int, nbytes: int, kind: Kind = Kind.REDUCE) -> Header:
    return Header(kind, 0, 1, 2, 3, index, 4, nbytes, 0, 5)


def noise(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("nbytes", [1, 7, 4096, 200_000, 3_000_000])
def test_a_frame_arrives_whole_and_its_memory_is_given_back(pair: Pair, nbytes: int) -> None:
    sent = noise(nbytes)
    pair.a.push((0, 0, 0), slice_header(9, nbytes), region(sent), "token")
    pair.pump(lambda: bool(pair.owner_b.frames and pair.owner_a.sent_tokens))
    header, arrived = pair.owner_b.frames[0]
    assert header == slice_header(9, nbytes)
    assert arrived == sent.tobytes()
    assert pair.owner_a.sent_tokens == ["token"]
    assert pair.a.idle


def test_frames_go_both_ways_at_once_without_loss(pair: Pair) -> None:
    rng = random.Random(1)
    arrays = [noise(rng.choice([1, 100, 50_000, 400_000]), seed) for seed in range(60)]
    for link in (pair.a, pair.b):
        for index, array in enumerate(arrays):
            link.push((0, 0, index), slice_header(index, len(array), Kind.BROADCAST), region(array), index)
    count = len(arrays)
    pair.pump(
        lambda: all(
            len(o.frames) == count and len(o.sent_tokens) == count for o in (pair.owner_a, pair.owner_b)
        )
    )
    for owner in (pair.owner_a, pair.owner_b):
        for index, (header, arrived) in enumerate(owner.frames):
            assert header.slice == index
            assert (arrived or b"") == arrays[index].tobytes()


def test_the_smallest_key_leaves_first_and_the_rest_in_order(pair: Pair) -> None:
    keys = [(step, priority, index) for step in (5, 3) for priority in (9, 0, 4) for index in (1, 0)]
    arrays = [noise(64, index) for index in range(len(keys))]
    for number, key in enumerate(keys):
        pair.a.push(key, slice_header(number, 64), region(arrays[number]), None)
    pair.pump(lambda: len(pair.owner_b.frames) == len(keys))
    arrived = [keys[header.slice] for header, _ in pair.owner_b.frames]
    assert arrived == sorted(keys)


def test_a_payload_goes_where_the_owner_wants_it(pair: Pair) -> None:
    if pair.a.by_reference:
        pytest.skip("read by reference: the owner copies when it is ready, there is nothing to receive into")
    sent, target = noise(100_000), bytearray(100_000)
    pair.owner_b.targets[9] = memoryview(target)
    pair.a.push((0, 0, 0), slice_header(9, len(sent), Kind.BROADCAST), region(sent), None)
    pair.pump(lambda: bool(pair.owner_b.frames))
    assert bytes(target) == sent.tobytes()


def test_memory_counts_as_sent_only_when_it_has_been_read(pair: Pair) -> None:
    sent = noise(50_000)
    pair.owner_b.keep = True
    pair.a.push((0, 0, 0), slice_header(9, len(sent)), region(sent), "token")
    pair.pump(lambda: bool(pair.owner_b.kept))
    if pair.a.by_reference:
        assert pair.owner_a.sent_tokens == []
        assert not pair.a.idle
    wanted = sent.tobytes()
    _, payload = pair.owner_b.kept[0]
    assert content(payload) == wanted
    payload.release()
    pair.pump(lambda: pair.owner_a.sent_tokens == ["token"])
    assert pair.a.idle


def test_control_frames_and_messages_need_no_payload_memory(pair: Pair) -> None:
    text = np.frombuffer(b"words and body", dtype=np.uint8).copy()
    pair.a.push((0, 0, 0), control(Kind.HEARTBEAT), None, None)
    pair.a.push((0, 0, 1), Header(Kind.MESSAGE, 0, 0, 0, 0, 7, 0, len(text), 0, 5), region(text), "message")
    pair.a.push((0, 0, 2), control(Kind.GOODBYE), None, None)
    pair.pump(lambda: len(pair.owner_b.frames) == 3 and pair.owner_a.sent_tokens == ["message"])
    assert [header.kind for header, _ in pair.owner_b.frames] == [Kind.HEARTBEAT, Kind.MESSAGE, Kind.GOODBYE]
    assert pair.owner_b.frames[1][1] == b"words and body"
    assert pair.b.said_goodbye  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "virtual"])
def test_a_window_of_one_is_stop_and_wait(kind: str) -> None:
    pair = KINDS[kind]()
    pair.a.window = pair.b.window = 1  # type: ignore[attr-defined]
    pair.owner_b.keep = True
    arrays = [noise(1000, seed) for seed in range(5)]
    for index, array in enumerate(arrays):
        pair.a.push((0, 9 - index, 0), slice_header(index, 1000), region(array), index)
    for count in range(1, 6):
        pair.pump(lambda wanted=count: len(pair.owner_b.kept) == wanted)
        if pair.a.by_reference:  # nothing more comes until the reader is done
            pair.owner_b.kept[-1][1].release()
    assert [header.slice for header, _ in pair.owner_b.kept] == [4, 3, 2, 1, 0]
    pair.pump(lambda: len(pair.owner_a.sent_tokens) == 5)
    pair.a.close()
    pair.b.close()


def test_bytes_are_counted(pair: Pair) -> None:
    pair.a.push((0, 0, 0), slice_header(0, 10_000), region(noise(10_000)), None)
    pair.pump(lambda: bool(pair.owner_b.frames))
    assert pair.b.bytes_received >= 10_000
    assert pair.a.bytes_sent > 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "virtual"])
def test_a_peer_that_goes_is_one_failure(kind: str) -> None:
    pair = KINDS[kind]()
    pair.a.close()
    pair.pump(lambda: bool(pair.owner_b.errors))
    pair.b.push((0, 0, 0), control(Kind.HEARTBEAT), None, "token")
    pair.b.flush()
    pair.b.on_readable()
    assert [type(error) for error in pair.owner_b.errors] == [PeerLost]
    assert "rank 0" in str(pair.owner_b.errors[0])
    pair.b.close()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n" + bytes(40), "magic"),
        (pack(control(Kind.HEARTBEAT)).replace(b"\x01", b"\x07", 1), "version 7"),
        (pack(Header(99, 0, 0, 0, 0, 0, 0, 0, 0, 0)), "unknown kind 99"),
        (pack(Header(Kind.REDUCE, 0, 0, 0, 0, 0, 0, MAX_PAYLOAD_BYTES + 1, 0, 0)), str(MAX_PAYLOAD_BYTES)),
    ],
)
def test_a_frame_that_does_not_fit_is_refused_with_its_numbers(raw: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        unpack(raw[:HEADER_BYTES])
    one, other = tcp_sockets()
    owner = Owner()
    link = TcpLink(other, 0, 0, owner)
    one.sendall(raw)
    while not owner.errors:
        select.select([link], [], [], 5)
        link.on_readable()
    assert isinstance(owner.errors[0], ProtocolError)
    one.close()
    link.close()


def test_the_header_is_as_long_as_it_says_and_round_trips() -> None:
    header = Header(Kind.BROADCAST, 3, 65535, 2**32 - 1, 7, 8, 2**32 - 1, 11, 12, 2**64 - 1)
    raw = pack(header)
    assert len(raw) == HEADER_BYTES
    assert raw[0] | raw[1] << 8 == MAGIC
    assert unpack(raw) == header


def test_frames_at_the_end_of_a_turn_are_not_forgotten() -> None:
    """More empty frames than one turn takes: the last ones must not wait for bytes that never come."""
    pair = tcp_pair()
    for number in range(100):
        pair.a.push((0, 0, number), control(Kind.HEARTBEAT), None, None)
    pair.a.push((0, 1, 0), slice_header(1, 8), region(noise(8)), None)
    pair.a.push((0, 2, 0), control(Kind.HEARTBEAT), None, None)
    pair.pump(lambda: len(pair.owner_b.frames) == 102)
    pair.a.close()
    pair.b.close()


def test_staging_memory_is_reused() -> None:
    pair = tcp_pair()
    for round_ in range(30):
        array = noise(100_000 + round_ % 7)
        pair.a.push((0, 0, 0), slice_header(round_, len(array)), region(array), None)
        pair.pump(lambda wanted=round_ + 1: len(pair.owner_b.frames) == wanted)
    assert pair.b.pool.allocated_bytes < 250_000  # type: ignore[attr-defined]
    pair.a.close()
    pair.b.close()


def test_shared_memory_that_is_full_waits_and_goes_on() -> None:
    pair = file_pair()
    pair.owner_b.keep = True
    arrays = [noise(1_500_000, seed) for seed in range(5)]
    for index, array in enumerate(arrays):
        pair.a.push((0, 0, index), slice_header(index, len(array)), region(array), index)
    pair.pump(lambda: len(pair.owner_b.kept) == 2)
    for expected in range(5):
        header, payload = pair.owner_b.kept[expected]
        assert content(payload) == arrays[header.slice].tobytes()
        payload.release()
        pair.pump(lambda wanted=expected: wanted in pair.owner_a.sent_tokens)
        if expected < 3:
            pair.pump(lambda wanted=expected + 3: len(pair.owner_b.kept) >= wanted)
    pair.a.close()
    pair.b.close()


def test_an_acknowledgement_of_nothing_is_a_protocol_error() -> None:
    pair = readv_pair()
    pair.b.push((0, 0, 0), control(Kind.ACK, extra=77), None, None)
    pair.pump(lambda: bool(pair.owner_a.errors))
    assert isinstance(pair.owner_a.errors[0], ProtocolError)
    pair.a.close()
    pair.b.close()
