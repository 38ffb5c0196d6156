"""The outer step: golden numbers, PyTorch's own SGD, and the same bits under other CPU capabilities and threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peers.outer import NO_HISTORY, Nesterov, base_digest

ROOT = Path(__file__).parents[2]

STEPS_IN_A_PROCESS_OF_ITS_OWN = """
import torch
from peers.outer import Nesterov, base_digest

def values(start, size):  # integers only: torch.randn differs between CPU capabilities
    numbers = torch.arange(start, start + size, dtype=torch.int64)
    mixed = (numbers * 6364136223846793005 + 1442695040888963407) >> 33
    return (mixed % 2000003).to(torch.float32) / 1000003.0 - 1.0

size = 100_003
print(torch.backends.cpu.get_cpu_capability())
for threads in (1, 2):
    torch.set_num_threads(threads)
    base, momentum = values(0, size), torch.zeros(size)
    outer = Nesterov(lr=0.7, momentum=0.8)
    for step in range(5):
        base, momentum = outer.step(base, momentum, values(size * (step + 1), size))
    facts = dict(fragment=1, version=5, total_element_samples=7, history=bytes(32))
    print(base_digest(**facts, base=base, momentum=momentum).hex())
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
    assert len(digests) == 6
    assert len(set(digests)) == 1


def test_golden_numbers_of_two_steps() -> None:
    outer = Nesterov(lr=0.5, momentum=0.5)
    base, momentum = outer.step(torch.tensor([1.0, -2.0]), torch.zeros(2), torch.tensor([0.25, 1.0]))
    # momentum = -average; base + 0.5 * (1 + 0.5) * average
    assert momentum.tolist() == [-0.25, -1.0]
    assert base.tolist() == [1.1875, -1.25]
    base, momentum = outer.step(base, momentum, torch.tensor([0.25, -1.0]))
    assert momentum.tolist() == [-0.375, 0.5]
    assert base.tolist() == [1.40625, -1.875]


def test_without_momentum_and_with_a_rate_of_one_the_base_moves_by_the_average() -> None:
    base, momentum = Nesterov(lr=1.0, momentum=0.0).step(torch.tensor([3.0]), torch.tensor([9.0]), torch.tensor([0.5]))
    assert base.tolist() == [3.5]
    assert momentum.tolist() == [-0.5]


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
    base, velocity = parameter.detach().clone(), torch.zeros(4)
    for values in averages:
        average = torch.tensor(values)
        parameter.grad = -average
        theirs.step()
        base, velocity = Nesterov(lr=lr, momentum=momentum).step(base, velocity, average)
    torch.testing.assert_close(base, parameter.detach(), rtol=1e-5, atol=1e-5)


def test_a_step_changes_none_of_its_arguments() -> None:
    base, momentum, average = torch.ones(5), torch.full((5,), 2.0), torch.full((5,), 3.0)
    Nesterov(lr=0.7, momentum=0.8).step(base, momentum, average)
    assert base.unique().tolist() == [1.0]
    assert momentum.unique().tolist() == [2.0]
    assert average.unique().tolist() == [3.0]


@pytest.mark.parametrize("changed", ["fragment", "version", "total_element_samples", "history", "base", "momentum"])
def test_the_digest_covers_everything_peers_must_agree_on(changed: str) -> None:
    facts = {
        "fragment": 1,
        "version": 2,
        "total_element_samples": 2**70,
        "history": NO_HISTORY,
        "base": torch.zeros(6),
        "momentum": torch.zeros(6),
    }
    other = dict(facts)
    if changed in ("base", "momentum"):
        other[changed] = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, -0.0])
    elif changed == "history":
        other[changed] = bytes(31) + b"1"
    else:
        other[changed] = facts[changed] + 1
    assert len(base_digest(**facts)) == 32
    assert base_digest(**facts) != base_digest(**other)


def test_the_digest_of_a_view_is_that_of_its_copy() -> None:
    everything = torch.arange(12, dtype=torch.float32)
    facts = {"fragment": 0, "version": 0, "total_element_samples": 0, "history": NO_HISTORY, "momentum": torch.zeros(6)}
    assert base_digest(base=everything[3:9], **facts) == base_digest(base=everything[3:9].clone(), **facts)
    assert base_digest(base=everything[::2], **facts) == base_digest(base=everything[::2].clone(), **facts)
