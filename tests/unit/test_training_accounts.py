"""A peer's accounts over all fragments, its own order of the data, and what the training process answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dht_config.manifest import InnerOptimizerSection
from p2p_trainer import training
from p2p_trainer.modes import LocalMode
from p2p_trainer.strategies import build_strategy
from p2p_trainer.strategies.rotation import ROUNDS_A_TURN, Rotation
from p2p_trainer.training import Accounts, LeaveFlag, LeaveRequested, Trainer, data_seed
from peers.arena import SharedArena
from peers.fragments import FragmentLayout, cut
from peers.ledger import Counts, Ledger
from peers.pipe import FragmentMeta, Quiet, Rebase, Rebased, SnapshotTaken, TakeSnapshot

LAYOUT = FragmentLayout(names=("a",), shapes=((40,),), bounds=(0, 30, 40))


def meta(ledger: Ledger, *, version: int = 1, total: int = 0) -> FragmentMeta:
    return FragmentMeta(
        version=version,
        digest=bytes([version]) * 32,
        total_element_samples=total,
        history=bytes(32),
        ledger=ledger.to_json(),
    )


def accounts(*ledgers: Ledger, samples: int, totals: tuple[int, ...] = (0, 0)) -> Accounts:
    fragments = [meta(ledger, total=total) for ledger, total in zip(ledgers, totals, strict=True)]
    counts = [Counts(samples, samples // 8)] * 2
    return Accounts(layout=LAYOUT, samples=samples, steps=samples // 8, counts=counts, fragments=fragments)


def test_a_fragment_weighs_as_much_as_it_has_parameters() -> None:
    both = accounts(Ledger.open(30).credit([(0, 30)], 80, 10), Ledger.open(10).credit([(0, 5)], 80, 10), samples=100)
    assert both.credited_samples == (30 * 80 + 5 * 80) / 40
    assert both.pending_samples == (30 * 20 + 5 * 20 + 5 * 100) / 40
    assert both.dropped_samples == 0
    assert both.exact


def test_dropped_samples_are_neither_credited_nor_pending() -> None:
    both = accounts(Ledger.open(30).drop(80, 10), Ledger.open(10), samples=100)
    assert both.dropped_samples == 30 * 80 / 40
    assert both.credited_samples == 0
    assert both.pending_samples == (30 * 20 + 10 * 100) / 40
    assert both.exact


events = st.lists(
    st.tuples(
        st.sampled_from(["credit", "drop"]),
        st.integers(0, 1),
        st.integers(0, 30),
        st.integers(0, 30),
        st.integers(0, 2**50),
        st.sampled_from([{0, 1}, {0}, {1}]),
    ),
    max_size=8,
)


@given(events)
def test_accounts_add_up_exactly_whatever_was_trained_credited_or_dropped(
    history: list[tuple[str, int, int, int, int, set[int]]],
) -> None:
    book = accounts(Ledger.open(30), Ledger.open(10), samples=0)
    trained_elements = 0
    for kind, fragment, start, stop, samples, trained in history:
        book.stepped(samples, trained)
        trained_elements += samples * sum(LAYOUT.size(each) for each in trained)
        ledger, counts = book.ledgers[fragment], book.counts[fragment]
        ledger = ledger.credit([(start, stop)], *counts) if kind == "credit" else ledger.drop(*counts)
        book.replace(fragment, meta(ledger))
        assert book.exact
        assert book.is_pending(fragment) == (book.by_fragment()[fragment]["pending_samples"] > 0)
        total = book.credited_samples + book.dropped_samples + book.pending_samples
        assert total == pytest.approx(book.trained_samples) == pytest.approx(trained_elements / 40)
        assert book.trained_samples <= book.samples


def test_accounts_that_do_not_add_up_say_so() -> None:
    ahead = accounts(Ledger.open(30).credit([(0, 1)], 101, 13), Ledger.open(10), samples=100)
    assert not ahead.exact, "more credited than processed"
    assert ahead.fields()["exact"] is False


def test_replacing_a_fragment_takes_its_ledger_over() -> None:
    both = accounts(Ledger.open(30), Ledger.open(10), samples=100)
    both.replace(1, meta(Ledger.open(10).credit([(0, 10)], 60, 7), version=5, total=600))
    assert both.credited_samples == 10 * 60 / 40
    assert both.fragments[1].version == 5


def test_the_lineages_samples_are_the_mean_over_all_elements() -> None:
    assert accounts(Ledger.open(30), Ledger.open(10), samples=0, totals=(30 * 1000, 10 * 600)).lineage_samples == 900


def test_what_is_reported_names_every_count() -> None:
    book = accounts(Ledger.open(30).credit([(0, 30)], 80, 10), Ledger.open(10), samples=100)
    assert book.fields() == {
        "processed_samples": 100,
        "inner_steps": 12,
        "trained_samples": 100.0,
        "credited_samples": 60.0,
        "pending_samples": 40.0,
        "dropped_samples": 0.0,
        "exact": True,
    }
    first, second = book.by_fragment()
    assert (first["parameters"], first["credited_samples"], first["pending_samples"]) == (30, 80.0, 20.0)
    assert (second["parameters"], second["credited_samples"], second["pending_samples"]) == (10, 0.0, 100.0)
    assert first["digest"] == (bytes([1]) * 32).hex()


def test_every_peer_and_every_restart_reads_its_own_order_of_the_data() -> None:
    seeds = {
        data_seed(run, peer, restart)
        for run in ("run-a", "run-b")
        for peer in ("peer-a", "peer-b", "measuring")
        for restart in range(10)
    }
    assert len(seeds) == 2 * 3 * 10
    assert all(0 <= seed < 2**56 for seed in seeds)
    assert data_seed("run-a", "peer-a", 3) == data_seed("run-a", "peer-a", 3)


def test_a_seed_tells_its_three_parts_apart() -> None:
    assert data_seed("run", "peer1", 1) != data_seed("run", "peer", 11)
    assert data_seed("run1", "peer", 1) != data_seed("run", "1peer", 1)


def test_leaving_is_checked_between_micro_batches() -> None:
    flag = LeaveFlag()
    flag.check()
    assert not flag.is_set
    flag.reason = "interrupted"
    assert flag.is_set
    with pytest.raises(LeaveRequested, match="interrupted"):
        flag.check()


class Swarm:
    """The pipe's other end: keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


@pytest.fixture
def trainer() -> Trainer:
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(torch.arange(40, dtype=torch.float32))
    layout = cut({"a": (40,)}, 2)
    ledgers = [Ledger.open(layout.size(fragment)) for fragment in range(2)]
    nothing: Any = SimpleNamespace()
    arena = SharedArena.create(40)
    task: Any = SimpleNamespace(batches=lambda seed, batch_size: iter(()))
    manifest: Any = SimpleNamespace(
        inner_optimizer=InnerOptimizerSection(name="sgd", lr=0.1), averaging=SimpleNamespace(codec="float32")
    )
    cpu, everything = torch.device("cpu"), frozenset({0, 1})
    strategy = build_strategy("full", model, layout, manifest.inner_optimizer, cpu, everything)
    return Trainer(
        task=nothing,
        strategy=strategy,
        mode=LocalMode(task, strategy, manifest, layout, arena, 4, 0),
        rotation=None,
        settings=nothing,
        accounts=Accounts(
            layout=layout,
            samples=100,
            steps=12,
            counts=[Counts(100, 12)] * 2,
            fragments=[meta(ledger) for ledger in ledgers],
        ),
        arena=arena,
        swarm=Swarm(),  # type: ignore[arg-type]
        metrics=nothing,
        view=nothing,
        peer_view=nothing,
        leave=LeaveFlag(),
        checkpoint_directory=nothing,
        checkpoint_meta={},
    )


def test_a_snapshot_is_a_copy_of_one_fragment_with_the_counts_it_stands_for(trainer: Trainer) -> None:
    trainer.handle(TakeSnapshot(1))
    assert trainer.arena.snapshot.tolist() == [0.0] * 20 + [float(value) for value in range(20, 40)]
    assert trainer.swarm.sent == [SnapshotTaken(fragment=1, samples=100, steps=12)]  # type: ignore[attr-defined]


def test_a_rebase_keeps_the_progress_made_since_the_reference(trainer: Trainer) -> None:
    where = trainer.accounts.layout.slice(1)
    trainer.arena.base[where] = 1000.0
    trainer.arena.snapshot[where] = 20.0
    credited = meta(Ledger.open(20).credit([(0, 20)], 90, 11), version=2)
    trainer.handle(Rebase(fragment=1, keep=True, meta=credited))
    assert trainer.strategy.model.a.tolist()[:20] == [float(value) for value in range(20)]
    assert trainer.strategy.model.a.tolist()[20:] == [1000.0 + value for value in range(20)]
    assert trainer.accounts.pending_samples == (20 * 100 + 20 * 10) / 40
    assert trainer.accounts.exact
    assert trainer.swarm.sent == [Rebased(fragment=1, samples=100, steps=12)]  # type: ignore[attr-defined]


def test_a_rebase_without_known_fate_drops_the_progress_and_says_so_in_the_ledger(trainer: Trainer) -> None:
    where = trainer.accounts.layout.slice(0)
    trainer.arena.base[where] = 7.0
    trainer.handle(Rebase(fragment=0, keep=False, meta=meta(Ledger.open(20), version=2)))
    assert trainer.strategy.model.a.tolist()[:20] == [7.0] * 20
    assert trainer.accounts.dropped_samples == 20 * 100 / 40
    assert trainer.accounts.exact


def test_a_checkpoint_holds_bases_as_they_are_and_ledgers_as_training_sees_them(trainer: Trainer) -> None:
    trainer.handle(Rebase(fragment=0, keep=False, meta=meta(Ledger.open(20), version=2)))
    bases = [meta(Ledger.open(20), version=2), meta(Ledger.open(20), version=1)]
    trainer.handle(Quiet(bases))
    tensors, saved = trainer.checkpoint_contents(bases, clean=False)
    assert set(tensors) >= {"base", "outer_state", "local.0", "local.1"}
    assert [row["version"] for row in saved["fragments"]] == [2, 1]
    ledgers = [Ledger.from_json(row["ledger"]) for row in saved["fragments"]]
    assert [ledger.dropped_element_samples() for ledger in ledgers] == [20 * 100, 0]
    assert (saved["samples"], saved["steps"], saved["clean"]) == (100, 12, False)
    assert (saved["counts"], saved["trained"]) == ([(100, 12)] * 2, [0, 1])
    trainer.strategy.model.a.data.zero_()
    assert tensors["local.1"].sum() != 0, "a copy: training goes on while it is written"


def test_where_memory_holds_no_step_beside_a_checkpoints_copy_messages_are_answered_until_it_is_written(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, written = threading.Event(), threading.Event()

    def save(*_contents: Any) -> None:
        answered.wait()
        written.set()

    def messages(_wait: float) -> Iterator[Any]:
        if trainer._saving is not None:
            answered.set()
            yield TakeSnapshot(1)
        else:
            yield Quiet([meta(Ledger.open(20)) for _ in range(2)])

    monkeypatch.setattr(training, "save_checkpoint", save)
    trainer.swarm.messages = messages  # type: ignore[method-assign,assignment]
    trainer.steps_while_saving = False
    trainer._save_in_background()
    assert written.is_set() and trainer._saving is not None and not trainer._saving.is_alive()
    assert SnapshotTaken(fragment=1, samples=100, steps=12) in trainer.swarm.sent  # type: ignore[attr-defined]
    assert trainer.waited_seconds > 0


def test_a_fragment_whose_turn_is_over_makes_room_for_another_which_begins_at_its_base(trainer: Trainer) -> None:
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(torch.arange(40, dtype=torch.float32))
    layout, section = trainer.accounts.layout, InnerOptimizerSection(name="sgd", lr=0.1)
    strategy = build_strategy("fragments", model, layout, section, torch.device("cpu"), frozenset({0}))
    manifest: Any = SimpleNamespace(inner_optimizer=section)
    task: Any = SimpleNamespace(batches=lambda seed, batch_size: iter(()))
    trainer.strategy, trainer.mode = strategy, LocalMode(task, strategy, manifest, layout, trainer.arena, 4, 0)
    trainer.rotation, trainer._wanted = Rotation(2, frozenset({0}), "a"), frozenset({0})
    written: list[Any] = []
    trainer.metrics = SimpleNamespace(write=lambda name, **fields: written.append((name, fields)))  # type: ignore
    bases = [meta(Ledger.open(20)) for _ in range(2)]
    trainer.swarm.messages = lambda wait: iter([Quiet(bases)])  # type: ignore[method-assign,assignment,misc]
    trainer.arena.base[layout.slice(1)] = 0.1
    for _ in range(ROUNDS_A_TURN):
        assert trainer._wanted == {0}
        trainer.handle(Rebase(fragment=0, keep=True, meta=meta(Ledger.open(20))))
    assert trainer._wanted == {1}
    trainer._rotate()
    assert strategy.trained == trainer._wanted == {1}
    assert written == [("rotation", {"started": [1], "stopped": [0], "trained": [1]})]
    trainer.handle(TakeSnapshot(1))
    assert torch.equal(trainer.arena.snapshot[layout.slice(1)], torch.full((20,), 0.1)), "its base, unrounded"
    trainer.accounts.stepped(8, strategy.trained)
    trainer.handle(TakeSnapshot(0))
    assert trainer.swarm.sent[-1] == SnapshotTaken(fragment=0, samples=100, steps=12)  # type: ignore[attr-defined]
    trainer.handle(TakeSnapshot(1))
    assert trainer.swarm.sent[-1] == SnapshotTaken(fragment=1, samples=108, steps=13)  # type: ignore[attr-defined]
    assert (trainer.accounts.samples, trainer.accounts.trained_samples) == (108, 104)
