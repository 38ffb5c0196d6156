"""What can be known of emulated links without making one: how they are written, and what a line does with packets."""

from __future__ import annotations

import math
import random

import pytest

from dht_config.errors import RehearsalError
from p2p_trainer.rehearsal.link_router import QUEUE_BYTES, QUEUE_SECONDS, Line, address
from p2p_trainer.rehearsal.links import LinkSpec, counted_bytes


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("50M/40ms", LinkSpec(down_bits_per_second=50e6, up_bits_per_second=50e6, round_trip_ms=40)),
        (
            "10M/2M/60ms/1%",
            LinkSpec(down_bits_per_second=10e6, up_bits_per_second=2e6, round_trip_ms=60, loss=0.01),
        ),
        ("256k", LinkSpec(down_bits_per_second=256e3, up_bits_per_second=256e3)),
        ("1.5G", LinkSpec(down_bits_per_second=1.5e9, up_bits_per_second=1.5e9)),
        ("3s/20%", LinkSpec(round_trip_ms=3000, loss=0.2)),
        ("40ms/5ms", LinkSpec(round_trip_ms=40, jitter_ms=5)),
        ("0ms/5ms", LinkSpec(jitter_ms=5)),
        (" 1M / 2ms ", LinkSpec(down_bits_per_second=1e6, up_bits_per_second=1e6, round_trip_ms=2)),
        ("100%", LinkSpec(loss=1)),
    ],
)
def test_a_link_is_read_and_written_back(text: str, spec: LinkSpec) -> None:
    assert LinkSpec.parse(text) == spec
    assert LinkSpec.parse(str(spec)) == spec


def test_a_link_without_limits_says_so() -> None:
    assert str(LinkSpec()) == str(LinkSpec.parse("0ms")) == "unlimited"
    assert LinkSpec.parse("unlimited") == LinkSpec()
    assert math.isinf(LinkSpec().down_bits_per_second)


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("", "''"),
        ("fast", "'fast'"),
        ("50/40ms", "'50'"),
        ("50m", "'50m'"),
        ("-1M", "'-1M'"),
        ("0M/1ms", "'0M'"),
        ("1M/2M/3M", "'3M'"),
        ("1M/2ms/3ms/4ms", "'4ms'"),
        ("1M/101%", "'101%'"),
        ("1%/2%", "'2%'"),
        ("1M//2ms", "''"),
        ("infM", "'infM'"),
        ("1e9M", "'1e9M'"),
    ],
)
def test_what_is_no_link_is_refused_and_named(text: str, piece: str) -> None:
    with pytest.raises(RehearsalError, match="such as 50M/40ms") as error:
        LinkSpec.parse(text)
    assert piece in error.value.problem


def line(*, rate: float | None = None, latency: float = 0.0, jitter: float = 0.0, loss: float = 0.0) -> Line:
    made = Line(random.Random(1))
    made.change({"bits_per_second": rate, "latency_seconds": latency, "jitter_seconds": jitter, "loss": loss}, 0.0)
    return made


def test_packets_stand_in_line_and_then_travel() -> None:
    slow = line(rate=8e3, latency=0.5)
    assert slow.admit(10.0, 100) == pytest.approx(10.6)
    assert slow.admit(10.0, 100) == pytest.approx(10.7)
    assert slow.admit(20.0, 100) == pytest.approx(20.6)
    assert line(latency=0.5).admit(1.0, 1500) == 1.5


@pytest.mark.parametrize("rate", [64e3, 1e6, 50e6])
def test_a_queue_holds_a_fifth_of_a_second_and_64_kib_at_least(rate: float) -> None:
    full = line(rate=rate)
    admitted = 0
    while full.admit(0.0, 1000) is not None:
        admitted += 1000
    assert admitted == pytest.approx(max(rate * QUEUE_SECONDS / 8, QUEUE_BYTES), abs=2000)
    assert full.admit(1.0 + 8 * admitted / rate, 1000) is not None


def test_jitter_delays_but_never_reorders() -> None:
    unsteady = line(latency=0.02, jitter=0.03)
    dues = [unsteady.admit(index / 1000, 100) for index in range(1000)]
    assert dues == sorted(dues)
    delays = [due - index / 1000 for index, due in enumerate(dues)]
    assert min(delays) >= 0.02 and max(delays) <= 0.05


def test_what_waits_is_sent_at_the_new_rate() -> None:
    changed = line(rate=8e3)
    changed.admit(0.0, 1000)
    changed.change({"bits_per_second": 8e4, "latency_seconds": 0, "jitter_seconds": 0, "loss": 0}, 0.0)
    assert changed.admit(0.0, 1000) == pytest.approx(1.0)  # behind the one that was promised for 1.0
    assert changed.admit(1.0, 1000) == pytest.approx(1.1)


def test_losses_are_the_share_that_was_asked_for_and_repeat_with_the_seed() -> None:
    lost = [[line(loss=0.2).admit(0.0, 100) is None]]
    for _ in range(2):
        lossy = line(loss=0.2)
        lost.append([lossy.admit(float(index), 100) is None for index in range(5000)])
    assert lost[1] == lost[2]
    assert 0.18 < sum(lost[1]) / 5000 < 0.22
    assert line(loss=1.0).admit(0.0, 100) is None


def test_addresses_of_many_peers_differ() -> None:
    assert address(1) == "198.18.0.1"
    assert len({address(number) for number in range(1, 1001)}) == 1000


def test_bytes_are_counted_on_every_interface_but_the_loopback() -> None:
    shown = """Inter-|   Receive                                               |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compr.
    lo:     999       9    0    0    0     0          0         0      999       9    0    0    0     0       0      0
  tun0: 3001234    2100    0    0    0     0          0         0   501234    1200    0    0    0     0       0      0
eth1:10 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0
"""
    assert counted_bytes(shown) == (501241, 3001244)
