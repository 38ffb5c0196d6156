"""Our training against what people use today, on unlike machines over unlike lines, emulated on this one.

``python tests/benchmarks/side_by_side.py --scene reference --seeds 3 --json FILE``

The same model, data, speeds and lines for everybody, each peer in a process and a network namespace of its own, one
contender after another:

ddp_equal         torch DistributedDataParallel over gloo, the same batch on every peer
ddp_proportional  the same with batches in the proportion of the speeds
hivemind_sync, hivemind_delayed, hivemind_local   ``hivemind.Optimizer`` 1.1.12: synchronous; step and averaging delayed
                  and offloaded; local updates with averaged states
fastest_alone     the fastest peer, on its own
one_machine       one machine with everybody's speed: what no swarm can beat
ours              ``p2p-trainer bootstrap`` and ``join``, as a rehearsal types them, with the shipped example; from
                  five peers on it has two fragments and ticks of 2 s

``side_by_side_rivals.py`` says how the rivals are set, ``side_by_side_scenes.py`` what the scenes are,
``side_by_side_figures.py`` what each number means. Held-out loss is the product's own function on the 64 held-out
samples that it evaluates by default: ours does so on each peer now and then while it trains, and is held up by it; the
rivals save parameters, which are evaluated after the run. Results are written after every run; ``--resume`` keeps those
that are there, and ``--show`` prints the tables of a file and runs nothing.

It needs network namespaces (root, or CAP_NET_ADMIN and CAP_SYS_ADMIN; ``nsenter``), and two cores with nothing else to
do. Everything it starts ends with it, also after Ctrl-C and TERM.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from side_by_side_figures import Run, summarise
from side_by_side_runs import run_ours, run_rival
from side_by_side_scenes import CONTENDERS, OURS, OURS_WITHOUT_CURSED, RUN, SCENES, contenders_of, load_scene
from side_by_side_tables import print_markdown, print_tables

from dht_config.errors import RehearsalError
from p2p_trainer.rehearsal.links import available

SECONDS = 90.0
LEAST_SECONDS = 30.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    if options.show:
        return _show(options.json, options.markdown)
    chosen = tuple(options.contenders.split(",")) if options.contenders else CONTENDERS
    if unknown := set(chosen) - set(CONTENDERS):
        parser.error(f"--contenders: {', '.join(sorted(unknown))} unknown; there are {', '.join(CONTENDERS)}")
    if options.seeds < 1 or options.seconds < LEAST_SECONDS:
        parser.error(f"--seeds must be 1 or more, --seconds {LEAST_SECONDS:g} or more")
    if reason := available().reason:
        parser.error(f"lines between peers cannot be emulated here: {reason}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    document = _document(options)
    try:
        _run_all(options, chosen, document, console)
    except KeyboardInterrupt:
        console.print("Interrupted; what was finished is kept.")
        return 130
    print_tables(document)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scene", choices=SCENES, default="reference")
    parser.add_argument("--seeds", type=int, default=3, help="how often each contender runs, with seeds from 0")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="training time of each run")
    parser.add_argument("--contenders", help=f"some of {','.join(CONTENDERS)}")
    parser.add_argument("--json", type=Path, required=True, help="results; written after every run")
    parser.add_argument("--resume", action="store_true", help="keep the runs that FILE has, and run the others")
    parser.add_argument("--directory", type=Path, help="keep every run's logs and metrics in a new one below this")
    parser.add_argument("--show", action="store_true", help="print the tables of FILE and run nothing")
    parser.add_argument("--markdown", action="store_true", help="with --show: the table as it stands in the README")
    return parser


def _show(path: Path, markdown: bool) -> int:
    document = {"throttled": [], **json.loads(path.read_text())}
    (print_markdown if markdown else print_tables)(_with_summary(document))
    return 0


def _document(options: argparse.Namespace) -> dict[str, Any]:
    """What the JSON begins with. Raises: SystemExit if FILE has results of another scene."""
    scene = load_scene(options.scene, options.seconds)
    document: dict[str, Any] = {
        "scene": scene.name,
        "seconds": scene.seconds,
        "run": RUN,
        "cores": os.cpu_count(),
        "peers": [
            {"name": peer.name, "samples_per_second": peer.samples_per_second, "link": str(peer.link)}
            for peer in scene.peers
        ],
        "killed": list(scene.killed),
        "flapping": list(scene.flapping),
        "throttled": list(scene.throttled),
        "runs": [],
    }
    if options.resume and options.json.exists():
        before = json.loads(options.json.read_text())
        # A line that a scene came to have later was, before, as it is in most scenes.
        before = {"throttled": [], **before}
        if any(before[key] != document[key] for key in document if key != "runs"):
            raise SystemExit(f"{options.json} has results of another scene, length or machine: --resume cannot go on.")
        document["runs"] = before["runs"]
    return document


def _run_all(options: argparse.Namespace, chosen: Sequence[str], document: dict[str, Any], console: Console) -> None:
    scene = load_scene(options.scene, options.seconds)
    done = {(run["contender"], run["seed"]) for run in document["runs"]}
    for seed in range(options.seeds):
        for contender in contenders_of(scene.name, chosen):
            if (contender, seed) in done:
                continue
            run = run_rival if contender not in (OURS, OURS_WITHOUT_CURSED) else run_ours
            began = time.monotonic()
            with _directory(options.directory, f"{contender}-{seed}") as directory:
                try:
                    result = run(scene, contender, seed, directory, console.print)
                except RehearsalError as error:
                    console.print(f"{contender}, seed {seed}: {error.problem} {error.remedy}", markup=False)
                    continue
            document["runs"].append(result.as_json())
            _write(options.json, _with_summary(document))
            console.print(
                f"{contender}, seed {seed}: efficiency {result.efficiency:.3f}, loss {result.curve[-1][2]:.3f}, "
                f"CPU {100 * result.cpu_share:.0f} %, {time.monotonic() - began:.0f} s"
            )


@contextmanager
def _directory(kept: Path | None, name: str) -> Iterator[Path]:
    """Where a run's processes write: below a directory that stays, or one that goes with the run."""
    if kept is not None:
        (kept / name).mkdir(parents=True)
        yield kept / name
        return
    with tempfile.TemporaryDirectory(prefix="side-by-side-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def _with_summary(document: dict[str, Any]) -> dict[str, Any]:
    document.update(summarise([Run.from_json(run) for run in document["runs"]]))
    return document


def _write(path: Path, document: dict[str, Any]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(document, indent=1) + "\n")
    draft.replace(path)


if __name__ == "__main__":
    sys.exit(main())
