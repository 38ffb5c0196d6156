"""What a plan is made from, and what it is: values alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from p2p_trainer.machine_checks import AVERAGING_BYTES, PROCESSES_BYTES
from p2p_trainer.planning.compute import ComputeDtype
from p2p_trainer.strategies import STRATEGIES, ModelFacts, StrategyName
from p2p_trainer.throughput import Stopped, Throughput
from peers.fragments import FragmentLayout
from peers.line import CadenceValue, CodecName, LineRate


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One strategy's probe."""

    results: tuple[Throughput, ...]
    stopped: Stopped | None
    failure: str = ""
    """Why it ended early, for a person; empty where it did not."""
    compiled: Throughput | None = None
    """Of steps in compiled code, at the best of the micro-batches."""
    compiling: str = ""
    """What became of torch.compile where it gave nothing to measure, as a sentence; empty where it was not tried."""
    killed: bool = False
    """Somebody killed it, mostly the kernel for want of memory: which may have been others' want, and is not kept."""
    program_bytes: int | None = None
    """What the measuring process held of the machine's memory without a model, its data read; None if not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is known of a machine."""

    device: str
    """As torch writes it: "cpu", "cuda:0", "mps"."""
    budget_bytes: int | None
    """All that this peer may take of the device's memory; on a CPU, programs included. None: not known."""
    host_budget_bytes: int | None = None
    """The same for the machine's own memory, where the device has one of its own."""
    compute_dtype: ComputeDtype = "float32"
    measured: Mapping[StrategyName, Measurement] = field(default_factory=dict)
    emulated_samples_per_second: float | None = None
    """It is slowed down to this."""

    @property
    def one_memory(self) -> bool:
        """Whether the device computes in the machine's own memory."""
        return not self.device.startswith("cuda")

    @property
    def program_bytes(self) -> int:
        """What a peer's processes take of the machine's memory without a model."""
        known = [one.program_bytes for one in self.measured.values() if one.program_bytes is not None]
        return max(known) + AVERAGING_BYTES if known else PROCESSES_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What of a run's model its manifest does not say."""

    layout: FragmentLayout
    facts: ModelFacts
    offered: tuple[StrategyName, ...] = STRATEGIES
    """The strategies that this model, the device and the run's mode allow, in the ladder's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What is known of a line, in bits a second; None: not measured."""

    up: float | None = None
    down: float | None = None
    round_trip_seconds: float = 0.0
    """To another peer and back; 0: not measured."""
    remembered: bool = False
    """It is what an earlier start measured."""

    @classmethod
    def of(
        cls,
        known: LineRate,
        *,
        up: float | None = None,
        down: float | None = None,
        up_limit: float | None = None,
    ) -> Link:
        """
        :param known: from an earlier start
        :param up: what a person says of it; so with ``down``
        :param up_limit: what a person leaves of it for the run
        """
        measured = {name: 8 * rate for name, rate in (("up", known.up), ("down", known.down)) if math.isfinite(rate)}
        said = {name: rate for name, rate in (("up", up), ("down", down)) if rate is not None}
        if up_limit is not None and up_limit < {**measured, **said}.get("up", math.inf):
            said["up"] = up_limit
        return cls(
            **{**measured, **said},
            round_trip_seconds=known.round_trip_seconds,
            remembered=bool(measured.keys() - said.keys()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmFacts:
    """What a run's records show; nothing if nobody was asked."""

    training_peers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a volunteer decided; None leaves it to the plan."""

    compile: bool | None = None
    micro_batch: int | None = None
    batch_size: int | None = None
    strategy: StrategyName | None = None
    train_fragments: int | None = None
    cadence: CadenceValue | None = None
    codec: CodecName | None = None


NO_WISHES = Wishes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What this machine does in this run."""

    micro_batch: int
    """Samples that go through the model at once."""
    batch_size: int
    """Samples of an inner step; at most the manifest's."""
    lr_factor: float
    """Times the manifest's learning rate: the square root of the batch's share of the manifest's."""
    strategy: StrategyName
    fragments: int
    """How many of them are trained."""
    all_fragments: int
    cadence: CadenceValue
    """Rounds of a fragment from one that this peer takes part in to the next; 1 until a line is measured."""
    codec: str
    compute_dtype: ComputeDtype
    compiled: bool
    """Steps are made in code of torch.compile."""
    samples_per_second: float | None
    """Alone; None if it was not measured."""
    predicted_bytes: int | None
    """Peak of the device's memory (on a CPU, of all of this peer's memory); None if it was not measured. What a
    checkpoint is written from comes on top where there is room for it beside a step: see ``steps_while_saving``."""
    program_bytes: int
    """Of the machine's memory, what this peer's processes take without a model; on a CPU part of the prediction."""
    steps_while_saving: bool
    """Training goes on while a checkpoint is written; else it waits, since memory holds no step beside that copy."""
    reasons: tuple[str, ...]

    def in_two_lines(self) -> list[str]:
        """What a volunteer is told: why this strategy, and everything else."""
        return [f"Plan: {self.reasons[0]}", " ".join(self.reasons[1:])][: min(2, len(self.reasons))]

    def to_json(self) -> dict[str, Any]:
        """The ``plan`` event, and what ``p2p-trainer plan --json`` prints."""
        return {
            "micro_batch": self.micro_batch,
            "strategy": self.strategy,
            "fragments": self.fragments,
            "all_fragments": self.all_fragments,
            "cadence": self.cadence,
            "codec": self.codec,
            "batch_size": self.batch_size,
            "lr_factor": self.lr_factor,
            "compute_dtype": self.compute_dtype,
            "compiled": self.compiled,
            "samples_per_second": self.samples_per_second,
            "predicted_bytes": self.predicted_bytes,
            "program_bytes": self.program_bytes,
            "steps_while_saving": self.steps_while_saving,
            "reasons": list(self.reasons),
        }
