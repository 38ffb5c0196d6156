"""A rehearsal with lines of its own and a peer that is killed: what it tells is what happened, and nothing is left."""

from __future__ import annotations

import json
import signal

import pytest
from harness import Swarm, needs_links

pytestmark = [pytest.mark.swarm, pytest.mark.namespaces, needs_links]


def test_a_killed_peer_on_a_slow_line_is_told_and_the_other_goes_on(swarm: Swarm) -> None:
    report_file = swarm.path / "report.json"
    rehearsal = swarm.run(
        "rehearsal",
        *("rehearse", "digits", "--peers", "40:50M/20ms:mem=2G,20:10M/2M/40ms:nat!12", "--minutes", "0.4"),
        *("--json", str(report_file), "--dir", str(swarm.path / "rehearsal")),
    )
    assert rehearsal.exit_code(within_seconds=240) == 0, rehearsal.text
    page = (swarm.path / "rehearsal" / "report.html").read_text()
    assert "killed after 12 s" in page and "by its network interface" in page
    report = json.loads(report_file.read_text())
    stayed, killed = report["peers"]
    assert (stayed["link"], killed["link"]) == ("50M/20ms", "10M/2M/40ms")
    assert (stayed["exit_code"], stayed["kills"]) == (0, [])
    assert (killed["exit_code"], killed["killed"], len(killed["kills"])) == (-signal.SIGKILL, True, 1)
    for peer in report["peers"]:
        assert peer["rounds_committed"] > 0 and peer["credited_samples"] > 0 and peer["samples_add_up"]
        assert peer["bytes_sent_per_hour"] > 0 and peer["bytes_received_per_hour"] > 0
        assert peer["bytes_counted"] == "line"
    timelines = report["timeline"]["peers"]
    assert [[one["what"] for one in peer["happenings"]] for peer in timelines] == [[], ["killed"]]
    (killed_at,) = (one["at_seconds"] for one in timelines[1]["happenings"])
    assert max(one["at_seconds"] for one in timelines[1]["rounds"]) < killed_at
    assert max(one["at_seconds"] for one in timelines[0]["rounds"]) > killed_at
    assert killed["window_seconds"] < stayed["window_seconds"]
    assert report["digests_agree"] and report["leftovers"] == []
    assert (stayed["behind_nat"], killed["behind_nat"]) == (False, True)
    if "Memory cannot be limited here" not in rehearsal.text:
        assert 100e6 < stayed["memory_peak_bytes"] < stayed["memory_limit_bytes"] == 2 << 30
        assert stayed["memory_kills"] == 0
    said = " ".join(rehearsal.text.split())
    assert "20 on 10 Mbit/s down and 2 Mbit/s up behind NAT (killed after 12 s) took part in" in said
    assert "exit code" not in rehearsal.text
