"""A peer on a slow line takes part in some rounds; the others hold theirs without it in between."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Swarm, assert_digests_agree, assert_no_traceback, needs_links, small_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.namespaces, needs_links]


def test_a_slow_line_takes_part_in_every_fourth_round_and_holds_nobody_up(swarm: Swarm) -> None:
    """A fragment of 0.55 MB takes its line 1.8 s of a tick of 2 s; with the base before it 5.5 s of four ticks."""
    manifest = small_manifest(
        swarm.path / "run.toml",
        hidden_sizes="hidden_sizes = [700, 700]",
        fragments="fragments = 4",
        tick_seconds="tick_seconds = 2.0",
    )
    swarm.links(bootstrap="100M", one="100M/10ms", other="100M/10ms", slow="2400k/40ms")
    bootstrap = swarm.bootstrap(manifest=manifest)
    one, other = (swarm.join(name, bootstrap.invite, 40) for name in ("one", "other"))
    swarm.wait_averaged(one, other, rounds=2)
    slow = swarm.join("slow", bootstrap.invite, 20)

    def every_fourth() -> list[dict[str, Any]]:
        # It may be in one or two rounds while it finds out.
        return [event for event in slow.rounds(group=2) if event["cadence"] == 4]

    swarm.wait_until(every_fourth, "the slow peer took part in a fourth round", 240)
    began = every_fourth()[0]["time"]
    swarm.wait_averaged(one, other, rounds=6, after=began)
    # Rounds that the slow one skips are held by the other two.
    assert [event for event in one.rounds(group=2, after=began) if event["group_size"] == 2]
    swarm.wait_averaged(slow, rounds=2)
    # It comes back, and begins as its line was found to be.
    assert slow.end() == 0
    again = swarm.join("slow", bootstrap.invite, 20)
    swarm.wait_averaged(again, rounds=1)
    (plan,) = again.events("plan")
    assert plan["cadence"] == 4 and "as rounds measured it before" in " ".join(plan["reasons"])
    assert again.rounds()[0]["cadence"] == 4
    assert_digests_agree(one, other, slow, again)
    assert_no_traceback(*swarm.peers)
