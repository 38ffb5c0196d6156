"""What a machine's figures mean for a peer: pure, one finding each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dht_config.manifest import RunManifest
from p2p_trainer.findings import Finding, not_known
from p2p_trainer.hardware import DeviceFacts
from p2p_trainer.limits import ENOUGH_OPEN_FILES, LEAST_OPEN_FILES, Limits, open_files_remedy
from p2p_trainer.nvml import NORMAL_REFUSALS, NvmlFacts, explain

PROCESSES_BYTES = 550_000_000
"""What a peer's three processes take without a model: proportional set sizes of 310, 155 and 88 MB (digits, one
thread)."""
AVERAGING_BYTES = 243_000_000
"""Of these, those of the averaging process and of its daemon."""
_BYTES_PER_VALUE = 4
_FRAGMENTS_OF_A_ROUND = 5.5
"""In use at most while two rounds overlap (README, "Memory of a round")."""
_CHECKPOINTS = 3
"""The newest, the one before it, and the next while it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The least that a peer takes, in bytes. Activations come on top: only a step shows how many."""

    device_bytes: int = 0
    host_bytes: int = PROCESSES_BYTES
    disk_bytes: int = 0


def need_of(manifest: RunManifest, num_elements: int) -> Need:
    """What a model of so many parameters takes, everything in float32.

    On the device: parameters, gradients and what the inner optimizer keeps. In the machine's memory: bases, what the
    outer optimizer keeps, and rounds. On the disk: all that is kept, in every checkpoint that is there at once.
    """
    optimizer_values = 0
    if manifest.averaging.mode == "local":
        section = manifest.inner_optimizer
        optimizer_values = 2 if section.name == "adamw" else int(section.momentum > 0)
    outer_values = 2 if manifest.outer_optimizer.name == "adamw" else 1
    value_bytes = _BYTES_PER_VALUE * num_elements
    return Need(
        device_bytes=value_bytes * (2 + optimizer_values),
        host_bytes=PROCESSES_BYTES
        + int(value_bytes * (1 + outer_values + _FRAGMENTS_OF_A_ROUND / manifest.run.fragments)),
        disk_bytes=_CHECKPOINTS * value_bytes * (2 + outer_values + optimizer_values),
    )


def judge_driver(nvml: NvmlFacts, *, card_present: bool, torch_cuda: str | None, asked_for_cpu: bool) -> Finding:
    """The driver of NVIDIA's cards.

    :param card_present: whether the machine has one, whatever became of its driver
    :param torch_cuda: what torch was built for; None if for no CUDA
    """
    if not card_present and not nvml.cards:
        return Finding(check="driver", ok=True, cause="None needed: there is no NVIDIA card.")
    if asked_for_cpu:
        return Finding(check="driver", ok=True, cause="None needed: the CPU was asked for.")
    if nvml.failure is not None:
        cause, remedy = explain(nvml.failure.code, nvml.failure.text)
        return Finding(check="driver", ok=False, cause=_sentence(cause), remedy=remedy)
    version = f"NVIDIA driver {nvml.driver}" if nvml.driver else "NVIDIA's driver does not tell its version"
    if torch_cuda is None:
        return Finding(
            check="driver",
            ok=False,
            cause=f"{version}, but this torch is built for the CPU only: the card would not be used.",
            remedy="Install torch for CUDA (see pytorch.org/get-started), or say --device cpu.",
        )
    unusual = [refusal for refusal in nvml.refusals if refusal.code not in NORMAL_REFUSALS]
    refused = f"; it does not answer {unusual[0].call} ({unusual[0].text})" if unusual else ""
    built = f", torch for CUDA {torch_cuda}" if torch_cuda else ""
    return Finding(check="driver", ok=True, cause=f"{version}{built}{refused}.")


def judge_device(device: DeviceFacts, need: Need, cores: float) -> Finding:
    """The device that computes, and whether a run's parameters fit into what is free of it."""
    about = [f"{device.name} ({device.kind}:{device.index})" if device.kind == "cuda" else device.name]
    if device.kind == "cpu":
        about.append(f"{cores:g} core(s)")
    elif device.free_bytes is not None and device.total_bytes is not None:
        about.append(f"{gigabytes(device.free_bytes)} of {gigabytes(device.total_bytes)} free")
    if device.utilisation is not None and device.kind != "cpu":
        about.append(f"{device.utilisation:.0%} busy")
    if device.temperature_celsius is not None:
        about.append(f"{device.temperature_celsius} °C")
    if device.power_watts is not None:
        about.append(f"{device.power_watts:.0f} W")
    cause = ", ".join(about)
    if device.kind != "cpu" and device.free_bytes is not None and device.free_bytes < need.device_bytes:
        return Finding(
            check="device",
            ok=False,
            cause=f"{cause}; parameters, gradients and optimizer alone take {gigabytes(need.device_bytes)}.",
            remedy="Close what else uses the card, or join a run with a smaller model.",
        )
    return Finding(check="device", ok=True, cause=f"{cause}.")


def judge_memory(limits: Limits, need: Need, *, computes_here: bool) -> Finding:
    """The machine's own memory.

    :param computes_here: whether the device's need has to fit in here, too: for the CPU and Apple's
    """
    least = need.host_bytes + (need.device_bytes if computes_here else 0)
    by = " that this container or session may use" if limits.memory_is_capped else ""
    cause = f"{gigabytes(limits.free_memory_bytes)} of {gigabytes(limits.total_memory_bytes)}{by} free"
    if limits.free_memory_bytes < least:
        return Finding(
            check="memory",
            ok=False,
            cause=f"{cause}; a peer takes at least {gigabytes(least)}.",
            remedy="Raise the limit (docker run --memory, systemd MemoryMax)."
            if limits.memory_is_capped
            else "Close other programs.",
        )
    return Finding(check="memory", ok=True, cause=f"{cause}; a peer takes at least {gigabytes(least)}.")


def judge_disk(directory: Path, free_bytes: int | None, *, writable: bool, need: Need) -> Finding:
    """Where the peer keeps its state."""
    if not writable:
        return Finding(
            check="disk",
            ok=False,
            cause=f"{directory} cannot be written to.",
            remedy="Make it writable for this user, or choose another directory with --dir.",
        )
    if free_bytes is None:
        return not_known("disk", f"The free space of {directory} cannot be read.")
    cause = f"{gigabytes(free_bytes)} free in {directory}"
    if free_bytes < need.disk_bytes or free_bytes == 0:
        return Finding(
            check="disk",
            ok=False,
            cause=f"{cause}; checkpoints take {gigabytes(need.disk_bytes)}.",
            remedy="Free some space, or choose a directory on another disk with --dir.",
        )
    return Finding(check="disk", ok=True, cause=f"{cause}.")


def judge_shared_memory(limits: Limits) -> Finding:
    """/dev/shm, for which other programs of this kind need a flag; this one does not."""
    size = "is not there" if limits.shared_memory_bytes is None else f"has {megabytes(limits.shared_memory_bytes)}"
    return Finding(check="shared_memory", ok=True, cause=f"/dev/shm {size}; a peer needs none of it.")


def judge_open_files(limits: Limits) -> Finding:
    """How many files and connections may be open at once."""
    allowed = max(limits.open_files, limits.open_files_hard)
    cause = f"{'no limit' if allowed >= 2**31 else allowed} (ulimit -n)"
    if allowed < LEAST_OPEN_FILES:
        return Finding(check="open_files", ok=False, cause=f"{cause}: no peer starts.", remedy=open_files_remedy())
    if allowed < ENOUGH_OPEN_FILES:
        cause += ": enough for a few peers only."
        return Finding(check="open_files", ok=False, cause=cause, remedy=open_files_remedy())
    return Finding(check="open_files", ok=True, cause=f"{cause}.")


def judge_ip(ipv4: str | None, ipv6: str | None) -> Finding:
    """What this machine can dial from: the source addresses that the system would use for the internet."""
    if ipv4 is None and ipv6 is None:
        return Finding(
            check="ip",
            ok=False,
            cause="This machine has no way into the internet, neither over IPv4 nor over IPv6.",
            remedy="Connect it, unless all peers are on this machine or in this network.",
        )
    parts = [f"{name} from {source}" if source else f"no {name}" for name, source in (("IPv4", ipv4), ("IPv6", ipv6))]
    hint = "" if ipv4 is not None else " Listen there with --host ::."
    return Finding(check="ip", ok=True, cause=f"{', '.join(parts)}.", remedy=hint.strip())


def gigabytes(size_bytes: float) -> str:
    """10^9 bytes, to a tenth; below one in megabytes."""
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else megabytes(size_bytes)


def megabytes(size_bytes: float) -> str:
    if size_bytes < 1e6:
        return f"{size_bytes / 1e3:.0f} kB"
    return f"{size_bytes / 1e6:.0f} MB" if size_bytes >= 1e7 else f"{size_bytes / 1e6:.1f} MB"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
