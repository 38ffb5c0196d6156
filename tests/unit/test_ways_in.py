"""Why nobody lets us in, whom to ask first next time, and which addresses of ours others are told."""

from __future__ import annotations

import itertools

import pytest

from dht_config.address import dialable, parse_address, reach
from peers.daemon import DialOutcome, DialReport
from peers.ways_in import (
    ADDRESSES_PER_PEER,
    REMEMBERED_PEERS,
    announced,
    best_first,
    clock_line,
    listening,
    nobody_answers,
    split_line,
)

IDS = ["QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "QmZtmD2qt6fJot32nabSP3CUjicnypEBz7bHVDhPQt9aAy"]
FAILURES = [outcome for outcome in DialOutcome if outcome is not DialOutcome.CONNECTED]


def way(host: str, peer: int = 0, port: int = 31337) -> str:
    return f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}/p2p/{IDS[peer]}"


def report(outcome: DialOutcome, host: str = "8.8.113.7") -> DialReport:
    return DialReport(address=parse_address(way(host)), outcome=outcome)


def test_every_cause_has_words_and_a_remedy_of_its_own() -> None:
    told = {outcome: nobody_answers([report(outcome), report(outcome, "8.8.113.8")]) for outcome in FAILURES}
    for outcome, (problem, remedy) in told.items():
        assert problem.count(outcome.value) == 2 and "8.8.113.8" in problem
        assert remedy.endswith("--peer.")
    clear = {DialOutcome.REFUSED, DialOutcome.TIMED_OUT, DialOutcome.NOT_FOUND, DialOutcome.NO_ROUTE}
    assert len({told[outcome][1] for outcome in clear}) == len(clear)
    assert "firewall" in told[DialOutcome.TIMED_OUT][1] and "firewall" not in told[DialOutcome.REFUSED][1]


@pytest.mark.parametrize("mixed", list(itertools.combinations(FAILURES, 2)))
def test_of_several_causes_none_is_taken_for_the_only_one(mixed: tuple[DialOutcome, DialOutcome]) -> None:
    problem, remedy = nobody_answers([report(mixed[0]), report(mixed[1], "2001:db8::7")])
    assert all(outcome.value in problem for outcome in mixed)
    assert remedy.startswith("Check the network")


def test_a_skewed_clock_is_told_with_its_direction_and_a_right_one_is_not() -> None:
    assert "300 s behind the swarm's" in clock_line(300.2)
    assert "300 s ahead of the swarm's" in clock_line(-300.2)
    assert clock_line(0.4) == clock_line(-1.0) == ""


def test_records_of_peers_that_nobody_reaches_are_told() -> None:
    assert "3 training peers" in split_line(3, 0)
    assert split_line(3, 1) == split_line(0, 0) == split_line(1, 0) == "", "one may just have ended"


def test_who_answered_is_asked_first_and_who_was_known_before_is_not_forgotten() -> None:
    found = {
        IDS[0]: [way("8.8.113.1")],
        IDS[1]: [way("192.168.0.4", 1), way("8.8.113.2", 1)],
        "behind NAT": [],
        "nonsense": ["/ip4/nowhere"],
    }
    earlier = [way("8.8.113.9"), way("8.8.113.1")]
    remembered = best_first(found, {IDS[1]}, earlier, given=[way("8.8.113.5")])
    assert remembered == [
        way("8.8.113.2", 1),
        way("8.8.113.1"),
        way("8.8.113.5"),
        way("192.168.0.4", 1),
        way("8.8.113.9"),
    ]
    many = [way(f"8.8.100.{number}") for number in range(100)]
    assert best_first(found, set(), many)[-1] == many[REMEMBERED_PEERS - 4]


def test_one_peers_record_does_not_make_up_most_of_what_is_remembered() -> None:
    """Else old friends would be forgotten for it, and strangers dialled at the next start."""
    own = [way(f"8.8.100.{number}", 1) for number in range(16)]
    record = [f"{way('8.8.1.1')},{own[0]}", *(",".join(own[at : at + 3]) for at in range(1, 16, 3))]
    earlier = [way(f"8.8.113.{number}") for number in range(8)]
    remembered = best_first({IDS[1]: record}, {IDS[1]}, earlier)
    assert remembered == [*own[:ADDRESSES_PER_PEER], *earlier]


def test_where_others_reached_us_is_announced_before_what_only_this_network_knows() -> None:
    own = [way("127.0.0.1"), way("172.17.0.2")]
    assert announced(own, []) == (way("172.17.0.2"),), "a container's own address, for those beside it"
    assert announced(own, ["8.8.113.9"]) == (way("8.8.113.9"), way("172.17.0.2"))
    assert announced(own, ["8.8.113.9", "2001:4860::8"]) == (
        way("8.8.113.9"),
        way("2001:4860::8"),
        way("172.17.0.2"),
    )
    assert announced(own, ["172.17.0.2"]) == (way("172.17.0.2"),)
    assert announced([way("127.0.0.1")], []) == (way("127.0.0.1"),), "all on one machine"
    assert announced([], ["8.8.113.9"]) == ()
    forwarded = announced(own, ["8.8.113.9"], port=54083)
    assert forwarded == (way("8.8.113.9", port=54083), way("172.17.0.2")), "by a router's port"


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.4", "::"])
def test_a_port_that_a_router_forwards_is_told_from_the_one_where_we_listen(host: str) -> None:
    """The daemon names both alike, and whichever comes first."""
    ours = [way("192.168.0.4"), *([] if host == "192.168.0.4" else [way("127.0.0.1")])]
    claimed = [way("11.0.0.9", port=54083), way("11.0.0.9", port=54084)]
    for visible in ([*claimed, *ours], [*ours, *claimed]):
        known, ports = listening(visible, host)
        assert {address.text for address in known} == set(ours) and ports == [54083, 54084]
    assert listening(ours, host)[1] == [] and listening([], host) == ([], [])


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("1.1.1.1", ""),
        ("172.17.0.2", "inside this network"),
        ("10.0.0.1", "inside this network"),
        ("100.64.0.1", "inside this network"),
        ("fd00::1", "inside this network"),
        ("169.254.1.1", "inside this network"),
        ("fe80::1", "inside this network"),
        ("127.0.0.1", "on this machine alone"),
        ("::1", "on this machine alone"),
    ],
)
def test_an_address_that_not_everybody_can_dial_is_flagged(host: str, words: str) -> None:
    assert reach(parse_address(way(host))) == words
    public = parse_address(f"/dns4/run.example.org/tcp/31337/p2p/{IDS[0]}")
    ranked = dialable([parse_address(way(host)), public])

    assert public in ranked and reach(public) == ""
