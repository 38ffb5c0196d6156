"""Builds the stub of NVIDIA's management library, and runs Python with the real ``pynvml`` on top of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMPILER = shutil.which("cc") or shutil.which("gcc")
SOURCE = Path(__file__).with_name("nvml_stub.c")
CALLS = (
    *("nvmlInitWithFlags", "nvmlShutdown", "nvmlSystemGetDriverVersion", "nvmlDeviceGetCount_v2"),
    *("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo"),
    *("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTemperature", "nvmlDeviceGetPowerUsage"),
    *("nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex"),
)
"""Every function of the stub that may fail, as the library names it."""
GIGABYTE = 10**9


def build(directory: Path, *flags: str) -> Path:
    """Compile the stub into a directory. Skips the test where there is no C compiler."""
    if COMPILER is None:
        pytest.skip("the stub of libnvidia-ml.so.1 needs a C compiler (cc or gcc), and there is none")
    directory.mkdir(exist_ok=True)
    library = directory / "libnvidia-ml.so.1"
    subprocess.run([COMPILER, "-shared", "-fPIC", *flags, "-o", library, SOURCE], check=True, timeout=120)
    return directory


def run(library_directory: Path, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own that finds the stub; it must end well."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("NVML_STUB_", "CUDA_VISIBLE_"))}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**clean, "LD_LIBRARY_PATH": str(library_directory), **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done
