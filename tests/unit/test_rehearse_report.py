import dataclasses
import json
import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from dht_config.errors import DirectoryError, ManifestError, P2PTrainerError, RehearsalError, UsageError
from dht_config.manifest import example_manifest, parse_manifest
from p2p_trainer.metrics import read_metrics
from p2p_trainer.rehearsal import emulation, memory_limits
from p2p_trainer.rehearsal import rehearse as rehearse_module
from p2p_trainer.rehearsal.forecast import _ordinal, forecast, memory_in_words
from p2p_trainer.rehearsal.links import Availability
from p2p_trainer.rehearsal.memory_limits import MemoryLimits, MemoryLimitsUnavailable, MemoryUse, hierarchies
from p2p_trainer.rehearsal.rehearsal_files import check_report_path, write_json, write_report
from p2p_trainer.rehearsal.rehearsal_view import print_report
from p2p_trainer.rehearsal.rehearse import START_SECONDS, RehearseOptions, rehearse, start_limit_seconds
from p2p_trainer.rehearsal.rehearsed_peer import LineCount, PeerRecord, PlayedLife, TimeUse
from p2p_trainer.rehearsal.rehearsed_processes import ProgramCommands
from p2p_trainer.rehearsal.report import RehearsedRun, Report, build_report, problems, verdict
from p2p_trainer.rehearsal.scene import parse_peers

RUN = RehearsedRun(seconds=20.0, fragments=2, tick_seconds=1.5)  # a cycle of 3 s


def event(time: float, name: str, **fields: Any) -> dict[str, Any]:
    return {"time": time, "event": name, **fields}


def fast_peer() -> list[dict[str, Any]]:
    """60 samples/s alone; 10 to 20 s: 540 samples, 400 of them credited. In the last 3 s it processed 150."""
    return [
        event(4.0, "throughput", phase="solo", samples_per_second=60.0),
        event(5.0, "join", run_id="words-0123", processed_samples=0),
        event(10.0, "training_started", processed_samples=0),
        event(12.0, "throughput", phase="running", samples_per_second=58.0),
        event(13.0, "train", samples=180, steps=22, loss=4.0),
        event(14.0, "round", fragment=0, version=1, digest="aa", outcome="committed", weight=180),
        event(15.5, "round", fragment=1, version=1, digest="bb", outcome="committed", weight=240),
        event(16.0, "eval", version=1, samples=64, loss=3.5),
        event(17.0, "round", fragment=0, version=1, digest="aa", outcome="carried", weight=300),
        event(18.0, "train", samples=440, steps=55, loss=None),
        event(
            20.5,
            "leave",
            training_ended=20.0,
            processed_samples=540,
            inner_steps=67,
            credited_samples=400.0,
            pending_samples=140.0,
            dropped_samples=0.0,
            exact=True,
            fragments=[
                {"fragment": 0, "parameters": 100, "pending_samples": 260.0},
                {"fragment": 1, "parameters": 300, "pending_samples": 100.0},
            ],
        ),
    ]


def slow_peer() -> list[dict[str, Any]]:
    """20 samples/s alone; 11 to 21 s: 200 samples, 190 credited, 2 dropped, 8 pending."""
    return [
        event(4.0, "throughput", phase="solo", samples_per_second=20.0),
        event(6.0, "join", run_id="words-0123", processed_samples=0),
        event(11.0, "training_started", processed_samples=0),
        event(15.0, "eval", version=0, samples=64, loss=5.5),
        event(15.5, "round", fragment=1, version=1, digest="bb", outcome="committed", weight=0),
        event(16.0, "train", samples=100, steps=12, loss=3.0),
        event(17.0, "rebase", fragment=0, from_version=0, to_version=1, digest="aa"),
        event(17.5, "round", fragment=0, version=2, digest="cc", outcome="committed", weight=130),
        event(19.0, "round", fragment=1, version=1, digest="bb", outcome="skipped"),
        event(
            21.0,
            "leave",
            training_ended=21.0,
            processed_samples=200,
            inner_steps=25,
            credited_samples=190.0,
            pending_samples=8.0,
            dropped_samples=2.0,
            exact=True,
            fragments=[
                {"fragment": 0, "parameters": 100, "pending_samples": 8.0},
                {"fragment": 1, "parameters": 300, "pending_samples": 8.0},
            ],
        ),
    ]


def report_of(*events: Sequence[dict[str, Any]], leftovers: Sequence[str] = ()) -> Report:
    peers = [PeerRecord(name=f"peer{number}", events=list(one)) for number, one in enumerate(events)]
    return build_report(RUN, peers, leftovers=leftovers)


def test_efficiency_is_what_a_pencil_gives() -> None:
    report = report_of(fast_peer(), slow_peer())
    assert report.credited_efficiency == pytest.approx((400 / 10 + 190 / 10) / 80)
    # Fast: between 18 s (440) and 20 s (540) there are 50 samples/s, between 13 s (180) and 18 s 52 samples/s. So at
    # 17 s it had processed 388, and 152 since then. Of fragment 0's 260 pending samples only 152 are younger than a
    # cycle, of fragment 1's all 100: (100 * 152 + 300 * 100) / 400 = 113. Slow: all of its 8.
    assert report.efficiency == pytest.approx(((400 + 113) / 10 + (190 + 8) / 10) / 80)


def test_samples_of_a_peer_that_skips_rounds_wait_for_longer() -> None:
    paced = [dict(one, cadence=2) if one["event"] == "round" else one for one in fast_peer()]
    # 14 s, 232 samples, is two cycles before its end: of fragment 0's 260 pending samples all are younger.
    report = report_of(paced)
    assert report.efficiency == pytest.approx((400 + (100 * 260 + 300 * 100) / 400) / 10 / 60)


def test_a_peer_is_described_by_its_own_metrics() -> None:
    fast, slow = report_of(fast_peer(), slow_peer()).peers
    assert (fast.solo_samples_per_second, fast.swarm_samples_per_second) == (60.0, pytest.approx(54.0))
    assert (fast.processed_samples, fast.credited_samples, fast.pending_samples) == (540, 400.0, 140.0)
    assert (fast.inner_steps, fast.rounds_committed, fast.rounds_carried, fast.rounds_skipped) == (67, 2, 1, 0)
    assert (slow.rounds_committed, slow.rounds_carried, slow.rounds_skipped) == (2, 0, 1)
    assert fast.final_loss == 4.0  # the later one was not finite and is null in the file
    assert fast.digests == {"0:1": "aa", "1:1": "bb"}
    assert slow.digests == {"0:1": "aa", "0:2": "cc", "1:1": "bb"}
    assert fast.seconds_to_first_credit == 9.0
    assert slow.seconds_to_first_credit == 11.5  # its first committed round held nothing of its own
    assert fast.share == pytest.approx(400 / 590)
    assert fast.samples_add_up
    assert slow.samples_add_up


def test_the_swarm_is_described_by_all_of_them() -> None:
    report = report_of(fast_peer(), slow_peer())
    assert (report.run_id, report.seconds, report.fragments, report.tick_seconds) == ("words-0123", 20.0, 2, 1.5)
    assert report.held_out_loss == [(5.0, 5.5), (6.0, 3.5)]
    assert report.digests_agree
    assert report.digests_compared == 2
    assert report.leftover_processes == 0


def test_a_fork_is_found_wherever_it_shows() -> None:
    forked = slow_peer()
    forked[6] = {**forked[6], "digest": "ab"}
    report = report_of(fast_peer(), forked)
    assert not report.digests_agree
    assert report.digest_conflicts == ["0:1"]
    assert "0:1" in verdict(report)
    bootstrap = PeerRecord(name="bootstrap", events=[event(9.0, "rebase", fragment=0, to_version=2, digest="dd")])
    peers = [PeerRecord(name="slow", events=slow_peer())]
    assert build_report(RUN, peers).digests_agree
    assert build_report(RUN, peers, others=[bootstrap]).digest_conflicts == ["0:2"]


def test_one_peer_that_contradicts_itself_is_a_fork() -> None:
    events = fast_peer()
    events.insert(8, event(16.5, "rebase", fragment=0, from_version=0, to_version=1, digest="ee"))
    assert report_of(events).digest_conflicts == ["0:1"]


def test_digests_of_rounds_that_were_not_committed_are_not_compared() -> None:
    events = slow_peer()
    events[8] = {**events[8], "digest": "of the base it still had"}
    assert report_of(fast_peer(), events).digests_agree


def test_agreement_about_nothing_is_none() -> None:
    events = [one for one in fast_peer() if one["event"] != "round"]
    report = report_of(events)
    assert not report.digests_agree
    assert report.digests_compared == 0
    assert "no round was committed" in verdict(report)


@pytest.mark.parametrize(
    "wrong",
    [
        {"credited_samples": 399.0},
        {"pending_samples": 140.5},
        {"dropped_samples": 1e-3},
        {"exact": False},
        {"exact": None},
        {"processed_samples": 541},
    ],
)
def test_samples_that_do_not_add_up_are_told(wrong: dict[str, Any]) -> None:
    events = fast_peer()
    events[-1] = {**events[-1], **wrong}
    report = report_of(events, slow_peer())
    assert [peer.samples_add_up for peer in report.peers] == [False, True]
    assert "the samples of peer peer0 do not add up" in verdict(report)


def test_means_that_are_rounded_still_add_up() -> None:
    events = fast_peer()
    events[-1] = {**events[-1], "credited_samples": 540 - 0.1 - 0.2, "pending_samples": 0.1, "dropped_samples": 0.2}
    assert report_of(events).peers[0].samples_add_up


def test_a_peer_that_trains_a_quarter_of_the_model_is_judged_by_what_it_trains() -> None:
    events = fast_peer()
    where = next(index for index, one in enumerate(events) if one["event"] == "training_started")
    events[where] = {**events[where], "trained_fragments": 1, "fragments": 4}
    events[-1] = {
        **events[-1],
        "trained_samples": 135.0,
        "credited_samples": 100.0,
        "pending_samples": 35.0,
        "fragments": [{"fragment": 0, "parameters": 100, "pending_samples": 35.0}],
    }
    (whole,), (part,) = report_of(fast_peer()).peers, report_of(events).peers
    assert part.samples_add_up and part.credited_samples == 100
    assert part.time == whole.time, "its steps were put to use as much"
    assert report_of(events).credited_efficiency == report_of(fast_peer()).credited_efficiency
    events[-1] = {**events[-1], "trained_samples": 136.0}
    assert not report_of(events).peers[0].samples_add_up


def test_a_peer_without_a_goodbye_is_judged_by_its_last_account() -> None:
    events = fast_peer()[:-1]
    events.append(
        event(19.0, "account", processed_samples=490, credited_samples=400.0, pending_samples=90.0, inner_steps=61)
    )
    (peer,) = report_of(events).peers
    assert (peer.processed_samples, peer.credited_samples, peer.inner_steps) == (490, 400.0, 61)
    assert peer.window_seconds == 9.0
    assert not peer.samples_add_up
    # Since 16 s: 490 - 336 = 154, so all of the 90 are younger than a cycle.
    assert report_of(events).efficiency == pytest.approx((490 / 9) / 60)


def test_a_window_shorter_than_a_cycle_counts_all_that_is_pending() -> None:
    events = fast_peer()
    events[-1] = {**events[-1], "training_ended": 12.0}
    events = [one for one in events if one["event"] != "train"]
    report = report_of(events)
    assert report.efficiency == pytest.approx(((400 + (100 * 260 + 300 * 100) / 400) / 2) / 60)


def test_a_peer_above_its_solo_speed_is_reported_as_it_is() -> None:
    events = fast_peer()
    events[0] = {**events[0], "samples_per_second": 30.0}
    assert report_of(events).efficiency > 1


@pytest.mark.parametrize(("missing", "words"), [("throughput", "no throughput"), ("training_started", "never trained")])
def test_a_peer_that_did_not_come_to_training_is_an_error(missing: str, words: str) -> None:
    with pytest.raises(RehearsalError, match=f"peer0 .*{words}"):
        report_of([one for one in fast_peer() if one["event"] != missing])


def test_torn_and_absurd_lines_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    odd = [event(18.5, "train", samples="many", loss=True), event(19.0, "round", outcome="committed"), {"time": None}]
    lines = [json.dumps(one) for one in [*fast_peer()[:-1], *odd, fast_peer()[-1]]]
    path.write_text("\n".join(lines) + '\n{"time": 21.0, "event": "trai')
    assert report_of(read_metrics(path)).efficiency == report_of(fast_peer()).efficiency


def test_the_report_is_json_with_the_names_that_tools_rely_on() -> None:
    table = json.loads(
        json.dumps(report_of(fast_peer(), slow_peer(), leftovers=["process 1 (p2pd)"]).as_json(), allow_nan=False)
    )
    assert table["leftover_processes"] == 1
    assert table["held_out_loss"] == [[5.0, 5.5], [6.0, 3.5]]
    names = (
        "efficiency credited_efficiency digests_agree held_out_loss leftover_processes peers run_id seconds fragments "
        "tick_seconds"
    )
    assert set(names.split()) <= table.keys()
    names = (
        "name solo_samples_per_second swarm_samples_per_second processed_samples credited_samples pending_samples "
        "inner_steps rounds_committed rounds_carried rounds_skipped final_loss digests seconds_to_first_credit "
        "samples_add_up"
    )
    assert set(names.split()) <= table["peers"][0].keys()


def test_a_loss_that_does_not_fall_is_told_once_there_was_time_for_it() -> None:
    events = slow_peer()
    assert "did not fall" not in verdict(report_of(events))
    events.insert(6, event(17.0, "eval", version=1, samples=64, loss=5.5))
    assert "did not fall" not in verdict(report_of(events))
    events.insert(8, event(18.5, "eval", version=2, samples=64, loss=5.6))
    assert "did not fall" in verdict(report_of(events))


def test_the_verdict_is_good_only_if_there_is_nothing_to_tell() -> None:
    events = fast_peer()
    events[0] = {**events[0], "samples_per_second": 50.0}
    report = report_of(events)
    assert problems(report) == []
    assert verdict(report).startswith("Good. This peer")
    bad = report_of(fast_peer(), slow_peer(), leftovers=["process 7 (p2pd)"])
    assert "only 88.9 %" in verdict(bad)
    assert "left behind: process 7 (p2pd)" in verdict(bad)
    killed = build_report(RUN, [PeerRecord(name="8", events=fast_peer(), exit_code=-signal.SIGKILL)])
    assert "peer 8 did not leave in time and was killed" in verdict(killed)


@pytest.mark.parametrize(
    ("names", "scale"), [(["80", "laptop-cpu-10"], 1), (["4090", "laptop-cpu"], 100), (["80", "8"], 10_000)]
)
def test_the_table_tells_everything_in_80_columns(names: list[str], scale: int, tmp_path: Path) -> None:
    report = report_of(fast_peer(), slow_peer())
    peers = [
        dataclasses.replace(
            peer,
            name=name,
            processed_samples=peer.processed_samples * scale,
            credited_samples=peer.credited_samples * scale,
        )
        for peer, name in zip(report.peers, names, strict=True)
    ]
    path = tmp_path / "output.txt"
    with path.open("w") as output:
        print_report(Console(file=output, width=80), dataclasses.replace(report, peers=peers))
    table = path.read_text().split("alone, swarm:")[0].splitlines()
    assert all(len(line) <= 80 for line in table) and "…" not in "".join(table)
    heading = next(line for line in table if "alone" in line)
    assert " ".join(heading.split()) == "peer alone swarm processed credited pending rounds carried share"
    rows = table[table.index(heading) + 2 :]
    assert "".join(line[:12].split(" ")[1] for line in rows if line.strip()) == "".join(names)
    for peer in peers:
        assert any(f" {peer.processed_samples} " in line for line in rows)


# --- lives: peers that come, go, are killed and frozen


def killed_peer() -> list[dict[str, Any]]:
    """60 samples/s alone; killed at 16.8 s, 1.8 s after its last account of 250 samples, 200 of them credited."""
    return [
        *fast_peer()[:6],
        event(15.0, "account", processed_samples=250, credited_samples=200.0, pending_samples=50.0, exact=True),
        event(16.0, "train", samples=310, steps=35, loss=4.0),
    ]


def life(**played: Any) -> PlayedLife:
    return PlayedLife(**{"joins": [0.0], **played})


def one_report(events: Sequence[dict[str, Any]], played: PlayedLife, **more: Any) -> Report:
    return build_report(RUN, [PeerRecord(name="8", events=events, life=played, **more)])


def test_a_peer_that_was_meant_to_be_killed_counts_by_its_last_account() -> None:
    report = one_report(killed_peer(), life(kills=[6.8]), exit_code=-signal.SIGKILL, killed=True)
    (peer,) = report.peers
    assert (peer.window_seconds, peer.processed_samples, peer.credited_samples) == (5.0, 250, 200.0)
    assert report.efficiency == pytest.approx(250 / (5 * 60))
    assert peer.lost_samples == 110  # seen 310, in a base 200
    assert peer.samples_add_up and peer.killed and peer.kills == [6.8]
    assert not any("killed" in one or "add up" in one for one in problems(report))
    # The same end, but nobody meant it.
    report = one_report(killed_peer(), life(), exit_code=-signal.SIGKILL)
    assert not report.peers[0].samples_add_up
    assert any("was killed" in one for one in problems(report))


def test_a_peer_that_was_killed_and_did_not_come_to_training_again_counts_by_its_last_account() -> None:
    report = one_report(killed_peer(), life(joins=[0.0, 9.0], kills=[6.8]), exit_code=0)
    assert report.peers[0].samples_add_up
    # It came back for good, and then ended without a goodbye.
    again = [event(19.0, "join", processed_samples=250), event(19.5, "training_started", processed_samples=250)]
    account = event(20.0, "account", processed_samples=260, credited_samples=200.0, pending_samples=60.0, exact=True)
    report = one_report([*killed_peer(), *again, account], life(joins=[0.0, 9.0], kills=[6.8]), exit_code=0)
    assert not report.peers[0].samples_add_up


def test_the_starts_of_one_peer_are_one_row() -> None:
    again = [
        event(30.0, "join", run_id="words-0123", processed_samples=220, restart=1),
        event(30.5, "throughput", phase="solo", samples_per_second=40.0),
        event(31.0, "training_started", processed_samples=220),
        event(33.0, "round", fragment=0, version=5, digest="ee", outcome="committed", weight=80, bytes_sent=1000),
        event(
            41.0,
            "leave",
            training_ended=41.0,
            processed_samples=620,
            inner_steps=70,
            credited_samples=600.0,
            pending_samples=20.0,
            dropped_samples=0.0,
            exact=True,
        ),
    ]
    report = one_report([*killed_peer(), *again], life(joins=[0.0, 20.0], kills=[6.8]), exit_code=0)
    (peer,) = report.peers
    assert (peer.processed_samples, peer.credited_samples, peer.solo_samples_per_second) == (620, 600.0, 60.0)
    assert peer.window_seconds == 5.0 + 10.0
    assert peer.swarm_samples_per_second == pytest.approx((250 + 400) / 15)
    assert peer.lost_samples == 90  # seen 310 before the kill, 220 after it
    assert peer.rounds_committed == 2
    assert peer.bytes_sent_per_hour == pytest.approx(1000 * 3600 / 15)
    assert report.efficiency == pytest.approx((600 + 20) / (5 * 60 + 10 * 40))
    assert peer.samples_add_up and not peer.killed and (peer.joins, peer.kills) == ([0.0, 20.0], [6.8])


def test_a_peer_weighs_in_the_efficiency_for_as_long_as_it_was_there() -> None:
    short = [{**one, "time": one["time"] - 7.5} for one in slow_peer()]
    short[2] = {**short[2], "time": 11.0}
    short[-1] = {**short[-1], "training_ended": 13.5}
    report = build_report(RUN, [PeerRecord(name="f", events=fast_peer()), PeerRecord(name="s", events=short)])
    assert report.credited_efficiency == pytest.approx((400 + 190) / (10 * 60 + 2.5 * 20))


def test_the_time_a_peer_is_frozen_is_in_no_window() -> None:
    report = one_report(fast_peer(), life(freezes=[2.0], frozen_at=[(8.0, 11.0), (14.0, 15.0)]))
    assert report.peers[0].window_seconds == 10 - 1 - 1
    assert report.peers[0].freezes == [2.0]


@pytest.mark.parametrize("there", [0, 1, 2])
def test_a_peer_that_came_too_late_to_train_is_told_and_no_failure(there: int) -> None:
    late = PeerRecord(name="late", events=fast_peer()[:there], life=life(joins=[19.0]))
    report = build_report(RUN, [PeerRecord(name="8", events=fast_peer()), late])
    assert report.efficiency == report_of(fast_peer()).efficiency
    peer = report.peers[1]
    assert (peer.processed_samples, peer.window_seconds, peer.samples_add_up) == (0, 0.0, True)
    assert "peer late took part in no round" in problems(report)
    assert forecast(peer).endswith("took part in no round.")


def test_a_start_that_left_before_it_trained_changes_nothing() -> None:
    again = [
        event(22.0, "join", run_id="words-0123", processed_samples=540),
        event(22.5, "throughput", phase="solo", samples_per_second=60.0),
        event(23.0, "leave", reason="terminated"),
    ]
    before, after = (one_report(events, life()) for events in (fast_peer(), [*fast_peer(), *again]))
    assert after == before


@pytest.mark.parametrize(
    ("link", "where"),
    [
        ("", "8 took"),
        ("10M/60ms", "8 on 10 Mbit/s took"),
        ("10M/500k/60ms", "8 on 10 Mbit/s down and 500 kbit/s up took"),
        ("40ms", "8 on 40ms took"),
        ("unlimited", "8 on a line without limits took"),
    ],
)
def test_the_forecast_says_what_such_a_machine_is_to_the_swarm(link: str, where: str) -> None:
    events = [{**one, "bytes_sent": 20_000, "bytes_received": 50_000} for one in fast_peer()]
    (peer,) = one_report(events, life(), link=link).peers
    assert forecast(peer) == (
        f"{where} part in 67 % of its rounds and contributed 100 %; they took 22 MB up and 54 MB down an hour. "
        "It did not compute for 10 % of its time."
    )


def test_the_forecast_names_a_cadence_and_where_time_went() -> None:
    report = report_of(fast_peer(), slow_peer())
    third = dataclasses.replace(report.peers[0], name="3060", cadence=3, share=0.07)
    assert forecast(third).startswith("3060 took part in every 3rd round and contributed 7 %; they took ")
    assert [_ordinal(one) for one in (2, 3, 4, 11, 12, 13, 21, 22, 103)] == (
        ["2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "22nd", "103rd"]
    )
    # One that is in every round of a fragment is told by how many those were.
    assert " 67 % of its rounds " in forecast(dataclasses.replace(third, cadence=1))
    wasted = TimeUse(credited=0.5, pending=0.2, rejected=0.26, waiting=0.04)
    assert forecast(dataclasses.replace(third, time=wasted)).endswith(
        " an hour. 26 % of its time went into work that was dropped or lost."
    )


def test_what_crosses_a_line_is_told_instead_of_the_rounds() -> None:
    counted = LineCount(sent_bytes=1_000_000, received_bytes=3_000_000, seconds=36.0)
    (peer,) = one_report(fast_peer(), life(), link="10M", line_count=counted).peers
    assert (peer.bytes_sent_per_hour, peer.bytes_received_per_hour, peer.bytes_counted) == (1e8, 3e8, "line")
    assert "; its line carried 100 MB up and 300 MB down an hour." in forecast(peer)
    assert one_report(fast_peer(), life()).peers[0].bytes_counted == "rounds"


def test_the_timeline_is_in_the_json() -> None:
    events = [{**one, "tick": 4} if one["event"] == "round" else one for one in fast_peer()]
    run = dataclasses.replace(RUN, start_seconds=8.0, began=11.0)
    peers = [PeerRecord(name="8", events=events, life=life(kills=[2.0]))]
    timeline = json.loads(json.dumps(build_report(run, peers).as_json()))["timeline"]
    assert timeline["began_unix_seconds"] == 10.0
    assert timeline["evaluations"] == [{"at_seconds": 6.0, "samples": 64, "loss": 3.5, "peer": "8"}]
    (peer,) = timeline["peers"]
    assert peer["happenings"] == [{"at_seconds": 3.0, "what": "killed"}]
    assert [(one["at_seconds"], one["state"]) for one in peer["rounds"]] == [(4.0, "in"), (4.0, "in"), (4.0, "carried")]


def test_the_forecast_tells_a_life() -> None:
    played = life(joins=[0.0, 40.2], kills=[30.0], freezes=[50.0])
    (peer,) = one_report(fast_peer(), played).peers
    assert forecast(peer).startswith("8 (killed after 30 s, joined after 40 s, frozen after 50 s) took part")


def test_the_forecast_tells_nat_and_want_of_memory() -> None:
    use = MemoryUse(limit_bytes=2 << 30, peak_bytes=600 << 20, kills=0)
    record = PeerRecord(name="8", events=fast_peer(), link="2M/80ms", behind_nat=True, memory=use)
    (peer,) = build_report(RUN, [record]).peers
    assert forecast(peer).startswith("8 on 2 Mbit/s behind NAT took part in 67 %")
    assert memory_in_words(peer) == "8 600 MB of 2 GB"
    assert peer.plan == ""
    reasons = ["2 GB: micro-batch 1 with activation checkpointing.", "And more."]
    planned = dataclasses.replace(record, events=[event(1.0, "plan", reasons=reasons), *record.events])
    assert build_report(RUN, [planned]).peers[0].plan == reasons[0]
    assert (peer.memory_limit_bytes, peer.memory_peak_bytes, peer.memory_kills) == (2 << 30, 600 << 20, 0)
    events = [one for one in fast_peer() if one["event"] == "throughput"]
    starved = PeerRecord(name="8", events=events, killed=True, life=life(joins=[0.0], out_of_memory=[0.0]), memory=use)
    (peer,) = build_report(RUN, [starved]).peers
    assert forecast(peer) == "8 (out of memory at its start) took part in no round."
    assert peer.samples_add_up and peer.out_of_memory == [0.0]


# --- processes: peers that pretend, in place of the program

PRETENDER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

role, directory, argument, behaviour = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4]
directory.mkdir(exist_ok=True)
metrics = (directory / "metrics.jsonl").open("a")


def tell(event, **fields):
    metrics.write(json.dumps({"time": time.time(), "event": event, **fields}) + "\\n")
    metrics.flush()


def leave(*_):
    if behaviour == "stubborn":
        return
    if role == "join":
        tell("leave", training_ended=time.time(), processed_samples=100, credited_samples=60.0, pending_samples=40.0,
             dropped_samples=0.0, inner_steps=12, exact=True, fragments=[])
    sys.exit(0)


signal.signal(signal.SIGTERM, leave)
print(f"[{role}] {argument} {sorted(name for name in os.environ if name.startswith('P2P_'))}", flush=True)
if behaviour == "broken":
    sys.exit("[it] broke")
if behaviour == "starved":
    bytearray(256 << 20)
if behaviour == "littering":
    sockets = Path(sys.argv[5])
    sockets.mkdir()
    (directory / "sockets.path").write_text(str(sockets))
    subprocess.Popen(["sleep", "300"], start_new_session=True)
if role == "bootstrap":
    temporary = Path(argument + ".new")
    temporary.write_text("p2pt1invite\\n")
    temporary.rename(argument)
else:
    tell("throughput", phase="solo", samples_per_second=50.0)
    tell("join", run_id="words-0123", processed_samples=0)
    tell("training_started", processed_samples=0)
    tell("train", samples=8, steps=1, loss=5.0)
    tell("round", fragment=0, version=1, digest="aa", outcome="committed", weight=8)
    tell("account", processed_samples=8, credited_samples=8.0, pending_samples=0.0, dropped_samples=0.0, exact=True)
if behaviour == "hungry":
    time.sleep(0.2)
    bytearray(256 << 20)
while True:
    signal.pause()
"""


class Pretenders:
    """``behaviours`` by the peer's speed, or "bootstrap"."""

    def __init__(self, directory: Path, **behaviours: str) -> None:
        self.script = directory / "pretender.py"
        self.script.write_text(PRETENDER)
        self.behaviours = behaviours
        self.sockets = directory / "p2p-trainer-abc"
        self.invites: list[str] = []

    def bootstrap(self, run: str, directory: Path, invite_file: Path, host: str) -> list[str]:
        return self._command("bootstrap", directory, str(invite_file), "bootstrap")

    def join(self, invite: str, directory: Path, samples_per_second: float, host: str) -> list[str]:
        self.invites.append(invite)
        return self._command("join", directory, invite, f"at{samples_per_second:g}")

    def _command(self, role: str, directory: Path, argument: str, who: str) -> list[str]:
        behaviour = self.behaviours.get(who, "good")
        return [sys.executable, str(self.script), role, str(directory), argument, behaviour, str(self.sockets)]


def quiet_console(tmp_path: Path) -> tuple[Console, Path]:
    path = tmp_path / "output.txt"
    return Console(file=path.open("w"), width=120), path


def memory_can_be_limited() -> bool:
    try:
        with MemoryLimits({"probe": 64 << 20}):
            return True
    except MemoryLimitsUnavailable:
        return False


needs_memory_limits = pytest.mark.skipif(not memory_can_be_limited(), reason="memory cannot be limited here")


def memory_groups() -> set[Path]:
    """Control groups of this process's rehearsals below ours and those around it."""
    around = [group for hierarchy in hierarchies() for group in hierarchy.upwards()]
    return {found for group in around for found in group.glob(f"p2p-trainer-rehearsal-{os.getpid()}-*")}


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def options(tmp_path: Path, **changes: Any) -> RehearseOptions:
    given = {"peers": "80,8", "seconds": 0.1, "directory": tmp_path / "rehearsal", **changes}
    return RehearseOptions(**given)


def test_a_rehearsal_starts_ends_and_reports_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2P_TRAINER_PEER", '["/ip4/203.0.113.7/tcp/1/p2p/Qm"]')
    console, output = quiet_console(tmp_path)
    before = children()
    pretenders = Pretenders(tmp_path)
    wanted = options(tmp_path, json_path=tmp_path / "report.json", html_path=tmp_path / "report.html")
    report = rehearse(wanted, console=console, commands=pretenders)
    assert [(peer.name, peer.exit_code, peer.processed_samples) for peer in report.peers] == [
        ("80", 0, 100),
        ("8", 0, 100),
    ]
    assert report.leftovers == []
    assert children() == before
    assert pretenders.invites == ["p2pt1invite", "p2pt1invite"]
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(report.as_json()))
    page = (tmp_path / "report.html").read_text()
    assert page == (tmp_path / "rehearsal" / "report.html").read_text() and "Rehearsal of words" in page
    assert sorted(one.name for one in tmp_path.glob(".*")) == []
    assert "words-0123, 0.1 s" in output.read_text()
    log = (tmp_path / "rehearsal" / "peer-80.log").read_text()
    assert (
        log == "[join] p2pt1invite ['P2P_TRAINER_ALLOW_FILES', 'P2P_TRAINER_EVAL_SECONDS']\n"
    )  # no settings of the person who rehearses


def test_a_temporary_directory_is_removed_only_if_all_went_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    console, _ = quiet_console(tmp_path)
    monkeypatch.setattr(rehearse_module, "problems", lambda report: [])
    rehearse(options(tmp_path, directory=None), console=console, commands=Pretenders(tmp_path))
    assert list(tmp_path.glob("rehearsal-*")) == []
    rehearse(options(tmp_path, directory=None, keep=True), console=console, commands=Pretenders(tmp_path))
    monkeypatch.setattr(rehearse_module, "problems", lambda report: ["something"])
    rehearse(options(tmp_path, directory=None), console=console, commands=Pretenders(tmp_path))
    assert len(list(tmp_path.glob("rehearsal-*"))) == 2


def test_peers_come_go_and_are_killed_as_the_scene_says(tmp_path: Path) -> None:
    console, _ = quiet_console(tmp_path)
    before = children()
    peers = "80!0.1@0.5-,40@-0.2,20@0.2-,10~0.2-0.6,8!0.3"
    pretenders = Pretenders(tmp_path, at8="littering")
    report = rehearse(options(tmp_path, peers=peers, seconds=1.5), console=console, commands=pretenders)
    assert children() == before
    back, left, late, frozen, killed = report.peers
    assert [len(peer.joins) for peer in report.peers] == [2, 1, 1, 1, 1]
    assert [len(peer.kills) for peer in report.peers] == [1, 0, 0, 0, 1]
    assert (len(left.leaves), len(frozen.freezes), late.joins[0] >= 0.2) == (1, 1, True)
    assert back.joins[0] == 0.0 and back.joins[1] >= 0.5
    assert [peer.killed for peer in report.peers] == [False, False, False, False, True]
    assert (left.exit_code, frozen.exit_code, killed.exit_code) == (0, 0, -signal.SIGKILL)
    assert (killed.processed_samples, killed.samples_add_up) == (8, True)
    assert not any("exit code" in one or "was killed" in one for one in problems(report))
    # It was killed on purpose, so its sockets are no leftover; what outlived it is.
    assert [one.split()[-1] for one in report.leftovers] in ([], ["(sleep)"])
    assert not pretenders.sockets.exists()


def test_a_peer_that_does_not_leave_when_its_time_has_come_is_killed_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearse_module, "END_SECONDS", 0.2)
    console, _ = quiet_console(tmp_path)
    commands = Pretenders(tmp_path, at8="stubborn")
    report = rehearse(options(tmp_path, peers="80,8@-0.1", seconds=1.0), console=console, commands=commands)
    assert (report.peers[1].exit_code, report.peers[1].killed) == (-signal.SIGKILL, False)
    assert "peer 8 did not leave in time and was killed" in problems(report)


def test_without_links_the_peers_meet_over_loopback_and_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulation, "available", lambda: Availability("not permitted"))
    console, output = quiet_console(tmp_path)
    report = rehearse(options(tmp_path, peers="80:10M/20ms,8"), console=console, commands=Pretenders(tmp_path))
    assert output.read_text().count("(not permitted): they all meet over loopback") == 1
    assert [peer.link for peer in report.peers] == ["", ""]
    assert [peer.behind_nat for peer in report.peers] == [False, False]


@needs_memory_limits
def test_a_peer_that_runs_out_of_memory_is_a_result_and_the_others_go_on(tmp_path: Path) -> None:
    console, output = quiet_console(tmp_path)
    before, groups = children(), memory_groups()
    pretenders = Pretenders(tmp_path, at8="hungry")
    peers = "80:mem=64M,8:mem=64M!2@2.5-,40"
    report = rehearse(options(tmp_path, peers=peers, seconds=3.0), console=console, commands=pretenders)
    fine, hungry, unlimited = report.peers
    assert children() == before and memory_groups() == groups and report.leftovers == []
    assert (fine.memory_limit_bytes, fine.memory_kills, fine.exit_code) == (64 << 20, 0, 0)
    assert 0 < (fine.memory_peak_bytes or 0) < 64 << 20
    assert (hungry.memory_peak_bytes, hungry.memory_kills, hungry.killed) == (64 << 20, 1, True)
    assert (len(hungry.out_of_memory), hungry.kills, hungry.exit_code) == (1, [], -signal.SIGKILL)
    assert (unlimited.memory_limit_bytes, unlimited.memory_peak_bytes, unlimited.memory_kills) == (None, None, 0)
    (told,) = [one for one in problems(report) if "peer 8 " in one]
    assert "64 MB do not suffice" in told and "mem=SIZE" in told
    said = output.read_text()
    assert "Peer 8 ran out of memory (64 MB), and the others go on." in said
    assert "8 64 MB of 64 MB, 1 of its processes killed for want of it" in said


@needs_memory_limits
def test_when_all_run_out_of_memory_the_rehearsal_ends_and_says_so(tmp_path: Path) -> None:
    console, _ = quiet_console(tmp_path)
    before, groups = children(), memory_groups()
    pretenders = Pretenders(tmp_path, at8="starved")
    with pytest.raises(RehearsalError, match="Every peer ran out of memory") as caught:
        rehearse(options(tmp_path, peers="8:mem=64M*2"), console=console, commands=pretenders)
    assert "mem=SIZE" in caught.value.remedy
    assert children() == before and memory_groups() == groups


def test_memory_that_cannot_be_limited_is_told_in_a_line_and_nothing_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_limits, "hierarchies", lambda proc=None: [])
    console, output = quiet_console(tmp_path)
    report = rehearse(options(tmp_path, peers="80:mem=64M,8"), console=console, commands=Pretenders(tmp_path))
    assert output.read_text().count("Memory cannot be limited here (no cgroup with the memory controller") == 1
    assert [peer.memory_peak_bytes for peer in report.peers] == [None, None]


def test_a_memory_that_this_computer_does_not_have_is_told_and_is_no_limit(tmp_path: Path) -> None:
    console, output = quiet_console(tmp_path)
    report = rehearse(options(tmp_path, peers="80:mem=900000G,8"), console=console, commands=Pretenders(tmp_path))
    assert report.peers[0].memory_limit_bytes is None
    if memory_can_be_limited():
        assert "so these have no limit: 80 (900000 GB)." in output.read_text()


@pytest.mark.parametrize(("who", "name"), [("bootstrap", "bootstrap"), ("at8", "peer-8")])
def test_a_process_that_ends_early_is_named_and_its_log_shown(tmp_path: Path, who: str, name: str) -> None:
    console, output = quiet_console(tmp_path)
    before = children()
    with pytest.raises(RehearsalError, match=r"exit code 1") as caught:
        rehearse(options(tmp_path, seconds=60.0), console=console, commands=Pretenders(tmp_path, **{who: "broken"}))
    assert name.removeprefix("peer-") in caught.value.problem
    assert str(tmp_path / "rehearsal" / f"{name}.log") in caught.value.remedy
    assert "[it] broke" in output.read_text()
    assert f"kept in {tmp_path / 'rehearsal'}" in output.read_text()
    assert children() == before


def test_what_outlives_its_peer_is_counted_and_then_ended(tmp_path: Path) -> None:
    console, _ = quiet_console(tmp_path)
    before = children()
    pretenders = Pretenders(tmp_path, at8="littering")
    report = rehearse(options(tmp_path), console=console, commands=pretenders)
    process, sockets = report.leftovers
    assert report.leftover_processes == 2
    assert process.endswith("(sleep)")
    assert sockets == f"sockets in {pretenders.sockets}"
    assert not pretenders.sockets.exists()
    pid = int(process.split()[1])
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert children() == before


def test_a_peer_that_does_not_leave_is_killed_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearse_module, "END_SECONDS", 0.5)
    console, output = quiet_console(tmp_path)
    report = rehearse(options(tmp_path), console=console, commands=Pretenders(tmp_path, at8="stubborn"))
    assert [peer.exit_code for peer in report.peers] == [0, -signal.SIGKILL]
    assert "peer 8 did not leave in time and was killed" in output.read_text()


def test_a_peer_that_does_not_begin_in_time_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearse_module, "INVITE_SECONDS", -1.0)
    console, _ = quiet_console(tmp_path)
    with pytest.raises(RehearsalError, match="no invite"):
        rehearse(options(tmp_path), console=console, commands=Pretenders(tmp_path))


def test_the_time_to_start_in_grows_with_model_lines_and_slowness() -> None:
    manifest = parse_manifest(example_manifest("stdlib-text"), source="a test")

    def limit(peers: str, model_bytes: float = 0) -> float:
        return start_limit_seconds(parse_peers(peers), manifest, int(model_bytes))

    usual = limit("80,40,20,8")
    assert START_SECONDS < usual < 300
    # 1 GB over 10 Mbit/s takes 800 s; the fast line of another does not help.
    assert limit("80:1G,40:10M", 1e9) > usual + 800 > limit("80:1G,40:1G", 1e9)
    assert limit("40:2M,40:10M", 1e9) > usual + 4000
    assert limit("40*8", 1e10) > limit("40*2", 1e10) + 1000, "they share the donor"
    assert limit("40:10M/50%", 1e9) > limit("40:10M", 1e9) + 800
    assert limit("laptop-cpu") > limit("80") + 2 * 8 / 0.3
    assert limit("80:3s/20%") > 216


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_term_end_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    console, _ = quiet_console(tmp_path)
    before = children()
    handler = signal.getsignal(signal.SIGTERM)
    train = rehearse_module.Rehearsal._train

    def interrupted(self: rehearse_module.Rehearsal) -> None:
        os.kill(os.getpid(), number)
        train(self)

    monkeypatch.setattr(rehearse_module.Rehearsal, "_train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rehearse(options(tmp_path, seconds=60.0), console=console, commands=Pretenders(tmp_path))
    assert children() == before
    assert signal.getsignal(signal.SIGTERM) is handler
    assert '"leave"' in (tmp_path / "rehearsal" / "peer-8" / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"peers": "80,fast"}, UsageError, "'fast'"),
        ({"seconds": 0.0}, UsageError, "--seconds 0"),
        ({"seconds": float("nan")}, UsageError, "--seconds nan"),
        ({"json_path": Path("/nonexistent/report.json")}, DirectoryError, "/nonexistent/report.json"),
        ({"html_path": Path("/nonexistent/report.html")}, DirectoryError, "/nonexistent/report.html"),
        ({"html_path": Path("/proc/report.html")}, DirectoryError, "/proc/report.html"),
        ({"html_path": Path("/tmp")}, DirectoryError, "/tmp"),
        ({"html_path": Path("/tmp", 300 * "x")}, DirectoryError, "xxx"),
        ({"html_path": Path("/tmp/same"), "json_path": Path("/tmp/same")}, UsageError, "same file"),
    ],
)
def test_options_that_cannot_be_used_are_told_before_anything_starts(
    tmp_path: Path, changes: dict[str, Any], kind: type[P2PTrainerError], words: str
) -> None:
    console, _ = quiet_console(tmp_path)
    with pytest.raises(kind) as caught:
        rehearse(options(tmp_path, **changes), console=console, commands=Pretenders(tmp_path))
    assert words in caught.value.problem
    assert not (tmp_path / "rehearsal").exists()


def test_a_manifest_that_is_not_there_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"nowhere\.toml"):
        rehearse(options(tmp_path, run=str(tmp_path / "nowhere.toml")), commands=Pretenders(tmp_path))


def test_a_directory_of_an_earlier_rehearsal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rehearsal" / "peer-80").mkdir(parents=True)
    with pytest.raises(DirectoryError, match="not empty"):
        rehearse(options(tmp_path), commands=Pretenders(tmp_path))


def test_the_commands_are_those_of_the_program() -> None:
    commands = ProgramCommands()
    bootstrap = commands.bootstrap("digits", Path("/d/bootstrap"), Path("/d/invite.txt"), "127.0.0.1")
    join = commands.join("p2pt1x", Path("/d/peer-8"), 8.5, "198.18.0.2")
    assert bootstrap[:5] == [sys.executable, "-m", "p2p_trainer", "bootstrap", "digits"]
    assert join[:5] == [sys.executable, "-m", "p2p_trainer", "join", "p2pt1x"]
    assert join[join.index("--emulate") + 1] == "8.5"
    assert [command[command.index("--host") + 1] for command in (bootstrap, join)] == ["127.0.0.1", "198.18.0.2"]


def test_a_report_never_takes_the_place_of_a_device(tmp_path: Path) -> None:
    link = tmp_path / "nowhere"
    link.symlink_to("/dev/null")
    check_report_path(link, "--json")
    write_report(link, "{}", "--json")
    assert link.is_symlink() and os.listdir(tmp_path) == ["nowhere"]
    written = tmp_path / "report.json"
    check_report_path(written, "--json")
    write_report(written, "{}", "--json")
    assert written.read_text() == "{}" and sorted(os.listdir(tmp_path)) == ["nowhere", "report.json"]


def test_a_report_of_a_run_that_diverged_is_json(tmp_path: Path) -> None:
    write_json(tmp_path / "report.json", {"held_out": [(1.0, math.nan), (2.0, math.inf)]}, "--json")
    assert json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail) == {
        "held_out": [[1.0, None], [2.0, None]]
    }
