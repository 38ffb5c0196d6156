"""A convolutional network with batch normalisation: its running statistics are in the base, alike for everyone."""

from __future__ import annotations

import pytest
import torch
from harness import (
    Swarm,
    assert_bases_hold_every_credit_once,
    assert_digests_agree,
    assert_no_traceback,
    assert_samples_add_up,
    small_manifest,
)
from safetensors.torch import load_file, load_model

from p2p_trainer.tasks import load_task

pytestmark = pytest.mark.swarm
LEARNT = 0.8
"""Of the held-out digits; a tenth is chance, and what statistics of no data give."""


def test_three_peers_and_a_newcomer_train_it_and_what_is_exported_knows_the_digits(swarm: Swarm) -> None:
    manifest = small_manifest(
        swarm.path / "convolutions.toml",
        hidden_sizes="hidden_sizes = []\nchannels = [8, 16]",
        matchmaking_seconds='matchmaking_seconds = 0.5\ncodec = "int8"\nanswer_codec = "int8"',
    )
    bootstrap = swarm.bootstrap("bootstrap", manifest)
    peers = [swarm.join(name, bootstrap.invite, rate) for name, rate in (("a", 80), ("b", 40), ("c", 20))]
    swarm.wait_averaged(*peers, group=3, rounds=6)
    late = swarm.join("late", bootstrap.invite, 40)
    swarm.wait_averaged(*peers, late, group=4, rounds=8)
    assert set(swarm.leave_all().values()) == {0}
    assert_digests_agree(*peers, late)
    assert_bases_hold_every_credit_once([*peers, late])
    assert_no_traceback(bootstrap, *peers, late)
    for peer in (*peers, late):
        assert assert_samples_add_up(peer)["dropped_samples"] == 0

    out = swarm.path / "out"
    assert swarm.run("export", "export", str(peers[0].directory), str(out)).exit_code() == 0
    stored = load_file(out / "model.safetensors")
    variances = [value for name, value in stored.items() if name.endswith("running_var")]
    assert len(variances) == 2 and all((value >= 0).all() and not (value == 1).all() for value in variances)
    assert all(value.dtype == torch.int64 for name, value in stored.items() if name.endswith("num_batches_tracked"))
    task = load_task("digits", {"hidden_sizes": [], "channels": [8, 16]}, {})
    model = task.build_model()
    load_model(model, str(out / "model.safetensors"))
    model.eval()
    (batch,) = task.held_out(1000, 1000)
    right = (model(batch[0]).argmax(1) == batch[1]).float().mean()
    assert right >= LEARNT
