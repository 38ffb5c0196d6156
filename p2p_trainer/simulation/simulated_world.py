"""What happens when in a simulated swarm: the peers, an event clock, and the run that they play."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dht_config.manifest import AveragingSection, RunManifest
from p2p_trainer.simulation.simulated_peer import SimulatedPeer
from peers.clock import Schedule
from peers.codecs import get_codec
from peers.presence import refresh_seconds
from peers.reducer import Rules
from peers.weighting import get_weighting

EventListener = Callable[[float, SimulatedPeer, str, Mapping[str, Any]], None]
"""Given the time in seconds, the peer, and an event of ``metrics.jsonl`` with its fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmModel:
    """What of a manifest a simulation plays."""

    schedule: Schedule
    sizes: tuple[int, ...]
    """Elements of each fragment."""
    parameters: tuple[int, ...]
    """How many of them are parameters."""
    rules: Rules
    averaging: AveragingSection
    lead_seconds: float
    target_group_size: int
    part_elements: int
    announcement_bytes: int = 0
    """What a leader sends every member of every member."""
    records_are_readable: bool = True
    """Whether the DHT can give everybody's records to anybody."""

    @classmethod
    def of(
        cls, manifest: RunManifest, sizes: Sequence[int], parameters: Sequence[int] | None = None, **others: Any
    ) -> SwarmModel:
        """:param parameters: of each fragment, where not all of its elements are"""
        averaging = manifest.averaging
        return cls(
            schedule=Schedule(
                start_seconds=0.0, tick_seconds=manifest.run.tick_seconds, fragments=manifest.run.fragments
            ),
            sizes=tuple(sizes),
            parameters=tuple(parameters or sizes),
            rules=Rules(
                codec=None if averaging.codec == "auto" else get_codec(averaging.codec),
                answer_codec=get_codec(averaging.answer_codec),
                weighting=get_weighting(averaging.weighting),
                batch_size=manifest.inner_optimizer.batch_size,
            ),
            lead_seconds=averaging.matchmaking_seconds,
            averaging=averaging,
            target_group_size=averaging.target_group_size,
            part_elements=max(1, averaging.part_bytes // 4),
            **others,
        )


class World:
    """The peers of a swarm and the queue of what happens next; times in seconds since training began."""

    def __init__(self, model: SwarmModel, seed: int, listener: EventListener | None) -> None:
        self.model, self.schedule = model, model.schedule
        self.chance = random.Random(seed)
        self.peers: list[SimulatedPeer] = []
        self.now = 0.0
        self._listener = listener
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0

    @property
    def news_seconds(self) -> float:
        """Until a change of a peer's records is known to the others."""
        return refresh_seconds(self.schedule.tick_seconds)

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do it then, or now if that has passed; in the order in which it was asked for at one moment."""
        self._order += 1
        heapq.heappush(self._queue, (max(when, self.now), self._order, action))

    def tell(self, peer: SimulatedPeer, event: str, **fields: Any) -> None:
        if self._listener is not None:
            self._listener(self.now, peer, event, fields)

    def run(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = until
