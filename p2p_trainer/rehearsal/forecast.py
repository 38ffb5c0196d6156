"""What a machine on its line is to a swarm like the rehearsed one, in plain words.

A forecast from what happened: it holds for a swarm of such machines and such lives, and says nothing about others.
"""

from __future__ import annotations

import math

from p2p_trainer.machines import memory_text
from p2p_trainer.rehearsal.links import UNLIMITED, LinkSpec
from p2p_trainer.rehearsal.report import PeerReport

WORTH_TELLING = 0.05
"""Waiting below this part of the time, or rejected work, is no news."""


def forecast(peer: PeerReport) -> str:
    """One sentence about a peer, or two if there is something to know about where its time went."""
    where = f" on {line_in_words(peer.link)}" if peer.link else ""
    where += " behind NAT" if peer.behind_nat else ""
    life = life_in_words(peer)
    who = f"{peer.name}{where}{f' ({life})' if life else ''}"
    if not peer.rounds_committed:
        return f"{who} took part in no round."
    traffic = f"{megabytes(peer.bytes_sent_per_hour)} up and {megabytes(peer.bytes_received_per_hour)} down an hour"
    return (
        f"{who} took part in {_rounds(peer)} and contributed {100 * peer.share:.0f} %; "
        f"{'its line carried' if peer.bytes_counted == 'line' else 'they took'} {traffic}.{_time(peer)}"
    )


def life_in_words(peer: PeerReport) -> str:
    """What the scene did to it; empty if it was there all the time."""
    happened = [
        *((at, "joined") for at in peer.joins if at > 0),
        *((at, "left") for at in peer.leaves),
        *((at, "killed") for at in peer.kills),
        *((at, "frozen") for at in peer.freezes),
        *((at, "out of memory") for at in peer.out_of_memory),
    ]
    return ", ".join(f"{what} after {at:.0f} s" if at else f"{what} at its start" for at, what in sorted(happened))


def memory_in_words(peer: PeerReport) -> str:
    """What a peer took of its memory; empty if that was not counted."""
    if peer.memory_peak_bytes is None:
        return ""
    limit = f" of {memory_text(peer.memory_limit_bytes)}" if peer.memory_limit_bytes is not None else ""
    killed = f", {peer.memory_kills} of its processes killed for want of it" if peer.memory_kills else ""
    return f"{peer.name} {memory_text(peer.memory_peak_bytes)}{limit}{killed}"


def line_in_words(link: str) -> str:
    """The rates of a line, or the line as it was written if it has no rate."""
    spec = LinkSpec.parse(link)
    down, up = spec.down_bits_per_second, spec.up_bits_per_second
    if not math.isfinite(min(down, up)):
        return "a line without limits" if link == UNLIMITED else link
    return f"{_rate(down)}" if down == up else f"{_rate(down)} down and {_rate(up)} up"


def megabytes(size_bytes: float) -> str:
    """A size as people say it."""
    return f"{size_bytes / 1e6:.0f} MB" if size_bytes >= 10e6 else f"{size_bytes / 1e6:.1f} MB"


def _rounds(peer: PeerReport) -> str:
    if peer.cadence is not None and peer.cadence > 1:
        return f"every {_ordinal(peer.cadence)} round"
    return f"{100 * peer.participation:.0f} % of its rounds"


def _ordinal(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"


def _time(peer: PeerReport) -> str:
    told = ""
    if peer.time.waiting >= WORTH_TELLING:
        told += f" It did not compute for {100 * peer.time.waiting:.0f} % of its time."
    if peer.time.rejected >= WORTH_TELLING:
        told += f" {100 * peer.time.rejected:.0f} % of its time went into work that was dropped or lost."
    return told


def _rate(bits_per_second: float) -> str:
    return f"{bits_per_second / 1e6:g} Mbit/s" if bits_per_second >= 1e6 else f"{bits_per_second / 1e3:g} kbit/s"
