"""The plan: the first rung that fits, the micro-batch that pays, the cadence of the line, and words for each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht_config.errors import ExitCode, PlanError, UsageError
from dht_config.manifest import RunManifest, parse_manifest
from p2p_trainer.machine_checks import AVERAGING_BYTES, PROCESSES_BYTES
from p2p_trainer.planning.plan import FIT, STEPS_PER_CYCLE, plan, probe_budget, trained_in_probe
from p2p_trainer.planning.plan_facts import NO_WISHES, Link, Machine, Measurement, Model, Plan, SwarmFacts, Wishes
from p2p_trainer.strategies import STRATEGIES, ModelFacts, StrategyName, fixed_bytes
from p2p_trainer.throughput import Throughput
from peers.fragments import cut
from peers.line import LineRate

MEGABYTE = 10**6
PARAMETERS = 10 * MEGABYTE
"""16 bytes each in training: 160 MB."""
UNKNOWN = Link()
CPU_STRATEGIES: tuple[StrategyName, ...] = ("full", "checkpoint", "fragments")


def manifest(**changes: Any) -> RunManifest:
    keys = {"batch_size": 8, "codec": "float32", "answer_codec": "float32", "tick_seconds": 10.0, **changes}
    return parse_manifest(
        f"""
        [run]
        name = "planned"
        fragments = 8
        tick_seconds = {keys["tick_seconds"]}
        [task]
        name = "text"
        [inner_optimizer]
        batch_size = {keys["batch_size"]}
        [averaging]
        codec = "{keys["codec"]}"
        answer_codec = "{keys["answer_codec"]}"
        """,
        source="a test",
    )


def model(offered: tuple[StrategyName, ...] = CPU_STRATEGIES) -> Model:
    layout = cut({f"layer{index}": (PARAMETERS // 8,) for index in range(8)}, 8)
    return Model(
        layout=layout, facts=ModelFacts(other_bytes=0, largest_block_elements=PARAMETERS // 8), offered=offered
    )


def measurement(strategy: StrategyName, sample_megabytes: float, **rates: float) -> Measurement:
    """:param rates: by micro-batch ("m4"), samples a second"""
    given = rates or {"m1": 10.0, "m2": 10.0, "m4": 10.0, "m8": 10.0}
    shape, run = model(), manifest()
    fixed = fixed_bytes(
        strategy, shape.layout, trained_in_probe(strategy, shape.layout), run.inner_optimizer, shape.facts
    ).device_bytes
    return Measurement(
        results=tuple(
            Throughput(
                samples_per_second=rate,
                micro_batch=int(name[1:]),
                measured_seconds=1.0,
                peak_bytes=fixed + int(sample_megabytes * MEGABYTE) * int(name[1:]),
            )
            for name, rate in given.items()
        ),
        stopped="done",
    )


RAN_OUT = Measurement(results=(), stopped="memory")


def machine(megabytes: int | None, **measured: Measurement) -> Machine:
    """A CPU that may give so much to bases, rounds and training: programs come on top."""
    budget = None if megabytes is None else PROCESSES_BYTES + megabytes * MEGABYTE
    return Machine(device="cpu", budget_bytes=budget, measured=dict(measured))  # type: ignore[arg-type]


def made(on: Machine, link: Link = UNKNOWN, wishes: Wishes = NO_WISHES, run: RunManifest | None = None) -> Plan:
    return plan(on, link, run or manifest(), SwarmFacts(), model=model(), wishes=wishes)


FULL, CHECKPOINT = measurement("full", 200), measurement("checkpoint", 50)
# Beside programs: bases, outer state and rounds 108 MB, or a probe's start 130 MB; training 160 MB; a checkpoint's copy
# 200 MB.


def test_with_memory_to_spare_everything_is_kept_and_the_smallest_good_micro_batch_is_taken() -> None:
    measured = measurement("full", 200, m1=40.0, m2=80.0, m4=96.0, m8=100.0)
    chosen = made(machine(10_000, full=measured))
    assert (chosen.strategy, chosen.micro_batch, chosen.fragments, chosen.all_fragments) == ("full", 4, 8, 8)
    assert chosen.samples_per_second == 96.0
    assert chosen.predicted_bytes == pytest.approx((550 + 130 + 160 + 4 * 200) * MEGABYTE)
    assert "within 5 % of the best (8: 100 samples/s)" in chosen.reasons[1]


def compiled_full(times: float, micro_batch: int = 1, extra_megabytes: int = 0, why: str = "") -> Measurement:
    """Of a machine that makes 10 samples/s, and so many times as many in compiled code."""
    best = FULL.results[0]
    found = replace(
        best,
        micro_batch=micro_batch,
        samples_per_second=times * best.samples_per_second,
        peak_bytes=(best.peak_bytes or 0) + extra_megabytes * MEGABYTE,
    )
    return replace(FULL, compiled=None if why else found, compiling=why)


def test_compiled_code_is_for_those_who_are_faster_with_it_by_a_twentieth() -> None:
    chosen = made(machine(10_000, full=compiled_full(1.3)))
    assert chosen.compiled and chosen.samples_per_second == 13.0
    assert "torch.compile makes 13 samples/s, 1.30 times as many." in chosen.reasons
    for measured, said in (
        (compiled_full(1.04), "torch.compile is not used: it makes 1.04 times the samples."),
        (compiled_full(1.3, extra_megabytes=10_000), "torch.compile is not used: it would take"),
        (compiled_full(1.3, why="torch.compile took too long."), "torch.compile took too long."),
    ):
        plain = made(machine(10_000, full=measured))
        assert not plain.compiled and plain.samples_per_second == 10.0
        assert any(reason.startswith(said) for reason in plain.reasons), plain.reasons
    assert not made(machine(10_000, full=compiled_full(1.3, micro_batch=2))).compiled, "it was measured at another size"
    assert not made(machine(10_000, full=compiled_full(1.3)), wishes=Wishes(compile=False)).compiled
    other = made(machine(10_000, full=compiled_full(1.3)), wishes=Wishes(micro_batch=4))
    assert not other.compiled
    assert "torch.compile is not used: it was measured with micro-batch 1." in other.reasons


def test_a_plan_in_compiled_code_counts_what_that_takes() -> None:
    plain, compiled = made(machine(10_000, full=FULL)), made(machine(10_000, full=compiled_full(1.3, 1, 3000)))
    assert compiled.compiled and plain.predicted_bytes is not None
    assert compiled.predicted_bytes == plain.predicted_bytes + 3000 * MEGABYTE
    # So much that a checkpoint's copy of 200 MB does not fit beside it, as it does beside an ordinary step.
    least = int((130 + 160 + 200 + 3000) / FIT) + 1
    assert made(machine(least, full=FULL)).steps_while_saving
    small = made(machine(least, full=compiled_full(1.3, 1, 3000)))
    assert small.compiled and not small.steps_while_saving


def test_what_was_compiled_for_more_samples_than_a_batch_has_promises_no_rate() -> None:
    rates = measurement("full", 20, m1=0.1, m2=0.2, m4=0.4, m8=0.8)
    best = replace(rates.results[-1], samples_per_second=0.88)
    chosen = made(machine(10_000, full=replace(rates, compiled=best)), run=manifest(tick_seconds=5.0))
    plain = made(machine(10_000, full=rates), run=manifest(tick_seconds=5.0))
    assert "torch.compile is not used: a batch has less than 8 samples." in chosen.reasons
    assert not chosen.compiled and chosen.micro_batch == chosen.batch_size == 4
    assert (chosen.samples_per_second, chosen.batch_size) == (plain.samples_per_second, plain.batch_size)


def test_who_asks_for_compiled_code_with_a_strategy_that_saves_memory_hears_that_it_is_not_for_that() -> None:
    said = "torch.compile is for training with everything in memory."
    asked = made(machine(10_000, checkpoint=CHECKPOINT), wishes=Wishes(strategy="checkpoint", compile=True))
    assert said in asked.reasons
    assert said not in made(machine(10_000, checkpoint=CHECKPOINT), wishes=Wishes(strategy="checkpoint")).reasons


@pytest.mark.parametrize(
    ("wish", "micro_batch"), [(Wishes(micro_batch=1000), 8), (Wishes(micro_batch=9, batch_size=2), 2)]
)
def test_a_micro_batch_larger_than_a_batch_counts_as_a_batch(wish: Wishes, micro_batch: int) -> None:
    chosen = made(machine(10_000, full=FULL), wishes=wish)
    assert (chosen.strategy, chosen.micro_batch, chosen.samples_per_second) == ("full", micro_batch, 10.0)
    assert f"Micro-batch {micro_batch}, as you said." in chosen.reasons


def test_a_larger_micro_batch_that_pays_is_not_taken_if_it_does_not_fit() -> None:
    measured = measurement("full", 200, m1=40.0, m2=80.0, m4=96.0, m8=100.0)
    chosen = made(machine(int((130 + 160 + 400) / FIT) + 1, full=measured))
    assert (chosen.strategy, chosen.micro_batch) == ("full", 2)


def test_one_sample_at_a_time_with_everything_kept_comes_before_the_next_rung() -> None:
    assert made(machine(int((130 + 160 + 200) / FIT) + 1, full=FULL, checkpoint=CHECKPOINT)).strategy == "full"


def test_where_plain_does_not_fit_activations_are_computed_again_and_the_reason_says_what_plain_needs() -> None:
    chosen = made(machine(500, full=FULL, checkpoint=CHECKPOINT))
    assert (chosen.strategy, chosen.micro_batch) == ("checkpoint", 1)
    assert "with activation checkpointing" in chosen.reasons[0]
    assert "plain would need 992 MB" in chosen.reasons[0], chosen.reasons


@pytest.mark.parametrize(("megabytes", "goes_on"), [(491, False), (689, False), (691, True), (10_000, True)])
def test_training_waits_for_a_checkpoint_where_its_copy_does_not_fit_beside_a_step(
    megabytes: int, goes_on: bool
) -> None:
    chosen = made(machine(int(megabytes / FIT), full=measurement("full", 200, m1=10.0)))
    assert (chosen.strategy, chosen.steps_while_saving) == ("full", goes_on)
    assert chosen.predicted_bytes == pytest.approx((550 + 130 + 160 + 200) * MEGABYTE)


def test_on_a_card_the_copy_lies_in_the_machines_own_memory_and_counts_there() -> None:
    assert made(card(500, 4000, full=FULL)).steps_while_saving
    assert not made(machine(10_000)).steps_while_saving, "nothing is known of its steps"


def test_a_probe_that_ran_out_of_memory_refutes_its_rung() -> None:
    chosen = made(machine(10_000, full=RAN_OUT, checkpoint=CHECKPOINT))
    assert chosen.strategy == "checkpoint" and "plain ran out of it with one sample" in chosen.reasons[0]


def test_next_fewer_fragments_are_trained_as_many_as_fit() -> None:
    counts = []
    for megabytes in (460, 420, 370, 300):
        chosen = made(machine(megabytes, full=FULL, checkpoint=CHECKPOINT, fragments=measurement("fragments", 50)))
        assert chosen.strategy == "fragments"
        assert f"{chosen.fragments} of 8 fragments" in chosen.reasons[0]
        counts.append(chosen.fragments)
    assert counts == sorted(counts, reverse=True) and len(set(counts)) > 2
    assert all(1 <= count < 8 for count in counts)


@pytest.mark.parametrize("codec", ["sparse", "auto"])
def test_what_a_sparse_codec_leaves_of_fragments_whose_turn_is_over_counts(codec: str) -> None:
    on, wish = machine(10_000, fragments=measurement("fragments", 50)), Wishes(strategy="fragments", train_fragments=2)
    plain, sparse = made(on, wishes=wish), made(on, wishes=wish, run=manifest(codec=codec))
    assert plain.predicted_bytes is not None and sparse.predicted_bytes is not None
    held_and_copied = 2 * 4 * PARAMETERS * 6 // 8
    assert sparse.predicted_bytes - plain.predicted_bytes == held_and_copied
    shape, small = model(STRATEGIES), card(5000, 850)
    plan(small, Link(), manifest(), SwarmFacts(), model=shape, wishes=wish)
    with pytest.raises(PlanError, match="own memory"):
        plan(small, Link(), manifest(codec=codec), SwarmFacts(), model=shape, wishes=wish)


@pytest.mark.parametrize("wishes", [Wishes(), Wishes(strategy="full"), Wishes(micro_batch=8)])
def test_memory_that_fits_nothing_is_one_line_with_a_remedy_and_a_code_of_its_own(wishes: Wishes) -> None:
    with pytest.raises(PlanError) as refused:
        made(machine(150), wishes=wishes)
    assert refused.value.exit_code == ExitCode.NO_PLAN
    assert "do not hold this run" in refused.value.problem and "--memory" in refused.value.remedy
    assert "\n" not in str(refused.value)


def test_what_a_person_asked_for_is_done_and_said() -> None:
    on = machine(10_000, full=FULL, checkpoint=CHECKPOINT, fragments=measurement("fragments", 50))
    chosen = made(on, wishes=Wishes(strategy="fragments", train_fragments=3, micro_batch=2, batch_size=4))
    assert (chosen.strategy, chosen.fragments, chosen.micro_batch, chosen.batch_size) == ("fragments", 3, 2, 4)
    assert chosen.lr_factor == pytest.approx(0.5**0.5)
    assert sum("as you said" in reason for reason in chosen.reasons) == 3
    assert made(on, wishes=Wishes(train_fragments=3)).strategy == "fragments"
    assert made(on, wishes=Wishes(batch_size=1000)).batch_size == 8, "never a larger one than the run's"
    with pytest.raises(PlanError, match="not offered"):
        made(on, wishes=Wishes(strategy="stream"))


@pytest.mark.parametrize("strategy", [None, "full", "fragments"])
def test_more_fragments_than_the_run_has_are_a_mistake_of_whoever_asks(strategy: StrategyName | None) -> None:
    with pytest.raises(UsageError, match="--train-fragments: 9 is more than the 8 that this run has"):
        made(machine(10_000), wishes=Wishes(strategy=strategy, train_fragments=9))


def test_without_figures_a_plan_is_careful() -> None:
    failed = Measurement(results=(), stopped=None, failure="it said nothing for 300 s")
    chosen = made(machine(None, full=failed))
    assert (chosen.strategy, chosen.micro_batch, chosen.samples_per_second) == ("full", 1, None)
    assert chosen.predicted_bytes is None
    assert any("it said nothing for 300 s" in reason for reason in chosen.reasons)


# --- speed


@pytest.mark.parametrize(("rate", "batch_size"), [(100.0, 8), (0.8, 8), (0.7, 7), (0.4, 4), (0.05, 1), (0.001, 1)])
def test_a_peer_too_slow_for_eight_steps_between_its_rounds_takes_a_smaller_batch(rate: float, batch_size: int) -> None:
    """80 s between two rounds of a fragment."""
    chosen = made(machine(10_000, full=measurement("full", 1, m1=rate, m8=rate)))
    assert chosen.batch_size == batch_size
    assert chosen.lr_factor == pytest.approx((batch_size / 8) ** 0.5)
    assert chosen.micro_batch <= chosen.batch_size
    assert any("learning rate times" in reason for reason in chosen.reasons) == (batch_size < 8)


def test_a_machine_that_is_slowed_down_counts_as_slow() -> None:
    on = replace(machine(10_000, full=FULL), emulated_samples_per_second=0.4)
    assert (made(on).samples_per_second, made(on).batch_size) == (0.4, 4)


@given(
    megabytes=st.integers(200, 3000),
    more=st.integers(0, 3000),
    full=st.floats(1, 500),
    checkpointed=st.floats(0, 1),
    rate=st.floats(1e-3, 1e4),
)
def test_more_memory_never_makes_a_plan_save_more_and_what_is_planned_fits(
    megabytes: int, more: int, full: float, checkpointed: float, rate: float
) -> None:
    rates = {f"m{size}": rate for size in (1, 2, 4, 8)}
    measured = {
        "full": measurement("full", full, **rates),
        "checkpoint": measurement("checkpoint", full * checkpointed, **rates),
        "fragments": measurement("fragments", full * checkpointed, **rates),
    }
    rungs = []
    for size in (megabytes, megabytes + more):
        on = machine(size, **measured)
        try:
            chosen = made(on)
        except PlanError:
            rungs.append(len(STRATEGIES) * 10.0)
            continue
        assert chosen.predicted_bytes is not None and on.budget_bytes is not None
        assert chosen.predicted_bytes <= on.budget_bytes
        assert 1 <= chosen.micro_batch <= chosen.batch_size <= 8
        assert 0 < chosen.lr_factor <= 1
        assert chosen.samples_per_second is not None
        steps = chosen.samples_per_second * 80 / chosen.batch_size
        assert steps >= STEPS_PER_CYCLE * (1 - 1e-9) or chosen.batch_size == 1
        rungs.append(10 * STRATEGIES.index(chosen.strategy) + 8 - chosen.fragments)
    assert rungs[0] >= rungs[1]


# --- the line


def test_a_line_that_is_not_known_is_tried() -> None:
    chosen = made(machine(10_000, full=FULL))
    assert (chosen.cadence, chosen.codec) == (1, "float32")
    assert any("not measured yet" in reason for reason in chosen.reasons)


@pytest.mark.parametrize(("megabits", "cadence"), [(100, 1), (5.1, 1), (4.9, 2), (2.6, 2), (2.4, 4), (0.5, 4)])
def test_the_way_up_decides_how_often(megabits: float, cadence: int) -> None:
    """A round sends 5 MB in 10 s, of which 80 % are to be had: 5 Mbit/s."""
    chosen = made(machine(10_000, full=FULL), Link(up=megabits * 1e6 * 1.0))
    assert chosen.cadence == cadence, chosen.reasons


def test_bases_that_are_fetched_count_for_the_way_down() -> None:
    """Every second round with 10 MB fetched takes 6 Mbit/s down, every fourth 3."""
    assert made(machine(10_000, full=FULL), Link(up=1e9, down=4e6)).cadence == 4


def test_where_no_cadence_is_enough_the_reason_says_what_would_be() -> None:
    chosen = made(machine(10_000, full=FULL), Link(up=0.5e6))
    assert chosen.cadence == 4
    said = " ".join(chosen.reasons)
    assert "Even that is too often" in said and "1.25 Mbit/s up" in said and "codec int8" in said


def test_what_rounds_measured_before_is_said_to_be_that_and_distance_counts() -> None:
    known = LineRate(up=1e7, down=1e7)
    chosen = made(machine(10_000, full=FULL), Link.of(known))
    assert chosen.cadence == 1
    assert any("80 Mbit/s each way (as rounds measured it before): every round" in one for one in chosen.reasons)
    far = made(machine(10_000, full=FULL), Link.of(replace(known, round_trip_seconds=30.0)))
    assert far.cadence > 1
    assert any("Nearer than 30 s to the others it would be every round" in one for one in far.reasons)


@pytest.mark.parametrize(("megabits", "codec"), [(100, "int8"), (0.7, "int4"), (0.05, "sparse")])
def test_a_run_that_leaves_the_codec_to_its_peers_gets_one_for_the_line(megabits: float, codec: str) -> None:
    run = manifest(codec="auto")
    chosen = made(machine(10_000, full=FULL), Link(up=megabits * 1e6), run=run)
    assert chosen.codec == codec and any("chosen by this peer" in reason for reason in chosen.reasons)


def test_a_person_may_choose_how_often_and_with_which_codec_and_hears_what_the_line_carries() -> None:
    on, run = machine(10_000, full=FULL), manifest(codec="auto")
    slow, fast = Link(up=0.05e6), Link(up=1e9, down=1e9)
    chosen = made(on, slow, Wishes(cadence=1, codec="int8"), run)
    assert (chosen.cadence, chosen.codec) == (1, "int8")
    said = " ".join(chosen.reasons)
    assert "50 kbit/s up: every round, as you say, int8 (as you say)." in said
    assert "The line carries every 4th round: while rounds close without this peer, it takes part less often." in said
    assert "or --codec sparse" in said, "even every 4th would be too much with this codec"
    rare = made(on, fast, Wishes(cadence=4), run)
    assert (rare.cadence, rare.codec) == (4, "int8") and "The line carries every round." in rare.reasons
    unknown = made(on, UNKNOWN, Wishes(cadence=2), run)
    assert unknown.cadence == 2 and "every 2nd round, as you say; int8" in " ".join(unknown.reasons)
    assert made(on, UNKNOWN, Wishes(codec="sparse"), run).codec == "sparse"


def test_a_codec_cannot_be_chosen_where_the_run_has_one_for_all() -> None:
    with pytest.raises(UsageError, match="--codec: all peers of this run encode with float32"):
        made(machine(10_000, full=FULL), wishes=Wishes(codec="int8"))


# --- a device with memory of its own


def card(megabytes: int, host_megabytes: int, **measured: Measurement) -> Machine:
    return Machine(
        device="cuda:0",
        budget_bytes=megabytes * MEGABYTE,
        host_budget_bytes=host_megabytes * MEGABYTE,
        compute_dtype="bfloat16",
        measured=dict(measured),  # type: ignore[arg-type]
    )


def test_on_a_card_the_bases_do_not_count_and_the_optimizer_may_move_to_the_host() -> None:
    shape = model(STRATEGIES)
    measured = {"full": FULL, "checkpoint": CHECKPOINT, "host_optimizer": measurement("host_optimizer", 50)}
    chosen = []
    for megabytes in (500, 240, 150):
        one = plan(card(megabytes, 4000, **measured), Link(), manifest(), SwarmFacts(), model=shape)
        chosen.append(one.strategy)
        assert any("bfloat16" in reason for reason in one.reasons)
    assert chosen == ["full", "checkpoint", "host_optimizer"]


def test_a_host_without_memory_for_the_bases_says_so() -> None:
    with pytest.raises(PlanError, match="own memory"):
        plan(card(5000, 600), Link(), manifest(), SwarmFacts(), model=model(STRATEGIES))


def test_a_probe_may_take_what_the_plan_has_for_it() -> None:
    """Of 1000 MB nine tenths, less what is there while it measures."""
    budget = probe_budget(machine(1000), manifest(), model(), "full")
    assert budget == pytest.approx((FIT * 1000 - 130) * MEGABYTE, rel=1e-3)
    assert probe_budget(machine(None), manifest(), model(), "full") is None
    assert probe_budget(machine(1), manifest(), model(), "full") == 0


def test_what_programs_take_is_measured_beside_the_model() -> None:
    heavy = replace(FULL, program_bytes=900 * MEGABYTE)
    assert machine(10_000, full=heavy).program_bytes == 900 * MEGABYTE + AVERAGING_BYTES
    light = made(machine(10_000, full=FULL)).predicted_bytes
    assert (
        made(machine(10_000, full=heavy)).predicted_bytes == light + 900 * MEGABYTE + AVERAGING_BYTES - PROCESSES_BYTES
    )


def test_a_plan_is_told_in_two_lines_and_written_whole() -> None:
    chosen = made(machine(10_000, full=FULL), Link(up=1e7))
    lines = chosen.in_two_lines()
    assert len(lines) == 2 and lines[0].startswith("Plan: ") and all("\n" not in line for line in lines)
    fields = chosen.to_json()
    assert {"micro_batch", "strategy", "fragments", "cadence", "codec", "reasons"} <= fields.keys()
    assert fields["reasons"] == list(chosen.reasons)
