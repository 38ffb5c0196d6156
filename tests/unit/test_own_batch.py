"""A slow peer's smaller batch: the learning rate goes with it, every sample counts, and a weight says so."""

from __future__ import annotations

import pytest
import torch
from hivemind.p2p import PeerID
from torch import nn

from dht_config.manifest import RunManifest, example_manifest, parse_manifest
from p2p_trainer.modes import LocalMode
from p2p_trainer.planning.compute import compute_dtype_of, in_dtype
from p2p_trainer.run_model import layout_of
from p2p_trainer.strategies import build_strategy
from p2p_trainer.tasks import Task, load_task
from peers.arena import SharedArena
from peers.ledger import PendingSpan
from peers.reducer import Rules
from peers.round_plan import GroupMember
from peers.weighting import get_weighting

CPU = torch.device("cpu")


def digits() -> tuple[RunManifest, Task, nn.Module]:
    manifest = parse_manifest(example_manifest("digits"), source="a test")
    task = load_task("digits", manifest.model, manifest.data)
    return manifest, task, task.build_model()


def test_a_step_takes_the_plans_batch_and_its_learning_rate() -> None:
    manifest, task, model = digits()
    layout = layout_of(model, manifest)
    strategy = build_strategy("full", model, layout, manifest.inner_optimizer, CPU, frozenset({0, 1}))
    arena = SharedArena.create(layout.num_elements)
    mode = LocalMode(task, strategy, manifest, layout, arena, 2, 0, batch_size=4, lr_factor=0.5)
    loss, samples = mode.step(0, None, lambda: None)
    assert (samples, loss > 0) == (4, True)
    assert {group["lr"] for group in strategy.optimizer.param_groups} == {0.5 * manifest.inner_optimizer.lr}
    mode.take_batches_of(3, 0.25)
    assert mode.step(4, None, lambda: None)[1] == 3
    assert {group["lr"] for group in strategy.optimizer.param_groups} == {0.25 * manifest.inner_optimizer.lr}


@pytest.mark.parametrize(("samples", "steps", "batches"), [(160, 10, 16), (160, 40, 4), (160, 160, 1)])
def test_fewer_samples_a_step_weigh_less_and_more_than_the_runs_are_not_believed(
    samples: int, steps: int, batches: int
) -> None:
    """n²/τ: a sample weighs as much as there are samples in its step, at most the run's batch."""
    rules = Rules(weighting=get_weighting("samples_times_batch"), batch_size=16)
    member = GroupMember(peer_id=PeerID(b"a" * 34), spans=(), samples=samples, steps=steps)
    honest = PendingSpan(start=0, stop=1, samples=samples, steps=steps)
    assert rules.value_weight(member, honest) == samples * batches
    claimed = PendingSpan(start=0, stop=1, samples=samples, steps=1)
    assert rules.value_weight(member, claimed) == samples * 16


def test_a_loss_in_bfloat16_is_near_the_one_in_float32_and_its_gradients_are_float32() -> None:
    torch.manual_seed(0)
    _, task, model = digits()
    batch = next(task.batches(0, 16))
    assert compute_dtype_of(CPU) == "float32" and in_dtype(task, CPU, "float32") is task
    exact = float(task.loss(model, batch).detach())
    loss = in_dtype(task, CPU, "bfloat16").loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == pytest.approx(exact, rel=0.02)
    assert float(loss.detach()) != exact
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {torch.float32}
