"""Memory strategies: the step of each is the step of ``full``, for what it trains; nothing else moves."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dht_config.errors import UsageError
from dht_config.manifest import InnerOptimizerSection
from p2p_trainer.inner_optimizer import build_inner_optimizer
from p2p_trainer.modes import GradientMode, LocalMode
from p2p_trainer.strategies import (
    STRATEGIES,
    MemoryStrategy,
    ModelFacts,
    build_strategy,
    facts_of,
    fixed_bytes,
    on_base,
    why_not,
)
from p2p_trainer.strategies.checkpointing import blocks_of, checkpoint_blocks
from p2p_trainer.strategies.host_optimizer import HostOptimizer
from p2p_trainer.strategies.partial import PartialModel
from p2p_trainer.strategies.whole import WholeModel
from p2p_trainer.tasks import load_task
from p2p_trainer.tasks.base import Batch
from p2p_trainer.throughput import inner_step
from peers.arena import SharedArena
from peers.fragments import FragmentLayout, cut

CPU = torch.device("cpu")
ADAMW = InnerOptimizerSection(name="adamw", lr=3e-3, weight_decay=0.1, batch_size=8)
SGD = InnerOptimizerSection(name="sgd", lr=0.05, momentum=0.9, weight_decay=0.01, batch_size=16)
LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}
TEXT = load_task("text", LLAMA, {"sequence_length": 8})
DIGITS = load_task("digits", {"hidden_sizes": [24, 16]}, {})
TASKS = {"llama": (TEXT, ADAMW, 5), "digits": (DIGITS, SGD, 3)}
"""Task, inner optimizer, fragments: of both models some cuts are inside tensors."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def layout_of(model: nn.Module, fragments: int) -> FragmentLayout:
    return cut({name: tuple(parameter.shape) for name, parameter in model.named_parameters()}, fragments)


def built(
    name: str, model: nn.Module, layout: FragmentLayout, section: InnerOptimizerSection, trained: frozenset[int]
) -> MemoryStrategy:
    """Also what is only offered with an accelerator: its arithmetic is the same where that is the CPU."""
    if name == "host_optimizer":
        return WholeModel(
            "host_optimizer", model, dict(model.named_parameters()), layout, HostOptimizer(model.parameters(), section)
        )
    if name == "stream":
        return PartialModel("stream", model, layout, section, CPU, trained, CPU)
    return build_strategy(name, model, layout, section, CPU, trained)  # type: ignore[arg-type]


def values(strategy: MemoryStrategy, layout: FragmentLayout) -> list[Tensor]:
    out = [torch.empty(layout.size(fragment)) for fragment in range(layout.num_fragments)]
    for fragment, tensor in enumerate(out):
        strategy.snapshot(fragment, tensor)
    return out


def rounded_where_frozen(model: nn.Module, layout: FragmentLayout, trained: frozenset[int]) -> nn.Module:
    """What a strategy that trains these fragments computes with, as an ordinary model."""
    whole = WholeModel("full", model, dict(model.named_parameters()), layout, None)  # type: ignore[arg-type]
    for fragment in set(range(layout.num_fragments)) - trained:
        own = torch.empty(layout.size(fragment))
        whole.snapshot(fragment, own)
        whole.load(fragment, own.bfloat16().float())
    return model


CHOICES = [
    (task, name, trained)
    for task, (_, _, fragments) in TASKS.items()
    for name in STRATEGIES
    if (task, name) != ("digits", "checkpoint")
    for trained in (
        [frozenset({0}), frozenset({1}), frozenset({fragments - 2, fragments - 1})]
        if name in ("fragments", "stream")
        else [frozenset(range(fragments))]
    )
]


def setting(
    task_name: str, trained: frozenset[int]
) -> tuple[Any, InnerOptimizerSection, FragmentLayout, nn.Module, nn.Module]:
    task, section, fragments = TASKS[task_name]
    torch.manual_seed(0)
    model = task.build_model()
    layout = layout_of(model, fragments)
    rounded_where_frozen(model, layout, trained)
    return task, section, layout, model, copy.deepcopy(model)


@pytest.mark.parametrize(("task_name", "name", "trained"), CHOICES)
def test_gradients_are_those_of_full(task_name: str, name: str, trained: frozenset[int]) -> None:
    task, section, layout, plain, model = setting(task_name, trained)
    batch: Batch = next(task.batches(0, 6))
    task.loss(plain, batch).backward()
    strategy = built(name, model, layout, section, trained)
    strategy.model.train()
    task.loss(strategy.model, batch).backward()
    expected = dict(plain.named_parameters())
    if name in ("fragments", "stream"):
        found = [piece for fragment in sorted(trained) for piece in strategy._fragments[fragment]]  # type: ignore[attr-defined]
        assert sum(piece.segment.length for piece in found) == sum(layout.size(fragment) for fragment in trained)
        for piece in found:
            start = piece.segment.tensor_start
            wanted = expected[piece.segment.name].grad.reshape(-1)[start : start + piece.segment.length]
            torch.testing.assert_close(piece.elements.grad.reshape(-1), wanted, rtol=1e-5, atol=1e-7)
    else:
        for key, parameter in strategy.parameters.items():  # type: ignore[attr-defined]
            torch.testing.assert_close(parameter.grad, expected[key].grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("task_name", "name", "trained"), CHOICES)
def test_steps_move_what_is_trained_as_full_does_and_nothing_else(
    task_name: str, name: str, trained: frozenset[int]
) -> None:
    task, section, layout, plain, model = setting(task_name, trained)
    whole = built("full", plain, layout, section, frozenset())
    strategy = built(name, model, layout, section, trained)
    before, reference_before = values(strategy, layout), values(whole, layout)
    one, same = task.batches(0, 6), task.batches(0, 6)
    for _ in range(3):
        inner_step(task, strategy.model, strategy.optimizer, next(one), 2)
        inner_step(task, whole.model, whole.optimizer, next(same), 6)
        for fragment in set(range(layout.num_fragments)) - trained:
            whole.load(fragment, reference_before[fragment])  # as if it had been frozen
    for fragment, (now, then, wanted) in enumerate(
        zip(values(strategy, layout), before, values(whole, layout), strict=True)
    ):
        if fragment in trained:
            assert not torch.equal(now, then)
            torch.testing.assert_close(now, wanted, rtol=1e-4, atol=2e-5)
        else:
            assert torch.equal(now, then)


@pytest.mark.parametrize(("task_name", "name", "trained"), CHOICES)
def test_fifty_steps_alone_are_those_of_plain_torch(task_name: str, name: str, trained: frozenset[int]) -> None:
    """With rounds in between, in which a peer alone averages with nobody: they disturb nothing."""
    task, section, layout, plain, model = setting(task_name, trained)
    section = section.model_copy(update={"batch_size": 4, "lr": section.lr / 10})
    manifest: Any = SimpleNamespace(inner_optimizer=section)
    arena = SharedArena.create(layout.num_elements)
    strategy = built(name, model, layout, section, trained)
    mode = LocalMode(task, strategy, manifest, layout, arena, 2, 7)
    optimizer = build_inner_optimizer(plain.parameters(), section)
    batches = task.batches(7, 4)
    whole = WholeModel("full", plain, dict(plain.named_parameters()), layout, optimizer)
    frozen = {fragment: values(whole, layout)[fragment] for fragment in set(range(layout.num_fragments)) - trained}
    start = values(strategy, layout)
    for fragment, local in enumerate(start):
        arena.base[layout.slice(fragment)] = local
    for step in range(50):
        mode.step(0, None, lambda: None)
        optimizer.zero_grad()
        task.loss(plain, next(batches)).backward()
        optimizer.step()
        for fragment, local in frozen.items():
            whole.load(fragment, local)
        if step % 3 == 0:
            fragment = step // 3 % layout.num_fragments
            where = layout.slice(fragment)
            mode.take_snapshot(fragment, 0)
            arena.base[where] = arena.snapshot[where]
            mode.rebase(fragment, keep=True, pending=False)
    for fragment, (now, wanted) in enumerate(zip(values(strategy, layout), values(whole, layout), strict=True)):
        torch.testing.assert_close(now, wanted, rtol=1e-3, atol=2e-4)
        assert (fragment in trained) != torch.equal(now, start[fragment])


class Blocks(nn.Module):
    """Blocks with running statistics in their buffers, in no model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)  # type: ignore[no-any-return]


def test_running_statistics_count_a_batch_once_although_it_is_computed_twice() -> None:
    torch.manual_seed(0)
    plain = Blocks()
    twin = copy.deepcopy(plain)
    checkpoint_blocks(twin)
    for model in (plain, twin):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in (DIGITS.batches(0, 8), DIGITS.batches(1, 8)):
            inner_step(DIGITS, model, optimizer, next(batch), 4)
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, twin.get_buffer(name)), name
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(twin.get_parameter(name), parameter)


def test_buffers_of_a_partly_frozen_model_go_on_as_in_full() -> None:
    torch.manual_seed(0)
    model = Blocks()
    layout = layout_of(model, 4)
    trained = frozenset({1})
    rounded_where_frozen(model, layout, trained)
    plain = copy.deepcopy(model)
    strategy = built("fragments", model, layout, SGD, trained)
    for each in (plain, strategy.model):
        torch.manual_seed(1)
        each.train()
        DIGITS.loss(each, next(DIGITS.batches(0, 8))).backward()
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, dict(strategy.model.named_buffers())[name]), name
    assert dict(plain.named_buffers())["blocks.0.1.num_batches_tracked"] == 1


def test_what_the_task_does_not_train_stays_as_it_is_under_every_strategy() -> None:
    torch.manual_seed(0)
    plain = Blocks()
    plain.blocks.requires_grad_(False)  # most of it
    trainable = {name: tuple(p.shape) for name, p in plain.named_parameters() if p.requires_grad}
    layout = cut(trainable, 2)
    for name in ("full", "checkpoint", "fragments"):
        model = copy.deepcopy(plain)
        strategy = build_strategy(name, model, layout, SGD, CPU, frozenset({0}))  # type: ignore[arg-type]
        inner_step(DIGITS, strategy.model, strategy.optimizer, next(DIGITS.batches(0, 8)), 4)
        assert sum(p.numel() for group in strategy.optimizer.param_groups for p in group["params"]) == (
            layout.num_elements if name != "fragments" else layout.size(0)
        )
        for parameter, before in zip(model.blocks.parameters(), plain.blocks.parameters(), strict=True):
            assert parameter.dtype == torch.float32
            assert torch.equal(parameter, before)


def test_a_model_without_blocks_cannot_checkpoint_and_says_so() -> None:
    model = DIGITS.build_model()
    assert blocks_of(model) == []
    with pytest.raises(ValueError, match="no list of blocks"):
        checkpoint_blocks(model)
    assert "no list of blocks" in why_not("checkpoint", model, CPU, "local")
    assert len(blocks_of(TEXT.build_model())) == 3


@pytest.mark.parametrize(
    ("name", "mode", "words"),
    [
        ("host_optimizer", "local", "On a CPU everything is in host memory already"),
        ("stream", "local", "On a CPU everything is in host memory already"),
        ("fragments", "gradient", "its strategies are full and checkpoint"),
        ("host_optimizer", "gradient", "its strategies are full and checkpoint"),
        ("checkpoint", "local", "no list of blocks"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(name: Any, mode: Any, words: str) -> None:
    model = DIGITS.build_model()
    with pytest.raises(UsageError, match=words) as refused:
        build_strategy(name, model, layout_of(model, 2), SGD, CPU, frozenset({0}), mode)
    assert name in refused.value.problem


def test_weights_that_cannot_be_replaced_are_found_before_anything_is_frozen() -> None:
    model = nn.Sequential(nn.LSTM(4, 4), nn.Linear(4, 4))
    assert "LSTM" in why_not("fragments", model, CPU, "local")
    assert not why_not("full", model, CPU, "local")


def test_tied_weights_stay_one_weight() -> None:
    model = TEXT.build_model()
    layout = layout_of(model, 5)
    strategy = build_strategy("fragments", model, layout, ADAMW, CPU, frozenset({4}))
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    strategy.load(0, torch.full((layout.size(0),), 0.5))
    assert model.lm_head.weight.flatten()[0] == 0.5 == model.model.embed_tokens.weight.flatten()[0]


def test_a_rotation_keeps_every_value_and_the_optimizers_state_of_what_goes_on() -> None:
    task, section, fragments = TASKS["llama"]
    torch.manual_seed(0)
    model = task.build_model()
    layout = layout_of(model, fragments)
    strategy = build_strategy("fragments", model, layout, section, CPU, frozenset({0, 1}))
    assert isinstance(strategy, PartialModel)
    batches = task.batches(0, 4)
    for _ in range(2):
        inner_step(task, model, strategy.optimizer, next(batches), 4)
    before = values(strategy, layout)
    going_on = {id(piece.elements): strategy.optimizer.state[piece.elements] for piece in strategy._fragments[1]}
    with pytest.raises(ValueError, match="low precision"):
        strategy.train_only(frozenset({1, 3}), {})
    base = torch.linspace(-1, 1, layout.size(3))
    strategy.train_only(frozenset({1, 3}), {3: base})
    after = values(strategy, layout)
    for fragment in (0, 1, 2, 4):
        assert torch.equal(after[fragment], before[fragment]), "unrounded, also what stopped"
    assert torch.equal(after[3], base)
    for piece in strategy._fragments[1]:
        assert strategy.optimizer.state[piece.elements] is going_on[id(piece.elements)]
    assert set(strategy.unrounded()) == {0, 1, 3}, "0 has work that is in no base yet"
    for _ in range(2):
        inner_step(task, model, strategy.optimizer, next(batches), 4)
    assert torch.equal(values(strategy, layout)[0], before[0])
    # The last of its work came into a base that moved by 1.
    strategy.rebase(0, before[0] + 1, before[0], pending=False)
    assert set(strategy.unrounded()) == {1, 3}
    assert torch.equal(values(strategy, layout)[0], (before[0] + 1).bfloat16().float())
    strategy.train_only(frozenset({0, 1}), {0: before[0] + 1})
    assert torch.equal(values(strategy, layout)[0], before[0] + 1)


def test_work_of_a_stopped_fragment_moves_with_its_base_until_nothing_is_pending() -> None:
    model = DIGITS.build_model()
    layout = layout_of(model, 3)
    strategy = build_strategy("fragments", model, layout, SGD, CPU, frozenset({0}))
    start = values(strategy, layout)[0]
    inner_step(DIGITS, model, strategy.optimizer, next(DIGITS.batches(0, 8)), 8)
    moved = values(strategy, layout)[0]
    strategy.train_only(frozenset({1}), {1: torch.zeros(layout.size(1))})
    strategy.rebase(0, start + 2, start, pending=True)
    torch.testing.assert_close(values(strategy, layout)[0], moved + 2)
    strategy.load(0, start, pending=False)
    assert torch.equal(values(strategy, layout)[0], start.bfloat16().float())


def test_pinned_weights_are_overwritten_only_when_the_device_has_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """No card here: what is pinned is told by hand, and whether the values stood still until the wait was over."""
    model = DIGITS.build_model()
    layout = layout_of(model, 3)
    strategy = built("stream", model, layout, SGD, frozenset({0}))
    before, waited = values(strategy, layout), list[bool]()

    def wait() -> None:
        waited.append(all(torch.equal(now, then) for now, then in zip(values(strategy, layout), before, strict=True)))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(synchronize=wait))
    strategy.load(1, before[1] + 1)
    assert waited == [], "nothing is pinned"
    before = values(strategy, layout)
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: tensor.dtype == torch.bfloat16)
    strategy.load(0, before[0])
    assert waited == [], "what is trained lies on the device"
    strategy.load(1, before[1] + 1)
    assert waited == [True]
    strategy.rebase(1, before[1] + 2, before[1], pending=False)
    assert len(waited) == 2


def test_evaluating_the_base_leaves_everything_as_it_was() -> None:
    for name, trained in (("full", frozenset(range(5))), ("fragments", frozenset({2}))):
        model = TEXT.build_model()
        layout = layout_of(model, 5)
        strategy = build_strategy(name, model, layout, ADAMW, CPU, trained)  # type: ignore[arg-type]
        before, base = values(strategy, layout), torch.zeros(layout.num_elements)
        with on_base(strategy, layout, base):
            inside = values(strategy, layout)
            assert all(inside[fragment].eq(0).all() for fragment in trained)
        assert all(torch.equal(a, b) for a, b in zip(values(strategy, layout), before, strict=True))


def test_autograd_keeps_no_frozen_weight_between_forward_and_backward() -> None:
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10))
    layout = layout_of(model, 20)
    strategy = build_strategy("fragments", model, layout, SGD, CPU, frozenset({0}))
    assert isinstance(strategy, PartialModel)
    loss = DIGITS.loss(strategy.model, next(DIGITS.batches(0, 4)))
    assert not strategy._notes._alive, "no assembled weight is alive"
    loss.backward()


def test_a_host_optimizer_steps_and_remembers_as_the_inner_optimizer_does() -> None:
    for section in (ADAMW, SGD):
        torch.manual_seed(0)
        model = TEXT.build_model()
        layout, plain = layout_of(model, 2), copy.deepcopy(model)
        hosted, whole = (
            built(name, each, layout, section, frozenset())
            for name, each in (("host_optimizer", model), ("full", plain))
        )
        for strategy in (hosted, whole):
            strategy.optimizer.param_groups[0]["lr"] = 1e-3
            inner_step(TEXT, strategy.model, strategy.optimizer, next(TEXT.batches(0, 4)), 2, 0.5)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(name), parameter)
        assert isinstance(hosted.optimizer, HostOptimizer)
        assert hosted.optimizer.state_bytes() >= layout.num_elements * 4
        whole.optimizer.load_state_dict(copy.deepcopy(hosted.optimizer.state_dict()))
        hosted.optimizer.load_state_dict(copy.deepcopy(whole.optimizer.state_dict()))
        for strategy in (hosted, whole):
            inner_step(TEXT, strategy.model, strategy.optimizer, next(TEXT.batches(1, 4)), 2, 0.5)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(name), parameter)


@pytest.mark.parametrize(("task_name", "name", "trained"), CHOICES)
def test_what_a_strategy_holds_is_what_was_reckoned(task_name: str, name: Any, trained: frozenset[int]) -> None:
    """Values, gradients and optimizer state, byte by byte; only what is there for a moment is left out."""
    task, section, layout, _, model = setting(task_name, trained)
    facts = ModelFacts(other_bytes=0, largest_block_elements=0)
    reckoned = fixed_bytes(name, layout, trained, section, facts)
    strategy = built(name, model, layout, section, trained)
    task.loss(strategy.model, next(task.batches(0, 2))).backward()
    parameters = [parameter for group in strategy.optimizer.param_groups for parameter in group["params"]]
    held = sum(parameter.nbytes + parameter.grad.nbytes for parameter in parameters)
    if isinstance(strategy, PartialModel):
        pieces = [piece.elements for own in strategy._fragments for piece in own]
        held += sum(elements.nbytes for elements in pieces if not isinstance(elements, nn.Parameter))
    strategy.optimizer.step()
    if isinstance(strategy.optimizer, HostOptimizer):
        state = strategy.optimizer.state_bytes()
        reckoned_state = reckoned.host_bytes - 8 * max(torch.Size(shape).numel() for shape in layout.shapes)
    else:
        tensors = [value for state in strategy.optimizer.state.values() for value in state.values()]
        state = sum(value.nbytes for value in tensors if isinstance(value, Tensor) and value.ndim)
        reckoned_state = 0
    counters = 4 * len(parameters)
    if isinstance(strategy.optimizer, HostOptimizer):
        assert held == reckoned.device_bytes
        assert 0 <= state - reckoned_state <= counters
    else:
        assert held + state == reckoned.total_bytes


def test_facts_of_a_model_are_known_before_it_takes_memory() -> None:
    with torch.device("meta"):
        model = Blocks()
    model.head.requires_grad_(False)
    facts = facts_of(model)
    assert facts.largest_block_elements == 64 * 64 + 3 * 64
    assert facts.other_bytes == 3 * (2 * 64 * 4 + 8) + 4 * (64 * 10 + 10)
    assert facts_of(DIGITS.build_model()).largest_block_elements == 64 * 24


def test_gradients_that_are_averaged_are_the_same_with_activations_computed_again() -> None:
    torch.manual_seed(0)
    plain = TEXT.build_model()
    twin = copy.deepcopy(plain)
    layout = layout_of(plain, 2)
    manifest: Any = SimpleNamespace(averaging=SimpleNamespace(delayed=False, global_batch=4))
    for name, model in (("full", plain), ("checkpoint", twin)):
        strategy = build_strategy(name, model, layout, ADAMW, CPU, frozenset(), "gradient")  # type: ignore[arg-type]
        parameters = dict(strategy.model.named_parameters())
        mode = GradientMode(TEXT, model, parameters, manifest, layout, SharedArena.create(layout.num_elements), 2, 0)
        mode.step(0, 2, lambda: None)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(twin.get_parameter(name).grad, parameter.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("task_name", "name", "trained"), CHOICES)
def test_a_newcomer_begins_at_the_base_that_it_fetched_bit_for_bit(
    task_name: str, name: str, trained: frozenset[int]
) -> None:
    """Not at the values that its own model was built with; what is frozen begins rounded."""
    _, section, layout, _, model = setting(task_name, trained)
    strategy = built(name, model, layout, section, trained)
    fetched = torch.randn(layout.num_elements)
    for fragment in range(layout.num_fragments):
        strategy.load(fragment, fetched[layout.slice(fragment)])
    for fragment, now in enumerate(values(strategy, layout)):
        base = fetched[layout.slice(fragment)]
        assert torch.equal(now, base if fragment in strategy.trained else base.bfloat16().float())
    assert not strategy.optimizer.state_dict()["state"]
