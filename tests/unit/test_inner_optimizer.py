import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dht_config.manifest import InnerOptimizerSection
from p2p_trainer.inner_optimizer import build_inner_optimizer, learning_rate, set_learning_rate


def test_the_learning_rate_rises_over_the_warm_up_and_the_first_step_is_not_wasted() -> None:
    section = InnerOptimizerSection(lr=0.4, batch_size=8, warmup_samples=32)
    assert [learning_rate(section, samples) for samples in (0, 8, 16, 24, 32, 10**9)] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.4, 0.4]
    )


def test_without_a_warm_up_the_learning_rate_is_the_manifests_from_the_start() -> None:
    assert learning_rate(InnerOptimizerSection(lr=0.3, warmup_samples=0), 0) == 0.3


def test_a_batch_larger_than_the_warm_up_does_not_overshoot() -> None:
    assert learning_rate(InnerOptimizerSection(lr=0.3, warmup_samples=4, batch_size=64), 0) == 0.3


def test_the_cosine_ends_at_its_final_fraction_and_stays_there() -> None:
    section = InnerOptimizerSection(
        lr=1.0, batch_size=1, schedule="cosine", warmup_samples=100, decay_samples=300, final_lr_fraction=0.2
    )
    assert learning_rate(section, 100) == pytest.approx(1.0)
    assert learning_rate(section, 200) == pytest.approx(0.6)
    assert learning_rate(section, 300) == pytest.approx(0.2)
    assert learning_rate(section, 10**12) == pytest.approx(0.2)


@given(
    samples=st.integers(0, 2**60),
    warmup=st.integers(0, 10**6),
    decay=st.integers(1, 10**6),
    fraction=st.floats(0, 1),
    schedule=st.sampled_from(["constant", "cosine"]),
)
def test_the_learning_rate_is_always_between_zero_and_the_manifests(
    samples: int, warmup: int, decay: int, fraction: float, schedule: str
) -> None:
    section = InnerOptimizerSection(
        lr=0.5,
        schedule=schedule,
        warmup_samples=warmup,
        decay_samples=warmup + decay,
        final_lr_fraction=fraction,
    )
    lr = learning_rate(section, samples)
    assert math.isfinite(lr)
    assert 0 <= lr <= 0.5 * (1 + 1e-12)


def test_only_matrices_are_decayed_and_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2))
    model[2].weight.requires_grad_(False)
    optimizer = build_inner_optimizer(
        model.parameters(), InnerOptimizerSection(name="adamw", lr=0.02, betas=(0.8, 0.9), weight_decay=0.3)
    )
    assert isinstance(optimizer, torch.optim.AdamW)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {id(param): 0.3 if param.ndim > 1 else 0.0 for param in model.parameters() if param.requires_grad}
    assert all(group["betas"] == (0.8, 0.9) and group["lr"] == 0.02 for group in optimizer.param_groups)


def test_one_step_of_adamw_is_the_textbooks() -> None:
    weight = nn.Parameter(torch.tensor([[1.0, -2.0]]))
    optimizer = build_inner_optimizer([weight], InnerOptimizerSection(lr=0.1, weight_decay=0.5))
    weight.grad = torch.tensor([[3.0, 0.5]])
    optimizer.step()
    # The first step's moments are unbiased to g and g squared: lr against the sign, after the decay.
    assert torch.allclose(weight.detach(), torch.tensor([[1.0 * 0.95 - 0.1, -2.0 * 0.95 - 0.1]]), atol=1e-6)


def test_two_steps_of_sgd_with_momentum_are_the_textbooks() -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = build_inner_optimizer([weight], InnerOptimizerSection(name="sgd", lr=0.1, momentum=0.5))
    for _ in range(2):
        weight.grad = torch.tensor([2.0])
        optimizer.step()
    assert float(weight.detach()) == pytest.approx(1.0 - 0.1 * 2.0 - 0.1 * 3.0)


def test_setting_the_learning_rate_reaches_every_group() -> None:
    optimizer = build_inner_optimizer(nn.Linear(3, 2).parameters(), InnerOptimizerSection())
    assert len(optimizer.param_groups) == 2
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        build_inner_optimizer(nn.Linear(2, 2).requires_grad_(False).parameters(), InnerOptimizerSection())
