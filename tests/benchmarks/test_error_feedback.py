"""Error feedback: what is sent follows what there was, and each operation is rounded on its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from error_feedback import ErrorFeedback
from hypothesis import given
from hypothesis import strategies as st

from peers.codecs import CODEC_NAMES, Codec, get_codec

each_codec = pytest.mark.parametrize("codec", [get_codec(name) for name in CODEC_NAMES], ids=CODEC_NAMES)


def normal(size: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(size).astype(np.float32))


@each_codec
@pytest.mark.parametrize("beta", [0.95, 1.0])
def test_with_error_feedback_what_is_sent_follows_what_there_was(codec: Codec, beta: float) -> None:
    """The sums of values and of what is decoded differ by the residual, which stays bounded."""
    size, rounds = 5000, 200
    feedback = ErrorFeedback(beta=beta)
    residual = torch.zeros(size)
    total, sent = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    drift = normal(size, 6) * 0.3
    norms = []
    for index in range(rounds):
        value = drift + normal(size, 1000 + index)
        total += value.double()
        value = feedback.compensate(value, residual)
        decoded = codec.decode(codec.encode(value), size)
        sent += decoded.double()
        residual = feedback.residual_after(value, decoded)
        norms.append(float(residual.norm()))
    if feedback.beta == 1:
        assert torch.allclose(total - sent, residual.double(), atol=1e-3)
        mean_error = float(((total - sent) / rounds).norm() / (total / rounds).norm())
        assert mean_error < {"float32": 1e-6, "float16": 1e-4, "int8": 1e-3, "int4": 1e-2, "sparse": 1}[codec.name]
    assert max(norms[rounds // 2 :]) <= 1.3 * max(norms[: rounds // 2]) + 1e-6
    if codec.lossless:
        assert norms[-1] == 0


def test_a_value_that_stays_the_same_arrives_in_the_end_also_when_it_is_small() -> None:
    """Without feedback a sparse codec would never send any but the same few."""
    size, rounds = 4096, 4000
    codec, feedback = get_codec("sparse"), ErrorFeedback(beta=1.0)
    value = normal(size, 7)
    residual, sent = torch.zeros(size), torch.zeros(size, dtype=torch.float64)
    for _ in range(rounds):
        compensated = feedback.compensate(value.clone(), residual)
        decoded = codec.decode(codec.encode(compensated), size)
        sent += decoded.double()
        residual = feedback.residual_after(compensated, decoded)
    assert float((sent / rounds - value.double()).norm() / value.double().norm()) < 0.1


def test_error_feedback_decays_works_in_place_and_keeps_the_residual_until_it_is_replaced() -> None:
    feedback = ErrorFeedback(beta=0.95)
    value, residual = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 0.0, -1.0])
    compensated = feedback.compensate(value, residual)
    assert compensated.data_ptr() == value.data_ptr()
    assert compensated.tolist() == [1.5, 2.0, 2.0] and residual.tolist() == [0.5, 0.0, -1.0]
    after = feedback.residual_after(compensated, torch.tensor([0.0, 2.0, 0.0]))
    assert after.data_ptr() == value.data_ptr()
    expected = np.array([1.5, 0.0, 2.0], dtype=np.float32) * np.float32(0.95)
    assert after.numpy().tobytes() == expected.tobytes()


@given(st.integers(1, 9000), st.integers(0, 2**32 - 1))
def test_error_feedback_rounds_each_operation_on_its_own(size: int, seed: int) -> None:
    value, residual, decoded = (normal(size, seed + offset) for offset in range(3))
    compensated = value.numpy() + residual.numpy()
    expected = (compensated - decoded.numpy()) * np.float32(0.95)
    feedback = ErrorFeedback(beta=0.95)
    value = feedback.compensate(value, residual)
    assert value.numpy().tobytes() == compensated.tobytes()
    assert feedback.residual_after(value, decoded).numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("beta", [-0.1, 1.01, math.nan])
def test_a_beta_that_makes_the_residual_grow_is_refused(beta: float) -> None:
    with pytest.raises(ValueError, match="beta is"):
        ErrorFeedback(beta=beta)
