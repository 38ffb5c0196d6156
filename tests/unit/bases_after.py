"""Bases from the averages that travelled in rounds: ``python bases_after.py FOLDER THREADS...``.

Prints the capability, then for each number of threads and each file in order the digest that whoever received that
round's averages ends on. A program of its own, since torch chooses its CPU kernels once, when a process begins.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from peers.codecs import get_codec
from peers.outer import NO_HISTORY, AdamW, Nesterov, OuterOptimizer, base_digest

OUTER: dict[str, OuterOptimizer] = {
    "nesterov": Nesterov(lr=0.7, momentum=0.6),
    "adamw": AdamW(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
}


def digest_after(outer: str, average: torch.Tensor) -> str:
    """Of a base after two steps of the same average, float32 ``(size,)``: the second one begins with momentum."""
    size, optimizer = average.numel(), OUTER[outer]
    numbers = torch.arange(size, dtype=torch.int64)  # integers only: torch.randn differs between CPU kernels
    base = ((numbers * 6364136223846793005 + 1442695040888963407) >> 33).remainder(2000003).float() / 1000003.0 - 1.0
    state = torch.zeros(optimizer.states, size)
    for version in (1, 2):
        base, state = optimizer.step(base, state, average, version)
    return base_digest(
        fragment=0, version=2, total_element_samples=1, history=NO_HISTORY, base=base, outer_state=state
    ).hex()


def main(folder: Path, *threads: str) -> None:
    print(torch.backends.cpu.get_cpu_capability())
    for number in threads:
        torch.set_num_threads(int(number))
        for file in sorted(folder.iterdir()):
            scene = json.loads(file.read_text())
            average = torch.zeros(scene["size"])
            for start, stop, body in scene["parts"]:
                average[start:stop] = get_codec(scene["answer_codec"]).decode(bytes.fromhex(body), stop - start)
            print(digest_after(scene["outer"], average))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
