"""What each memory strategy takes and how fast it is, measured in a process of its own: ``ladder.py --json FILE``.

A llama of the asked size makes real inner steps on the sources of the standard library, one process for each strategy
and micro-batch, on the CPU with one thread. Measured is the most that the process holds during its steps on top of what
it held before there was a model. Predicted is ``fixed_bytes`` and the activations of a sample times the micro-batch, as
a probe of ``full`` and one of ``checkpoint`` at two micro-batches give them: a line through their two points.

``host_optimizer`` and ``stream`` bring nothing on a CPU. Their arithmetic runs here all the same, with device and host
being one memory.

Measured, all within 3.1 % of what was predicted: README, "Memory of training"; ``results/ladder.json``. With the own
threshold of glibc, which keeps much of what was freed: 850, 604, 641, 337 and 349 MB.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dht_config.manifest import InnerOptimizerSection
from p2p_trainer.hardware import resident_bytes
from p2p_trainer.running_statistics import trainable
from p2p_trainer.strategies import (
    PARTIAL,
    STRATEGIES,
    MemoryStrategy,
    StrategyName,
    build_strategy,
    facts_of,
    fixed_bytes,
)
from p2p_trainer.strategies.checkpointing import checkpoint_blocks
from p2p_trainer.strategies.host_optimizer import HostOptimizer
from p2p_trainer.strategies.partial import PartialModel
from p2p_trainer.strategies.whole import WholeModel
from p2p_trainer.tasks import Task, load_task
from p2p_trainer.throughput import inner_step
from peers.fragments import FragmentLayout, cut

CPU = torch.device("cpu")
FRAGMENTS, TRAINED = 8, frozenset({0, 3, 6})
LAYERS = 8
SECTION = InnerOptimizerSection(name="adamw", lr=1e-4, weight_decay=0.1)
PROBED = (1, 4)
"""Micro-batches from which the activations of a sample are told."""


def task_of(megaparams: float, sequence_length: int) -> Task:
    width = max(64, round(math.sqrt(megaparams * 1e6 / (12 * LAYERS)) / 64) * 64)
    model = {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": width,
        "intermediate_size": width * 8 // 3,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": width // 64,
        "max_position_embeddings": sequence_length,
        "tie_word_embeddings": True,
    }
    return load_task("text", model, {"sequence_length": sequence_length})


def built(name: StrategyName, model: torch.nn.Module, layout: FragmentLayout) -> MemoryStrategy:
    if name == "host_optimizer":
        checkpoint_blocks(model)
        return WholeModel(name, model, trainable(model), layout, HostOptimizer(model.parameters(), SECTION))
    if name == "stream":
        checkpoint_blocks(model)
        return PartialModel(name, model, layout, SECTION, CPU, TRAINED, CPU)
    return build_strategy(name, model, layout, SECTION, CPU, TRAINED)


def held_bytes() -> tuple[int, int]:
    held = resident_bytes()
    if held is None:
        raise RuntimeError("this system does not tell what a process holds")
    return held


def child(name: StrategyName, micro_batch: int, megaparams: float, sequence_length: int, steps: int) -> dict[str, Any]:
    """Measure one strategy in this process."""
    torch.set_num_threads(1)
    task = task_of(megaparams, sequence_length)
    small = task_of(0.01, sequence_length)  # whatever libraries load on first use is not the model's
    warm = built("full", model := small.build_model(), _layout(model))
    batches = task.batches(0, micro_batch)
    inner_step(small, warm.model, warm.optimizer, next(batches), micro_batch)
    del warm, model
    before, _ = held_bytes()
    model = task.build_model()
    layout, facts = _layout(model), facts_of(model)
    fixed = fixed_bytes(name, layout, TRAINED, SECTION, facts).total_bytes
    strategy = built(name, model, layout)
    inner_step(task, strategy.model, strategy.optimizer, next(batches), micro_batch)
    Path("/proc/self/clear_refs").write_text("5")  # the peak of building is not that of a step
    began = time.perf_counter()
    for _ in range(steps):
        inner_step(task, strategy.model, strategy.optimizer, next(batches), micro_batch)
    seconds = (time.perf_counter() - began) / steps
    return {
        "strategy": name,
        "micro_batch": micro_batch,
        "parameters": layout.num_elements,
        "fixed_bytes": fixed,
        "measured_bytes": held_bytes()[1] - before,
        "samples_per_second": micro_batch / seconds,
    }


def _layout(model: torch.nn.Module) -> FragmentLayout:
    return cut({name: tuple(parameter.shape) for name, parameter in trainable(model).items()}, FRAGMENTS)


def measured(name: StrategyName, micro_batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own."""
    arguments = [str(value) for value in (options.megaparams, options.sequence_length, options.steps)]
    done = subprocess.run(
        [sys.executable, __file__, "--child", name, str(micro_batch), *arguments],
        stdout=subprocess.PIPE,
        # As peers have it on a CPU: else glibc keeps freed activations in fragments, and the figures are of those.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
        check=True,
        timeout=900,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megaparams", type=float, default=25.0)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    lines = {}
    for name in ("full", "checkpoint"):
        low, high = (measured(name, micro_batch, options) for micro_batch in PROBED)
        per_sample = (high["measured_bytes"] - low["measured_bytes"]) / (PROBED[1] - PROBED[0])
        lines[name] = per_sample, low["measured_bytes"] - low["fixed_bytes"] - PROBED[0] * per_sample
    rows = []
    for name in STRATEGIES:
        row = measured(name, options.micro_batch, options)
        per_sample, besides = lines["full" if name == "full" else "checkpoint"]
        row["predicted_bytes"] = round(row["fixed_bytes"] + besides + options.micro_batch * per_sample)
        row["trained"] = len(TRAINED) if name in PARTIAL else FRAGMENTS
        rows.append(row)
    report = {"activation_bytes_per_sample": {name: line[0] for name, line in lines.items()}, "strategies": rows}
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    table = Table(title=f"{rows[0]['parameters'] / 1e6:.1f} M parameters, micro-batch {options.micro_batch}")
    for heading in ("strategy", "fixed MB", "predicted MB", "measured MB", "measured / predicted", "samples/s"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for row in rows:
        megabytes = [f"{row[key] / 1e6:.0f}" for key in ("fixed_bytes", "predicted_bytes", "measured_bytes")]
        ratio = row["measured_bytes"] / row["predicted_bytes"]
        table.add_row(row["strategy"], *megabytes, f"{ratio:.3f}", f"{row['samples_per_second']:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        strategy_name, batch, size, length, count = sys.argv[2:]
        print(json.dumps(child(strategy_name, int(batch), float(size), int(length), int(count))))  # type: ignore[arg-type]
    else:
        main()
