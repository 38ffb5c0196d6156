"""What a volunteer sees while the peer runs: one line that says in plain words whether it works.

On a terminal the line is redrawn in place, with bars while something is measured or fetched. Elsewhere (a pipe, a
log file, ``docker logs``) plain lines are printed, few enough to read. Nothing here starts a thread: the averaging
process is forked after the first lines were shown, and a fork must not meet one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from peers.life import State

PLAIN_UPDATE_SECONDS = 10.0
"""Where lines stay (no terminal), the live line is printed at most this often."""
REDRAW_SECONDS = 0.1
"""On a terminal, updates that come faster than this are not drawn."""


@dataclass(slots=True, kw_only=True)
class PeerView:
    """What the live line tells. The training loop keeps one and changes it as things happen."""

    run_id: str
    state: State = "training"
    """"training" goes without saying, others ("leaving") are said."""
    reason: str = ""
    """Why the peer is in that state."""
    peers_in_swarm: int = 1
    """Training peers that the records show, this one included."""
    last_round_at: float | None = None
    """Unix seconds of this peer's last committed round; None before the first."""
    last_group_size: int = 0
    """Peers in that round, this one included; 1 if it was alone."""
    last_share: float = 0.0
    """This peer's part of that round's weight, 0 to 1."""
    loss: float | None = None
    """Mean training loss of late; None before the first step."""
    samples_per_second: float = 0.0
    processed_samples: int = 0
    trained_share: float = 1.0
    """How much of the model they trained, 0 to 1: less where memory holds some fragments frozen."""
    credited_samples: float = 0.0
    pending_samples: float = 0.0
    note: str = ""
    """Why this peer is alone or has not averaged, or whatever else a person should know, in a few words."""


def sentence(view: PeerView, now: float) -> str:
    """The live line: in the swarm or not, last averaged when and with how many, share, loss, speed, credit.

    :param now: unix seconds on the clock that ``last_round_at`` was taken from.
    """
    isolated = view.state == "isolated"
    alone = view.peers_in_swarm <= 1 and not isolated
    note = view.note if view.note != view.reason else ""
    clauses = []
    if view.state != "training":
        clauses.append(view.state.capitalize() + (f": {view.reason}" if view.reason else ""))

    if isolated:
        clauses.append("training goes on by itself")
    elif alone:
        clauses.append(f"Alone in the swarm: {note or 'no other peer is training yet'}")
        note = ""
    else:
        others = view.peers_in_swarm - 1
        clauses.append(f"In the swarm with {others} {'other' if others == 1 else 'others'}")

    if view.last_round_at is None:
        if alone or isolated:
            clauses.append("not averaged yet")
        else:
            clauses.append(f"not averaged yet: {note or 'the first round is still to come'}")
            note = ""
    elif view.last_group_size <= 1:
        clauses.append(f"last round {_ago(now - view.last_round_at)}, alone")
    else:
        clauses.append(f"averaged {_ago(now - view.last_round_at)} in a group of {view.last_group_size}")
        clauses.append(f"your share {_percent(view.last_share)}")

    if view.loss is not None:
        clauses.append(f"loss {view.loss:.2f}")
    clauses.append(f"{_number(view.samples_per_second)} samples/s")
    if view.processed_samples > 0:
        credited = _percent(view.credited_samples / (view.processed_samples * (view.trained_share or 1.0)))
        clauses.append(f"{credited} of {view.processed_samples:,} samples credited{_for_a_part(view)}")
    if note:
        clauses.append(note)
    return " · ".join(clauses)


def address_line(addresses: Sequence[str], where: str) -> str:
    """What to tell others, whole: an address is long, but half of one is of no use.

    :param where: from where it can be dialled, such as "on this machine alone"; empty for everywhere
    """
    reach = f" ({where})" if where else ""
    return f"This peer's address{reach}, for others to give as --peer: {' or '.join(addresses)}"


def only_inside(port: int) -> str:
    """What to tell an organiser whose door has an address that not everybody can dial."""
    return (
        f"Volunteers elsewhere cannot dial that. For them, have the router or container host forward port {port} here, "
        f"and say where: --port {port} --announce /ip4/ITS-PUBLIC-ADDRESS/tcp/{port}, or /dns4/ITS-NAME/tcp/{port}."
    )


NOT_DIALLED = (
    "Nobody can open connections to this peer: it is behind NAT or a firewall. It takes part all the same, and "
    "averages nothing for others. To change that, switch on UPnP or NAT-PMP in the router, or have it forward a port "
    "to this peer, and give that with --port and --announce."
)


def farewell(view: PeerView, directory: Path, problem: str) -> str:
    """The last line of a volunteer's peer.

    :param problem: why the last checkpoint could not be written; empty if it was
    """
    counts = f"{view.processed_samples:,} samples processed{_for_a_part(view)}, {view.credited_samples:,.0f} credited"
    return f"Left the run: {counts}; {_kept('progress', directory, problem)} The same command continues."


def _for_a_part(view: PeerView) -> str:
    return "" if view.trained_share > 0.995 else f" for {_percent(view.trained_share)} of the model"


def farewell_of_a_door(directory: Path, problem: str) -> str:
    """The last line of a bootstrap peer; parameters as for ``farewell``."""
    return f"Stopped serving; {_kept('bases', directory, problem)} The same command opens the same door again."


def _kept(what: str, directory: Path, problem: str) -> str:
    if not problem:
        return f"{what} saved in {directory}."
    return f"{what} NOT saved ({problem.rstrip('.')}): {directory} has the checkpoint before, if there was one."


class Output(Console):
    """A console whose reader may go away, as with ``| head`` or a log that is closed: nobody is told any more, and
    the peer trains on. rich's would end it on the spot."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with suppress(OSError), open(os.devnull, "w") as nowhere:  # else Python complains at its end
            os.dup2(nowhere.fileno(), self.file.fileno())


class LiveView:
    """Shows status lines, progress bars and the live line on a terminal, plain lines elsewhere.

    Use it as a context manager, from one thread. Call ``update`` as often as there is news: the view decides
    what is drawn.
    """

    def __init__(
        self, console: Console | None = None, *, plain: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        """
        :param plain: plain lines even on a terminal. NO_COLOR, TERM=dumb and output that is no terminal mean the
            same.
        :param clock: unix seconds, the clock of ``PeerView.last_round_at``.
        """
        self.console = console or Output()
        """Loggers that write to the same terminal should print through it, or they break the live line."""
        self.interactive = (
            self.console.is_terminal and not self.console.is_dumb_terminal and not self.console.no_color and not plain
        )
        self._clock = clock
        self._live: Live | None = None
        self._progress: tuple[str, Progress, TaskID] | None = None
        self._drawn_at = float("-inf")
        self._printed_at = float("-inf")
        self._last_status = ""
        self._last_view: PeerView | None = None
        self._unprinted = False
        self._under_way = ""
        self._received = 0
        self._began = self._told = (0.0, 0)
        """When the first and the last plain line about the download were due, and how much was there."""

    def status(self, text: str) -> None:
        """Say something once, on a line of its own; the same text again is not repeated."""
        if text == self._last_status:
            return
        self._last_status = text
        self._print(text)

    def measuring(self, fraction: float) -> None:
        """Show how far the measurement of this machine is, 0 to 1; 1 ends it."""
        fraction = min(1.0, max(0.0, fraction))
        done = fraction >= 1.0
        if self.interactive:
            if self._progress is None and done:
                return
            self._bar("Measuring this machine", fraction, 1.0, (TaskProgressColumn(),), done)
        elif self._begins_or_ends("measuring", done):
            self._print("This machine is measured." if done else "Measuring this machine ...")

    def syncing(self, bytes_received: int, bytes_expected: int) -> None:
        """Show the download of the model's bases; it ends when everything expected is there. It never goes backwards.

        :param bytes_expected: 0 while it is not known
        """
        bytes_received = self._received = max(bytes_received, self._received)
        done = 0 < bytes_expected <= bytes_received
        title = "Fetching the model from other peers"
        if self.interactive:
            total = float(bytes_expected) if bytes_expected > 0 else None
            columns = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(compact=True))
            self._bar(title, float(bytes_received), total, columns, done)
        elif self._begins_or_ends("syncing", done):
            self._told = self._began = self._clock(), bytes_received
            expected = f" ({_megabytes(bytes_expected)})" if bytes_expected > 0 else ""
            self._print(
                f"The model is here: {_megabytes(bytes_received)} fetched." if done else f"{title}{expected} ..."
            )
        elif not done and self._clock() - self._told[0] >= PLAIN_UPDATE_SECONDS:
            self._print(f"{title}: {self._how_far(bytes_received, bytes_expected)}")
        if done:
            self._received = 0

    def _how_far(self, received: int, expected: int) -> str:
        """Bytes, rate since the last plain line, and time left at the rate since the first one."""
        now = self._clock()
        (told_at, told), self._told = self._told, (now, received)
        rate = (received - told) / max(now - told_at, 1e-3)
        words = f"{_megabytes(received)} so far, {_megabytes(int(rate))}/s"
        mean_rate = (received - self._began[1]) / max(now - self._began[0], 1e-3)
        if expected <= 0:
            return words
        left = f", about {_duration((expected - received) / mean_rate)} left" if mean_rate > 0 else ""
        return words.replace(" so far", f" of {_megabytes(expected)}") + left

    def update(self, view: PeerView) -> None:
        """Show the live line. ``view`` may be changed and given again."""
        first = self._last_view is None or self._progress is not None
        self._progress = None
        self._under_way = ""
        self._last_view = view
        self._unprinted = True
        now = self._clock()
        if self.interactive:
            hint = Text(f"run {view.run_id} · Ctrl-C leaves", style="dim")
            self._draw(Group(Text(sentence(view, now)), hint), now=first)
        elif now - self._printed_at >= PLAIN_UPDATE_SECONDS:
            self._print_view(view, now)

    def close(self) -> None:
        """Leave the last live line on the screen and give the terminal back. May be called more than once."""
        if self._last_view is not None and self._unprinted and not self.interactive:
            self._print_view(self._last_view, self._clock())
        if self._live is not None:
            if self._last_view is not None:
                # Without the hint how to leave.
                self._live.update(Text(sentence(self._last_view, self._clock())))
            self._live.stop()
            self._live = None
        self._last_view = None
        self._progress = None

    def __enter__(self) -> LiveView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _print_view(self, view: PeerView, now: float) -> None:
        self._printed_at = now
        self._unprinted = False
        self._print(sentence(view, now))

    def _print(self, text: str) -> None:
        # A Text, since words in [brackets] would be taken for markup; a long line is the pager's to wrap.
        self.console.print(Text(text), soft_wrap=True)

    def _begins_or_ends(self, what: str, done: bool) -> bool:
        """Whether a plain line is due: the first call of a stretch, and the one that ends it."""
        began = self._under_way != what
        self._under_way = "" if done else what
        return began != done  # begun and ended in one call: it was nothing to tell

    def _bar(
        self, title: str, completed: float, total: float | None, columns: Sequence[ProgressColumn], done: bool
    ) -> None:
        if self._progress is None or self._progress[0] != title:
            progress = Progress(TextColumn("{task.description}"), BarColumn(), *columns, auto_refresh=False)
            self._progress = title, progress, progress.add_task(title, total=total)
        _, progress, task = self._progress
        progress.update(task, completed=completed, total=total)
        self._draw(progress, now=done)
        if done:
            self._progress = None

    def _draw(self, renderable: RenderableType, now: bool = False) -> None:
        due = time.monotonic() - self._drawn_at >= REDRAW_SECONDS
        if self._live is None:
            # Without auto_refresh there is no thread; stderr is left to the logger's own handler.
            self._live = Live(console=self.console, auto_refresh=False, redirect_stderr=False)
            self._live.start()
            due = True
        self._live.update(renderable, refresh=due or now)
        if due or now:
            self._drawn_at = time.monotonic()


def _duration(seconds: float) -> str:
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _ago(seconds: float) -> str:
    if seconds < 1:  # also clocks that were set back
        return "just now"
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= (2 * length if unit == "days" else length):
            return f"{int(seconds // length)} {unit} ago"
    return f"{int(seconds)} s ago"


def _percent(share: float) -> str:
    percent = 100 * min(1.0, max(0.0, share))
    if 0 < percent < 1:
        return "under 1 %"
    if 99 < percent < 100:
        return "over 99 %"
    return f"{percent:.0f} %"


def _number(value: float) -> str:
    """Three digits that matter: 0.35, 4.2, 80, 1,234."""
    if value >= 10:
        return f"{value:,.0f}"
    return f"{value:.1f}".removesuffix(".0") if value >= 1 else f"{value:.2g}"


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"
