"""A second door to a run: it needs no key, keeps bases and an archive, and lets people in when the first is gone."""

from __future__ import annotations

import time

import pytest
from harness import START_SECONDS, Swarm, assert_digests_agree, assert_no_traceback, assert_samples_add_up

from dht_config.invite import Invite
from p2p_trainer.archive import Archive
from p2p_trainer.checkpoint import read_checkpoint

pytestmark = pytest.mark.swarm


def test_newcomers_join_through_the_standby_and_it_opens_again_by_itself(swarm: Swarm) -> None:
    bootstrap = swarm.bootstrap()
    first = swarm.join("first", bootstrap.invite, 80)
    second = swarm.join("second", bootstrap.invite, 40)
    swarm.wait_averaged(first, second)
    archive = ("--snapshot-versions", "2", "--snapshot-keep", "2")
    standby = swarm.bootstrap("standby", bootstrap.invite, "--standby", *archive)
    assert set(Invite.decode(standby.invite).addresses) > set(Invite.decode(bootstrap.invite).addresses)
    kept = Archive(standby.directory / "archive", 2, 2)
    swarm.wait_until(lambda: len(kept.versions()) > 2, "the standby keeps snapshots", START_SECONDS)
    assert not (standby.directory / "organiser.key").exists()

    bootstrap.crash()
    crashed = time.time()
    newcomer = swarm.join("newcomer", standby.invite, 20)
    swarm.wait_averaged(newcomer, after=crashed)
    versions = kept.versions()
    assert all(read_checkpoint(kept.path(version)).tensors["base"].isfinite().all() for version in versions[:2])

    assert_digests_agree(first, second, newcomer, standby)

    assert standby.end() == 0
    for peer in (first, second, newcomer):
        peer.crash()
    again = swarm.bootstrap("standby", bootstrap.invite, "--standby", *archive)
    swarm.wait_joined(again)
    assert again.peer_id == standby.peer_id
    back = swarm.join("newcomer", standby.invite, 20, directory=newcomer.directory)
    swarm.wait_until(lambda: back.rounds(), "a peer that came back trains on through the standby", START_SECONDS)
    swarm.wait_until(lambda: again.events("rebase"), "the standby follows it", START_SECONDS)
    assert set(swarm.leave_all().values()) == {0}
    assert_samples_add_up(back)
    # What they made between the standby's goodbye and their end is lost with them: another line goes on.
    assert_digests_agree(again, back)
    assert_no_traceback(*swarm.peers)
