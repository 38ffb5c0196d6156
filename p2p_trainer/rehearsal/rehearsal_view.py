"""What a person sees of a rehearsal: one line while it goes on, and the report at its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from p2p_trainer.rehearsal.forecast import forecast, memory_in_words
from p2p_trainer.rehearsal.report import Report, verdict

STATUS_SECONDS = 10.0


class Status:
    """One line that says what is going on; on a terminal in place, elsewhere now and then. No thread."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._phase = ""
        self._shown_at = float("-inf")

    def show(self, phase: str, detail: str = "") -> None:
        text = f"{phase}: {detail}" if detail else f"{phase} ..."
        now = time.monotonic()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stderr=False)
                self._live.start()
            self._live.update(Text(text), refresh=True)
        elif phase != self._phase or now - self._shown_at >= STATUS_SECONDS:
            self._shown_at = now
            say(self._console, text)
        self._phase = phase

    def clear(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


@contextmanager
def show_status(console: Console) -> Iterator[Status]:
    status = Status(console)
    try:
        yield status
    finally:
        status.clear()


def print_report(console: Console, report: Report) -> None:
    # Fits into 80 columns. Numbers are never cut; a long name is folded before it vanishes.
    table = Table(title=f"{report.run_id}, {report.seconds:g} s", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("peer", overflow="fold", min_width=4)
    for heading in ("alone", "swarm", "processed", "credited", "pending", "rounds", "carried", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    for peer in report.peers:
        table.add_row(
            Text(peer.name),
            _figure(peer.solo_samples_per_second),
            _figure(peer.swarm_samples_per_second),
            f"{peer.processed_samples}",
            _figure(peer.credited_samples),
            _figure(peer.pending_samples),
            f"{peer.rounds_committed}",
            f"{peer.rounds_carried}",
            f"{100 * peer.share:.0f} %",
        )
    console.print(table)
    for line in _summary(report):
        say(console, line)


def _figure(value: float) -> str:
    """To a tenth, as far as a tenth matters."""
    return f"{value:.1f}" if value < 10_000 else f"{value:.0f}"


def _summary(report: Report) -> list[str]:
    """The swarm's lines, what each peer was to it, and the verdict."""
    lines = [
        "alone, swarm: samples/s; rounds: committed; share: of all credited samples.",
        f"Efficiency {report.efficiency:.3f} of the sum of what the peers do alone; credited alone "
        f"{report.credited_efficiency:.3f}.",
        f"Digests {'agree' if report.digests_agree else 'do not agree'}: {report.digests_compared} versions of "
        "fragments were on several peers.",
    ]
    if report.held_out_loss:
        (first_at, first), (last_at, last) = report.held_out_loss[0], report.held_out_loss[-1]
        lines.append(f"Held-out loss {first:.3f} after {first_at:.0f} s, {last:.3f} after {last_at:.0f} s.")
    lines.extend(forecast(peer) for peer in report.peers)
    memories = [memory for peer in report.peers if (memory := memory_in_words(peer))]
    if memories:
        lines.append(f"Memory taken at most: {'; '.join(memories)}.")
    lines.extend(f"{peer.name} planned: {peer.plan}" for peer in report.peers if peer.memory_limit_bytes and peer.plan)
    lines.append(f"Left behind: {', '.join(report.leftovers) or 'nothing'}.")
    return [*lines, verdict(report)]


def say(console: Console, text: str) -> None:
    # A Text, since words in [brackets] would be taken for markup.
    console.print(Text(text), soft_wrap=True)
