"""One fragment as this peer holds it: base, account and what is under way; how a new base takes the old one's place."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from peers.arena import SharedArena
from peers.fragments import FragmentLayout
from peers.ledger import Ledger
from peers.lineage import Claim
from peers.messages import MAX_RECEIPTS, AveragedPart, Receipt, extend_history
from peers.outer import NO_HISTORY, Nesterov, base_digest
from peers.pipe import FragmentMeta, SnapshotTaken
from peers.round import RoundPlan, element_samples, receipt_for
from peers.transfer import FetchedBase, FrozenBase

RECENT_ROUNDS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class NextBase:
    """A base that is complete but not yet in place."""

    version: int
    digest: bytes
    total_element_samples: int
    history: bytes
    base: torch.Tensor
    momentum: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Milestone:
    """Our account as of one version of one line of bases."""

    version: int
    digest: bytes
    history: bytes
    ledger: Ledger


class FragmentState:
    """Everything one peer knows of one fragment. ``busy`` is held by whoever works on its next base."""

    def __init__(self, index: int, layout: FragmentLayout, arena: SharedArena) -> None:
        where = layout.slice(index)
        self.index = index
        self.size = layout.size(index)
        self.base = arena.base[where]
        self.momentum = arena.momentum[where]
        self.snapshot = arena.snapshot[where]
        self.version = -1
        self.digest = b""
        self.total_element_samples = 0
        self.ledger = Ledger.open(self.size)
        self.history = NO_HISTORY
        self.receipts: list[Receipt] = []
        self.history_before = NO_HISTORY
        self.milestones: deque[Milestone] = deque(maxlen=MAX_RECEIPTS)
        self.busy = asyncio.Lock()
        self.content = asyncio.Lock()
        self.taken: SnapshotTaken | None = None
        self.late: SnapshotTaken | None = None
        """A snapshot that came too late for the round it was meant for; good for the next."""
        self.uncertain = False
        """Whether a contribution of ours may be in a base that we do not have."""
        self.unresolved_mates: frozenset[str] = frozenset()
        self.backed_until = 0.0
        self.backers = 1
        """Peers that made our base with us; for a while they stand behind it before their records say so."""
        self.recent_seconds: deque[float] = deque(maxlen=RECENT_ROUNDS)

    @property
    def claim(self) -> Claim:
        """What this peer announces for the fragment."""
        return Claim(version=self.version, digest=self.digest, total_samples=self.total_element_samples // self.size)

    @property
    def meta(self) -> FragmentMeta:
        return FragmentMeta(
            version=self.version,
            digest=self.digest,
            total_element_samples=self.total_element_samples,
            history=self.history,
            ledger=self.ledger.to_json(),
        )

    def restore(self, meta: FragmentMeta) -> None:
        """Take over the description of the base that lies in the arena."""
        self.version, self.digest = meta.version, meta.digest
        self.total_element_samples = meta.total_element_samples
        self.history = self.history_before = meta.history
        self.ledger = Ledger.from_json(meta.ledger)
        self._remember()

    def contribution(self) -> torch.Tensor:
        """Local parameters minus base as of the snapshot: a new float32 tensor ``(size,)``."""
        return torch.sub(self.snapshot, self.base)

    def frozen(self) -> FrozenBase:
        """A copy of the base for serving."""
        return FrozenBase(
            version=self.version,
            digest=self.digest,
            total_element_samples=self.total_element_samples,
            history=self.history,
            history_before=self.history_before,
            payload=self.base.numpy().tobytes() + self.momentum.numpy().tobytes(),
            receipts=tuple(self.receipts),
        )

    def next_base(
        self, outer: Nesterov, plan: RoundPlan, average: torch.Tensor, parts: Sequence[AveragedPart]
    ) -> NextBase:
        """The outer step, in buffers of its own (shadow); nothing in place changes."""
        base, momentum = outer.step(self.base, self.momentum, average)
        total = self.total_element_samples + element_samples(plan, parts)
        version = self.version + 1
        history = extend_history(self.history, receipt_for(plan, parts, version))
        digest = base_digest(
            fragment=self.index,
            version=version,
            total_element_samples=total,
            history=history,
            base=base,
            momentum=momentum,
        )
        return NextBase(
            version=version,
            digest=digest,
            total_element_samples=total,
            history=history,
            base=base,
            momentum=momentum,
        )

    def commit(self, new: NextBase, plan: RoundPlan, parts: Sequence[AveragedPart], own_id: bytes) -> None:
        """Put a round's base in place. The reference becomes the snapshot where we are in it, else the old base."""
        receipt = receipt_for(plan, parts, new.version)
        entry, held = receipt.ranges_of(own_id)
        self._set_reference(held)
        if entry is not None:
            self.ledger = self.ledger.credit(held, entry.samples, entry.steps)
        self.receipts.append(receipt)
        while len(self.receipts) > MAX_RECEIPTS:
            self.history_before = extend_history(self.history_before, self.receipts.pop(0))
        self.backers = len(plan.members)
        self._put(new)

    def adopt(self, fetched: FetchedBase, own_id: bytes) -> bool:
        """Put a fetched base in place; returns whether this peer's progress stands.

        Its receipts, which its digest vouches for, say where its line left ours and whether contributions whose
        answers we missed are in it. What was credited in a line that we leave is dropped. If we cannot know what
        became of a contribution, progress is dropped: a sample may be lost, but none counts twice.
        """
        ancestor = self._common_ancestor(fetched)
        since = self.version
        if ancestor is not None:
            since = ancestor.version
            if ancestor.version < self.version:
                self.ledger = self.ledger.abandon(ancestor.ledger)
        keep = ancestor is not None or not self.uncertain
        held: list[tuple[int, int]] = []
        for receipt in fetched.receipts:
            entry, ranges = receipt.ranges_of(own_id)
            if receipt.version <= since or entry is None or not ranges:
                continue
            if self.taken is not None and (entry.samples, entry.steps) == (self.taken.samples, self.taken.steps):
                held.extend(ranges)
            elif not self.ledger.knows(ranges, entry.samples):
                keep = False  # counted from a snapshot that we no longer have
            self.ledger = self.ledger.credit(ranges, entry.samples, entry.steps)
        self._set_reference(held)
        self.receipts = list(fetched.receipts)
        self.history_before = fetched.history_before
        self.backers = 1
        self._put(
            NextBase(
                version=fetched.claim.version,
                digest=fetched.claim.digest,
                total_element_samples=fetched.total_element_samples,
                history=fetched.history,
                base=fetched.base,
                momentum=fetched.momentum,
            )
        )
        return keep

    def _common_ancestor(self, fetched: FetchedBase) -> Milestone | None:
        """The newest version that the fetched line and ours have in common, if both remember that far."""
        history = fetched.history_before
        line = {fetched.claim.version - len(fetched.receipts): history}
        for receipt in fetched.receipts:
            history = extend_history(history, receipt)
            line[receipt.version] = history
        for milestone in reversed(self.milestones):
            if line.get(milestone.version) == milestone.history:
                return milestone
        return None

    def _set_reference(self, held: Iterable[tuple[int, int]]) -> None:
        """``snapshot`` stays in the ranges ``held``; elsewhere it becomes the base, so that progress counts from it."""
        position = 0
        for start, stop in sorted(held):
            if position < start:
                self.snapshot[position:start].copy_(self.base[position:start])
            position = max(position, stop)
        if position < self.size:
            self.snapshot[position:].copy_(self.base[position:])

    def _put(self, new: NextBase) -> None:
        self.base.copy_(new.base)
        self.momentum.copy_(new.momentum)
        self.version, self.digest = new.version, new.digest
        self.total_element_samples = new.total_element_samples
        self.history = new.history
        self.taken = self.late = None
        self.uncertain = False
        self.unresolved_mates = frozenset()
        self._remember()

    def _remember(self) -> None:
        self.milestones.append(
            Milestone(version=self.version, digest=self.digest, history=self.history, ledger=self.ledger)
        )

    @property
    def ancestors(self) -> frozenset[bytes]:
        """Digests of the bases before this one that we remember."""
        return frozenset(milestone.digest for milestone in self.milestones) - {self.digest}
