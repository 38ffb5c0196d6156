"""The learning check itself: where theory says what must come out, it comes out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import learning
import learning_swarm
import pytest
import torch
from learning import DEFAULT, PLAIN, QUICK
from learning_swarm import Cell, PartialPeer, Peer, Swarm, credited_steps, run_cell

TINY = replace(
    QUICK,
    name="tiny",
    model=QUICK.model | {"hidden_size": 16, "intermediate_size": 32},
    sequence_length=8,
    rounds=3,
    steps_per_cycle=(6.0, 2.5, 0.3),
    held_out_samples=64,
)
ALONE = replace(TINY, steps_per_cycle=(6.0,))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are tiny: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(cell: Cell, scale: learning_swarm.Scale) -> Swarm:
    swarm = Swarm(cell, scale, seed=0)
    for tick in range(scale.rounds * scale.fragments):
        swarm.tick(tick)
    return swarm


def trained_without_rounds(swarm: Swarm) -> torch.Tensor:
    """What the first peer would be if it had made its steps by itself."""
    initial = Swarm(DEFAULT, ALONE, seed=0).base
    peer = Peer(ALONE, initial, 0)
    for _ in range(swarm.peers[0].steps):
        peer.step(10**9)
    return peer.net.values


@pytest.fixture
def no_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up follows what has landed, which depends on the rounds."""
    monkeypatch.setattr(learning_swarm, "learning_rate", lambda section, samples: section.lr)


@pytest.mark.usefixtures("no_warmup")
@pytest.mark.parametrize("delay", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("codec", ["float32", "int4", "sparse"])
def test_rounds_do_not_disturb_one_peer_alone_whatever_the_codec_leaves_out(codec: str, delay: float) -> None:
    swarm = trained(replace(PLAIN, delay_cycles=delay, up=codec), ALONE)
    torch.testing.assert_close(swarm.peers[0].net.values, trained_without_rounds(swarm), rtol=0, atol=1e-4)


@pytest.mark.parametrize("codec", ["int4", "sparse"])
def test_base_and_a_residual_kept_apart_add_up_to_all_progress(codec: str) -> None:
    swarm = Swarm(replace(PLAIN, delay_cycles=0.0, up=codec, feedback="apart"), ALONE, seed=0)
    (peer,), initial = swarm.peers, swarm.base.clone()
    progress = torch.zeros_like(initial)
    average = swarm.average

    def watched(tick: int) -> learning_swarm.Round:
        where = swarm.layout.slice(tick % ALONE.fragments)
        progress[where] += peer.net.values[where] - swarm.base[where]
        return average(tick)

    swarm.average = watched  # type: ignore[method-assign]
    for tick in range(ALONE.rounds * ALONE.fragments):
        swarm.tick(tick)
    assert peer.residual.abs().max() > 1e-4
    torch.testing.assert_close(swarm.base - initial + peer.residual, progress, rtol=0, atol=1e-5)


def test_peers_agree_with_the_base_but_for_progress_since_their_snapshots() -> None:
    swarm = trained(replace(DEFAULT, delay_cycles=0.0), TINY)
    last = swarm.layout.slice(TINY.fragments - 1)
    for peer in swarm.peers:
        torch.testing.assert_close(peer.net.values[last], swarm.base[last], rtol=0, atol=1e-6)


@pytest.mark.parametrize("delay", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("partial", [0, 2])
def test_every_sample_is_counted_once(delay: float, partial: int) -> None:
    cell = replace(DEFAULT, delay_cycles=delay, batch_factors=(2,), partial_peers=partial, trained_fragments=1)
    swarm = trained(cell, TINY)
    swarm.land(10**9)
    assert swarm.element_samples == sum(
        peer.accounted[fragment] * peer.batch_size * swarm.layout.size(fragment)
        for peer in swarm.peers
        for fragment in range(TINY.fragments)
    )
    assert all(max(peer.accounted) == peer.steps for peer in swarm.peers if not isinstance(peer, PartialPeer))
    for peer in swarm.peers:
        if isinstance(peer, PartialPeer):
            assert sum(peer.trained_steps) == peer.steps, "one fragment at a time"
            assert all(peer.accounted[fragment] <= peer.trained_steps[fragment] for fragment in range(TINY.fragments))


def test_all_cells_see_as_many_samples_as_the_one_process() -> None:
    one_process = credited_steps(TINY) * TINY.batch_size
    partial = replace(DEFAULT, partial_peers=1, trained_fragments=2)
    for cell in (DEFAULT, replace(DEFAULT, delay_cycles=1.0, up="sparse", weighting="uniform"), partial):
        assert run_cell(cell, TINY, 0).samples == pytest.approx(one_process, abs=2 * TINY.batch_size)


def test_the_same_seed_gives_the_same_loss() -> None:
    cell = replace(DEFAULT, up="int8", down="int8")
    first, again, other = (run_cell(cell, TINY, seed).loss for seed in (0, 0, 1))
    assert first == again != other


def test_results_are_written_with_ratios_to_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "QUICK", TINY)
    path = tmp_path / "results.json"
    arguments = ["--quick", "--json", str(path), "--compare", "codec", "--only", "int4|=int8", "--resume", "--seeds"]
    assert learning.main([*arguments, "1"]) == 0
    first = json.loads(path.read_text())
    assert learning.main([*arguments, "2"]) == 0
    report = json.loads(path.read_text())
    assert [cell["name"] for cell in report["cells"]] == [
        DEFAULT.name,
        *(cell.name for cell in learning.codec_cells() if "int" in cell.name),
    ]
    assert report["cells"][0]["ratio"] == 1
    assert all(len(cell["runs"]) == 2 and len(cell["runs"]["0"]["curve"]) == 4 for cell in report["cells"])
    for before, after in zip(first["cells"], report["cells"], strict=True):
        assert before["runs"]["0"] == after["runs"]["0"], "not run again"
    assert str(tmp_path) not in path.read_text()


def test_a_compiled_step_is_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # without a C++ compiler
    initial = Swarm(DEFAULT, ALONE, seed=0).base
    plain, compiled = Peer(ALONE, initial, 0), Peer(ALONE, initial, 0, compiled=True)
    plain.step(10**9)
    compiled.step(10**9)
    torch.testing.assert_close(compiled.net.gradient, plain.net.gradient, rtol=1e-4, atol=1e-6)
