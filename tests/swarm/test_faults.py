"""Every fault at every await of a round: the others go on, all end on one base, every sample counts once.

One swarm suffers a kind of fault at every await, one after the other, so that what one leaves behind would be seen in
the next. ``-m faults`` runs them all; those that need no restarts, and so no minutes, are among the swarm tests.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from harness import (
    START_SECONDS,
    Peer,
    Swarm,
    assert_bases_hold_every_credit_once,
    assert_digests_agree,
    assert_no_traceback,
    assert_samples_add_up,
    small_manifest,
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

POINTS = ("before-join", "after-join", "mid-send", "mid-reduce", "before-commit", "after-commit")
KINDS = (
    "kill",
    "slow",
    pytest.param("freeze", marks=[pytest.mark.swarm, pytest.mark.slow]),
    pytest.param("garbage", marks=pytest.mark.swarm),
)
CYCLE_TICKS = 4
FROZEN_TICKS = 5
SETTLED_ROUNDS, FAILING_ROUNDS = 100, 400
"""The first ones fill caches and pools."""
PROGRAM = (str(Path(__file__).with_name("faulty.py")),)


class Faulty:
    """The peer that suffers, in all its lives."""

    def __init__(self, swarm: Swarm, invite: str) -> None:
        self.swarm, self.invite = swarm, invite
        self.order = swarm.path / "fault.order"
        self.lives: list[Peer] = []
        self.start()

    def start(self) -> None:
        self.lives.append(
            self.swarm.join(
                "faulty",
                self.invite,
                40,
                *("--checkpoint-seconds", "1"),
                directory=self.swarm.path / "faulty",
                environment={"FAULT_ORDER": str(self.order)},
                program=PROGRAM,
            )
        )

    @property
    def peer(self) -> Peer:
        return self.lives[-1]

    def suffer(self, point: str, kind: str) -> None:
        """Until the fault has come about."""
        done = self.order.with_suffix(".done")
        done.unlink(missing_ok=True)
        if kind == "kill":
            self.peer.expected_to_live = False
            self.swarm.may_remain.update(self.swarm.sockets_of(self.peer))
        draft = self.order.with_suffix(".draft")
        draft.write_text(f"{point} {kind}")
        draft.rename(self.order)
        self.swarm.wait_until(done.exists, f"the fault came about: {kind} {point}", START_SECONDS)


def resources(peer: Peer) -> dict[str, int]:
    """What its processes hold: resident bytes, open descriptors, threads."""
    processes = peer.processes()
    return {
        "rss_bytes": sum(process.memory_info().rss for process in processes),
        "descriptors": sum(process.num_fds() for process in processes),
        "threads": sum(process.num_threads() for process in processes),
    }


def test_three_hundred_failing_rounds_leave_nothing_behind(swarm: Swarm) -> None:
    """A reducer that answers nonsense and a sender that sends it: no round of the two can succeed."""
    manifest = small_manifest(
        swarm.path / "quick.toml",
        fragments="fragments = 8",
        tick_seconds="tick_seconds = 0.2",
        matchmaking_seconds="matchmaking_seconds = 0.6",
    )
    bootstrap = swarm.bootstrap(manifest=manifest)
    steady = swarm.join("steady", bootstrap.invite, 40)
    faulty = Faulty(swarm, bootstrap.invite)
    swarm.wait_averaged(steady, faulty.peer)
    faulty.order.write_text("mid-send garbage always\nmid-reduce garbage always\n")
    began = time.time()

    def failed() -> int:
        return len([event for event in steady.events("round") if event["group_size"] == 2 and event["time"] > began])

    held = {}
    for count in (SETTLED_ROUNDS, FAILING_ROUNDS):
        swarm.wait_until(lambda count=count: failed() >= count, f"{count} rounds have failed", 600)
        held[count] = resources(steady)
    print(f"held after so many failing rounds: {held}")
    outcomes = [event["outcome"] for event in steady.rounds(group=2, after=began + 2)]
    assert len(outcomes) < failed() / 20, "they should fail"
    before, after = held[SETTLED_ROUNDS], held[FAILING_ROUNDS]
    assert after["rss_bytes"] <= 1.03 * before["rss_bytes"]
    assert after["descriptors"] <= before["descriptors"] + 8
    assert after["threads"] <= before["threads"] + 4
    assert set(swarm.leave_all().values()) == {0}
    assert_no_traceback(*swarm.peers)


def rounds_until_agreed(peers: list[Peer], after: float) -> int | None:
    """After how many rounds of a fragment, the slowest of the fragments, all had committed one base; None: not yet."""
    slowest = 0
    for fragment in range(CYCLE_TICKS):
        bases = []
        for peer in peers:
            events = peer.rounds(group=len(peers), after=after)
            bases.append({e["tick"]: (e["version"], e["digest"]) for e in events if e["fragment"] == fragment})
        common = [tick for tick in bases[0] if all(other.get(tick) == bases[0][tick] for other in bases)]
        if not common:
            return None
        held = {e["tick"] for peer in peers for e in peer.events("round") if e["time"] > after}
        slowest = max(slowest, len([tick for tick in held if tick % CYCLE_TICKS == fragment and tick <= min(common)]))
    return slowest


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_any_await_costs_the_others_little_and_no_sample_counts_twice(swarm: Swarm, kind: str) -> None:
    manifest = small_manifest(swarm.path / "four.toml", fragments=f"fragments = {CYCLE_TICKS}")
    bootstrap = swarm.bootstrap(manifest=manifest)
    healthy = [swarm.join(name, bootstrap.invite, rate) for name, rate in (("a", 80), ("b", 40), ("c", 20))]
    faulty = Faulty(swarm, bootstrap.invite)
    swarm.wait_averaged(*healthy, faulty.peer, group=4, rounds=CYCLE_TICKS)
    needed: dict[str, int] = {}
    for point in POINTS:
        faulty.suffer(point, kind)
        struck = time.time()
        if kind in ("kill", "freeze"):
            swarm.wait_averaged(*healthy, group=3, rounds=FROZEN_TICKS, after=struck)
        if kind == "kill":
            faulty.peer.process.wait()
            faulty.start()
            swarm.wait_averaged(faulty.peer, group=4)
        if kind == "freeze":
            faulty.peer.thaw()
        everybody = [*healthy, faulty.peer]
        swarm.wait_until(
            lambda everybody=everybody, struck=struck: rounds_until_agreed(everybody, struck) is not None,
            f"all agree after {kind} {point}",
            START_SECONDS,
        )
        needed[point] = rounds_until_agreed(healthy if kind in ("kill", "freeze") else everybody, struck) or 0
    print(f"{kind}: rounds of a fragment until all agreed: {needed}")
    again = [event for peer in healthy for event in peer.rounds(group=3) if event["attempts"] > 1]
    assert again or kind != "kill", "a group that loses a reducer re-forms without it in the same cycle"
    assert set(swarm.leave_all().values()) == {0}
    for peer in (*healthy, faulty.peer):
        assert_samples_add_up(peer)
    assert_digests_agree(*healthy)
    assert_bases_hold_every_credit_once([*healthy, faulty.peer])
    assert_no_traceback(*swarm.peers)
