"""The process behind ``links``: a namespace for each peer, and every packet between them held for as long as it takes.

Run as a script by ``links.Network``, with the standard library alone, so that it starts at once.
It makes network namespaces without a name, which the kernel removes with the last process and descriptor in them, and
a TUN device in each; what a peer sends arrives here, crosses the sender's line up and the receiver's line down, and is
written into the receiver's device. A peer behind NAT has a private address, and its packets pass its home's router at
this end of its line. So nothing has to be undone, whoever is killed.

Commands come as JSON lines on the standard input, and each is answered by a line; the end of the input ends it.
Measured: up to 600 Mbit/s of full packets in half a core.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import math
import os
import random
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # isolated: neither the program's packages nor its own directory are on the path
    sys.path.append(str(Path(__file__).parents[2]))

from p2p_trainer.rehearsal.home_router import PRIVATE_ADDRESS, PRIVATE_NETMASK, HomeRouter

MTU_BYTES = 1500
QUEUE_SECONDS = 0.2
QUEUE_BYTES = 1 << 16
"""A line's queue holds QUEUE_SECONDS of its rate, and this much at least; what comes on top is lost."""
PACKETS_PER_TURN = 64
NICENESS = -10
"""Peers that train take every core; a packet that is late by their turn would be a slower line."""
SUBNET = "198.18"
"""RFC 2544's network for benchmarks. Not one of the private ones: libp2p dials those as a LAN, within 5 s."""
NETMASK = "255.255.0.0"
CONGESTION_CONTROL = "reno"
"""Every kernel lets a namespace have it; what TCP makes of losses must not depend on this machine's choice."""

_CLONE_NEWNET, _CLONE_NEWUSER = 0x40000000, 0x10000000
_PR_SET_PDEATHSIG = 1
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU, _SIOCADDRT = 0x8914, 0x8916, 0x891C, 0x8922, 0x890B
_RTF_UP = 0x1
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_DEVICE = b"tun0"
_IPV4_HEADER_BYTES = 20


def address(number: int) -> str:
    """The IPv4 address of the peer of this number, from 1; of one behind NAT its home's."""
    return f"{SUBNET}.{number >> 8}.{number & 255}"


class Line:
    """One direction of a peer's link: packets leave it in the order in which they came, or not at all."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._bits_per_second = math.inf
        self._latency_seconds = self._jitter_seconds = self._loss = 0.0
        self._free_at = self._last_due = float("-inf")

    def change(self, spec: Mapping[str, Any], now: float) -> None:
        """Go on with another rate (bit/s, None for no limit), latency and jitter (s), and loss (0 to 1)."""
        rate = math.inf if spec["bits_per_second"] is None else float(spec["bits_per_second"])
        if self._free_at > now:  # what waits is sent at the new rate
            self._free_at = now + (self._free_at - now) * self._bits_per_second / rate
        self._bits_per_second = rate
        self._latency_seconds, self._jitter_seconds = spec["latency_seconds"], spec["jitter_seconds"]
        self._loss = spec["loss"]

    def admit(self, now: float, size_bytes: int) -> float | None:
        """When a packet that comes now is at the other end; None if it is lost."""
        begins = max(now, self._free_at)
        waiting_seconds = begins - now
        if waiting_seconds > QUEUE_SECONDS and waiting_seconds * self._bits_per_second > 8 * QUEUE_BYTES:
            return None
        self._free_at = begins + 8 * size_bytes / self._bits_per_second
        # A packet that is lost on the way has taken its time on the line all the same.
        if self._loss and self._chance.random() < self._loss:
            return None
        due = self._free_at + self._latency_seconds
        if self._jitter_seconds:
            due += self._chance.random() * self._jitter_seconds
        self._last_due = max(due, self._last_due)
        return self._last_due


class Router:
    """Carries packets between the peers' devices."""

    def __init__(
        self,
        devices: Sequence[int],
        seed: int,
        behind_nat: Collection[int] = (),
        controls: Sequence[socket.socket] = (),
    ) -> None:
        """
        :param devices: TUN descriptors of the peers, the first one's address being number 1
        :param behind_nat: numbers of the peers that have a router of their own
        :param controls: a socket in each peer's namespace
        """
        self._controls = controls
        self._devices = devices
        self._up = [Line(random.Random(f"{seed} up {index}")) for index in range(len(devices))]
        self._down = [Line(random.Random(f"{seed} down {index}")) for index in range(len(devices))]
        self._connected = [True] * len(devices)
        self._part = [0] * len(devices)
        self._index = {socket.inet_aton(address(index + 1)): index for index in range(len(devices))}
        self._homes = {number - 1: HomeRouter(socket.inet_aton(address(number))) for number in behind_nat}
        self._order = count()
        self._under_way: list[tuple[float, int, bool, int, bytes]] = []
        """A heap: due, tie breaker, whether it is on the last line, the receiver, the packet."""

    def change(self, peer: int, up: Mapping[str, Any], down: Mapping[str, Any]) -> None:
        now = time.monotonic()
        self._up[peer].change(up, now)
        self._down[peer].change(down, now)

    def connect(self, peer: int, connected: bool) -> None:
        """Cut the peer off, in both directions and with what is on the way, or take it back."""
        self._connected[peer] = connected

    def split(self, parts: Sequence[int]) -> None:
        """Nothing passes between peers of different parts any more; of each peer, which one it is in."""
        self._part = list(parts)

    def renumber(self, peer: int, number: int) -> None:
        """Give a peer the address of another number; nobody is at its old one any more."""
        set_address(self._controls[peer], address(number), NETMASK)
        self._index = {held: index for held, index in self._index.items() if index != peer}
        self._index[socket.inet_aton(address(number))] = peer

    def run(self, commands: int) -> None:
        """Until the descriptor of the commands ends."""
        text = bytearray()
        watched = [commands, *self._devices]
        senders = {device: index for index, device in enumerate(self._devices)}
        while True:
            self._move_on()
            wait = max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None
            # Not epoll: it counts in milliseconds, and a packet meets four of these waits on a round trip.
            for ready in select.select(watched, (), (), wait)[0]:
                if ready != commands:
                    self._take_from(senders[ready], ready)
                    continue
                if not (received := os.read(commands, 1 << 16)):
                    return
                text += received
                *lines, rest = text.split(b"\n")
                text = bytearray(rest)
                for line in lines:
                    self._obey(json.loads(line))

    def _obey(self, command: Mapping[str, Any]) -> None:
        if "parts" in command:
            self.split(command["parts"])
        elif "number" in command:
            self.renumber(command["peer"], command["number"])
        elif "connected" in command:
            self.connect(command["peer"], command["connected"])
        else:
            self.change(command["peer"], command["up"], command["down"])
        print("{}", flush=True)

    def _take_from(self, sender: int, device: int) -> None:
        now = time.monotonic()
        for _ in range(PACKETS_PER_TURN):
            try:
                packet = os.read(device, MTU_BYTES + 1)
            except BlockingIOError:
                return
            if len(packet) < _IPV4_HEADER_BYTES or packet[0] >> 4 != 4:
                continue
            if sender in self._homes:
                if (leaving := self._homes[sender].leaves(packet)) is None:
                    continue
                packet = leaving
            receiver = self._index.get(packet[16:20])
            if receiver is None or not self._connected[sender] or self._part[sender] != self._part[receiver]:
                continue
            due = self._up[sender].admit(now, len(packet))
            if due is not None:
                heapq.heappush(self._under_way, (due, next(self._order), False, receiver, packet))

    def _move_on(self) -> None:
        """Move every packet that is due onto its last line, or out of it."""
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            due, _, last, receiver, packet = heapq.heappop(self._under_way)
            if not self._connected[receiver]:
                continue
            if last:
                self._deliver(receiver, packet)
                continue
            # From when it was due, not from now: lateness of ours must not add up.
            arrives = self._down[receiver].admit(due, len(packet))
            if arrives is not None:
                heapq.heappush(self._under_way, (arrives, next(self._order), True, receiver, packet))

    def _deliver(self, receiver: int, packet: bytes) -> None:
        entering = self._homes[receiver].enters(packet) if receiver in self._homes else packet
        if entering is not None:
            with suppress(OSError):  # its queue is full
                os.write(self._devices[receiver], entering)


def make_namespace(number: int, behind_nat: bool = False) -> tuple[int, int, socket.socket]:
    """A namespace with a device of the address of this number, or of a private one that leads everywhere.

    Returns: the descriptors of namespace and device, and a socket in it. This process is in it then.

    :raises OSError: not permitted, or no TUN on this machine
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise OSError(code := ctypes.get_errno(), os.strerror(code))
    namespace = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", _DEVICE, _IFF_TUN | _IFF_NO_PI))
    own_address, netmask = (PRIVATE_ADDRESS, PRIVATE_NETMASK) if behind_nat else (address(number), NETMASK)
    control = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    set_address(control, own_address, netmask)
    for request, content in (
        (_SIOCSIFMTU, struct.pack("i20x", MTU_BYTES)),
        (_SIOCSIFFLAGS, struct.pack("H22x", _IFF_UP | _IFF_RUNNING)),
    ):
        fcntl.ioctl(control, request, struct.pack("16s24s", _DEVICE, content))
    fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", _IFF_UP | _IFF_RUNNING))
    if behind_nat:
        _add_default_route(control)
    with suppress(OSError), open("/proc/sys/net/ipv4/tcp_congestion_control", "w") as setting:
        setting.write(CONGESTION_CONTROL)
    return namespace, device, control


def set_address(control: socket.socket, own_address: str, netmask: str) -> None:
    """Give the device of a socket's namespace an address, in place of the one it has. :raises OSError:"""
    for request, content in ((_SIOCSIFADDR, own_address), (_SIOCSIFNETMASK, netmask)):
        fcntl.ioctl(control, request, struct.pack("16s24s", _DEVICE, _internet_address(content)))


def _add_default_route(control: socket.socket) -> None:
    device = ctypes.create_string_buffer(_DEVICE)
    anywhere = _internet_address("0.0.0.0")[:16]
    # struct rtentry: destination, gateway, mask, flags, metric, the device's name.
    route = struct.pack(
        "@L16s16s16sHhLPhPLLH", 0, anywhere, anywhere, anywhere, _RTF_UP, 0, 0, 0, 0, ctypes.addressof(device), 0, 0, 0
    )
    fcntl.ioctl(control, _SIOCADDRT, route)


def _internet_address(text: str) -> bytes:
    return struct.pack("HH4s16x", socket.AF_INET, 0, socket.inet_aton(text))


def make_namespaces(peers: int, behind_nat: Collection[int]) -> list[tuple[int, int, socket.socket]]:
    """One for each number from 1. This process stays in the last one: it needs no network. :raises OSError:"""
    return [make_namespace(number, number in behind_nat) for number in range(1, peers + 1)]


def enter_user_namespace() -> None:
    """Where this user may not make network namespaces: become one who may, in a user namespace of its own.

    :raises OSError: that is not permitted either
    """
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUSER) != 0:
        raise OSError(code := ctypes.get_errno(), os.strerror(code))
    # Everybody keeps his number, so that files belong to whom they did.
    for name, content in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path("/proc/self", name).write_text(content)


def main() -> None:
    """Arguments: the parent's pid, the number of peers, the seed of what is lost; numbers of peers behind NAT."""
    parent, peers, seed, *behind_nat = (int(argument) for argument in sys.argv[1:])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    with suppress(OSError):
        os.nice(NICENESS)
    user_namespace = False
    try:
        try:
            made = make_namespaces(peers, behind_nat)
        except PermissionError:
            enter_user_namespace()
            user_namespace = True
            made = make_namespaces(peers, behind_nat)
    except OSError as error:
        print(json.dumps({"error": f"{error.filename or 'making a network namespace'}: {error.strerror}"}), flush=True)
        return
    found = {"namespaces": [namespace for namespace, _, _ in made], "user_namespace": user_namespace}
    print(json.dumps(found), flush=True)
    router = Router([device for _, device, _ in made], seed, behind_nat, [control for _, _, control in made])
    router.run(sys.stdin.fileno())


if __name__ == "__main__":
    main()
