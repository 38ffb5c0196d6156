"""What a new run should be set to, from what its organiser expects: pure arithmetic, and what follows from it.

One rule makes the clock: between two rounds of a fragment the fastest machine should make 20 to 30 inner steps, or more
where links need longer: twice what the slow decile's line takes to carry its rounds. So codec, fragments and ticks
follow from the size of the model, the speed of the fastest machine, the slowest line and the number of volunteers.

Speeds of machines that nobody has measured yet are assumptions and are called so; ``Wishes.fastest_samples_per_second``
takes the place of the assumption as soon as somebody has measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from p2p_trainer.machines import MACHINES
from p2p_trainer.traffic import DAY_SECONDS, cycle_bytes

Codec = Literal["float32", "int8", "int4", "sparse"]

STEPS_A_CYCLE = 25
"""Inner steps of the fastest machine between two rounds of a fragment."""
LINE_SHARE = 0.5
"""Of the slowest line's time, at most, for rounds."""
ROUNDS_WORTH_A_RUN = 400
"""Of each fragment; a run that is much shorter may not beat its fastest peer alone."""
ASSUMED_FASTEST = "4090"
ASSUMED_SHARE_OF_PEAK = 1 / 3
"""Of a machine's published peak: what training reaches of it. An assumption."""
FRAGMENT_ELEMENTS = 12_500_000
"""A round takes some six fragments' worth of memory; with 100 M parameters in 8 fragments that was measured."""
LEAST_FRAGMENTS, MOST_FRAGMENTS = 4, 256
LEAST_TICK_SECONDS, MOST_TICK_SECONDS = 1.0, 3600.0
LIST_BYTES_A_PAIR = 750
"""A round's leader tells every member of every member in this many bytes."""
LARGEST_SWARM = 511
"""Beyond, no group of 256 is a majority."""
LEARNING_RATES = ((1e6, 3e-3), (3e7, 1e-3), (2e8, 6e-4), (math.inf, 3e-4))
"""Up to how many parameters which; from 125 M on as in table 2.1 of arXiv:2005.14165."""
VOCABULARY = 256
"""Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What an organiser says of a run."""

    name: str
    task: str
    parameters: int
    """About; what the shape of the model comes to is in ``Proposal.parameters``."""
    volunteers: int
    slowest_up_bits_per_second: float
    """Of the slowest tenth of the lines."""
    fastest_samples_per_second: float | None = None
    """Of the fastest machine with this model, where somebody measured it."""
    sequence_length: int = 256
    batch_size: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A llama over bytes, with tied embeddings."""

    hidden_size: int
    layers: int

    @property
    def heads(self) -> int:
        return max(1, self.hidden_size // 64)

    @property
    def intermediate_size(self) -> int:
        """Of the gated feed-forward layer: 8/3 of the hidden size, in steps of 16."""
        return 16 * round(self.hidden_size / 6)

    @property
    def parameters(self) -> int:
        layer = 4 * self.hidden_size**2 + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        return VOCABULARY * self.hidden_size + self.layers * layer + self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What the manifest should say, and why."""

    wishes: Wishes
    shape: Shape | None
    """None for a task whose model is not ours to shape."""
    parameters: int
    lr: float
    codec: Codec
    """Of the slowest lines; ``codec_setting`` is the run's."""
    answer_codec: Literal["float32", "int8", "int4"]
    fragments: int
    tick_seconds: float
    step_seconds: float
    """Of an inner step of the fastest machine, measured or assumed."""
    assumed: str
    """What was assumed of the fastest machine; empty if it was measured."""
    binding: Literal["steps", "line", "ticks"]
    """What makes the cycle as long as it is: the fastest machine's steps, the slowest line, or the least tick."""

    @property
    def cycle_seconds(self) -> float:
        return self.tick_seconds * self.fragments

    @property
    def codec_setting(self) -> str:
        """Where the slowest lines need a strong codec, each peer chooses its own: int8 if its line can."""
        return "auto" if self.codec in ("int4", "sparse") else self.codec

    @property
    def cycle_bytes(self) -> float:
        """That the rounds of a volunteer on a slow line send in a cycle."""
        return self.cycle_bytes_with(self.codec)

    def cycle_bytes_with(self, codec: Codec) -> float:
        return _cycle_bytes(codec, self.answer_codec, self.parameters, self.fragments, self.wishes.volunteers)


def propose(wishes: Wishes, size: int | None = None) -> Proposal:
    """Derive a run's settings.

    :param size: the exact number of parameters, where the task's model is known; else a llama is shaped
    """
    shape = shape_of(wishes.parameters) if size is None else None
    parameters = shape.parameters if shape is not None else size or wishes.parameters
    step_seconds, assumed = _step_seconds(wishes, parameters)
    fragments = max(1, min(max(math.ceil(parameters / FRAGMENT_ELEMENTS), LEAST_FRAGMENTS), MOST_FRAGMENTS, parameters))
    by_steps = STEPS_A_CYCLE * step_seconds
    by_ticks = fragments * max(LEAST_TICK_SECONDS, _list_seconds(wishes))
    codec, answer_codec = choose_codec(wishes, parameters, fragments, max(by_steps, by_ticks))
    by_line = _line_seconds(wishes, _cycle_bytes(codec, answer_codec, parameters, fragments, wishes.volunteers))
    cycle_seconds = max(by_steps, by_ticks, by_line)
    # Rounded up: neither rule is broken by it.
    tick_seconds = math.ceil(10 * cycle_seconds / fragments - 1e-9) / 10
    binding: Literal["steps", "line", "ticks"] = (
        "ticks" if cycle_seconds == by_ticks else "steps" if cycle_seconds == by_steps else "line"
    )
    return Proposal(
        wishes=wishes,
        shape=shape,
        parameters=parameters,
        lr=next(lr for most, lr in LEARNING_RATES if parameters <= most),
        codec=codec,
        answer_codec=answer_codec,
        fragments=fragments,
        tick_seconds=min(max(tick_seconds, LEAST_TICK_SECONDS), MOST_TICK_SECONDS),
        step_seconds=step_seconds,
        assumed=assumed,
        binding=binding,
    )


def choose_codec(
    wishes: Wishes, parameters: int, fragments: int, cycle_seconds: float
) -> tuple[Codec, Literal["float32", "int8", "int4"]]:
    """The least lossy codec that the slowest line carries in the time that there is anyway.

    If it carries none of those for such a line, the last of them, and the time becomes longer: 8 bits at 100 Mbit/s and
    more, 4 at 20 to 100, sparse below.
    """
    choices: list[tuple[Codec, Literal["float32", "int8", "int4"]]] = [("float32", "float32"), ("int8", "int8")]
    if wishes.slowest_up_bits_per_second < 100e6:
        choices.append(("int4", "int4"))
    if wishes.slowest_up_bits_per_second < 20e6:
        choices.append(("sparse", "int4"))
    for codec, answer in choices:
        sent = _cycle_bytes(codec, answer, parameters, fragments, wishes.volunteers)
        if _line_seconds(wishes, sent) <= cycle_seconds:
            return codec, answer
    return choices[-1]


def shape_of(parameters: int) -> Shape:
    """The llama nearest to a size, its width about 64 times its depth; a small one is at least 2 layers deep."""
    shapes = [
        Shape(hidden_size=hidden, layers=layers)
        for hidden in [*range(16, 128, 16), *range(128, 8193, 64)]
        for layers in {max(2, round(hidden / ratio)) for ratio in (40, 48, 56, 64, 72, 80, 96)}
    ]
    return min(shapes, key=lambda shape: (abs(math.log(shape.parameters / parameters)), shape.layers))


def forecast_lines(proposal: Proposal) -> list[str]:
    """What a volunteer and the organiser should know before anybody joins, in plain words."""
    wishes, cycle = proposal.wishes, proposal.cycle_seconds
    daily = proposal.cycle_bytes * DAY_SECONDS / cycle
    line = 8 * proposal.cycle_bytes / cycle
    steps = cycle / proposal.step_seconds
    hours = ROUNDS_WORTH_A_RUN * cycle / 3600
    first = 8.0 * proposal.parameters
    why = {
        "steps": f"{STEPS_A_CYCLE} inner steps of the fastest machine",
        "line": "the slowest lines are busy with rounds for half of the time",
        "ticks": "shorter ticks than these leave no time for a round's members to find each other",
    }[proposal.binding]
    lines = [
        f"{proposal.parameters:,} parameters in {proposal.fragments} fragments, one averaged every "
        f"{proposal.tick_seconds:g} s, each every {cycle:g} s: {why}.",
        f"A volunteer's rounds take {_size(daily)} up and as much down a day ({line / 1e6:.2g} Mbit/s each way), "
        f"{_size(proposal.cycle_bytes / proposal.fragments)} every {proposal.tick_seconds:g} s; joining fetches "
        f"{_size(first)} once. Twice the ticks are half of that.",
        *_of_faster_lines(proposal),
        f"The fastest machine makes {steps:.0f} inner steps between two rounds of a fragment"
        + (f" (assumed: {proposal.assumed}; measure it and give --fastest)." if proposal.assumed else "."),
        f"{ROUNDS_WORTH_A_RUN} rounds of each fragment, below which a run may not beat its fastest peer, take "
        f"{hours:.1f} hours.",
    ]
    if wishes.volunteers > LARGEST_SWARM:
        lines.append(
            f"{wishes.volunteers} volunteers are too many for this version: beyond {LARGEST_SWARM} training peers no "
            "group is most of them, and no round makes a version."
        )
    if _line_seconds(wishes, proposal.cycle_bytes) > cycle * 1.001:
        lines.append(
            "The slowest lines do not carry every round: peers on them will take part in every second or fourth."
        )
    return lines


def start_of(now: datetime) -> datetime:
    """Tick 0: the beginning of today, since any past moment will do and a round one is easier to read."""
    return now.replace(hour=0, minute=0, second=0, microsecond=0)


def _of_faster_lines(proposal: Proposal) -> list[str]:
    if proposal.codec_setting != "auto":
        return []
    daily = proposal.cycle_bytes_with("int8") * DAY_SECONDS / proposal.cycle_seconds
    return [
        f"That is with the codec {proposal.codec}, which the slowest lines will choose; a peer that keeps to int8 "
        f"sends {_size(daily)} a day."
    ]


def _size(size_bytes: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes / 1e3:.1f} kB"


def _step_seconds(wishes: Wishes, parameters: int) -> tuple[float, str]:
    """Seconds of an inner step of the fastest machine, and what was assumed for it."""
    if wishes.fastest_samples_per_second is not None:
        return wishes.batch_size / wishes.fastest_samples_per_second, ""
    # 6 operations a parameter and token: Kaplan et al. 2020, arXiv:2001.08361, section 2.1.
    operations = 6.0 * parameters * wishes.sequence_length * wishes.batch_size
    rate = MACHINES[ASSUMED_FASTEST].tflops * 1e12 * ASSUMED_SHARE_OF_PEAK
    return operations / rate, f"a {ASSUMED_FASTEST} at a third of its peak, {operations / rate:.2g} s a step"


def _cycle_bytes(codec: str, answer_codec: str, parameters: int, fragments: int, volunteers: int) -> float:
    even, more = divmod(parameters, fragments)
    sizes = [even + (index < more) for index in range(fragments)]
    return cycle_bytes(codec, answer_codec, sizes, max(2, volunteers))


def _line_seconds(wishes: Wishes, sent_bytes: float) -> float:
    """How long a cycle must be for the slowest line to be busy for no more than its share of it."""
    return 8 * sent_bytes / wishes.slowest_up_bits_per_second / LINE_SHARE


def _list_seconds(wishes: Wishes) -> float:
    """How long a tick must be for a leader on the slowest line to tell all members of all members."""
    return _line_seconds(wishes, LIST_BYTES_A_PAIR * wishes.volunteers**2)
