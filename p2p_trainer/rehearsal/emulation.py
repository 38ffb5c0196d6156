"""What of a scene this computer can emulate: lines and memories.

What it cannot, it says in a line, and goes on without. Everything here is undone when its context ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from p2p_trainer.machines import memory_text
from p2p_trainer.rehearsal.links import LinkSpec, LinksUnavailable, Network, available
from p2p_trainer.rehearsal.memory_limits import MemoryLimits, MemoryLimitsUnavailable, memory_of_this_computer
from p2p_trainer.rehearsal.rehearsal_view import say
from p2p_trainer.rehearsal.scene import Scene


@contextmanager
def lines(scene: Scene, console: Console, bootstrap: str) -> Iterator[Network | None]:
    """The scene's lines, and one without limits for the bootstrap; None for loopback."""
    if not scene.has_links:
        yield None
        return
    network = Network(
        {bootstrap: LinkSpec(), **{peer.name: peer.link or LinkSpec() for peer in scene.peers}},
        behind_nat=[peer.name for peer in scene.peers if peer.behind_nat],
        seed=scene.seed,
    )
    reason = available().reason
    if not reason:
        try:
            network.__enter__()
        except LinksUnavailable as error:
            reason = str(error)
    if reason:
        say(console, f"Lines between peers cannot be emulated here ({reason}): they all meet over loopback.")
        yield None
        return
    try:
        yield network
    finally:
        network.__exit__(None, None, None)


@contextmanager
def memories(scene: Scene, console: Console) -> Iterator[MemoryLimits | None]:
    """A budget for every peer whose machine has a memory, and a limit where that is less than this computer's."""
    budgets = {peer.name: peer.memory_bytes for peer in scene.peers if peer.memory_bytes is not None}
    if not budgets:
        yield None
        return
    here = memory_of_this_computer()
    beyond = [f"{name} ({memory_text(size)})" for name, size in budgets.items() if size >= here]
    limits = MemoryLimits({name: size if size < here else None for name, size in budgets.items()})
    try:
        limits.__enter__()
    except MemoryLimitsUnavailable as error:
        if len(beyond) < len(budgets):
            say(console, f"Memory cannot be limited here ({error}): every peer may take what there is.")
        yield None
        return
    if beyond:
        say(console, f"This computer has {memory_text(here)} of memory, so these have no limit: {', '.join(beyond)}.")
    try:
        yield limits
    finally:
        limits.__exit__(None, None, None)
