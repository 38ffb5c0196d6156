"""The outer step: golden numbers, PyTorch's own SGD, and the same bits under other CPU capabilities and threads."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peers.outer import NO_HISTORY, PIECE_ELEMENTS, AdamW, Nesterov, OuterOptimizer, base_digest, power

ROOT = Path(__file__).parents[2]

STEPS_IN_A_PROCESS_OF_ITS_OWN = """
import torch
from peers.outer import AdamW, Nesterov, base_digest

def values(start, size):  # integers only: torch.randn differs between CPU capabilities
    numbers = torch.arange(start, start + size, dtype=torch.int64)
    mixed = (numbers * 6364136223846793005 + 1442695040888963407) >> 33
    return (mixed % 2000003).to(torch.float32) / 1000003.0 - 1.0

size = 100_003
print(torch.backends.cpu.get_cpu_capability())
for threads in (1, 2):
    torch.set_num_threads(threads)
    for outer in (
        Nesterov(lr=0.7, momentum=0.8), AdamW(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    ):
        base, state = values(0, size), torch.zeros(outer.states, size)
        for step in range(5):
            base, state = outer.step(base, state, values(size * (step + 1), size), step + 1)
        facts = dict(fragment=1, version=5, total_element_samples=7, history=bytes(32))
        print(base_digest(**facts, base=base, outer_state=state).hex())
"""


def test_the_same_steps_give_the_same_bits_under_other_cpu_capabilities_and_threads() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "ATEN_CPU_CAPABILITY"}
    native: dict[str, str] = {}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", STEPS_IN_A_PROCESS_OF_ITS_OWN],
            cwd=ROOT,
            env=environment | capability,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for capability in ({"ATEN_CPU_CAPABILITY": "default"}, {"ATEN_CPU_CAPABILITY": "avx2"}, native)
    ]
    digests = []
    for run in runs:
        printed, problems = run.communicate(timeout=200)
        assert run.returncode == 0, problems
        capability, *found = printed.split()
        digests += found
        print(capability, found)
    assert len(digests) == 12
    assert len(set(digests)) == 2, "one of each optimizer"


def test_golden_numbers_of_two_steps() -> None:
    outer = Nesterov(lr=0.5, momentum=0.5)
    base, momentum = outer.step(torch.tensor([1.0, -2.0]), torch.zeros(1, 2), torch.tensor([0.25, 1.0]), 1)
    # momentum = -average; base + 0.5 * (1 + 0.5) * average
    assert momentum.tolist() == [[-0.25, -1.0]]
    assert base.tolist() == [1.1875, -1.25]
    base, momentum = outer.step(base, momentum, torch.tensor([0.25, -1.0]), 2)
    assert momentum.tolist() == [[-0.375, 0.5]]
    assert base.tolist() == [1.40625, -1.875]


def test_without_momentum_and_with_a_rate_of_one_the_base_moves_by_the_average() -> None:
    outer = Nesterov(lr=1.0, momentum=0.0)
    base, momentum = outer.step(torch.tensor([3.0]), torch.tensor([[9.0]]), torch.tensor([0.5]), 1)
    assert base.tolist() == [3.5]
    assert momentum.tolist() == [[-0.5]]


@given(
    lr=st.floats(0.05, 1.5),
    momentum=st.floats(0.1, 0.95),
    averages=st.lists(st.lists(st.floats(-2, 2, width=32), min_size=4, max_size=4), min_size=1, max_size=8),
)
def test_it_is_what_torchs_sgd_does_with_the_negative_average_as_gradient(
    lr: float, momentum: float, averages: list[list[float]]
) -> None:
    parameter = torch.nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.0]))
    theirs = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=True)
    base, velocity = parameter.detach().clone(), torch.zeros(1, 4)
    for version, values in enumerate(averages, 1):
        average = torch.tensor(values)
        parameter.grad = -average
        theirs.step()
        base, velocity = Nesterov(lr=lr, momentum=momentum).step(base, velocity, average, version)
    torch.testing.assert_close(base, parameter.detach(), rtol=1e-5, atol=1e-5)


@given(
    betas=st.tuples(st.floats(0.5, 0.95), st.floats(0.5, 0.999)),
    weight_decay=st.floats(0, 0.5),
    averages=st.lists(st.lists(st.floats(-2, 2, width=32), min_size=4, max_size=4), min_size=1, max_size=8),
)
def test_adamw_is_torchs_with_the_negative_average_as_gradient(
    betas: tuple[float, float], weight_decay: float, averages: list[list[float]]
) -> None:
    parameter = torch.nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.0]))
    theirs = torch.optim.AdamW([parameter], lr=0.01, betas=betas, eps=1e-6, weight_decay=weight_decay)
    ours = AdamW(lr=0.01, betas=betas, eps=1e-6, weight_decay=weight_decay)
    base, state = parameter.detach().clone(), torch.zeros(2, 4)
    for version, values in enumerate(averages, 1):
        average = torch.tensor(values)
        parameter.grad = -average
        theirs.step()
        base, state = ours.step(base, state, average, version)
    torch.testing.assert_close(base, parameter.detach(), rtol=1e-4, atol=1e-5)


@given(st.floats(0, 1), st.integers(0, 10**6))
def test_power_is_the_power(base: float, exponent: int) -> None:
    assert math.isclose(power(base, exponent), base**exponent, rel_tol=1e-9, abs_tol=1e-300)


@pytest.mark.parametrize(
    "outer", [Nesterov(lr=0.7, momentum=0.8), AdamW(lr=0.1, betas=(0.9, 0.9), eps=1e-8, weight_decay=0.1)]
)
def test_a_step_changes_none_of_its_arguments(outer: OuterOptimizer) -> None:
    base, state, average = torch.ones(5), torch.full((outer.states, 5), 2.0), torch.full((5,), 3.0)
    outer.step(base, state, average, 1)
    assert base.unique().tolist() == [1.0]
    assert state.unique().tolist() == [2.0]
    assert average.unique().tolist() == [3.0]


@pytest.mark.parametrize("changed", ["fragment", "version", "total_element_samples", "history", "base", "outer_state"])
def test_the_digest_covers_everything_peers_must_agree_on(changed: str) -> None:
    facts = {
        "fragment": 1,
        "version": 2,
        "total_element_samples": 2**70,
        "history": NO_HISTORY,
        "base": torch.zeros(6),
        "outer_state": torch.zeros(6),
    }
    other = dict(facts)
    if changed in ("base", "outer_state"):
        other[changed] = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, -0.0])
    elif changed == "history":
        other[changed] = bytes(31) + b"1"
    else:
        other[changed] = facts[changed] + 1
    assert len(base_digest(**facts)) == 32
    assert base_digest(**facts) != base_digest(**other)


def test_the_digest_of_a_view_is_that_of_its_copy() -> None:
    everything = torch.arange(12, dtype=torch.float32)
    facts = {
        "fragment": 0,
        "version": 0,
        "total_element_samples": 0,
        "history": NO_HISTORY,
        "outer_state": torch.zeros(6),
    }
    assert base_digest(base=everything[3:9], **facts) == base_digest(base=everything[3:9].clone(), **facts)
    assert base_digest(base=everything[::2], **facts) == base_digest(base=everything[::2].clone(), **facts)


@pytest.mark.parametrize(
    "outer", [Nesterov(lr=0.7, momentum=0.8), AdamW(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)]
)
def test_a_step_in_place_gives_the_same_bits(outer: OuterOptimizer) -> None:
    torch.manual_seed(0)
    size = PIECE_ELEMENTS + 1001
    base, state, average = torch.rand(size), torch.rand(outer.states, size), torch.rand(size)
    new_base, new_state = outer.step(base, state, average, 3)
    outer.step(base, state, average, 3, (base, state))
    assert torch.equal(base, new_base) and torch.equal(state, new_state)
