"""What the choices of a round do to learning: real gradients, simulated time.

Eight peers, up to 20 times apart in speed, train a causal language model on the sources of Python's standard library,
by the product's own rules for fragments, weights, outer optimizer and codecs. Between two ticks peers do not depend
on each other, so one process computes their steps one after the other, as many as each would have made by the clock;
nothing sleeps and everything is seeded. A cell is one choice of rules; all cells of a comparison see the same initial
model, the same data in the same order and the same number of samples, so they are compared seed by seed.

    python tests/benchmarks/learning.py --quick --json results.json --seeds 3 --compare codec

``--quick`` with all comparisons leaves cells out; each comparison by itself has them all.

``results/`` holds what it gave on one core of a shared machine, continued with ``--resume``, mostly ``--compiled``:
``learning-quick.json`` (outer grid, one seed; weightings, three), ``learning-quick-400-rounds.json`` (``--rounds 400``:
the default, int8 and int4, nine seeds; sparse, three; the best of the grid, two; weightings, one) and
``learning-full.json`` (1.03 M parameters, one seed: more did not fit). Figures stand where the choices do:
``OuterOptimizerSection``, ``peers/weighting.py``, ``peers/codecs.py``. Held-out loss with the product's
defaults, and of the baselines:

===========================  =======================  =========================  =================
scale                        default                  one process, same samples  fastest peer alone
===========================  =======================  =========================  =================
quick, 100 rounds, 1 seed    2.051                                               2.197
quick, 400 rounds            1.700 (9 seeds ± 0.017)  1.682 (2 seeds ± 0.007)
the same, inner lr / 3       1.623 (1 seed)           1.586 (2 seeds ± 0.002)
full, 400 rounds, 1 seed     1.624                    1.716                      1.907
===========================  =======================  =========================  =================

That one process ends above the swarm at full size does not say that swarms learn better: a third of the example's
inner learning rate suits it better, and at that rate, in the quick runs, it is ahead.

Peers that train some fragments by turns (``--compare memory --rounds 200``, ``learning-memory-200-rounds.json``, three
seeds), until the base holds as many samples as with everybody whole: with the four slowest of eight training 2 of 4
fragments 0.985 ± 0.003 of the default's loss (1.826 for 1.854), with all but the fastest 0.981 ± 0.010 (1.818). They
need more rounds for those samples, and in each less is averaged, which may be why they end lower.

What it does not show: networks, late or lost peers, churn, private data, models above a few million parameters,
learning-rate schedules that end low. Everyone is in every round, and every contribution is counted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from learning_swarm import STALENESS, Cell, FlatModel, Outcome, Scale, run_cell, task_of
from rich.console import Console
from rich.table import Table

from peers.weighting import WEIGHTING_NAMES

LR_GRID, MOMENTUM_GRID, DELAYS_CYCLES = (0.4, 0.7, 1.0), (0.6, 0.8, 0.9), (0.0, 0.5, 1.0)


_LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}
QUICK = Scale(
    name="quick",  # 135 k parameters; the steps are so small that calls into torch cost as much as arithmetic
    model=_LLAMA | {"hidden_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 256},
    sequence_length=32,
    batch_size=4,
    rounds=100,
    steps_per_cycle=(16.0, 10.0, 7.0, 4.5, 3.0, 2.0, 1.3, 0.8),
)
FULL = Scale(
    name="full",  # 1.03 M parameters
    model=_LLAMA | {"hidden_size": 144, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 384},
    sequence_length=32,
    batch_size=4,
    rounds=400,
    steps_per_cycle=(8.0, 5.0, 3.5, 2.25, 1.5, 1.0, 0.65, 0.4),  # half of the quick ones: it has to end
)


DEFAULT = Cell(name="default")
"""The product's defaults, and bases that land half a cycle late."""
PLAIN = replace(DEFAULT, lr=1.0, momentum=0.0)
"""Plain averaging."""
BASELINES = (
    Cell(name="one process, as many samples", kind="one process"),
    Cell(name="fastest peer alone, as long", kind="fastest alone"),
)


def codec_cells() -> Iterator[Cell]:
    """Lossy codecs, and where what they leave out is kept. Sparse contributions are answered in int8."""
    for name in ("float16", "int8", "int4"):
        yield replace(DEFAULT, name=name, up=name, down=name)
    yield replace(DEFAULT, name="int4, dropped", brief=False, up="int4", down="int4", feedback="dropped")
    for suffix, cell in (("", DEFAULT), (", outer 1/0", PLAIN)):
        sparse = replace(cell, up="sparse", down="int8")
        yield replace(sparse, name=f"sparse{suffix}")
        yield replace(sparse, name=f"sparse, β 0.95{suffix}", beta=0.95)
        yield replace(sparse, name=f"sparse, β 0.8{suffix}", brief=False, beta=0.8)
        yield replace(sparse, name=f"sparse, apart{suffix}", brief=False, feedback="apart")
        yield replace(sparse, name=f"sparse, apart, β 0.95{suffix}", feedback="apart", beta=0.95)
        yield replace(sparse, name=f"sparse, apart, β 0.8{suffix}", brief=False, feedback="apart", beta=0.8)
        yield replace(sparse, name=f"sparse, dropped{suffix}", brief=False, feedback="dropped")


def weighting_cells() -> Iterator[Cell]:
    """Rules for the weight of a contribution, also with plain averaging: a rule that gives slow peers more weight
    makes smaller outer steps, which helps by itself where they are too big. With unequal batches the first two differ.
    """
    for name in WEIGHTING_NAMES:
        if name != DEFAULT.weighting:
            yield replace(DEFAULT, name=name, weighting=name, brief=name != "samples")
        if name not in WEIGHTING_NAMES[:2]:
            yield replace(PLAIN, name=f"{name}, outer 1/0", weighting=name, brief=False)
    for name in WEIGHTING_NAMES[:2]:
        yield replace(
            DEFAULT, name=f"{name}, fastest 3 with batch x 4", weighting=name, batch_factors=(4, 4, 4), brief=False
        )


def staleness_cells() -> Iterator[Cell]:
    """The fastest peer and two others on lines that carry every fourth round, which is half of all samples."""
    for rule in STALENESS:
        yield replace(DEFAULT, name=f"slow lines, {rule}", slow_lines=(0, 3, 5), staleness=rule, brief=False)


def outer_cells() -> Iterator[Cell]:
    """The outer optimizer's grid and plain averaging for each delay, and the inner step; in a quick look
    at everything only a cross through the default.
    """
    pairs = [(lr, momentum) for lr in LR_GRID for momentum in MOMENTUM_GRID] + [(PLAIN.lr, PLAIN.momentum)]
    for delay in DELAYS_CYCLES:
        for lr, momentum in pairs:
            off = (lr != DEFAULT.lr) + (momentum != DEFAULT.momentum) + (delay != DEFAULT.delay_cycles)
            if off:
                yield replace(
                    DEFAULT,
                    name=f"outer {lr:g}/{momentum:g}, delay {delay:g}",
                    lr=lr,
                    momentum=momentum,
                    delay_cycles=delay,
                    brief=off == 1,
                )
    for name, cell in ((DEFAULT.name, DEFAULT), ("outer 1/0", PLAIN), (BASELINES[0].name, BASELINES[0])):
        yield replace(cell, name=f"inner lr / 3: {name}", inner_lr_factor=1 / 3, brief=False)


def memory_cells() -> Iterator[Cell]:
    """Peers whose memory holds some fragments only, at as many samples in the base as with everybody whole."""
    for peers, fragments in ((4, 2), (4, 1), (7, 2)):
        yield replace(
            DEFAULT,
            name=f"{peers} slowest train {fragments} fragments",
            partial_peers=peers,
            trained_fragments=fragments,
            brief=(peers, fragments) == (4, 2),
        )


@dataclass(slots=True)
class Results:
    """Outcomes as they come in."""

    scale: Scale
    cells: Sequence[Cell]
    """All there are, so that a continued file keeps what this call does not run."""
    outcomes: dict[str, dict[int, Outcome]] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """What is known so far; ratios are to the default with the same seed."""
        reference = self.outcomes.get(DEFAULT.name, {})
        rows = []
        for cell in self.cells:
            outcomes = self.outcomes.get(cell.name, {})
            if not outcomes:
                continue
            losses = {seed: outcome.loss for seed, outcome in sorted(outcomes.items())}
            ratios = [loss / reference[seed].loss for seed, loss in losses.items() if seed in reference]
            rows.append(
                {
                    "name": cell.name,
                    "loss": round(statistics.mean(losses.values()), 4),
                    "loss_stdev": _stdev(list(losses.values())),
                    "ratio": round(statistics.mean(ratios), 4) if ratios else None,
                    "ratio_stdev": _stdev(ratios),
                    "runs": {seed: asdict(outcome) for seed, outcome in sorted(outcomes.items())},
                    "settings": {
                        key: value for key, value in _settings(cell).items() if value != getattr(DEFAULT, key)
                    },
                }
            )
        return rows

    def write(self, path: Path) -> None:
        report = {
            "torch": torch.__version__,
            "scale": self.described_scale(),
            "default": _settings(DEFAULT),
            "cells": self.rows(),
        }
        path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")

    def described_scale(self) -> dict[str, Any]:
        parameters = len(FlatModel(task_of(self.scale), self.scale).values)
        scale: dict[str, Any] = json.loads(json.dumps(asdict(self.scale)))
        return scale | {"parameters": parameters}

    def resume(self, path: Path) -> None:
        """Take over what a file holds. :raises ValueError: it is of another scale, or of other defaults"""
        report, defaults = json.loads(path.read_text()), json.loads(json.dumps(_settings(DEFAULT)))
        # A choice that came later was, before, what it is by default.
        if report["scale"] != self.described_scale() or {**defaults, **report["default"]} != defaults:
            raise ValueError(f"{path} holds results of another scale or of other defaults; name another file")
        for row in report["cells"]:
            runs = {int(seed): Outcome(**run) for seed, run in row["runs"].items()}
            self.outcomes.setdefault(row["name"], {}).update(runs)

    def table(self) -> Table:
        table = Table(title=f"{self.scale.name}: {self.scale.rounds} rounds of each fragment")
        for heading in ("cell", "held-out loss", "±", "to default", "±", "seeds", "samples", "CPU s"):
            table.add_column(heading, justify="left" if heading == "cell" else "right")
        for row in self.rows():
            table.add_row(
                row["name"],
                f"{row['loss']:.4f}",
                f"{row['loss_stdev']:.4f}" if row["loss_stdev"] is not None else "",
                f"{row['ratio']:.4f}" if row["ratio"] is not None else "",
                f"{row['ratio_stdev']:.4f}" if row["ratio_stdev"] is not None else "",
                str(len(row["runs"])),
                str(max(run["samples"] for run in row["runs"].values())),
                f"{statistics.mean(run['cpu_seconds'] for run in row['runs'].values()):.0f}",
            )
        return table


def _means(text: str, cell: Cell) -> bool:
    return text[1:] == cell.name if text.startswith("=") else text in cell.name


def _settings(cell: Cell) -> dict[str, Any]:
    return {key: value for key, value in asdict(cell).items() if key not in ("name", "brief")}


def _stdev(values: list[float]) -> float | None:
    return round(statistics.stdev(values), 4) if len(values) > 1 else None


def run_cells(
    jobs: Sequence[tuple[Cell, int]], scale: Scale, processes: int, threads: int, compiled: bool
) -> Iterator[tuple[tuple[Cell, int], Outcome]]:
    """Run cells with their seeds; outcomes come as they are ready."""
    if processes == 1:
        torch.set_num_threads(threads)
        yield from ((job, run_cell(job[0], scale, job[1], compiled)) for job in jobs)
        return
    # Spawned, not forked: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, torch.set_num_threads, (threads,)) as pool:
        futures = {pool.submit(run_cell, cell, scale, seed, compiled): (cell, seed) for cell, seed in jobs}
        for future in as_completed(futures):
            yield futures[future], future.result()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="135 k parameters, 100 rounds of each fragment")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="written after every run of a cell")
    parser.add_argument("--resume", action="store_true", help="keep what FILE holds already, run what it lacks")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, help="rounds of each fragment")
    parser.add_argument(
        "--compare", choices=["weighting", "outer", "codec", "memory", "staleness", "all"], default="all"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="the default, and cells called =TEXT or with TEXT in their name: 'a|=b'",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--threads", type=int, default=1, help="torch threads in each process")
    parser.add_argument(
        "--compiled", action="store_true", help="with torch.compile: needs a C++ compiler, saves a third"
    )
    options = parser.parse_args(arguments)

    scale = QUICK if options.quick else FULL
    if options.rounds:
        scale = replace(scale, rounds=options.rounds)
    cells = [DEFAULT, *BASELINES]
    if options.compare in ("codec", "all"):
        cells += codec_cells()
    if options.compare in ("weighting", "all"):
        cells += weighting_cells()
    if options.compare in ("outer", "all"):
        cells += outer_cells()
    if options.compare in ("staleness", "all"):
        cells += staleness_cells()
    if options.compare in ("memory", "all"):
        cells += memory_cells()
    if options.quick and options.compare == "all" and not options.only:
        cells = [cell for cell in cells if cell.brief]
    if options.only:
        wanted = options.only.split("|")
        cells = [cell for cell in cells if cell is DEFAULT or any(_means(text, cell) for text in wanted)]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    everything = [
        DEFAULT,
        *BASELINES,
        *codec_cells(),
        *weighting_cells(),
        *outer_cells(),
        *memory_cells(),
        *staleness_cells(),
    ]
    results = Results(scale, everything)
    if options.resume and options.json.exists():
        results.resume(options.json)
    console = Console(width=None if sys.stdout.isatty() else 120)

    jobs = [(cell, seed) for seed in seeds for cell in cells if seed not in results.outcomes.get(cell.name, {})]
    for (cell, seed), outcome in run_cells(jobs, scale, options.jobs, options.threads, options.compiled):
        results.outcomes.setdefault(cell.name, {})[seed] = outcome
        results.write(options.json)
        console.print(f"{cell.name}, seed {seed}: {outcome.loss:.4f} ({outcome.cpu_seconds:.0f} s)", style="dim")
    console.print(results.table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
