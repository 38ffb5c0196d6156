"""Real gradients on a virtual clock: peers learn, every sample is accounted for, the same seed is the same."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dht_config.errors import UsageError
from dht_config.manifest import RunManifest, example_manifest, parse_manifest
from p2p_trainer.rehearsal.rehearse import RehearseOptions
from p2p_trainer.rehearsal.scene import Life, Scene, Stay, parse_peers
from p2p_trainer.simulation.virtual_time import VirtualRehearsal, played, rehearse_in_virtual_time


def manifest_of(**sections: dict[str, Any]) -> RunManifest:
    table = parse_manifest(example_manifest("digits"), "the example").model_dump()
    for name, values in sections.items():
        table[name] |= values
    return RunManifest.model_validate(table)


def rehearsed(peers: str, seconds: float = 14.0, manifest: RunManifest | None = None) -> VirtualRehearsal:
    rehearsal = VirtualRehearsal(Scene(peers=parse_peers(peers, seconds), seconds=seconds), manifest or manifest_of())
    rehearsal.report = rehearsal.run()  # type: ignore[attr-defined]
    return rehearsal


def report_of(rehearsal: VirtualRehearsal) -> Any:
    return rehearsal.report  # type: ignore[attr-defined]


def test_unequal_peers_learn_together_and_are_credited_with_what_they_did() -> None:
    rehearsal = rehearsed("80,40,20", seconds=24.0)
    report = report_of(rehearsal)
    (_, _, first), *_, (at, samples, last) = rehearsal.held_out
    assert at == 24.0 and last < 0.7 * first
    assert samples == pytest.approx(140 * 24, rel=0.12)
    assert report.digests_agree and report.digests_compared > 15 and not report.digest_conflicts
    assert all(peer.samples_add_up for peer in report.peers)
    assert [peer.share for peer in report.peers] == pytest.approx([4 / 7, 2 / 7, 1 / 7], abs=0.03)
    assert report.efficiency > 0.97


@pytest.mark.parametrize("codec", ["int8", "sparse"])
def test_peers_end_on_the_same_bits_whatever_a_codec_leaves_out(codec: str) -> None:
    rehearsal = rehearsed("80,40,20", manifest=manifest_of(averaging={"codec": codec, "answer_codec": "int8"}))
    report = report_of(rehearsal)
    assert report.digests_agree and all(peer.samples_add_up for peer in report.peers)
    assert rehearsal.held_out[-1][2] < rehearsal.held_out[0][2]


def test_groups_of_two_end_on_the_same_bits() -> None:
    report = report_of(rehearsed("40*5", manifest=manifest_of(averaging={"target_group_size": 2})))
    assert report.digests_agree and report.peers[0].rounds_committed > 8


def test_lives_on_slow_lines_lose_no_sample_that_was_not_killed() -> None:
    report = report_of(rehearsed("40:1M/40ms,20:2M/80ms@-8@12-,20!9@13-,10~5-7", seconds=24.0))
    left, killed = report.peers[1], report.peers[2]
    assert report.digests_agree and all(peer.samples_add_up for peer in report.peers)
    assert left.joins == [0.0, 12.0] and left.leaves == [8.0] and left.dropped_samples == 0
    assert killed.kills == [9.0] and killed.dropped_samples > 0
    assert all(peer.rounds_committed > 5 for peer in report.peers)


def test_the_same_seed_gives_the_same_file_and_another_seed_another(tmp_path: Path) -> None:
    texts = []
    for number, seed in enumerate((1, 1, 2)):
        path = tmp_path / f"{number}.json"
        options = RehearseOptions(peers="40,20", seconds=12.0, seed=seed, run="digits", json_path=path)
        rehearse_in_virtual_time(options, Console(file=io.StringIO()))
        texts.append(path.read_text())
    assert texts[0] == texts[1] != texts[2]
    table = json.loads(texts[0])
    assert table["simulated"] is True
    assert [loss for _, loss in table["held_out_loss_by_samples"]] == [loss for _, loss in table["held_out_loss"]]


def test_a_report_says_that_it_is_simulated() -> None:
    out = io.StringIO()
    rehearse_in_virtual_time(RehearseOptions(peers="40", seconds=5.0, run="digits"), Console(file=out, width=120))
    assert out.getvalue().count("imulated") >= 2


def test_averaged_gradients_are_not_played(tmp_path: Path) -> None:
    text = example_manifest("digits").replace('mode = "local"', 'mode = "gradient"\nglobal_batch = 64')
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match="local"):
        rehearse_in_virtual_time(RehearseOptions(peers="40", run=str(path)), Console(file=io.StringIO()))


def test_only_what_happened_before_the_end_is_told_of_a_life() -> None:
    life = Life(stays=(Stay(0.0, 5.0), Stay(8.0, 30.0, killed=True)), frozen=((9.0, 40.0),))
    told = played(life, 20.0)
    assert (told.joins, told.leaves, told.kills, told.frozen_at) == ([0.0, 8.0], [5.0], [], [(9.0, 20.0)])
