"""What the tests of emulated links run at the ends of one: standard library only, results as JSON on the last line."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from pathlib import Path

PORT = 7000
BLOCK = bytes(1 << 16)
WAIT_SECONDS = 0.5
"""For the answers that are still under way."""
DIAL_SECONDS = 2.0


def echo(host: str) -> None:
    """Send every datagram back; of TCP connections, count what arrives and say it when the sender is done."""
    stream = socket.create_server((host, PORT))
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind((host, PORT))
    print(json.dumps({"namespace": os.readlink("/proc/self/ns/net"), "devices": devices()}), flush=True)
    while True:
        for ready in select.select([stream, datagrams], [], [])[0]:
            if ready is datagrams:
                datagrams.sendto(*datagrams.recvfrom(2048))
                continue
            connection, _ = stream.accept()
            received, began = 0, time.monotonic()
            while data := connection.recv(1 << 16):
                received += len(data)
            connection.sendall(json.dumps({"bytes": received, "seconds": time.monotonic() - began}).encode())
            connection.close()


def pour(host: str, seconds: float) -> None:
    """Send for a while over TCP; the receiver's count is the result."""
    with socket.create_connection((host, PORT), 10) as connection:
        # What the sender's kernel holds is not on the line yet when the time is over.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 17)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            connection.sendall(BLOCK)
        connection.shutdown(socket.SHUT_WR)
        print(connection.recv(1 << 16).decode())


def ping(host: str, packets: int, pause: float) -> None:
    """Send datagrams and take the answers: round trips in milliseconds, and how many were sent."""
    times = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ours:
        ours.connect((host, PORT))

        def take(until: float) -> None:
            while (left := until - time.monotonic()) > 0 and select.select([ours], [], [], left)[0]:
                sent = float(ours.recv(2048))
                times.append(1e3 * (time.monotonic() - sent))

        begin = time.monotonic()
        for index in range(packets):
            ours.send(repr(time.monotonic()).encode())
            take(begin + (index + 1) * pause)
        take(time.monotonic() + WAIT_SECONDS)
    print(json.dumps({"sent": packets, "milliseconds": times}))


def dial(host: str) -> None:
    """What becomes of a TCP connection."""
    try:
        socket.create_connection((host, PORT), DIAL_SECONDS).close()
        outcome = "connected"
    except OSError as error:
        outcome = type(error).__name__
    print(json.dumps({"outcome": outcome}))


def devices() -> list[str]:
    """Names of the network devices that this process sees."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sorted(line.split(":")[0].strip() for line in lines)


if __name__ == "__main__":
    what, host, *numbers = sys.argv[1:]
    if what == "echo":
        echo(host)
    elif what == "pour":
        pour(host, float(numbers[0]))
    elif what == "dial":
        dial(host)
    else:
        ping(host, int(numbers[0]), float(numbers[1]))
