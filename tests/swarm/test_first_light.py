"""The product's headline: unequal peers train real text together, nothing is lost, nothing is left."""

from __future__ import annotations

import json

import pytest
from harness import Swarm

pytestmark = pytest.mark.swarm


def test_four_unequal_peers_train_one_model_and_leave_nothing_behind(swarm: Swarm) -> None:
    report_file = swarm.path / "report.json"
    rehearsal = swarm.run(
        "rehearsal",
        *("rehearse", "--peers", "80,40,20,8", "--seconds", "25", "--json", str(report_file)),
        *("--dir", str(swarm.path / "rehearsal")),
    )
    assert rehearsal.exit_code(within_seconds=240) == 0
    report = json.loads(report_file.read_text())
    assert report["digests_agree"] and report["digests_compared"] >= 4
    assert [peer["name"] for peer in report["peers"]] == ["80", "40", "20", "8"]
    for peer in report["peers"]:
        assert peer["samples_add_up"] and peer["exit_code"] == 0
        assert peer["rounds_committed"] > 0 and peer["credited_samples"] > 0
    assert report["held_out_loss"][-1][1] < report["held_out_loss"][0][1]
    assert 0 < report["credited_efficiency"] <= report["efficiency"]
    assert report["leftover_processes"] == 0
