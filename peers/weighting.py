"""How much a contribution of n samples, made in τ inner steps, counts in an average.

An average is ``sum(value_weight · difference) / normaliser(sum(normaliser_terms))`` over the members of a group, where
a difference is local parameters minus base, as it travels. Both sums are over plain numbers that every member
announced, so a reducer can form them for a whole part, or for each stretch in which members' counts are constant.

====================  ============  =========  =======================================================
name                  value weight  terms      the average is
====================  ============  =========  =======================================================
samples_times_batch   n²/τ          n²/τ       weighted by samples times mean batch; the intended default
samples               n             n          weighted by samples
fednova               n/τ           n, n·τ     a mean step, times the mean number of steps
sqrt                  √n            √n         between samples and uniform
uniform               1             1          of one vote for each peer that did anything
====================  ============  =========  =======================================================

With equal inner batches, as manifests have them, ``samples_times_batch`` and ``samples`` are the same average. They
part where machines use batches of their own: a bigger batch makes fewer steps, and its difference is smaller for
the same samples; n²/τ makes up for it.

Each weight is rounded once, from exact integers, and ``sqrt`` is IEEE's correctly rounded one; there is no ``pow``,
which libraries round differently. So members that know the same counts know the same weights, bit for bit. Their sums
depend on the order of addition: whoever needs the same bits adds in the same order.

What this does not stop: counts that are not true. In ``samples_times_batch`` and ``fednova`` understating τ raises
one's weight like overstating n does, so whoever admits a contribution should hold n against τ times the run's batch
size, and n against what its sender is known to be able to do. A slow peer may step on smaller batches than the run's
(``p2p_trainer/planning/plan.py``): one that claims the run's all the same, fewer steps than it made, weighs more by the
factor between them at most.

Measured with ``python tests/benchmarks/learning.py --quick --seeds 3 --compare weighting --json FILE``: 135 k
parameters, 8 peers 20 times apart in speed, 100 rounds of each fragment, like data everywhere, bases half a cycle late,
outer optimizer 0.7 / 0.6. Held-out loss, mean and standard deviation of three seeds: samples (here equal to n²/τ) 2.024
and 0.026, sqrt 2.002 and 0.005, uniform 2.006 and 0.019, fednova 2.070 and 0.016. So fednova is worse here, with every
seed, and between the others nothing is settled. With ``--rounds 400`` and one seed samples 1.692, sqrt
1.670, uniform 1.691, fednova 1.710. Not measured: unlike data, unequal batches at these outer settings, bigger models.

Sources: n²/τ: Decoupled DiLoCo (Douillard et al. 2026, arXiv:2604.21428), tokens times tokens a step; FedNova: Wang et
al. 2020, arXiv:2007.07481, section 4, with p = n / sum(n) and plain inner steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol


class Weighting(Protocol):
    """A rule. Stateless: one object serves every part and thread."""

    @property
    def name(self) -> str:
        """What manifests call it."""

    def value_weight(self, samples: int, steps: int) -> float:
        """The factor of a member's raw difference in the sum; 0.0 if it has no samples.

        :param steps: inner steps in which the samples were processed; at least 1 if there are samples
        :raises ValueError: counts that no peer can have
        """

    def normaliser_terms(self, samples: int, steps: int) -> tuple[float, ...]:
        """What a member adds, item by item, to the sums that ``normaliser`` takes; as many items for every member.

        :raises ValueError: counts that no peer can have
        """

    def normaliser(self, sum_of_terms: tuple[float, ...]) -> float:
        """What the sum of weighted differences is divided by; 0.0 means that nobody has weight: no average."""


def _check(samples: int, steps: int) -> None:
    if samples < 0 or steps < 0:
        raise ValueError(f"{samples} samples in {steps} steps: less than nothing")
    if samples and not steps:
        raise ValueError(f"{samples} samples in 0 steps: samples are processed in at least one step")


@dataclass(frozen=True, slots=True)
class WeightedMean:
    """An ordinary weighted mean: the weights are divided by their sum."""

    name: str
    weight: Callable[[int, int], float]
    """Of samples (above 0) and steps (above 0)."""

    def value_weight(self, samples: int, steps: int) -> float:
        _check(samples, steps)
        return self.weight(samples, steps) if samples else 0.0

    def normaliser_terms(self, samples: int, steps: int) -> tuple[float, ...]:
        return (self.value_weight(samples, steps),)

    def normaliser(self, sum_of_terms: tuple[float, ...]) -> float:
        (total,) = sum_of_terms
        return total


@dataclass(frozen=True, slots=True)
class FedNova:
    """Normalised averaging: (Σ n·Δ/τ) · (Σ n·τ) / (Σ n)². For runs whose peers hold unlike data.

    A peer that made many steps moves the average as far as its samples do, not as far as its steps took it. The
    average of equal differences is then not that difference, unless all made as many steps.
    """

    name: ClassVar[str] = "fednova"

    def value_weight(self, samples: int, steps: int) -> float:
        _check(samples, steps)
        return samples / steps if samples else 0.0

    def normaliser_terms(self, samples: int, steps: int) -> tuple[float, ...]:
        _check(samples, steps)
        return float(samples), float(samples * steps)

    def normaliser(self, sum_of_terms: tuple[float, ...]) -> float:
        samples, samples_times_steps = sum_of_terms
        return samples * samples / samples_times_steps if samples_times_steps > 0 else 0.0


_WEIGHTINGS: dict[str, Weighting] = {
    weighting.name: weighting
    for weighting in (
        WeightedMean("samples_times_batch", lambda samples, steps: samples * samples / steps),
        WeightedMean("samples", lambda samples, steps: float(samples)),
        FedNova(),
        WeightedMean("sqrt", lambda samples, steps: math.sqrt(samples)),
        WeightedMean("uniform", lambda samples, steps: 1.0),
    )
}
WEIGHTING_NAMES = tuple(_WEIGHTINGS)
"""The default first."""


def get_weighting(name: str) -> Weighting:
    """The rule of that name. :raises ValueError: there is none"""
    try:
        return _WEIGHTINGS[name]
    except KeyError:
        raise ValueError(f"weighting is {name!r}; it can be one of {', '.join(WEIGHTING_NAMES)}") from None
