"""How often a line lets this machine take part in rounds, and why: pure."""

from __future__ import annotations

from dht_config.manifest import RunManifest
from p2p_trainer.plan_facts import Link
from peers.cadence import CADENCES, SHARE_OF_LINE, CadenceValue, LineUse, line_use
from peers.clock import Schedule
from peers.codecs import get_codec
from peers.fragments import FragmentLayout

_BYTES_PER_VALUE = 4
_DENSER_CODECS = ("int8", "int4", "sparse")


def plan_cadence(link: Link, manifest: RunManifest, layout: FragmentLayout) -> tuple[CadenceValue, list[str]]:
    codec = manifest.averaging.codec
    about_codec = (
        f"{codec} both ways"
        if codec == manifest.averaging.answer_codec
        else (f"{codec}, answers {manifest.averaging.answer_codec}")
    )
    uses = _line_uses(link, manifest, layout)
    if not uses:
        return 1, [f"The line is not measured yet: every round until rounds show otherwise; {about_codec}, the run's."]
    direction, rate, use = max(uses, key=lambda item: item[2].least_cadence())
    cadence = use.least_cadence()
    often = {1: "every round", 2: "every 2nd round", 4: "every 4th round"}[cadence]
    reasons = [f"{bits(rate)} {direction}: {often}, {about_codec} as the run says."]
    if use.share(cadence) > SHARE_OF_LINE:
        needed = rate * use.share(CADENCES[-1]) / SHARE_OF_LINE
        remedy = _codec_that_would_do(link, manifest, layout)
        reasons.append(
            f"That is too little even for every {CADENCES[-1]}th round: rounds would come late. It takes "
            f"{bits(needed)} {direction}, longer ticks{remedy}."
        )
    return cadence, reasons


def _line_uses(link: Link, manifest: RunManifest, layout: FragmentLayout) -> list[tuple[str, float, LineUse]]:
    """(direction, bits a second, use) of the directions that are known. Bases are fetched downwards only."""
    schedule = Schedule(
        start_seconds=manifest.run.start.timestamp(),
        tick_seconds=manifest.run.tick_seconds,
        fragments=manifest.run.fragments,
    )
    size = max(layout.size(fragment) for fragment in range(layout.num_fragments))
    outer_values = 2 if manifest.outer_optimizer.name == "adamw" else 1
    base_bytes = _BYTES_PER_VALUE * size * (1 + outer_values)
    directions = (("up", link.up, 0), ("down", link.down, base_bytes))
    return [
        (name, rate, line_use(manifest.averaging, schedule, size=size, base_bytes=fetched, bytes_per_second=rate / 8))
        for name, rate, fetched in directions
        if rate is not None
    ]


def _codec_that_would_do(link: Link, manifest: RunManifest, layout: FragmentLayout) -> str:
    """A denser codec of the run with which cadence 4 would be enough; empty if there is none."""
    size = max(layout.size(fragment) for fragment in range(layout.num_fragments))
    now = get_codec(manifest.averaging.codec).encoded_bytes(size)
    for codec in _DENSER_CODECS:
        if get_codec(codec).encoded_bytes(size) >= now:
            continue
        answer = codec if codec != "sparse" else "int4"
        averaging = manifest.averaging.model_copy(update={"codec": codec, "answer_codec": answer})
        denser = manifest.model_copy(update={"averaging": averaging})
        if all(use.share(CADENCES[-1]) <= SHARE_OF_LINE for _, _, use in _line_uses(link, denser, layout)):
            return f", or a run with codec {codec}"
    return ""


def bits(rate: float) -> str:
    """Bits a second for people: "10 Mbit/s"."""
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if rate >= size:
            return f"{rate / size:.3g} {unit}"
    return f"{rate:.3g} bit/s"
