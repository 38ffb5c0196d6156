"""Weights: what each rule makes of samples and steps, and that no rule makes something of nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.weighting import WEIGHTING_NAMES, Weighting, get_weighting

every_weighting = pytest.mark.parametrize(
    "weighting", [get_weighting(name) for name in WEIGHTING_NAMES], ids=list(WEIGHTING_NAMES)
)
counts = st.integers(1, 10_000).flatmap(lambda steps: st.tuples(st.integers(steps, steps * 4096), st.just(steps)))
groups = st.lists(st.tuples(counts, st.floats(-1, 1)), min_size=1, max_size=8)

MEMBERS = [((160, 20), 1.0), ((80, 10), -2.0), ((8, 1), 4.0)]
"""((samples, steps), difference)"""


def average(weighting: Weighting, members: Sequence[tuple[tuple[int, int], float]]) -> float:
    """What a reducer does, for one element."""
    weighted = sum(weighting.value_weight(*count) * difference for count, difference in members)
    terms = zip(*(weighting.normaliser_terms(*count) for count, _ in members), strict=True)
    divisor = weighting.normaliser(tuple(math.fsum(column) for column in terms))
    return weighted / divisor if divisor > 0 else 0.0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("samples_times_batch", (160 * 1.0 - 80 * 2.0 + 8 * 4.0) / 248),
        ("samples", (160 * 1.0 - 80 * 2.0 + 8 * 4.0) / 248),
        ("fednova", (8 * 1.0 - 8 * 2.0 + 8 * 4.0) * (160 * 20 + 80 * 10 + 8 * 1) / 248**2),
        ("sqrt", (math.sqrt(160) - 2 * math.sqrt(80) + 4 * math.sqrt(8)) / sum(map(math.sqrt, (160, 80, 8)))),
        ("uniform", 1.0),
    ],
)
def test_each_rule_averages_as_its_formula_says(name: str, expected: float) -> None:
    assert average(get_weighting(name), MEMBERS) == pytest.approx(expected, rel=1e-14)


@given(groups, st.integers(1, 4096))
def test_with_equal_inner_batches_samples_times_batch_is_sample_weighting(
    members: list[tuple[tuple[int, int], float]], batch: int
) -> None:
    equal = [((steps * batch, steps), difference) for (_, steps), difference in members]
    by_batch, by_samples = (average(get_weighting(name), equal) for name in ("samples_times_batch", "samples"))
    assert by_batch == pytest.approx(by_samples, rel=1e-9, abs=1e-12)


def test_with_unequal_batches_the_larger_batch_counts_more_a_sample() -> None:
    weighting = get_weighting("samples_times_batch")
    assert weighting.value_weight(160, 10) == 2 * weighting.value_weight(160, 20)


@given(groups, st.integers(1, 10_000))
def test_with_equal_steps_fednova_is_sample_weighting(members: list[tuple[tuple[int, int], float]], steps: int) -> None:
    equal = [((samples, steps), difference) for (samples, _), difference in members]
    nova, by_samples = (average(get_weighting(name), equal) for name in ("fednova", "samples"))
    assert nova == pytest.approx(by_samples, rel=1e-9, abs=1e-12)


@given(groups)
def test_fednova_takes_a_mean_step_times_the_mean_number_of_steps(
    members: list[tuple[tuple[int, int], float]],
) -> None:
    total = sum(samples for (samples, _), _ in members)
    step = sum(samples * difference / steps for (samples, steps), difference in members) / total
    number = sum(samples * steps for (samples, steps), _ in members) / total
    assert average(get_weighting("fednova"), members) == pytest.approx(step * number, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", [name for name in WEIGHTING_NAMES if name != "fednova"])
@given(members=groups)
def test_a_mean_lies_between_the_differences(name: str, members: list[tuple[tuple[int, int], float]]) -> None:
    differences = [difference for _, difference in members]
    assert min(differences) - 1e-9 <= average(get_weighting(name), members) <= max(differences) + 1e-9


@every_weighting
@given(members=groups)
def test_a_member_without_samples_changes_nothing(
    weighting: Weighting, members: list[tuple[tuple[int, int], float]]
) -> None:
    for idle in ((0, 0), (0, 7)):
        assert weighting.value_weight(*idle) == 0.0
        assert average(weighting, [*members, (idle, 1000.0)]) == average(weighting, members)


@every_weighting
def test_if_nobody_has_samples_the_normaliser_is_zero(weighting: Weighting) -> None:
    assert weighting.normaliser(weighting.normaliser_terms(0, 0)) == 0.0
    assert weighting.normaliser(weighting.normaliser_terms(0, 3)) == 0.0


@every_weighting
@given(count=counts)
def test_whoever_is_alone_gets_its_own_difference(weighting: Weighting, count: tuple[int, int]) -> None:
    assert average(weighting, [(count, 0.5)]) == pytest.approx(0.5, rel=1e-12)


@given(st.integers(1, 2**60), st.integers(1, 2**60))
def test_weights_are_exact_but_for_one_rounding(samples: int, steps: int) -> None:
    assert get_weighting("samples_times_batch").value_weight(samples, steps) == float(Fraction(samples**2, steps))
    assert get_weighting("fednova").value_weight(samples, steps) == float(Fraction(samples, steps))
    assert get_weighting("samples").value_weight(samples, steps) == float(samples)


def test_the_square_root_has_the_same_bits_everywhere() -> None:
    assert [get_weighting("sqrt").value_weight(samples, 1).hex() for samples in (2, 3, 1000)] == [
        "0x1.6a09e667f3bcdp+0",
        "0x1.bb67ae8584caap+0",
        "0x1.f9f6e4990f227p+4",
    ]


@every_weighting
@pytest.mark.parametrize(("samples", "steps"), [(1, 0), (-1, 1), (1, -1), (0, -1)])
def test_impossible_counts_are_refused(weighting: Weighting, samples: int, steps: int) -> None:
    with pytest.raises(ValueError, match=f"{samples} samples in {steps} steps"):
        weighting.value_weight(samples, steps)
    with pytest.raises(ValueError, match=f"{samples} samples in {steps} steps"):
        weighting.normaliser_terms(samples, steps)


def test_an_unknown_rule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="weighting is 'fedavg'; it can be one of samples_times_batch, samples"):
        get_weighting("fedavg")
