"""Every message between the training process and the averaging process, on one page.

They travel through a pipe of our own, in order, and the order decides who may touch the shared arena:

- From ``TakeSnapshot`` to its answer the training process writes that fragment of ``arena.snapshot``.
- From ``Rebase`` to its answer the averaging process leaves that fragment alone.
- From ``Quiet`` to ``Resume`` the averaging process leaves all of the arena alone.
- At all other times ``base`` and ``outer_state`` belong to the averaging process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dht_config.errors import P2PTrainerError
from dht_config.records import SignedManifest
from peers.fragments import FragmentLayout
from peers.ledger import Counts
from peers.past import Past


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentMeta:
    """What belongs to a fragment's base besides its tensors; ``ledger`` as from ``Ledger.to_json``.

    ``past`` is there where the whole state is handed over, for a checkpoint or from one.
    """

    version: int
    digest: bytes
    total_element_samples: int
    history: bytes
    ledger: list[list[int]]
    past: Past | None = None

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint's meta."""
        return {
            "version": self.version,
            "digest": self.digest.hex(),
            "total_element_samples": self.total_element_samples,
            "history": self.history.hex(),
            "ledger": self.ledger,
            "past": self.past.to_json() if self.past is not None else None,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> FragmentMeta:
        return cls(
            version=row["version"],
            digest=bytes.fromhex(row["digest"]),
            total_element_samples=row["total_element_samples"],
            history=bytes.fromhex(row["history"]),
            ledger=row["ledger"],
            past=Past.from_json(row["past"]) if row.get("past") else None,
        )


# --- training process to averaging process


@dataclass(frozen=True, slots=True, kw_only=True)
class Configure:
    """The arena is ready (its file descriptor follows in the pipe).

    ``fragments`` describes the bases that lie in the arena, or is None when they must be fetched.
    ``clean`` says that no contribution of ours can be under way since the bases were saved.
    ``samples`` and ``steps`` went through the model; ``counts`` says of each fragment how many while it was trained,
    and ``contributed`` what those were at our last contribution, in whatever start.
    """

    layout: FragmentLayout
    states: int
    """Vectors of outer optimizer state in the arena."""
    signed_manifest: SignedManifest
    fragments: list[FragmentMeta] | None
    samples: int
    steps: int
    clean: bool
    counts: tuple[Counts, ...]
    contributed: tuple[Counts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginTraining:
    """Training has begun: announce it and take part in rounds."""

    samples_per_second: float
    micro_batch: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTaken:
    """The fragment's parameters lie in ``arena.snapshot``, as of these cumulative counts of its own."""

    fragment: int
    samples: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebased:
    """The fragment's parameters stand on the new base, at these cumulative counts of its own."""

    fragment: int
    samples: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Cumulative counts, the current rate and what is trained, for the profile."""

    samples: int
    steps: int
    credited_samples: float
    samples_per_second: float
    trained: frozenset[int] | None = None
    """Fragments; None for all of them."""


@dataclass(frozen=True, slots=True)
class Quiesce:
    """Stop changing the arena and say so with ``Quiet``."""


@dataclass(frozen=True, slots=True)
class Resume:
    """The arena may change again."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish or hand over rounds, say goodbye, end."""

    reason: str


# --- averaging process to training process


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nobody is reachable yet; one plain line for a person."""

    text: str


@dataclass(frozen=True, slots=True)
class Alive:
    """Sent all the time, so that a frozen averaging process is noticed. ``SwarmHandle`` keeps it to itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """This peer is in the DHT. ``signed_manifest`` is None only for a peer that starts the run."""

    peer_id: str
    addresses: tuple[str, ...]
    """Where others dial this peer; empty if they cannot."""
    signed_manifest: SignedManifest | None


@dataclass(frozen=True, slots=True)
class Syncing:
    """Bases are being fetched."""

    bytes_received: int
    bytes_expected: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    """Bases lie in the arena, references in ``arena.snapshot``.

    ``keep[f]`` says whether restored progress of fragment f stands (parameters - reference) or is dropped,
    ``counts[f]`` from which of its counts training goes on.
    """

    fragments: list[FragmentMeta]
    keep: list[bool]
    samples: int
    steps: int
    counts: list[Counts]


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Copy this fragment's parameters into ``arena.snapshot`` and answer ``SnapshotTaken``."""

    fragment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebase:
    """The fragment has a new base: parameters become base + (parameters - reference in ``arena.snapshot``).

    If ``keep`` is False they become the base: progress is dropped, since its fate is unknown.
    """

    fragment: int
    keep: bool
    meta: FragmentMeta
    unsent: bool = False
    """A sparse codec left most of the last contribution in the parameters, to be sent later."""


@dataclass(frozen=True, slots=True)
class Quiet:
    """The arena does not change until ``Resume``; these are its bases."""

    fragments: list[FragmentMeta]


@dataclass(frozen=True, slots=True)
class Event:
    """Something for metrics.jsonl: ``round``, ``rebase`` or ``peers``."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """The averaging process cannot go on; the training process raises this error."""

    error: P2PTrainerError


@dataclass(frozen=True, slots=True)
class Stopped:
    """Goodbye has been said; the arena will not change any more.

    ``clean`` says that what became of every contribution of ours is known.
    """

    fragments: list[FragmentMeta]
    clean: bool
