"""How often a line lets this machine take part in rounds, how strongly it encodes for that, and why: pure."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from dht_config.errors import UsageError
from dht_config.manifest import RunManifest
from p2p_trainer.planning.plan_facts import NO_WISHES, Link, Wishes
from peers.clock import Schedule
from peers.fragments import FragmentLayout
from peers.line import (
    CADENCES,
    CODECS,
    SHARE_OF_LINE,
    CadenceValue,
    CodecName,
    LineRate,
    LineUse,
    least_codec,
    line_use,
)

_BYTES_PER_VALUE = 4
_OFTEN = {1: "every round", 2: "every 2nd round", 4: "every 4th round"}


def plan_line(
    link: Link, manifest: RunManifest, layout: FragmentLayout, wishes: Wishes = NO_WISHES
) -> tuple[CadenceValue, str, list[str]]:
    """(cadence, codec, why). Unless the run leaves the codec to its peers it is the run's, alike for all.

    :raises UsageError: a codec is wished for, and the run has one for all
    """
    refuse_codec(manifest, wishes.codec)
    of_run = manifest.averaging.codec
    rate = LineRate(
        up=link.up / 8 if link.up is not None else math.inf,
        down=link.down / 8 if link.down is not None else math.inf,
        round_trip_seconds=link.round_trip_seconds,
    )
    use = partial(_line_use, manifest, layout)
    codec: str = of_run
    if wishes.codec is not None:
        codec, whose = wishes.codec, "as you say"
    elif of_run == "auto":
        codec, whose = least_codec(rate, use) if rate.is_known else CODECS[0], "chosen by this peer"
    else:
        whose = "the run's"
    if not rate.is_known:
        often = f"{_OFTEN[wishes.cadence]}, as you say" if wishes.cadence else "every round until rounds show otherwise"
        return wishes.cadence or 1, codec, [f"The line is not measured yet: {often}; {codec} ({whose})."]
    carried = use(codec).least_cadence(rate)
    cadence = wishes.cadence or carried
    said = ", as you say" if wishes.cadence else ""
    reasons = [f"{_line_in_words(link)}: {_OFTEN[cadence]}{said}, {codec} ({whose})."]
    if carried > cadence:
        reasons.append(
            f"The line carries {_OFTEN[carried]}: while rounds close without this peer, it takes part less often."
        )
    elif carried < cadence:
        reasons.append(f"The line carries {_OFTEN[carried]}.")
    near = use(codec).least_cadence(replace(rate, round_trip_seconds=0.0))
    if near < cadence and not wishes.cadence:
        reasons.append(f"Nearer than {link.round_trip_seconds:.2g} s to the others it would be {_OFTEN[near]}.")
    most = CADENCES[-1]
    if (share := use(codec).share(rate, most)) > SHARE_OF_LINE:
        way, bits_per_second = _bottleneck(use(codec), rate, most)
        fixed = of_run != "auto" or wishes.codec is not None
        denser = [name for name in CODECS if use(name).share(rate, most) <= SHARE_OF_LINE and fixed]
        where = "a run with codec" if of_run != "auto" else "--codec"
        other_run = f"{where} {denser[0]}" if denser else "longer ticks"
        reasons.append(
            f"Even that is too often: this peer's rounds would come late. It takes "
            f"{bits(bits_per_second * share / SHARE_OF_LINE)} {way}, or {other_run}."
        )
    return cadence, codec, reasons


def refuse_codec(manifest: RunManifest, wished: CodecName | None) -> None:
    """:raises UsageError: a codec is wished for, and the run has one for all"""
    of_run = manifest.averaging.codec
    if wished is not None and of_run != "auto":
        raise UsageError(
            f"--codec: all peers of this run encode with {of_run}.",
            'Leave --codec out; it is for runs whose manifest says codec = "auto".',
        )


def _line_use(manifest: RunManifest, layout: FragmentLayout, codec: str) -> LineUse:
    schedule = Schedule(
        start_seconds=manifest.run.start.timestamp(),
        tick_seconds=manifest.run.tick_seconds,
        fragments=manifest.run.fragments,
    )
    size = max(layout.size(fragment) for fragment in range(layout.num_fragments))
    outer_values = 2 if manifest.outer_optimizer.name == "adamw" else 1
    base_bytes = _BYTES_PER_VALUE * size * (1 + outer_values)
    return line_use(manifest.averaging, schedule, codec=codec, size=size, base_bytes=base_bytes)


def _bottleneck(use: LineUse, rate: LineRate, cadence: int) -> tuple[str, float]:
    """(way, bits a second) of the way that is busier."""
    ways = {"up": LineRate(up=rate.up), "down": LineRate(down=rate.down)}
    way = max(ways, key=lambda name: use.share(ways[name], cadence))
    return way, 8 * min(ways[way].up, ways[way].down)


def _line_in_words(link: Link) -> str:
    before = " (as rounds measured it before)" if link.remembered else ""
    if link.up == link.down and link.up is not None:
        return f"{bits(link.up)} each way{before}"
    ways = (("up", link.up), ("down", link.down))
    return ", ".join(f"{bits(rate)} {way}" for way, rate in ways if rate is not None) + before


def bits(rate: float) -> str:
    """Bits a second for people: "10 Mbit/s"."""
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if rate >= size:
            return f"{rate / size:.3g} {unit}"
    return f"{rate:.3g} bit/s"
