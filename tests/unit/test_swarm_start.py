"""What a peer's averaging process announces before training has reported anything."""

from __future__ import annotations

from types import SimpleNamespace

from dht_config.manifest import example_manifest, parse_manifest
from peers.arena import SharedArena
from peers.fragments import FragmentLayout
from peers.ledger import Counts, Ledger
from peers.outer import NO_HISTORY
from peers.pipe import Configure, FragmentMeta
from peers.swarm import _fragments, _restored_progress

RUN = parse_manifest(example_manifest("digits"), "digits")
LAYOUT = FragmentLayout(names=("a",), shapes=((12,),), bounds=(0, 4, 12))


def configured(fragments: list[FragmentMeta] | None, samples: int) -> Configure:
    return Configure(
        layout=LAYOUT,
        states=1,
        signed_manifest=SimpleNamespace(),
        fragments=fragments,
        samples=samples,
        steps=samples // 8,
        clean=True,
        counts=(Counts(samples, samples // 8),) * 2,
        contributed=(Counts(),) * 2,
    )


def test_a_returning_peer_announces_the_samples_and_the_credit_of_its_checkpoint() -> None:
    ledgers = [Ledger.open(4).credit([(0, 4)], 80, 10), Ledger.open(8).credit([(0, 4)], 40, 5)]
    metas = [
        FragmentMeta(version=3, digest=b"", total_element_samples=0, history=NO_HISTORY, ledger=ledger.to_json())
        for ledger in ledgers
    ]
    configure = configured(metas, 96)
    progress = _restored_progress(configure, _fragments(configure, SharedArena.create(12), RUN))
    assert (progress.samples, progress.steps) == (96, 12)
    assert progress.credited_samples == (4 * 80 + 4 * 40) / 12


def test_a_newcomer_announces_none() -> None:
    configure = configured(None, 0)
    progress = _restored_progress(configure, _fragments(configure, SharedArena.create(12), RUN))
    assert (progress.samples, progress.credited_samples) == (0, 0.0)
