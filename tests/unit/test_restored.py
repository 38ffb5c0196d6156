"""A peer that comes back on another rung of the memory ladder, or trains other fragments: what it takes over."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from dht_config.manifest import InnerOptimizerSection
from p2p_trainer.checkpoint import Checkpoint, load_checkpoint, optimizer_to_tensors, save_checkpoint
from p2p_trainer.inner_optimizer import build_inner_optimizer
from p2p_trainer.session import Session, load_values, make_initial_bases
from p2p_trainer.strategies import MemoryStrategy, build_strategy
from p2p_trainer.strategies.host_optimizer import HostOptimizer
from p2p_trainer.strategies.whole import WholeModel
from p2p_trainer.training import Accounts, LeaveFlag
from peers.arena import SharedArena
from peers.fragments import cut
from peers.ledger import Counts

CPU = torch.device("cpu")
SECTION = InnerOptimizerSection(name="adamw", lr=0.01)
LAYOUT = cut({"weight": (3, 4), "bias": (3,)}, 3)


def strategy_of(name: str, trained: frozenset[int] = frozenset({0}), section: Any = SECTION) -> MemoryStrategy:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    if name == "host_optimizer":  # offered with a card only; its arithmetic is the same here
        parameters = dict(model.named_parameters())
        return WholeModel(name, model, parameters, LAYOUT, HostOptimizer(model.parameters(), section))
    return build_strategy(cast(Any, name), model, LAYOUT, section, CPU, trained)


def stepped(strategy: MemoryStrategy) -> MemoryStrategy:
    strategy.model(torch.ones(2, 4)).square().sum().backward()
    strategy.optimizer.step()
    return strategy


def checkpoint_of(strategy: MemoryStrategy, directory: Path) -> Checkpoint:
    """Through a file, as a restart has it."""
    state, meta = optimizer_to_tensors(strategy.optimizer)
    tensors = {f"optimizer.{name}": value.clone() for name, value in state.items()}
    tensors |= {f"local.{fragment}": values for fragment, values in strategy.unrounded().items()}
    rows: list[Any] = [{}] * LAYOUT.num_fragments
    save_checkpoint(
        directory, tensors, {"format": 3, "optimizer": meta, "trained": sorted(strategy.trained), "fragments": rows}
    )
    found = load_checkpoint(directory, pytest.fail)
    assert found is not None
    return found


def session(said: list[str]) -> Session:
    view: Any = SimpleNamespace(status=said.append)
    return Session(cast(Any, None), cast(Any, None), "training", view, LeaveFlag())


@pytest.mark.parametrize(("before", "after"), [("full", "host_optimizer"), ("host_optimizer", "full")])
def test_the_optimizers_state_moves_between_device_and_host(before: str, after: str, tmp_path: Path) -> None:
    old, new, said = stepped(strategy_of(before)), strategy_of(after), list[str]()
    session(said)._restore_optimizer(checkpoint_of(old, tmp_path), new)
    assert said == []
    ours, theirs = new.optimizer.state_dict()["state"], old.optimizer.state_dict()["state"]
    assert ours.keys() == theirs.keys() and len(ours) == 2
    assert all(torch.equal(ours[index]["exp_avg"], theirs[index]["exp_avg"]) for index in ours)


@pytest.mark.parametrize(
    "other",
    [
        ("fragments", frozenset({1}), SECTION),
        ("fragments", frozenset({0, 1, 2}), SECTION),
        ("full", frozenset(), InnerOptimizerSection(name="sgd", lr=0.1, momentum=0.9)),
    ],
)
def test_state_that_does_not_fit_starts_afresh_and_ends_nothing(other: Any, tmp_path: Path) -> None:
    new, said = strategy_of(*other), list[str]()
    session(said)._restore_optimizer(checkpoint_of(stepped(strategy_of("full")), tmp_path), new)
    assert len(said) == 1 and "starts afresh" in said[0]
    assert not new.optimizer.state_dict()["state"]
    stepped(new)


def test_the_kind_of_an_optimizer_does_not_tell_where_its_state_is() -> None:
    kinds = {optimizer_to_tensors(strategy_of(name).optimizer)[1]["kind"] for name in ("full", "host_optimizer")}
    assert kinds == {type(build_inner_optimizer(nn.Linear(1, 1).parameters(), SECTION)).__name__}


def test_nothing_of_a_checkpoint_stays_in_memory_once_it_was_taken_over(tmp_path: Path) -> None:
    old, new = stepped(strategy_of("full")), strategy_of("full")
    checkpoint = checkpoint_of(old, tmp_path)
    held = [weakref.ref(tensor) for tensor in checkpoint.tensors.values()]
    restored = session([])._restored(checkpoint, new, LAYOUT)
    arena = SharedArena.create(LAYOUT.num_elements)
    bases = make_initial_bases(dict(strategy_of("full").model.named_parameters()), LAYOUT, arena)
    arena.snapshot.copy_(arena.base)
    counts = [Counts(2, 1)] * LAYOUT.num_fragments
    accounts = Accounts(layout=LAYOUT, samples=2, steps=1, counts=counts, fragments=bases)
    load_values(new, arena, accounts, restored, [True, True, False])
    for name, parameter in new.model.named_parameters():
        whole = (LAYOUT.size(0) + LAYOUT.size(1)) if name == "weight" else 0
        torch.testing.assert_close(
            parameter.detach().view(-1)[:whole], old.model.get_parameter(name).detach().view(-1)[:whole]
        )
    assert restored == {} and held and not any(reference() is not None for reference in held)
