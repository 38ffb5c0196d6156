"""A swarm on an event clock: the same seed is the same swarm, every sample is accounted for, lives are lived."""

from __future__ import annotations

import pytest

from dht_config.manifest import example_manifest, parse_manifest
from p2p_trainer.rehearsal.scene import Scene, parse_peers
from p2p_trainer.simulation.simulate import play, played, random_peers
from p2p_trainer.simulation.simulated_dht import RecordSizes, dht_load
from p2p_trainer.simulation.simulated_swarm import SimulatedSwarm
from p2p_trainer.simulation.simulated_ticks import NOBODY_TO_DIAL

MANIFEST = parse_manifest(example_manifest("stdlib-text"), "the example")
FRAGMENTS = [30_000, 28_000, 31_000, 29_000]
RECORDS = RecordSizes(profile=913, state=790, matchmaking=614, announcement=754, news=1150)


def swarm_of(peers: str, seconds: float = 60.0, seed: int = 0) -> SimulatedSwarm:
    scene = Scene(peers=parse_peers(peers, seconds), seconds=seconds, seed=seed)
    return played(scene, MANIFEST, FRAGMENTS, RECORDS)


def test_every_sample_is_credited_pending_or_dropped() -> None:
    swarm = swarm_of("80:50M/20ms,40:10M/60ms@10-30@35-,20!25@30-,8~20-24")
    for peer in swarm.peers:
        assert peer.samples == pytest.approx(peer.credited_samples + peer.pending_samples + peer.dropped_samples)
        assert peer.credited_samples > 0
    for fragment in range(len(FRAGMENTS)):
        holdings = [peer.work.holdings[fragment] for peer in swarm.peers]
        credited = sum(holding.ledger.credited_element_samples() for holding in holdings)
        assert credited == max(holding.total_element_samples for holding in holdings)


def test_peers_without_lines_are_in_every_round_and_train_as_fast_as_alone() -> None:
    swarm = swarm_of("80,40,20,8")
    assert [peer.samples for peer in swarm.peers] == [4800, 2400, 1200, 480]
    assert all(peer.tally.participation == 1.0 for peer in swarm.peers)
    assert len(swarm.ticks.group_sizes) == swarm.peers[0].tally.committed == 59


def test_one_peer_goes_on_alone() -> None:
    (peer,) = swarm_of("40").peers
    assert peer.tally.participation == 1.0 and peer.tally.bytes_sent == 0


def test_who_is_behind_nat_contributes_and_averages_nothing() -> None:
    behind, other, dialled = swarm_of("40:50M/20ms:nat,20:50M/20ms:nat,20:50M/20ms").peers
    for peer in (behind, other, dialled):
        assert peer.tally.participation > 0.95
        assert peer.credited_samples > 0.9 * peer.samples
    # It takes in two contributions and gives out two averages; each of the others one of each.
    assert dialled.tally.bytes_received == pytest.approx(2 * behind.tally.bytes_sent, rel=0.01)
    assert other.tally.bytes_sent == pytest.approx(behind.tally.bytes_sent, rel=0.01)


def test_peers_that_are_all_behind_nat_hold_no_round_and_say_why() -> None:
    swarm = swarm_of("40:50M/20ms:nat,20:50M/20ms:nat")
    assert not any(peer.tally.committed for peer in swarm.peers)
    assert NOBODY_TO_DIAL in swarm.ticks.reasons


def test_a_killed_peer_comes_back_without_what_was_in_no_base_and_takes_part_again() -> None:
    stays, killed = swarm_of("40,20!20@30-").peers
    assert killed.dropped_samples > 0
    assert killed.tally.bytes_fetched > 0
    assert killed.tally.committed > 30
    assert stays.tally.participation > 0.85
    assert stays.work.holdings[0].claim == killed.work.holdings[0].claim


def test_a_frozen_peer_holds_the_others_up_until_it_is_known_and_then_takes_part_again() -> None:
    thawed = swarm_of("40,20,20~20-30").peers[2]
    assert thawed.samples == pytest.approx(20 * 50, abs=8)
    assert thawed.tally.committed > 20


def test_the_same_seed_gives_the_same_figures_and_another_one_others() -> None:
    peers = random_peers(24, seed=3)
    assert peers[:5] == random_peers(5, seed=3) and peers != random_peers(24, seed=4)
    scene = Scene(peers=peers, seconds=30.0, seed=3, churn=0.25).with_churn()
    assert play(scene, MANIFEST, FRAGMENTS, RECORDS) == play(scene, MANIFEST, FRAGMENTS, RECORDS)
    other = Scene(peers=peers, seconds=30.0, seed=4, churn=0.25).with_churn()
    assert play(scene, MANIFEST, FRAGMENTS, RECORDS) != play(other, MANIFEST, FRAGMENTS, RECORDS)


def test_nobody_makes_a_base_where_no_group_can_be_most_of_the_swarm() -> None:
    scene = Scene(peers=random_peers(600, seed=0), seconds=10.0)
    size = play(scene, MANIFEST, FRAGMENTS, RECORDS)
    assert size.records_are_readable and size.rounds_per_minute == 0
    assert any("training peers" in reason for reason in size.reasons)


def test_records_that_nobody_can_read_are_said_to_be_so() -> None:
    scene = Scene(peers=random_peers(1200, seed=0), seconds=5.0)
    size = play(scene, MANIFEST, FRAGMENTS, RECORDS)
    assert not size.records_are_readable and size.participation == 0


def test_the_load_of_records_grows_with_the_swarm_and_with_every_tick() -> None:
    loads = [dht_load(RECORDS, peers, 1.0, 1.5, 1.0) for peers in (10, 100, 1000)]
    assert 3 * loads[0].bytes_per_second < loads[1].bytes_per_second < 10 * loads[0].bytes_per_second
    assert loads[2].signatures_per_second > 4 * loads[1].signatures_per_second
    assert dht_load(RECORDS, 100, 10.0, 1.5, 0.1).bytes_per_second < 0.6 * loads[1].bytes_per_second
    assert dht_load(RECORDS, 1, 1.0, 1.5, 1.0).bytes_per_second == 0


def test_sizes_of_records_are_those_of_records_that_peers_make() -> None:
    measured = RecordSizes.measured(fragments=4, fragment_size=30_000)
    # A signature and a public key are 550 bytes of each.
    assert 600 < measured.matchmaking < measured.state < measured.profile < measured.news < 1400
    assert measured.readable(1000) and not measured.readable(2000)


@pytest.mark.parametrize("moment", ["~20-24", "~20.3-24", "~20.9-21.1", "!20.5@24-", "@-20.5@24-"])
def test_nothing_is_under_way_for_ever_whenever_a_peer_goes_away(moment: str) -> None:
    swarm = swarm_of(f"40:20M/40ms,20:20M/40ms,20:20M/40ms{moment}")
    for peer in swarm.peers:
        claims = [holding.claim.version for holding in peer.work.holdings]
        assert min(claims) >= 12, f"{peer.name} holds {claims}"
        assert not peer.fetching and len(peer.busy) <= 3


def test_a_line_that_is_slow_upwards_is_in_every_round_where_its_peer_chooses_the_codec() -> None:
    seconds = 240.0
    scene = Scene(peers=parse_peers("80:200M/20ms,40:200M/20ms,8:100M/2M/40ms", seconds), seconds=seconds)
    sizes = [4_000_000] * len(FRAGMENTS)
    peers = {}
    for codec in ("int8", "auto"):
        averaging = MANIFEST.averaging.model_copy(update={"codec": codec, "answer_codec": "int8"})
        slower = MANIFEST.run.model_copy(update={"tick_seconds": 4.0})
        manifest = MANIFEST.model_copy(update={"averaging": averaging, "run": slower})
        peers[codec] = played(scene, manifest, sizes, RECORDS).peers
    fast, slow = peers["auto"][0], peers["auto"][2]
    assert fast.cadence.codec == "int8" and slow.cadence.codec == "sparse"
    assert peers["int8"][2].cadence.announced > slow.cadence.announced == 1
    assert slow.tally.committed > peers["int8"][2].tally.committed


def test_a_base_that_comes_while_others_still_look_for_each_other_is_in_time() -> None:
    """It takes a line of 8 Mbit/s a moment longer than others wait to look: once a round behind it would stay so."""
    scene = Scene(peers=parse_peers("80:100M/10ms,40:100M/10ms,20:8M/40ms", 240.0), seconds=240.0, seed=0)
    slow = played(scene, MANIFEST, [300_000] * 4, RECORDS).peers[2]
    assert slow.cadence.announced == 4 and slow.tally.participation > 0.2
    assert slow.credited_samples > 0.9 * slow.samples
