"""What a peer remembers of the line of bases behind its own: enough to find where two lines parted.

Part of a checkpoint, so that a peer that comes back can still be told, and can tell others, whose work is in which
base.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peers.ledger import Ledger
from peers.messages import Receipt, pack_receipts, unpack_receipts


@dataclass(frozen=True, slots=True, kw_only=True)
class Milestone:
    """Our account as of one version of one line of bases."""

    version: int
    digest: bytes
    history: bytes
    ledger: Ledger

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "digest": self.digest.hex(),
            "history": self.history.hex(),
            "ledger": self.ledger.to_json(),
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Milestone:
        return cls(
            version=row["version"],
            digest=bytes.fromhex(row["digest"]),
            history=bytes.fromhex(row["history"]),
            ledger=Ledger.from_json(row["ledger"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The newest receipts of a base's line, the history before them, and our milestones, each oldest first."""

    receipts: tuple[Receipt, ...]
    history_before: bytes
    milestones: tuple[Milestone, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "receipts": pack_receipts(self.receipts).hex(),
            "history_before": self.history_before.hex(),
            "milestones": [milestone.to_json() for milestone in self.milestones],
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Past:
        return cls(
            receipts=unpack_receipts(bytes.fromhex(row["receipts"])),
            history_before=bytes.fromhex(row["history_before"]),
            milestones=tuple(Milestone.from_json(one) for one in row["milestones"]),
        )
