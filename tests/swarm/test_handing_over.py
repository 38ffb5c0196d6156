"""The last one to leave hands its bases over; where it cannot, a line is lost but no account goes wrong."""

from __future__ import annotations

import pytest
from harness import (
    ROUND_SECONDS,
    Peer,
    Swarm,
    assert_bases_hold_every_credit_once,
    assert_no_traceback,
    assert_samples_add_up,
)

pytestmark = pytest.mark.swarm


def digests(peer: Peer) -> list[str]:
    return [row["digest"] for row in peer.checkpoint_meta()["fragments"]]


def test_the_last_one_to_leave_hands_its_bases_to_the_door(swarm: Swarm) -> None:
    bootstrap = swarm.bootstrap()
    last = swarm.join("last", bootstrap.invite, 40)
    swarm.wait_averaged(last, group=1, rounds=3)
    assert last.end() == 0
    left_with = assert_samples_add_up(last)
    other = swarm.join("other", bootstrap.invite, 40)
    swarm.wait_averaged(other, group=1, rounds=3)
    assert (other.end(), bootstrap.end()) == (0, 0)
    assert left_with["credited_samples"] > 0
    assert_samples_add_up(other)
    assert_bases_hold_every_credit_once([last, other])
    assert digests(bootstrap) == digests(other)


def test_a_line_that_nobody_took_over_is_told_and_counted_as_dropped(swarm: Swarm) -> None:
    bootstrap = swarm.bootstrap()
    first = swarm.join("first", bootstrap.invite, 40)
    swarm.wait_averaged(first, group=1, rounds=2)
    bootstrap.crash()  # its newest bases are those of its first checkpoint: version 0
    swarm.wait_averaged(first, group=1, rounds=4)
    assert first.end() == 0
    assert assert_samples_add_up(first)["credited_samples"] > 0

    bootstrap = swarm.bootstrap()
    others = [swarm.join("second", bootstrap.invite, 40), swarm.join("third", bootstrap.invite, 40)]
    swarm.wait_averaged(*others, rounds=2)
    again = swarm.join("first", bootstrap.invite, 40, directory=first.directory)
    swarm.wait_averaged(again, *others, group=3, rounds=2)
    swarm.wait_until(lambda: "went on without them" in again.text, "it was told of what was lost", ROUND_SECONDS)
    assert set(swarm.leave_all().values()) == {0}
    accounts = [assert_samples_add_up(peer) for peer in (again, *others)]
    assert accounts[0]["dropped_samples"] > 0
    assert_bases_hold_every_credit_once([again, *others])
    assert_no_traceback(again, *others, bootstrap)
