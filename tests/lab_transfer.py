"""Run by the lab's tests, once per rank: plain sockets at full speed, and what arrived how fast.

Arguments: seconds, then flows such as ``0>1``.  Each receiver prints one line of JSON to standard error:
``{"flow": "0>1", "mbit_per_s": steady goodput, "first_bytes": bytes of the first 10 ms, "cpu_s": ...}``.
Ports are 6000 + the flow's number.  Rank r's address comes from the environment of the lab (channel 0).
"""

import json
import os
import socket
import sys
import threading
import time

START_S = 0.010
SKIPPED_S = 0.3


def receive(flow: str, server: socket.socket) -> None:
    connection, _ = server.accept()
    buffer = bytearray(1 << 18)
    total, first, skipped, start, last = 0, 0, None, None, 0.0
    while count := connection.recv_into(buffer):
        now = time.perf_counter()
        start = now if start is None else start
        total += count
        last = now - start
        if last < START_S:
            first = total
        elif last > SKIPPED_S and skipped is None:
            skipped = (last, total)
    mbit = (total - skipped[1]) * 8e-6 / (last - skipped[0])
    print(json.dumps({"flow": flow, "mbit_per_s": mbit, "first_bytes": first}), file=sys.stderr, flush=True)


def send(address: str, port: int, seconds: float) -> None:
    deadline = time.perf_counter() + 20.0
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=20.0)
            break
        except ConnectionRefusedError:
            if time.perf_counter() > deadline:
                raise
    if name := os.environ.get("LAB_TEST_CONGESTION"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    payload = bytes(1 << 18)
    with connection:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            connection.sendall(payload)


def main() -> None:
    seconds, *flows = sys.argv[1:]
    rank = int(os.environ["RANK"])
    addresses = json.loads(os.environ["LAB_TEST_ADDRESSES"])
    threads, servers = [], []
    for number, flow in enumerate(flows):
        src, dst = map(int, flow.split(">"))
        if dst == rank:
            servers.append(socket.create_server(("", 6000 + number)))
            threads.append(threading.Thread(target=receive, args=(flow, servers[-1])))
        if src == rank:
            threads.append(
                threading.Thread(target=send, args=(addresses[dst], 6000 + number, float(seconds)))
            )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


main()
