"""What a round takes of the host's memory, measured on two real peers: ``memory.py [--megaparams 100] --json FILE``.

A bootstrap peer and two volunteers average a llama of the asked size over loopback. Counted is what the averaging
process of a volunteer has for itself (its anonymous memory) and the arena that it shares with training, which the
kernel counts in the arena's file; the program and its libraries are what that process had before there was a model.
Figures are in bytes a parameter, and for what comes on top of bases and outer state in fragments' worth (4 bytes an
element): the highest of a sample every 50 ms, over ``--rounds`` rounds.

Measured: 100.9 M parameters, 8 fragments, ``--tick-seconds 30 --rounds 5``, load 2 on 2 shared cores: 8.00 bytes a
parameter for bases and outer state, 1.1 fragments' worth on top between rounds, 3.9 at most, with one snapshot in the
arena. When contributions lay there whole it had been 4.4, when whole rounds were kept until their last deadline 26.9.
On a busier machine rounds overlap, and two snapshots were there at once.

With ``--codec int8 --tick-seconds 15 --rounds 9`` and nothing else at work 3.1 at most; 4.1 when what averages left out
lay between other buffers in the heap, 5.0 when it took a byte an element and what was sent stayed until the last
deadline.

With ``--codec sparse`` and the same otherwise, at a load of 9 to 19, 5.0 at most with three snapshots in the arena:
up to two may be of rounds that brought no result.

Not counted: what training itself needs (model, gradients, inner optimizer), and serving bases to newcomers, which
freezes a fragment's base for as long as somebody fetches it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from dht_config.manifest import example_manifest, load_manifest
from p2p_trainer.metrics import read_metrics
from p2p_trainer.tasks.text import create

FRAGMENTS = 8
SAMPLE_SECONDS = 0.05
START_SECONDS = 600.0
PER_LAYER = 12
"""A llama layer of width h with a feed-forward of 8/3 h has about 12 h² parameters."""


def manifest(megaparams: float, tick_seconds: float, codec: str) -> str:
    layers = 8
    answers = "int8" if codec == "sparse" else codec
    width = round(math.sqrt(megaparams * 1e6 / (PER_LAYER * layers)) / 64) * 64
    lines = {
        "tick_seconds": tick_seconds,
        "fragments": FRAGMENTS,
        "hidden_size": width,
        "intermediate_size": width * 8 // 3,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "sequence_length": 16,
        "batch_size": 1,
        "mode": f'"local"\ncodec = "{codec}"\nanswer_codec = "{answers}"',
    }
    text = []
    for line in example_manifest("stdlib-text").splitlines():
        key = line.split("=")[0].strip()
        text.append(f"{key} = {lines[key]}" if key in lines else line)
    return "\n".join(text) + "\n"


def parameters_of(path: Path) -> int:
    """Of a manifest's model; asked of a peer as it leaves, there would be no answer where that takes too long."""
    run = load_manifest(path)
    with torch.device("meta"):
        model = create(run.model, run.data).build_model()
    return sum(parameter.numel() for parameter in model.parameters())


class Volunteer:
    def __init__(self, directory: Path, target: str, *more: str) -> None:
        self.directory = directory
        self.log = directory.with_suffix(".log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "p2p_trainer", *more, target, "--dir", str(directory), "--plain"],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def events(self, kind: str) -> list[dict[str, Any]]:
        with suppress(OSError):
            return [event for event in read_metrics(self.directory / "metrics.jsonl") if event["event"] == kind]
        return []

    def committed(self) -> int:
        return len([event for event in self.events("round") if event["group_size"] == 2 and event["version"] > 0])

    def averaging(self) -> psutil.Process | None:
        children = psutil.Process(self.process.pid).children()
        return children[0] if children else None

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.log.close()


def anonymous_bytes(process: psutil.Process) -> int:
    """Memory of its own: no files, no shared arena."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not tell RssAnon")


def arena_bytes(process: psutil.Process) -> int:
    """What the shared arena takes, for all processes together."""
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(OSError):
            if "p2p-trainer" in str(descriptor.readlink()):
                return descriptor.stat().st_blocks * 512
    return 0


def measure(megaparams: float, rounds: int, tick_seconds: float, codec: str) -> dict[str, Any]:
    directory = Path(tempfile.mkdtemp(prefix="memory-"))
    peers: list[Volunteer] = []
    try:
        path, invite = directory / "run.toml", directory / "invite"
        path.write_text(manifest(megaparams, tick_seconds, codec))
        peers.append(
            Volunteer(
                directory / "bootstrap", str(path), "bootstrap", "--host", "127.0.0.1", "--invite-file", str(invite)
            )
        )
        _wait(invite.exists, peers, directory)
        joins = (
            "join",
            "--host",
            "127.0.0.1",
            "--threads",
            "1",
            "--eval-samples",
            "0",
            "--checkpoint-seconds",
            "86400",
        )
        for name in ("a", "b"):
            peers.append(Volunteer(directory / name, invite.read_text().strip(), *joins))
        measured = peers[1]
        before = 0

        def program() -> bool:
            """Until the arena comes, which is when the process has all its libraries but no model."""
            nonlocal before
            process = measured.averaging()
            if process is None:
                return False
            if arena_bytes(process) == 0:
                before = max(before, anonymous_bytes(process))
                return False
            return True

        _wait(program, peers, directory)
        _wait(lambda: all(peer.committed() >= 2 for peer in peers[1:]), peers, directory)
        process = measured.averaging()
        if process is None:
            raise RuntimeError("the averaging process ended")
        own, shared, both = [], [], []
        enough = measured.committed() + rounds
        while measured.committed() < enough:
            now = (anonymous_bytes(process), arena_bytes(process))
            own.append(now[0])
            shared.append(now[1])
            both.append(sum(now))
            _check(peers, directory)
            time.sleep(SAMPLE_SECONDS)
        seconds = [event["seconds"] for event in measured.events("round") if event["outcome"] == "committed"]
        parameters = parameters_of(path)
        bases = 8 * parameters
        fragment_bytes = 4 * parameters / FRAGMENTS
        return {
            "parameters": parameters,
            "fragments": FRAGMENTS,
            "codec": codec,
            "rounds": rounds,
            "median_round_seconds": statistics.median(seconds),
            "most_snapshots_at_once": round((max(shared) - bases) / fragment_bytes),
            "program_bytes": before,
            "bases_and_outer_state_bytes_per_parameter": min(shared) / parameters,
            "peak_arena_bytes_per_parameter": max(shared) / parameters,
            "peak_bytes_per_parameter": (max(both) - before) / parameters,
            "at_rest_bytes_per_parameter": (min(both) - before) / parameters,
            "peak_on_top_fragments": (max(both) - before - bases) / fragment_bytes,
            "at_rest_on_top_fragments": (min(both) - before - bases) / fragment_bytes,
        }
    finally:
        for peer in reversed(peers):
            peer.end()
        shutil.rmtree(directory, ignore_errors=True)


def _check(peers: list[Volunteer], directory: Path) -> None:
    for peer in peers:
        if peer.process.poll() is not None:
            raise RuntimeError(peer.directory.with_suffix(".log").read_text()[-2000:])


def _wait(condition: Any, peers: list[Volunteer], directory: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while not condition():
        _check(peers, directory)
        if time.monotonic() > end:
            raise RuntimeError("the peers did not begin in time")
        time.sleep(SAMPLE_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megaparams", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tick-seconds", type=float, default=6.0)
    parser.add_argument("--codec", default="float32", help="of contributions and averages; with sparse these are int8")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    result = measure(arguments.megaparams, arguments.rounds, arguments.tick_seconds, arguments.codec)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
