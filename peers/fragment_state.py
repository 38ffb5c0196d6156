"""One fragment as this peer holds it: base, account and what is under way; how a new base takes the old one's place."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from peers.arena import SharedArena
from peers.codecs import Sparse
from peers.contribution import Contribution, Difference, Outgoing, SentPart
from peers.fragments import FragmentLayout
from peers.ledger import Counts, Ledger, PendingSpan
from peers.lineage import MANY_MEMBERS, Claim
from peers.messages import MAX_RECEIPTS, AveragedPart, Contributor, Receipt, extend_history
from peers.outer import NO_HISTORY, OuterOptimizer, base_digest
from peers.past import Milestone, Past
from peers.pipe import FragmentMeta, SnapshotTaken
from peers.residual import AverageResidual
from peers.rivals import BELIEVED, ReducedShare, Verdict, judge_rival, same_round, shares_of
from peers.round_plan import RoundPlan, element_samples, receipt_for
from peers.transfer import FetchedBase, FrozenBase, LiveBytes


class FragmentState:
    """Everything one peer knows of one fragment. ``busy`` is held by whoever works on its next base."""

    def __init__(
        self, index: int, layout: FragmentLayout, arena: SharedArena, contribution: Contribution | None = None
    ) -> None:
        where = layout.slice(index)
        self.index = index
        self._arena, self._where = arena, where
        self.size = layout.size(index)
        self.parameters = layout.parameters_of(index)
        """The first of its elements; the others are running statistics."""
        self.base = arena.base[where]
        self.outer_state = arena.outer_state[:, where]
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
        self.counted: Counts | None = None
        """The furthest that we have contributed up to, or gone on from at our start; None before that."""
        self.undecided: Ledger | None = None
        """The account before we dropped, at our start, work of which we do not know whether it arrived."""
        self.first_tick: int | None = None
        """Of our first contribution since our start; what receipts of earlier ticks name is from before it."""
        self.unresolved_mates: frozenset[str] = frozenset()
        self.backed_until = float("-inf")
        """Until when ``backers`` do: seconds, by a clock that is never corrected."""
        self.backers: frozenset[str] = frozenset()
        """Peers that made our base with us; for a while they stand behind it before their records say so."""
        self.round_size = 0
        """Members of the round that made our base; 0 if we fetched or restored it."""
        self.reduced: tuple[ReducedShare, ...] = ()
        """Who averaged what in that round."""
        self.origin: frozenset[str] = frozenset()
        """Training peers that announced our base when we fetched it."""
        self.average_residual = AverageResidual()
        self._contribution = contribution or Difference()
        self.unsent = False
        """Whether a sparse codec left most of the contribution that was accepted last where it came from."""
        self.sent: list[SentPart] = []
        """What a lossy codec made of the contribution of ``taken``. Its round appends to it; the next has its own."""

    @property
    def num_bytes(self) -> int:
        """Of the base and its outer state."""
        return self.base.nbytes + self.outer_state.nbytes

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

    @property
    def record(self) -> FragmentMeta:
        """``meta`` with what we remember of the line behind it."""
        past = Past(
            receipts=tuple(self.receipts), history_before=self.history_before, milestones=tuple(self.milestones)
        )
        return replace(self.meta, past=past)

    def restore(self, meta: FragmentMeta) -> None:
        """Take over the description of the base that lies in the arena."""
        self.version, self.digest = meta.version, meta.digest
        self.total_element_samples = meta.total_element_samples
        self.history = self.history_before = meta.history
        self.ledger = Ledger.from_json(meta.ledger)
        if meta.past is not None:
            self.receipts, self.history_before = list(meta.past.receipts), meta.past.history_before
            self.milestones.extend(meta.past.milestones)
        if not self.milestones or self.milestones[-1].history != self.history:
            self._remember()

    def contribution(self, spans: Sequence[PendingSpan]) -> Outgoing:
        """What the snapshot brings for what is pending, float32 ``(size,)``; to be held before either changes."""
        self.sent = []
        if self.taken is not None and self.counted is not None:
            self.counted = self.counted.furthest(Counts(self.taken.samples, self.taken.steps))
        return self._contribution.outgoing(self.snapshot, self.base, spans)

    def give_up(self) -> None:
        """What the snapshot holds is of use to nobody."""
        self.taken = self.late = None
        self.sent = []
        self._contribution.given_up(self.snapshot)

    def forget_snapshot(self) -> None:
        """Give its memory back. If it turns out to be in a base later, what was trained since is dropped with it."""
        if not self._contribution.accumulates:
            self.taken = self.late = None
            self.sent = []
            self._arena.release_snapshot(self._where)

    def frozen(self) -> FrozenBase:
        """The base for serving, until it changes."""
        return FrozenBase(
            version=self.version,
            digest=self.digest,
            total_element_samples=self.total_element_samples,
            history=self.history,
            history_before=self.history_before,
            payload=LiveBytes(self.base, self.outer_state),
            receipts=tuple(self.receipts),
        )

    def commit(
        self,
        outer: OuterOptimizer,
        plan: RoundPlan,
        average: torch.Tensor,
        parts: Sequence[AveragedPart],
        own_id: bytes,
    ) -> None:
        """A round's average is whole: step the base, in place. The reference becomes the snapshot where we are in it.

        Elsewhere it becomes the old base. Nothing here waits for anybody. A process that is killed in the middle leaves
        a base that fits no digest; who reads it from a checkpoint notices.

        :param average: float32 ``(size,)``
        :param parts: who is in which elements of it
        """
        version = self.version + 1
        receipt = receipt_for(plan, parts, version)
        entry, held = receipt.ranges_of(own_id)
        total = self.total_element_samples + element_samples(plan, parts)
        history = extend_history(self.history, receipt)
        if self.sent:
            self.unsent = any(part.codec.name == Sparse.name for part in self.sent)
        self._contribution.accepted(self.snapshot, self.base, held, list(self.sent))
        try:
            stepped = slice(self.parameters)
            base, state = self.base[stepped], self.outer_state[:, stepped]
            outer.step(base, state, average[stepped], version, (base, state))
            self.base[self.parameters :].add_(average[self.parameters :])
            digest = base_digest(
                fragment=self.index,
                version=version,
                total_element_samples=total,
                history=history,
                base=self.base,
                outer_state=self.outer_state,
            )
        except BaseException:
            self.version, self.digest = -1, b""  # half a step is no base: it must be fetched
            raise
        if entry is not None:
            self.ledger = self.ledger.credit(held, entry.samples, entry.steps)
        self.receipts.append(receipt)
        while len(self.receipts) > MAX_RECEIPTS:
            self.history_before = extend_history(self.history_before, self.receipts.pop(0))
        self.round_size, self.reduced, self.origin = len(plan.members), shares_of(plan), frozenset()
        self.backers = frozenset(str(member.peer_id) for member in plan.training if member.peer_id.to_bytes() != own_id)
        self._moved_to(version, digest, total, history)

    def adopt(self, fetched: FetchedBase, own_id: bytes, possible_samples: float = math.inf) -> bool:
        """Put a fetched base in place; returns whether this peer's progress stands.

        Its receipts, which its digest vouches for, say where its line left ours and whether contributions whose
        answers we missed are in it. What was credited in a line that we leave is dropped. If we cannot know what
        became of a contribution, progress is dropped: a sample may be lost, but none counts twice.

        A receipt that names more work of ours than we ever had is a lie, and no account of ours follows it: we would
        have nothing to contribute any more, in this run directory for ever.

        :param possible_samples: more than this nobody can have processed; in steps of one sample at least
        """
        line = _line(fetched)
        ancestor = self._common_ancestor(line)
        since = self.version
        if ancestor is not None:
            since = ancestor.version
            if ancestor.history != self.history:
                self.ledger = self.ledger.change_line(_account_in(fetched.receipts, ancestor, own_id))
        elif self.version in line or fetched.claim.version < self.version:
            # It left ours before anything that we remember: nothing of what we were credited is known to be in it.
            since = min(self.version, *line)
            self.ledger = self.ledger.change_line(Ledger.open(self.size))
        keep = ancestor is not None or not self.uncertain
        held: list[tuple[int, int]] = []
        for receipt in fetched.receipts:
            entry, ranges = receipt.ranges_of(own_id)
            if receipt.version <= since or entry is None or not ranges:
                continue
            if not self._may_be_ours(entry, possible_samples):
                continue
            if self.taken is not None and (entry.samples, entry.steps) == (self.taken.samples, self.taken.steps):
                held.extend(ranges)
            elif not self.ledger.knows(ranges, entry.samples):
                keep = False  # counted from a snapshot that we no longer have
            self._credit(ranges, entry, receipt.tick)
        if self.sent:
            self.unsent = any(part.codec.name == Sparse.name for part in self.sent)
        self._contribution.accepted(self.snapshot, self.base, held, list(self.sent))
        self.average_residual.replace({})  # it may be in this base already
        if not keep:
            self.give_up()
        self.receipts = list(fetched.receipts)
        self.history_before = fetched.history_before
        self.backers = frozenset()
        self.round_size, self.reduced, self.origin = 0, (), fetched.origin
        self.base.copy_(fetched.base)
        self.outer_state.copy_(fetched.outer_state)
        self._moved_to(fetched.claim.version, fetched.claim.digest, fetched.total_element_samples, fetched.history)
        return keep

    def judge(self, fetched: FetchedBase, announcers: Collection[str], others: int) -> Verdict:
        """Whether to take a base instead of ours, by what it says of the round that made both, if one did.

        :param announcers: who says that it holds it
        :param others: how many other peers announce any base
        """
        if fetched.claim.version != self.version or min(self.round_size, others + 1) < MANY_MEMBERS:
            return BELIEVED
        if not same_round(self.receipts, fetched.receipts):
            # Whoever held another round was not alone in it.
            return replace(BELIEVED, believed=len(announcers) > 1)
        ours, theirs = (self.base, *self.outer_state), (fetched.base, *fetched.outer_state)
        return judge_rival(self.reduced, (ours, self.receipts[-1]), (theirs, fetched.receipts[-1]), announcers)

    def contributes(self, tick: int) -> None:
        """A contribution of ours is about to be sent."""
        self.uncertain = True
        if self.first_tick is None:
            self.first_tick = tick

    def drop_undecided(self, samples: int, steps: int) -> None:
        """Drop work up to the cumulative counts, of which we do not know whether it is in a base already."""
        self.undecided = self.ledger
        self.ledger = self.ledger.drop(samples, steps)
        self.give_up()

    def _may_be_ours(self, entry: Contributor, possible_samples: float) -> bool:
        """Before our start is over, what we know of may be less than what we contributed: a checkpoint can be lost."""
        if self.counted is None:
            return entry.steps <= entry.samples <= possible_samples
        return entry.samples <= self.counted.samples and entry.steps <= self.counted.steps

    def _credit(self, ranges: Sequence[tuple[int, int]], entry: Contributor, tick: int) -> None:
        """A receipt says that our work up to the entry's counts is in the base; also work that we gave up for lost."""
        self.ledger = self.ledger.credit(ranges, entry.samples, entry.steps)
        if self.undecided is not None and (self.first_tick is None or tick < self.first_tick):
            after = self.undecided.credit(ranges, entry.samples, entry.steps)
            self.ledger = self.ledger.recover(self.undecided, after)
            self.undecided = after

    def _common_ancestor(self, line: Mapping[int, bytes]) -> Milestone | None:
        """The newest version that another line and ours have in common, if both remember that far."""
        for milestone in reversed(self.milestones):
            if line.get(milestone.version) == milestone.history:
                return milestone
        return None

    def _moved_to(self, version: int, digest: bytes, total_element_samples: int, history: bytes) -> None:
        """Another base is in place."""
        self.version, self.digest = version, digest
        self.total_element_samples = total_element_samples
        self.history = history
        self.taken = self.late = None
        self.sent = []
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


def _line(fetched: FetchedBase) -> dict[int, bytes]:
    """The history at every version that a fetched base's receipts tell of."""
    history = fetched.history_before
    line = {fetched.claim.version - len(fetched.receipts): history}
    for receipt in fetched.receipts:
        history = extend_history(history, receipt)
        line[receipt.version] = history
    return line


def _account_in(receipts: Sequence[Receipt], ancestor: Milestone, own_id: bytes) -> Ledger:
    """What a line holds of a peer's work, which remembers it as of one of its versions."""
    ledger = ancestor.ledger
    for receipt in receipts:
        entry, ranges = receipt.ranges_of(own_id)
        if receipt.version > ancestor.version and entry is not None:
            ledger = ledger.credit(ranges, entry.samples, entry.steps)
    return ledger


def counts_at_start(state: FragmentState, saved: Counts, contributed: Counts) -> Counts:
    """Cumulative counts of a fragment to go on from, so that no two pieces of work carry the same numbers.

    :param saved: those of the checkpoint
    :param contributed: those of the last contribution
    """
    return saved.furthest(contributed, *(Counts(span.samples, span.steps) for span in state.ledger.spans))
