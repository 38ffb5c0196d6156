from typing import Any

import pytest

from p2p_trainer.rehearsal.rehearsed_peer import Account, PeerRecord, PlayedLife, TimeUse, time_use
from p2p_trainer.rehearsal.timeline import PeerRound, Timeline, TimelineClock, build_timeline, cadence

CLOCK = TimelineClock(zero=1000.0, scene_zero=1003.0, run_start=400.0, tick_seconds=1.5)  # tick 400 begins at zero


def event(time: float, name: str, **fields: Any) -> dict[str, Any]:
    return {"time": time, "event": name, **fields}


def round_event(tick: int, outcome: str, **fields: Any) -> dict[str, Any]:
    given = {"fragment": tick % 2, "group_size": 3, "weight": 8.0, "seconds": 0.456, "reason": "", **fields}
    return event(400 + 1.5 * tick + 1, "round", tick=tick, outcome=outcome, **given)


def peer(*events: dict[str, Any], life: PlayedLife | None = None, name: str = "8") -> Account:
    began = [
        event(995.0, "throughput", phase="solo", samples_per_second=10.0),
        event(999.0, "join", processed_samples=0),
        event(1000.0, "training_started", processed_samples=0),
    ]
    return Account.of(PeerRecord(name=name, events=[*began, *events], life=life or PlayedLife(joins=[0.0])))


def timeline(*accounts: Account) -> Timeline:
    return build_timeline(accounts, CLOCK)


def committed(*ticks: int, fragments: int = 2) -> list[PeerRound]:
    return [
        PeerRound(
            tick=tick,
            fragment=tick % fragments,
            at_seconds=0.0,
            state="in",
            reason="",
            group_size=2,
            samples=8.0,
            took_seconds=0.1,
        )
        for tick in ticks
    ]


@pytest.mark.parametrize(
    ("outcome", "fields", "state"),
    [
        ("committed", {}, "in"),
        ("committed", {"late_share": 0.0}, "in"),
        ("committed", {"late_share": 0.25}, "late"),
        ("committed", {"group_size": 1}, "alone"),
        ("carried", {"late_share": 0.0}, "carried"),
        ("skipped", {"group_size": 0}, "skipped"),
        ("skipped", {"group_size": 0, "due": True}, "skipped"),
        ("skipped", {"group_size": 0, "due": False}, "resting"),
    ],
)
def test_a_round_is_told_as_it_was_for_the_peer(outcome: str, fields: dict[str, Any], state: str) -> None:
    (mark,) = timeline(peer(round_event(410, outcome, **fields))).peers[0].rounds
    assert (mark.state, mark.tick, mark.fragment, mark.at_seconds, mark.took_seconds) == (state, 410, 0, 15.0, 0.46)


def test_rounds_that_cannot_be_read_are_left_out() -> None:
    odd = [round_event(410, "tomorrow"), {**round_event(411, "committed"), "tick": "x"}, event(1010.0, "round")]
    assert timeline(peer(*odd)).peers[0].rounds == []


def test_all_peers_and_the_scene_are_on_one_clock() -> None:
    life = PlayedLife(joins=[0.0, 30.0], kills=[20.0], leaves=[50.0], frozen_at=[(1010.0, 1012.5)])
    late = peer(
        event(1022.0, "account", processed_samples=80, credited_samples=80.0, exact=True),
        event(1037.0, "join", processed_samples=80),
        event(1039.0, "training_started", processed_samples=80),
        event(1052.0, "train", samples=90),
        life=life,
    )
    told = timeline(late).peers[0]
    assert told.trained == [(0.0, 22.0), (39.0, 52.0)]
    assert [(one.at_seconds, one.what) for one in told.happenings] == [
        (23.0, "killed"),
        (33.0, "joined"),
        (53.0, "left"),
    ]
    assert told.frozen == [(10.0, 12.5)]
    assert timeline(late).seconds == 52.0


def test_the_goodbye_of_a_start_that_did_not_train_is_no_part_of_the_one_before() -> None:
    life = PlayedLife(joins=[0.0, 30.0], kills=[20.0])
    told = timeline(peer(event(1023.0, "train", samples=80), event(1090.0, "leave", reason="terminated"), life=life))
    assert told.peers[0].trained == [(0.0, 23.0)]


def test_evaluations_are_everybodys_in_order_and_never_before_the_beginning() -> None:
    first = peer(event(1009.0, "eval", samples=80, loss=3.0), event(1010.0, "eval", samples=90, loss=None), name="a")
    second = peer(event(999.5, "eval", samples=0, loss=5.0), event(1011.0, "eval", samples="x", loss=2.0), name="b")
    found = timeline(first, second).evaluations
    assert [(one.at_seconds, one.samples, one.loss, one.peer) for one in found] == [
        (0.0, 0, 5.0, "b"),
        (9.0, 80, 3.0, "a"),
    ]


def test_nothing_at_all_is_a_timeline_too() -> None:
    assert timeline().seconds == 0.0
    never = Account.of(PeerRecord(name="8", events=[], life=PlayedLife(joins=[5.0], kills=[6.0])))
    told = timeline(never).peers[0]
    assert (told.trained, told.rounds, [one.what for one in told.happenings]) == ([], [], ["joined", "killed"])


@pytest.mark.parametrize(
    ("ticks", "every"),
    [
        (range(20), 1),
        (range(0, 40, 2), 1),  # only one of the two fragments, but each of its rounds
        ([tick for tick in range(60) if tick // 2 % 3 == 0], 3),
        ([0, 6, 12, 18, 20], 3),
        ([0, 2, 6, 8, 16, 18, 24], None),
        ([0, 6, 12], None),  # too few to see a rule
        ([], None),
    ],
)
def test_a_cadence_is_what_most_gaps_between_committed_rounds_are(ticks: list[int], every: int | None) -> None:
    assert cadence(committed(*ticks), 2) == every


def test_rounds_without_a_new_base_do_not_make_a_cadence() -> None:
    account = peer(*(round_event(tick, "committed" if tick // 2 % 2 else "skipped") for tick in range(400, 440)))
    assert cadence(timeline(account).peers[0].rounds, 2) == 2


def test_a_peer_that_kept_a_cadence_for_a_while_only_has_none() -> None:
    outcomes = ["committed" if tick // 2 % 2 and tick < 416 else "skipped" for tick in range(400, 440)]
    account = peer(*(round_event(tick, outcome) for tick, outcome in enumerate(outcomes, start=400)))
    assert cadence(timeline(account).peers[0].rounds, 2) is None


def test_time_is_used_up_whole() -> None:
    end = event(1010.0, "leave", training_ended=1010.0, processed_samples=90, credited_samples=60.0)
    use = time_use(peer({**end, "pending_samples": 20.0, "dropped_samples": 10.0, "exact": True}))
    assert use == TimeUse(
        credited=pytest.approx(0.6), pending=pytest.approx(0.2), rejected=pytest.approx(0.1), waiting=pytest.approx(0.1)
    )
    faster = time_use(peer({**end, "processed_samples": 200, "credited_samples": 200.0, "exact": True}))
    assert (faster.credited, faster.waiting) == (1.0, 0.0)


def test_what_a_kill_took_is_rejected() -> None:
    account = peer(
        event(1010.0, "account", processed_samples=100, credited_samples=40.0, exact=True),
        event(1020.0, "join", processed_samples=40),
        event(1020.0, "training_started", processed_samples=40),
        event(1030.0, "leave", training_ended=1030.0, processed_samples=140, credited_samples=140.0, exact=True),
        life=PlayedLife(joins=[0.0, 15.0], kills=[10.0]),
    )
    use = time_use(account)
    assert (use.credited, use.rejected, use.waiting) == pytest.approx((0.7, 0.3, 0.0))


def test_a_peer_that_never_trained_used_no_time() -> None:
    never = Account.of(PeerRecord(name="8", events=[], life=PlayedLife(joins=[5.0], kills=[6.0])))
    assert time_use(never) == TimeUse(credited=0.0, pending=0.0, rejected=0.0, waiting=0.0)


@pytest.mark.parametrize(
    ("played", "seconds"),
    [
        (PlayedLife(joins=[0.0]), 90.0),
        (PlayedLife(joins=[0.0, 40.0], kills=[30.0]), 80.0),
        (PlayedLife(joins=[10.0], leaves=[25.0]), 15.0),
        (PlayedLife(joins=[0.0, 20.0, 50.0], leaves=[60.0], kills=[10.0, 40.0]), 40.0),
        (PlayedLife(), 0.0),
    ],
)
def test_a_life_is_so_many_seconds_long(played: PlayedLife, seconds: float) -> None:
    assert played.seconds_there(90.0) == seconds
