"""The side-by-side benchmark's own arithmetic: numbers that people compare must be right before they are measured."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import side_by_side
from side_by_side_figures import (
    PeerRun,
    Run,
    choose_losses,
    curve_of_evaluations,
    curve_of_snapshots,
    least_own_rate,
    loss_at_samples,
    seconds_to_loss,
    seconds_to_recover,
    slow_credited,
    summarise,
    value_at,
)
from side_by_side_rivals import HIVEMIND_MODES, TRAIN, RivalConfig
from side_by_side_scenes import (
    ALONE,
    CONTENDERS,
    CYCLE_SECONDS,
    DDP,
    HIVEMIND,
    OURS,
    OURS_WITHOUT_CURSED,
    RUN,
    SCENES,
    Flapping,
    LineChange,
    batches,
    contenders_of,
    load_scene,
    manifest_text,
    proportional_batches,
)
from side_by_side_tables import notes, print_tables, rows

from dht_config.manifest import example_manifest, parse_manifest

WHOLE = [(0.0, 0.0), (90.0, 900.0)]
"""Ten samples a second for as long as a run is."""


def peer(name: str = "a", **changed: Any) -> PeerRun:
    fields: dict[str, Any] = {
        "name": name,
        "speed": 10.0,
        "solo": 9.0,
        "lived_seconds": 90.0,
        "processed": 900.0,
        "credited": 900.0,
        "bytes_received": 9e6,
        "bytes_sent": 18e6,
        "progress": WHOLE,
        "work": WHOLE,
    }
    return PeerRun(**{**fields, **changed})


def run(contender: str = OURS, scene: str = "reference", **changed: Any) -> Run:
    fields: dict[str, Any] = {
        "contender": contender,
        "seed": 0,
        "scene": load_scene(scene, 90.0),
        "peers": [
            peer(one.name, speed=one.samples_per_second) for one in load_scene(scene, 90.0).taking_part(contender)
        ],
        "rounds": 20.0,
        "parameters": 1000,
        "curve": [(0.0, 0.0, 5.0), (45.0, 5000.0, 3.0), (90.0, 10000.0, 2.0)],
        "cpu": [(0.0, 5.0), (90.0, 50.0)],
        "machine": [(0.0, 0.0), (90.0, 90.0)],
        "window": (0.0, 90.0),
    }
    return Run.of(**{**fields, **changed})


# ---------------------------------------------------------------------- scenes


@pytest.mark.parametrize("name", SCENES)
def test_every_scene_has_the_fastest_peer_first_and_names_only_peers_that_it_has(name: str) -> None:
    scene = load_scene(name, 90.0)
    speeds = [one.samples_per_second for one in scene.peers]
    assert speeds == sorted(speeds, reverse=True)
    names = {one.name for one in scene.peers}
    assert len(names) == len(scene.peers)
    assert {*scene.killed, *scene.flapping, *scene.throttled} <= names
    assert all(one.link is not None for one in scene.peers)


def test_the_reference_cluster_is_as_described_and_the_fastest_is_not_on_the_fastest_line() -> None:
    peers = load_scene("reference", 90.0).peers
    slowest = peers[-1].samples_per_second
    assert [one.samples_per_second / slowest for one in peers] == [20, 10, 5, 4, 2, 2, 1, 1]
    links = [one.link for one in peers if one.link is not None]
    assert sorted(link.up_bits_per_second / 1e6 for link in links) == [10, 20, 30, 50, 100, 100, 300, 1000]
    assert {link.round_trip_ms for link in links} <= set(range(10, 81))
    assert links[0].up_bits_per_second < max(link.up_bits_per_second for link in links)


def test_the_cursed_scene_is_the_reference_and_one_more_of_a_hundredth_of_the_speed_on_a_bad_line() -> None:
    reference, cursed = load_scene("reference", 90.0), load_scene("cursed", 90.0)
    assert cursed.peers[:-1] == reference.peers
    assert cursed.peers[-1].samples_per_second == cursed.peers[0].samples_per_second / 100
    assert cursed.flapping == (cursed.peers[-1].name,)
    assert cursed.taking_part(OURS_WITHOUT_CURSED) == reference.peers


def test_killed_are_about_30_percent_of_the_speed_while_all_train() -> None:
    scene = load_scene("killed", 90.0)
    lost = sum(one.samples_per_second for one in scene.peers if one.name in scene.killed)
    assert 0.25 < lost / scene.samples_per_second < 0.35
    assert scene.kill_at_seconds is not None and 0 < scene.kill_at_seconds < scene.seconds
    assert scene.lived_seconds(scene.killed[0]) == scene.kill_at_seconds
    assert scene.lived_seconds(scene.peers[0].name) == scene.seconds


def test_who_takes_part() -> None:
    scene = load_scene("8421", 90.0)
    assert [one.samples_per_second for one in scene.taking_part("fastest_alone")] == [80]
    assert [one.samples_per_second for one in scene.taking_part("one_machine")] == [150]
    assert scene.taking_part("ddp_equal") == scene.peers


def test_what_runs_in_a_scene() -> None:
    assert contenders_of("reference", CONTENDERS) == CONTENDERS
    assert contenders_of("cursed", ("ddp_equal", OURS)) == ("ddp_equal", OURS_WITHOUT_CURSED, OURS)
    assert not set(ALONE) & set(contenders_of("killed", CONTENDERS))
    assert set(TRAIN) == set(CONTENDERS) - {OURS}
    assert set(HIVEMIND_MODES) == set(HIVEMIND)


def test_a_flapping_line_is_up_at_the_end() -> None:
    moments = list(Flapping(up_seconds=15, down_seconds=5).moments(41))
    assert moments == [(15, False), (20, True), (35, False), (40, True)]
    assert list(Flapping(up_seconds=15, down_seconds=5).moments(39)) == [(15, False), (20, True)]


def test_lines_change_for_those_who_have_one() -> None:
    scene = load_scene("throttled", 90.0)
    slow, as_before = scene.line_changes(OURS)
    assert (slow.at_seconds, slow.peer, str(slow.link)) == (30.0, "20", "256k/80ms")
    assert as_before == LineChange(60.0, "20", scene.peers[2].link)
    assert not scene.line_changes("fastest_alone")
    flapping = load_scene("cursed", 90.0)
    assert [change.link is None for change in flapping.line_changes(OURS)[:2]] == [True, False]
    assert not flapping.line_changes(OURS_WITHOUT_CURSED)


def test_proportional_batches_are_exact_where_a_total_allows_it() -> None:
    assert proportional_batches([60, 30, 15, 12, 6, 6, 3, 3], 64) == [20, 10, 5, 4, 2, 2, 1, 1]
    assert proportional_batches([80, 40, 20, 10], 32) == [16, 8, 4, 2]
    assert proportional_batches([30, 30], 16) == [8, 8]


def test_a_share_may_be_rounded_to_nothing_and_none_is_lost() -> None:
    shares = proportional_batches([60, 30, 15, 12, 6, 6, 3, 3, 0.6], 72)
    assert shares[-1] == 0
    assert 0.7 * 72 <= sum(shares) <= 1.3 * 72


@pytest.mark.parametrize("peers", [4, 8])
def test_our_cycle_is_as_long_whatever_the_number_of_peers(peers: int) -> None:
    manifest = parse_manifest(manifest_text(peers), "the benchmark")
    assert manifest.run.tick_seconds * manifest.run.fragments == CYCLE_SECONDS
    assert manifest.inner_optimizer == parse_manifest(example_manifest(RUN), RUN).inner_optimizer
    assert manifest.run.fragments == (4 if peers == 4 else 2)


def test_batches_of_each_contender() -> None:
    speeds = [60.0, 30.0, 3.0]
    assert batches("ddp_equal", speeds, 8) == batches("hivemind_local", speeds, 8) == [8, 8, 8]
    assert batches("hivemind_sync", speeds, 8) == [8, 7, 1]
    assert sum(batches(DDP[1], speeds, 8)) == pytest.approx(24, rel=0.3)


# --------------------------------------------------------------------- figures


def test_values_between_points_and_outside_of_them() -> None:
    assert value_at([(1.0, 10.0), (3.0, 30.0)], 2.0) == 20.0
    assert value_at([(1.0, 10.0)], 0.0) == value_at([(1.0, 10.0)], 9.0) == 10.0
    assert value_at([], 1.0) == 0.0


def test_efficiency_and_where_the_time_went_add_up() -> None:
    scene = load_scene("equal", 90.0)
    peers = [peer(one.name, speed=30.0, processed=2160.0, credited=1890.0) for one in scene.peers]
    figures = run("hivemind_sync", "equal", peers=peers)
    assert figures.efficiency == pytest.approx(0.7)
    assert figures.compute == pytest.approx(0.8)
    assert figures.waiting == pytest.approx(0.2)
    assert figures.rejected == pytest.approx(0.1)
    assert figures.cpu_share == pytest.approx(45 / 90 / (os.cpu_count() or 1))


def test_a_killed_peer_counts_for_as_long_as_it_lived() -> None:
    scene = load_scene("killed", 90.0)
    peers = [
        peer(
            one.name,
            speed=one.samples_per_second,
            lived_seconds=scene.lived_seconds(one.name),
            processed=one.samples_per_second * scene.lived_seconds(one.name),
            credited=one.samples_per_second * scene.lived_seconds(one.name),
        )
        for one in scene.peers
    ]
    assert run("hivemind_local", "killed", peers=peers).efficiency == pytest.approx(1.0)


def test_machines_that_a_contender_does_not_use_count_as_unused() -> None:
    alone = run("fastest_alone", peers=[peer("60", speed=60.0, processed=5400.0, credited=5400.0)])
    assert alone.efficiency == pytest.approx(60 / 135)
    assert alone.bytes_per_parameter_up is None
    without = run(OURS_WITHOUT_CURSED, "cursed", peers=[peer("60", speed=60.0, processed=5400.0, credited=5400.0)])
    assert without.efficiency == pytest.approx(1.0)


def test_bytes_are_those_of_a_parameter_and_a_round() -> None:
    figures = run()
    assert figures.bytes_per_parameter_up == pytest.approx(18e6 / 1000 / 20)
    assert figures.bytes_per_parameter_down == pytest.approx(9e6 / 1000 / 20)
    assert figures.kilobytes_per_second_up == pytest.approx(200)
    assert run(rounds=0.0).bytes_per_parameter_up is None


def test_what_is_pending_counts_where_it_is_said() -> None:
    figures = run(counted=0.95 * 135 * 90)
    assert figures.efficiency == pytest.approx(0.95)
    assert figures.credited_efficiency == pytest.approx(8 * 900 / (135 * 90))


def test_a_swarm_has_recovered_when_the_survivors_are_credited_what_they_do_alone() -> None:
    stalled = [(0.0, 0.0), (36.0, 360.0), (46.0, 360.0), (90.0, 800.0)]
    assert seconds_to_recover([peer(progress=WHOLE)], 36.0, 90.0) == 0.0
    assert seconds_to_recover([peer(progress=stalled)], 36.0, 90.0) == pytest.approx(10.0)
    assert seconds_to_recover([peer(progress=[(0.0, 0.0), (36.0, 360.0)])], 36.0, 90.0) is None


def test_own_rates_are_those_of_the_worst_third_and_of_whose_line_is_as_it_was() -> None:
    scene = load_scene("throttled", 90.0)
    held_up = [(0.0, 0.0), (30.0, 300.0), (60.0, 570.0), (90.0, 870.0)]
    dead = [(0.0, 0.0), (90.0, 0.0)]
    peers = [peer("80"), peer("40", work=held_up), peer("20", work=dead)]
    assert least_own_rate(scene, peers) == pytest.approx(0.9)
    assert least_own_rate(load_scene("8421", 90.0), peers) is None


def test_who_was_throttled_has_recovered_when_it_is_credited_as_before() -> None:
    back = [(0.0, 0.0), (30.0, 300.0), (67.0, 300.0), (90.0, 530.0)]
    found = run(scene="throttled", peers=[peer("80"), peer("40"), peer("20", progress=back), peer("10")])
    assert found.seconds_to_recover == pytest.approx(7, abs=1)


def test_of_the_slowest_line_what_is_credited_counts() -> None:
    peers = [peer("80", credited=0.0), peer("10", processed=100.0, credited=80.0)]
    assert slow_credited(load_scene("lines", 90.0), peers) == pytest.approx(0.8)


def test_seconds_to_a_loss_are_on_the_line_between_two_evaluations() -> None:
    curve = [(0.0, 0.0, 5.0), (10.0, 100.0, 4.0), (20.0, 200.0, 2.0), (30.0, 300.0, 2.5)]
    assert seconds_to_loss(curve, 5.5) == 0.0
    assert seconds_to_loss(curve, 3.0) == 15.0
    assert seconds_to_loss(curve, 2.0) == 20.0
    assert seconds_to_loss(curve, 1.9) is None
    assert loss_at_samples(curve, 150.0) == 3.0


def test_the_losses_are_three_that_most_contenders_reach() -> None:
    reached = {"ours": 1.5, "one_machine": 1.0, "fastest_alone": 2.0, "ddp_equal": 4.0}
    runs = [run(name, curve=[(0.0, 0.0, 5.0), (90.0, 9.0, loss)]) for name, loss in reached.items()]
    losses = choose_losses(runs)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == 2.0
    assert losses[0] == pytest.approx(2.0 + 0.4 * 3.0)


def test_samples_of_a_snapshot_are_those_of_all_peers() -> None:
    processed = [[(100.0, 0.0), (110.0, 100.0)], [(100.0, 0.0), (110.0, 10.0)]]
    losses = [(100.0, 5.0), (105.0, 4.0), (120.0, 3.0)]
    assert curve_of_snapshots(losses, processed, 100.0, 115.0) == [(0.0, 0.0, 5.0), (5.0, 55.0, 4.0)]


def test_evaluations_of_all_peers_are_one_curve_of_the_newest_base() -> None:
    events = [
        {"time": 12.0, "samples": 20, "loss": 4.0},
        {"time": 9.0, "samples": 0, "loss": 5.0},
        {"time": 11.0, "samples": 10, "loss": None},
        {"time": 13.0, "samples": 10, "loss": 4.5},
    ]
    assert curve_of_evaluations(events, 10.0) == [(0.0, 0.0, 5.0), (2.0, 20.0, 4.0)]


# ------------------------------------------------------------- JSON and tables


def document(*runs: Run, scene: str = "reference") -> dict[str, Any]:
    played = load_scene(scene, 90.0)
    found = {"scene": scene, "seconds": 90.0, "cores": 2, "killed": list(played.killed), "throttled": [], "runs": []}
    # Through JSON, as --resume and --show read it.
    tables = json.loads(json.dumps([one.as_json() for one in runs]))
    return {**found, **summarise([Run.from_json(table) for table in tables])}


def test_the_json_has_what_other_tools_rely_on() -> None:
    found = document(run(), run("ddp_equal"), run("fastest_alone"))
    assert found["scene"] == "reference"
    assert set(found["contenders"]) == {OURS, "ddp_equal", "fastest_alone"}
    for table in found["contenders"].values():
        assert {
            *("efficiency", "seconds_to_loss", "final_loss", "bytes_per_parameter_up", "bytes_per_parameter_down"),
            *("cursed_ratio", "seconds_to_recover", "seconds_to_first_credit", "spread"),
        } <= set(table)
        assert len(table["seconds_to_loss"]) == 3
    assert found["contenders"][OURS]["cursed_ratio"] is None
    assert found["contenders"][OURS]["seconds_to_recover"] is None


def test_figures_of_several_seeds_are_means_with_their_spread() -> None:
    found = document(run(counted=0.9 * 135 * 90), run(seed=1, counted=0.96 * 135 * 90))["contenders"][OURS]
    assert found["efficiency"] == pytest.approx(0.93)
    assert found["spread"]["efficiency"] == pytest.approx([0.9, 0.96])
    assert found["seeds"] == [0, 1]


def test_a_loss_that_one_seed_did_not_reach_has_no_mean_time() -> None:
    short = run(seed=1, curve=[(0.0, 0.0, 5.0), (90.0, 100.0, 4.9)])
    others = [run("one_machine"), run("fastest_alone")]
    times = document(run(), short, *others)["contenders"][OURS]["seconds_to_loss"]
    assert set(times.values()) == {None}


def test_the_cursed_ratio_is_the_rate_with_over_the_rate_without() -> None:
    with_it = run(OURS, "cursed", peers=[peer(progress=[(0.0, 0.0), (90.0, 891.0)])])
    without = run(OURS_WITHOUT_CURSED, "cursed", peers=[peer()])
    found = document(with_it, without, scene="cursed")
    assert found["contenders"][OURS]["cursed_ratio"] == pytest.approx(0.99)
    assert OURS_WITHOUT_CURSED not in found["contenders"]


def test_the_table_says_where_a_rival_wins_and_who_did_not_survive(capsys: pytest.CaptureFixture[str]) -> None:
    better = run("one_machine", curve=[(0.0, 0.0, 5.0), (10.0, 5000.0, 2.0), (90.0, 10000.0, 1.0)])
    dead = run("ddp_equal", "killed", ended="RuntimeError: [gloo/pair.cc] Connection closed by peer [198.18.0.2]")
    found = document(run(scene="killed"), better, dead, scene="killed")
    said = "\n".join(notes(found))
    assert "one_machine is ahead of ours in: " in said
    assert "ddp_equal: not at 95 % of the survivors' sum again." in said
    assert any("ended: RuntimeError" in line[0] for line in rows(found))
    assert {len(line) for line in rows(found)} == {len(rows(found)[0])}
    print_tables(found)
    assert "one_machine" in capsys.readouterr().out


def test_nothing_finished_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    print_tables(document())
    assert "No run has finished" in capsys.readouterr().out


def test_options_that_cannot_be_used_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--contenders", "horovod"], ["--seeds", "0"], ["--seconds", "5"]):
        with pytest.raises(SystemExit):
            side_by_side.main(["--json", str(tmp_path / "out.json"), *options])
    assert "horovod unknown" in capsys.readouterr().err


def test_a_configuration_is_read_as_it_was_written(tmp_path: Path) -> None:
    config = RivalConfig(
        contender="ddp_equal",
        run="stdlib-text",
        seed=1,
        speeds=(2.0, 1.0),
        hosts=("198.18.0.1", "198.18.0.2"),
        batches=(8, 8),
        target_batch=12,
        directory=str(tmp_path),
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps({name: getattr(config, name) for name in RivalConfig.__dataclass_fields__}))
    assert RivalConfig.read(path) == config
