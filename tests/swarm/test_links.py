"""Emulated links are measured: a line that is not what it says would make every test over it a story."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from harness import marked_processes, needs_links

from p2p_trainer.rehearsal.links import LinkSpec, Network

pytestmark = [pytest.mark.swarm, pytest.mark.namespaces, needs_links]

PROBE = [sys.executable, "-IS", str(Path(__file__).with_name("probe.py"))]
UNHURRIED = LinkSpec()


def user_namespaces() -> bool:
    """Whether this machine lets users make namespaces of their own."""
    return subprocess.run(["unshare", "--user", "true"], stderr=subprocess.DEVNULL).returncode == 0


@contextmanager
def answering(network: Network, peer: str) -> Iterator[dict[str, Any]]:
    """Somebody answers at this peer; gives what it sees of the network."""
    command = network.command(peer, [*PROBE, "echo", network.address(peer)])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.kill()


def measured(network: Network, peer: str, what: str, other: str, *numbers: float) -> dict[str, Any]:
    host = network.address(other) if other in network else other
    command = network.command(peer, [*PROBE, what, host, *map(str, numbers)])
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


def unhurt(times: list[float]) -> float:
    """The lower quartile: on a busy machine some answers wait for a core, which is not the line's doing."""
    return statistics.quantiles(times, n=4)[0]


def megabits_per_second(network: Network, sender: str, receiver: str, seconds: float = 2.0) -> float:
    poured = measured(network, sender, "pour", receiver, seconds)
    return float(8e-6 * poured["bytes"] / poured["seconds"])


def test_a_line_carries_its_rate_in_each_direction_and_all_lines_together_far_more() -> None:
    with Network({"home": LinkSpec.parse("20M/10M/10ms"), "far": UNHURRIED}) as network, answering(network, "far"):
        assert 9 < megabits_per_second(network, "home", "far") < 10.5
        with answering(network, "home"):
            assert 18 < megabits_per_second(network, "far", "home") < 21
        network.set_link("home", UNHURRIED)
        assert megabits_per_second(network, "home", "far", 1.0) > 40


def test_what_crosses_a_line_is_counted_by_its_interface() -> None:
    with Network({"home": UNHURRIED, "far": UNHURRIED, "idle": UNHURRIED}) as network, answering(network, "far"):
        poured = measured(network, "home", "pour", "far", 0.5)["bytes"]
        sent, received = network.traffic("home")
        assert poured < sent < 1.1 * poured and received < 0.1 * poured
        assert poured < network.traffic("far")[1] < 1.1 * poured
        assert max(network.traffic("idle")) < 2000, "no more than the kernel's own router solicitations"


def test_a_line_adds_its_round_trip_and_its_jitter() -> None:
    with Network({"near": LinkSpec.parse("40ms"), "far": UNHURRIED}) as network, answering(network, "far"):
        times = measured(network, "near", "ping", "far", 60, 0.02)["milliseconds"]
        assert len(times) == 60
        assert min(times) >= 40
        assert 38 < unhurt(times) < 44
        network.set_link("near", LinkSpec.parse("40ms/30ms"))
        times = measured(network, "near", "ping", "far", 60, 0.05)["milliseconds"]
        # Two crossings, each 0 to 30 ms more.
        assert min(times) >= 40
        assert 60 < statistics.median(times) < 80
        assert statistics.quantiles(times, n=10)[-1] - statistics.quantiles(times, n=10)[0] > 15
        network.set_link("far", LinkSpec.parse("20ms"))
        network.set_link("near", LinkSpec.parse("40ms"))
        times = measured(network, "near", "ping", "far", 30, 0.02)["milliseconds"]
        # To 10 %, as for one line.
        assert min(times) >= 60
        assert unhurt(times) < 66, "two lines add up"


def test_a_line_loses_its_share_and_cut_off_nothing_arrives() -> None:
    with Network({"lossy": LinkSpec.parse("20%"), "far": UNHURRIED}) as network, answering(network, "far"):
        result = measured(network, "lossy", "ping", "far", 1500, 0.002)
        lost_on_round_trip = 1 - len(result["milliseconds"]) / result["sent"]
        crossing = 1 - (1 - lost_on_round_trip) ** 0.5
        assert 0.15 < crossing < 0.25

        network.set_link("lossy", UNHURRIED)
        network.down("far")
        assert measured(network, "lossy", "ping", "far", 20, 0.01)["milliseconds"] == []
        network.up("far")
        assert len(measured(network, "lossy", "ping", "far", 20, 0.01)["milliseconds"]) == 20


def test_a_split_network_carries_within_its_parts_alone() -> None:
    links = {"a": UNHURRIED, "b": UNHURRIED, "far": UNHURRIED, "other": UNHURRIED}
    with Network(links) as network, answering(network, "far"):

        def answers(peer: str) -> int:
            return len(measured(network, peer, "ping", "far", 10, 0.01)["milliseconds"])

        network.split(("a", "far"))
        assert (answers("a"), answers("b")) == (10, 0)
        network.split(("a", "b"), ("far", "other"))
        assert (answers("a"), answers("other")) == (0, 10)
        network.split()
        assert (answers("a"), answers("b"), answers("other")) == (10, 10, 10)


def test_a_peer_gets_another_address_and_nobody_is_at_the_old_one() -> None:
    with Network({"moves": UNHURRIED, "far": UNHURRIED}) as network:
        before = network.address("moves")
        after = network.renumber("moves")
        assert after == network.address("moves") != before
        with answering(network, "moves"), answering(network, "far"):
            assert len(measured(network, "far", "ping", "moves", 10, 0.01)["milliseconds"]) == 10
            assert measured(network, "far", "ping", before, 10, 0.01)["milliseconds"] == []
            assert len(measured(network, "moves", "ping", "far", 10, 0.01)["milliseconds"]) == 10


def test_peers_see_only_their_own_line_and_nothing_is_left_of_it() -> None:
    devices_here = sorted(os.listdir("/sys/class/net"))
    with (
        Network({"a": UNHURRIED}) as one,
        Network({"a": UNHURRIED}) as other,  # with the same addresses
        answering(one, "a") as seen,
        answering(other, "a") as elsewhere,
    ):
        assert seen["devices"] == elsewhere["devices"] == ["lo", "tun0"]
        namespaces = {seen["namespace"], elsewhere["namespace"]}
        assert len(namespaces) == 2
        assert namespaces <= namespaces_in_use()
        assert sorted(os.listdir("/sys/class/net")) == devices_here
    assert not namespaces & namespaces_in_use()


def test_a_network_ends_with_the_program_that_made_it(tmp_path: Path) -> None:
    mark = tmp_path.name
    program = (
        "import time, subprocess, sys; from p2p_trainer.rehearsal.links import LinkSpec, Network\n"
        "with Network({'a': LinkSpec()}) as network: print(network.address('a'), flush=True); time.sleep(60)"
    )
    for number in (signal.SIGKILL, signal.SIGINT):
        with subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "SWARM_TEST_MARKS": mark},
        ) as process:
            assert process.stdout is not None and process.stdout.readline()
            assert len(marked_processes(mark)) == 2
            process.send_signal(number)
            process.wait(10)
        deadline = time.monotonic() + 5
        while (left := marked_processes(mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left


AS_A_USER = """
import ctypes, json, signal, subprocess, sys
from p2p_trainer.rehearsal.links import LinkSpec, Network

def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)

probe = sys.argv[1]
tell = "import ctypes; number = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(number)); print(number.value)"
with Network({"a": LinkSpec.parse("40ms"), "b": LinkSpec()}, behind_nat=["a"]) as network:
    command = network.command("b", [sys.executable, "-IS", probe, "echo", network.address("b")])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as echo:
        echo.stdout.readline()
        ping = network.command("a", [sys.executable, "-IS", probe, "ping", network.address("b"), "20", "0.02"])
        result = json.loads(subprocess.run(ping, stdout=subprocess.PIPE, text=True, check=True).stdout)
        echo.kill()
    telling = network.command("a", [sys.executable, "-c", tell])
    told = subprocess.run(telling, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent)
print(json.dumps({**result, "command": command, "death_signal": int(told.stdout)}))
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None or not user_namespaces(),
    reason="needs root to stop being it, setpriv, and user namespaces",
)
def test_without_privileges_a_user_namespace_does() -> None:
    stripped = ["setpriv", "--bounding-set=-sys_admin,-net_admin", "--inh-caps=-all"]
    command = [*stripped, sys.executable, "-c", AS_A_USER, PROBE[-1]]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    result = json.loads(ended.stdout)
    assert any(argument.startswith("--user=") for argument in result["command"])
    assert len(result["milliseconds"]) == 20 and min(result["milliseconds"]) >= 40
    assert result["death_signal"] == signal.SIGTERM, "a peer ends with its rehearsal here as well"


def namespaces_in_use() -> set[str]:
    """Network namespaces of all processes, and those that a descriptor keeps."""
    found = set()
    for path in [*Path("/proc").glob("[0-9]*/ns/net"), *Path("/proc").glob("[0-9]*/fd/*")]:
        with suppress(OSError):
            if (target := os.readlink(path)).startswith("net:"):
                found.add(target)
    return found


def test_behind_nat_a_peer_dials_everybody_and_nobody_dials_it() -> None:
    links = {"a": UNHURRIED, "b": UNHURRIED, "open": UNHURRIED}
    with Network(links, behind_nat=["a", "b"]) as network, answering(network, "open"), answering(network, "a"):
        assert network.address("a") == network.address("b") == "192.168.1.2"
        assert len({network.public_address(peer) for peer in links}) == 3
        for peer in ("a", "b"):
            assert len(measured(network, peer, "ping", "open", 20, 0.01)["milliseconds"]) == 20
            assert megabits_per_second(network, peer, "open", 0.5) > 1
        for peer in ("open", "b"):
            assert measured(network, peer, "dial", network.public_address("a"))["outcome"] == "TimeoutError"
            result = measured(network, peer, "ping", network.public_address("a"), 5, 0.01)
            assert result["milliseconds"] == []
