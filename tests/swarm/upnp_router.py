"""A router that forwards ports to whoever asks: miniupnpd, beside the kernel's masquerading, in a home of its own.

The namespace that ``links.Network`` makes for a name becomes the router; behind it are machines in namespaces of their
own, at private addresses, that see each other. What one of them sends to the router's outer address the router does not
lead back, as many do not. Nothing has a name on this computer, and all is gone with the processes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from p2p_trainer.rehearsal.links import Network

ADDRESSES, ROUTER_ADDRESS = ("192.168.7.2", "192.168.7.3"), "192.168.7.1"
CLAIMED_ADDRESS = "11.0.0.9"
"""What the router takes for its own. miniupnpd forwards nothing if it has none of the internet's, as no lab does; that
this one leads elsewhere is what a router behind another one tells as well."""
_PROGRAMS = ("miniupnpd", "nft", "ip", "unshare")
_RULES = """
table inet filter {
  chain forward {
    type filter hook forward priority 0; policy drop;
    iifname "lan0" accept
    ct state established,related accept
    jump miniupnpd
  }
  chain miniupnpd { }
}
table inet nat {
  chain prerouting { type nat hook prerouting priority -100; iifname "tun0" jump prerouting_miniupnpd; }
  chain prerouting_miniupnpd { }
  chain postrouting {
    type nat hook postrouting priority 100;
    oifname "tun0" jump postrouting_miniupnpd
    oifname "tun0" masquerade
  }
  chain postrouting_miniupnpd { }
}
"""
_SETTINGS = f"""
ext_ifname=tun0
ext_ip={CLAIMED_ADDRESS}
listening_ip=lan0
port=49000
enable_upnp=yes
enable_natpmp=no
secure_mode=yes
uuid=00000000-0000-0000-0000-000000000001
upnp_table_name=filter
upnp_nat_table_name=nat
upnp_forward_chain=miniupnpd
upnp_nat_chain=prerouting_miniupnpd
upnp_nat_postrouting_chain=postrouting_miniupnpd
allow 1024-65535 192.168.7.0/24 1024-65535
deny 0-65535 0.0.0.0/0 0-65535
"""


def why_not() -> str:
    """Why there can be no such router here; empty if there can."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} missing (Debian: miniupnpd-nftables, nftables, iproute2)"
    return "" if os.geteuid() == 0 else "it needs root"


@dataclass(frozen=True, slots=True)
class Home:
    """A machine behind the router."""

    address: str
    namespace_pid: int

    def command(self, command: Sequence[str]) -> list[str]:
        """The command that runs this command there."""
        return ["nsenter", f"--net=/proc/{self.namespace_pid}/ns/net", "--", *command]


class UpnpRouter:
    """Between some machines and a network, from entering this context to leaving it.

    :param name: the network's, of the router's line
    :param directory: an empty one for the router's settings
    :param machines: how many there are behind it
    :param forwards: whether it forwards ports, from the beginning
    """

    def __init__(
        self, network: Network, name: str, directory: Path, *, machines: int = 1, forwards: bool = True
    ) -> None:
        self._network, self._name, self._directory = network, name, directory
        self._machines, self._forwards = machines, forwards
        self._processes: list[subprocess.Popen[bytes]] = []
        self._daemon: subprocess.Popen[bytes] | None = None
        self.homes: list[Home] = []

    def __enter__(self) -> UpnpRouter:
        self._run("ip", "link", "add", "lan0", "type", "bridge")
        self._run("ip", "address", "add", f"{ROUTER_ADDRESS}/24", "dev", "lan0")
        self._run("ip", "link", "set", "lan0", "up")
        self._run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        self._run("nft", "-f", "-", text=_RULES)
        for number in range(self._machines):
            self._add_home(f"lan{number + 1}", ADDRESSES[number])
        if self._forwards:
            self.switch_on()
        return self

    def _add_home(self, port: str, address: str) -> None:
        ready, says = os.pipe()
        process = self._start("unshare", "--net", "sh", "-c", "echo; exec sleep infinity", output=says)
        os.close(says)
        os.read(ready, 1)  # the namespace is there
        os.close(ready)
        home = Home(address, process.pid)
        self._run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
        self._run("ip", "link", "set", port, "master", "lan0", "up")
        for command in (
            ("ip", "link", "set", "lo", "up"),
            ("ip", "address", "add", f"{address}/24", "dev", "eth0"),
            ("ip", "link", "set", "eth0", "up"),
            ("ip", "route", "add", "default", "via", ROUTER_ADDRESS),
        ):
            subprocess.run(home.command(command), check=True)
        self.homes.append(home)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def switch_on(self) -> None:
        """Forward ports to whoever asks, until ``switch_off``."""
        settings = self._directory / "miniupnpd.conf"
        settings.write_text(_SETTINGS)
        self._daemon = self._start("miniupnpd", "-d", "-f", str(settings), "-P", str(self._directory / "miniupnpd.pid"))

    def switch_off(self) -> None:
        """Answer no more, and forget what was forwarded."""
        assert self._daemon is not None
        self._daemon.kill()
        self._daemon.wait()
        for family, chain in (("nat", "prerouting_miniupnpd"), ("filter", "miniupnpd")):
            self._run("nft", "flush", "chain", "inet", family, chain)

    def forwards(self) -> list[str]:
        """The rules that lead from outside to the machines."""
        shown = self._run("nft", "list", "chain", "inet", "nat", "prerouting_miniupnpd")
        return [line.strip() for line in shown.splitlines() if "dnat ip to " in line]

    def _start(self, *command: str, output: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(self._network.command(self._name, command), stdout=output, stderr=subprocess.DEVNULL)
        self._processes.append(process)
        return process

    def _run(self, *command: str, text: str = "") -> str:
        return subprocess.run(
            self._network.command(self._name, command), input=text, capture_output=True, text=True, check=True
        ).stdout
