"""A peer whose graphics card fails, for tests: ``python device_fault.py ARGUMENTS OF THE PROGRAM``.

DEVICE_FAULT is ``hidden`` (the machine has a card that torch does not see; NVML is whatever LD_LIBRARY_PATH leads to)
or a number: the training step at which the card is gone for good.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from p2p_trainer import devices
from p2p_trainer.cli import main
from p2p_trainer.modes import LocalMode

FAULT = os.environ["DEVICE_FAULT"]
step = LocalMode.step
steps = 0


def fail_at(mode: LocalMode, *arguments: Any) -> tuple[float, int]:
    global steps
    steps += 1
    if steps >= int(FAULT):
        raise torch.AcceleratorError("CUDA error: GPU is lost\nCUDA kernel errors might be asynchronously reported")
    return step(mode, *arguments)


def hide_the_card(proc: Path) -> None:
    (proc / "driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    devices._PROC = proc
    torch.version.cuda = "12.8"
    torch.cuda.is_available = lambda: False


if FAULT == "hidden":
    with tempfile.TemporaryDirectory() as directory:
        hide_the_card(Path(directory))
        main()
else:
    LocalMode.step = fail_at  # type: ignore[method-assign]
    main()
