"""One peer of a simulated swarm: what it holds of each fragment, what it has trained, what it remembers of rounds.

Accounts, measured rates and whom not to trust are the product's own objects. What training does to parameters is behind
``Work``: the simulation of scale counts samples, the one in virtual time computes real gradients.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hivemind.p2p import PeerID

from dht_config.address import SHA256_MULTIHASH_PREFIX
from p2p_trainer.rehearsal.scene import EmulatedPeer, Moment
from peers.cadence import Cadence
from peers.closing import Reliability, TransferTimes
from peers.ledger import Ledger, PendingSpan
from peers.line import LinkRate
from peers.lineage import Claim
from peers.messages import MAX_RECEIPTS, AveragedPart, Receipt
from peers.outer import NO_HISTORY
from peers.round_plan import RoundPlan
from peers.swarm import LEAVE_ROUND_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeBase:
    """What a round made of a fragment, the same for all that have it."""

    plan: RoundPlan
    parts: tuple[AveragedPart, ...]
    claim: Claim
    """What they announce from now on, where no tensors say it better."""
    total_element_samples: int
    receipt: Receipt
    mates: frozenset[str]
    """Base58 peer ids of all members."""
    average: Any = None
    """Whatever the work makes of it; None where there are no tensors."""


class Holding(Protocol):
    """One fragment as one peer holds it."""

    size: int
    backed_until: float
    """As the three below: what the product knows of its last rounds."""

    @property
    def ledger(self) -> Ledger: ...

    @property
    def claim(self) -> Claim: ...

    @property
    def total_element_samples(self) -> int: ...

    @property
    def backers(self) -> frozenset[str]: ...

    @property
    def unresolved_mates(self) -> frozenset[str]: ...

    @property
    def ancestors(self) -> frozenset[bytes]: ...

    def take(self, samples: int, steps: int, spans: Sequence[PendingSpan]) -> bool:
        """Copy out what a round will be given, as of these cumulative counts; False if it is of no use to anybody."""

    def contributes(self, tick: int, mates: frozenset[str]) -> None:
        """It is about to be sent to the members of this round, base58 peer ids."""

    def commit(self, made: MadeBase, index: int) -> None:
        """Move on with a round in which this peer is the member ``index`` of the plan."""

    def frozen(self) -> Any:
        """The base for somebody who fetches it."""

    def adopt(self, fetched: Any) -> None:
        """Put a fetched base in place, with what this peer has trained since its own on top."""

    def drop(self, samples: int, steps: int) -> None:
        """Give up what is pending up to the cumulative counts."""

    def restarts(self) -> None:
        """Its process ends: what only that remembers is gone."""


class Work(Protocol):
    """What one peer trains."""

    @property
    def holdings(self) -> Sequence[Holding]: ...

    def train(self, steps: int, lineage_samples: int) -> int:
        """Make so many inner steps; returns the samples in them.

        :param lineage_samples: of all peers, in the bases
        """


class CountedHolding:
    """A fragment of which nothing is known but the counts."""

    def __init__(self, own_id: bytes, size: int) -> None:
        self._own_id, self.size = own_id, size
        self.ledger = Ledger.open(size)
        self.total_element_samples = 0
        self.claim = Claim(version=0, digest=NO_HISTORY, total_samples=0)
        self.backers = self.unresolved_mates = frozenset[str]()
        self.backed_until = 0.0
        self.ancestors = frozenset[bytes]()
        self._receipts: tuple[Receipt, ...] = ()

    def take(self, samples: int, steps: int, spans: Sequence[PendingSpan]) -> bool:
        return True

    def contributes(self, tick: int, mates: frozenset[str]) -> None:
        self.unresolved_mates = mates

    def commit(self, made: MadeBase, index: int) -> None:
        member = made.plan.members[index]
        held = [(part.start, part.stop) for part in made.parts if index in part.included]
        self.ledger = self.ledger.credit(held, member.samples, member.steps)
        self._receipts = (*self._receipts[1 - MAX_RECEIPTS :], made.receipt)
        self.backers = made.mates - {str(member.peer_id)}
        self._moved_to(made.claim, made.total_element_samples)

    def frozen(self) -> tuple[Claim, int, tuple[Receipt, ...]]:
        return self.claim, self.total_element_samples, self._receipts

    def adopt(self, fetched: tuple[Claim, int, tuple[Receipt, ...]]) -> None:
        claim, total, receipts = fetched
        for receipt in receipts:
            if receipt.version > self.claim.version:
                entry, held = receipt.ranges_of(self._own_id)
                if entry is not None:
                    self.ledger = self.ledger.credit(held, entry.samples, entry.steps)
        self._receipts = receipts
        self.backers = frozenset()
        self._moved_to(claim, total)

    def drop(self, samples: int, steps: int) -> None:
        self.ledger = self.ledger.drop(samples, steps)

    def restarts(self) -> None:
        self.backers = self.unresolved_mates = frozenset()

    def _moved_to(self, claim: Claim, total_element_samples: int) -> None:
        self.claim, self.total_element_samples = claim, total_element_samples
        self.unresolved_mates = frozenset()


class CountedWork:
    """Training that only counts."""

    def __init__(self, own_id: bytes, sizes: Sequence[int], batch_size: int) -> None:
        self.holdings = [CountedHolding(own_id, size) for size in sizes]
        self._batch_size = batch_size

    def train(self, steps: int, lineage_samples: int) -> int:
        return steps * self._batch_size


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a peer's ticks came to."""

    committed: int = 0
    carried: int = 0
    skipped: int = 0
    bytes_sent: int = 0
    """In rounds; what others fetched and what the DHT carries are not in it."""
    bytes_received: int = 0
    bytes_fetched: int = 0

    @property
    def rounds(self) -> int:
        return self.committed + self.carried + self.skipped

    @property
    def participation(self) -> float:
        """The part, 0 to 1, of its rounds that it committed."""
        return self.committed / self.rounds if self.rounds else 0.0


@dataclass(slots=True, kw_only=True)
class SimulatedPeer:
    """A peer, where it stands and what it has seen."""

    emulated: EmulatedPeer
    peer_id: PeerID
    id_text: str
    """The same in base58."""
    work: Work
    step_seconds: float
    """Of one inner step on this machine."""
    reducers: Reliability
    moments: deque[Moment]
    cadence: Cadence
    heard_of: dict[int, tuple[Claim, float]] = field(default_factory=dict)
    """By fragment: the better claim, and since when this peer knows of it."""
    present: bool = False
    """Its process runs, frozen or not."""
    announced: bool = False
    """Its record says that it trains, and the others have read it."""
    trains: bool = False
    """It makes steps: it has all bases."""
    frozen: bool = False
    samples: int = 0
    steps: int = 0
    trained_seconds: float = 0.0
    trained_until: float = 0.0
    found_nobody: bool = False
    round_times: TransferTimes = field(default_factory=TransferTimes)
    arrival_times: TransferTimes = field(default_factory=TransferTimes)
    link_rate: LinkRate = field(default_factory=LinkRate)
    busy: set[int] = field(default_factory=set)
    """Fragments in a round or a fetch."""
    sending: dict[int, float] = field(default_factory=dict)
    """Fragments whose round is under way, and when all of its own contribution has gone out."""
    """Fragments whose rounds share its line now."""
    fetching: set[int] = field(default_factory=set)
    starts: int = 0
    """How often it has started: what was begun before the last start is not gone on with."""
    tally: Tally = field(default_factory=Tally)

    @property
    def name(self) -> str:
        return self.emulated.name

    @property
    def awake(self) -> bool:
        return self.present and not self.frozen

    def advance(self, now: float) -> None:
        """Make the steps that this machine has made by now."""
        if self.trains and self.awake:
            self.trained_seconds += now - self.trained_until
            due = math.floor(self.trained_seconds / self.step_seconds + 1e-9)
            if due > self.steps:
                self.samples += self.work.train(due - self.steps, self.lineage_samples)
                self.steps = due
        self.trained_until = now

    @property
    def lineage_samples(self) -> int:
        holdings = self.work.holdings
        return sum(one.total_element_samples for one in holdings) // sum(one.size for one in holdings)

    def stops_after(self, now: float) -> tuple[float, bool]:
        """When its process will be gone or frozen, infinite for never; and whether without a word."""
        if not self.awake:
            return now, True
        for moment in self.moments:
            if moment.action == "leave":
                return moment.at_seconds + LEAVE_ROUND_SECONDS, False
            if moment.action in ("kill", "freeze"):
                return moment.at_seconds, moment.action == "freeze"
        return math.inf, False

    def mean_over_elements(self, element_samples: Sequence[int]) -> float:
        return sum(element_samples) / sum(one.size for one in self.work.holdings)

    @property
    def credited_samples(self) -> float:
        return self.mean_over_elements([one.ledger.credited_element_samples() for one in self.work.holdings])

    @property
    def dropped_samples(self) -> float:
        return self.mean_over_elements([one.ledger.dropped_element_samples() for one in self.work.holdings])

    @property
    def pending_samples(self) -> float:
        return self.mean_over_elements([one.ledger.pending_element_samples(self.samples) for one in self.work.holdings])


def peer_id_of(seed: int, name: str) -> PeerID:
    """An identity that nobody has the key of."""
    return PeerID(SHA256_MULTIHASH_PREFIX + hashlib.sha256(f"{seed}\n{name}".encode()).digest())
