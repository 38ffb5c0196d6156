"""``p2p-trainer doctor``: everything that keeps a peer from working, looked at one by one, with cause and remedy.

Each look at the machine, and the one at the run, happens in a process of its own (``findings.py``). What the figures
mean stands in ``machine_checks.py`` and ``swarm_checks.py``.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from dht_config.address import Address
from dht_config.errors import ExitCode, P2PTrainerError
from dht_config.manifest import RunManifest
from p2p_trainer.devices import nvidia_device_present, pick_device
from p2p_trainer.findings import Finding, Note, Report, not_known, run_isolated
from p2p_trainer.hardware import read_device
from p2p_trainer.limits import free_disk_bytes, nearest_existing, read_limits
from p2p_trainer.machine_checks import (
    Need,
    judge_device,
    judge_disk,
    judge_driver,
    judge_ip,
    judge_memory,
    judge_open_files,
    judge_shared_memory,
    need_of,
)
from p2p_trainer.nvml import read_nvml
from p2p_trainer.run_directory import remembered_port
from p2p_trainer.settings import PeerSettings, default_data_directory
from p2p_trainer.swarm_checks import (
    SUGGESTED_PORT,
    judge_clock,
    judge_dials,
    judge_manifest,
    judge_nat,
    judge_own_manifest,
    judge_peers,
    judge_port,
    judge_traffic,
)
from p2p_trainer.target import Target
from peers.daemon import SOCKET_DIRECTORY_PREFIX
from peers.examination import ClockCompared, Dialled, DialledBack, Examined, ManifestFound, Seen, examine

MACHINE_CHECKS = ("driver", "device", "memory", "disk", "shared_memory", "open_files", "ip")
SWARM_CHECKS = ("swarm", "clock", "manifest", "peers", "traffic", "port", "nat")
CHECKS = (*MACHINE_CHECKS, *SWARM_CHECKS)
"""Names and order are a promise to programs."""

DRIVER_SECONDS = 30.0
DEVICE_SECONDS = 120.0
"""Starting CUDA takes seconds on a good day, a minute where its kernels must be compiled first."""
LIMITS_SECONDS = 20.0
"""A disk on another machine may not answer."""
SWARM_SECONDS = 120.0
"""Beyond the time to wait for somebody."""

AFTER_FAILURE: dict[ExitCode, tuple[str, ...]] = {
    ExitCode.UNREACHABLE: ("ip", "open_files"),
    ExitCode.DEVICE: ("driver", "memory"),
    ExitCode.DEVICE_LOST: ("driver", "memory"),
    ExitCode.LIMITS: ("memory", "disk", "open_files"),
    ExitCode.CHECKPOINT: ("disk",),
    ExitCode.SWARM_PROCESS_DIED: ("memory", "disk", "open_files"),
}
"""What is worth a look after a join that failed. None of it computes: CUDA may be broken in this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """Whom to examine: a machine, and the run that it would join if there is one."""

    settings: PeerSettings
    target: Target | None
    addresses: tuple[Address, ...]
    """Of peers to ask; none for the machine alone."""

    @property
    def directory(self) -> Path:
        """Where the peer keeps, or would keep, its state."""
        if self.settings.dir is not None:
            return self.settings.dir
        runs = default_data_directory()
        return runs / self.target.run_id / "peer" if self.target is not None else runs


def examine_everything(patient: Patient, say: Callable[[str], None]) -> list[Finding]:
    """One finding for each of CHECKS, in that order. Call it before CUDA or threads are started.

    :param say: shows a person what is being waited for
    """
    if patient.target is None:
        swarm = [not_known(check, "Give an invite to have it looked at.") for check in SWARM_CHECKS]
        return [*examine_machine(patient, Need(), MACHINE_CHECKS), *swarm]
    swarm, need = _examine_run(patient, patient.target, say)
    return [*examine_machine(patient, need, MACHINE_CHECKS), *swarm]


def examine_machine(patient: Patient, need: Need, checks: Sequence[str]) -> list[Finding]:
    """The chosen ones of MACHINE_CHECKS, each in a process of its own."""
    looks: dict[str, tuple[Callable[[Patient, Need], Finding], float]] = {
        "driver": (_look_at_driver, DRIVER_SECONDS),
        "device": (_look_at_device, DEVICE_SECONDS),
        "memory": (_look_at_memory, LIMITS_SECONDS),
        "disk": (_look_at_disk, LIMITS_SECONDS),
        "shared_memory": (lambda _patient, _need: judge_shared_memory(read_limits()), LIMITS_SECONDS),
        "open_files": (lambda _patient, _need: judge_open_files(read_limits()), LIMITS_SECONDS),
        "ip": (_look_at_ip, LIMITS_SECONDS),
    }

    def one(check: str) -> Finding:
        look, seconds = looks[check]
        (finding,), _ = run_isolated((check,), lambda report: report(look(patient, need)), seconds)
        return finding

    return [one(check) for check in checks]


def failing_lines(error: P2PTrainerError, patient: Patient) -> list[str]:
    """What a machine has to do with a failed join: lines for a person, none where it has nothing to do with it."""
    checks = AFTER_FAILURE.get(error.exit_code, ())
    findings = examine_machine(patient, Need(), checks) if checks else []
    return [line(finding) for finding in findings if finding.ok is False and finding.remedy not in error.remedy]


def line(finding: Finding) -> str:
    """One line for a terminal; ASCII where the terminal has nothing else."""
    marks = {True: "✓", False: "✗", None: "?"}
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    try:
        "".join(marks.values()).encode(encoding)
    except (UnicodeError, LookupError):
        marks = {True: "ok", False: "NO", None: "? "}
    remedy = f" {finding.remedy}" if finding.remedy else ""
    return f"{marks[finding.ok]} {finding.check.replace('_', ' '):<14}{finding.cause}{remedy}"


def as_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """``check``, ``ok`` (true, false, null for not known), ``cause``, ``remedy``, in the order of CHECKS."""
    return [asdict(finding) for finding in findings]


def exit_code(findings: Sequence[Finding]) -> ExitCode:
    """OK unless something is wrong; what is not known is not wrong."""
    return ExitCode.CHECKS_FAILED if any(finding.ok is False for finding in findings) else ExitCode.OK


def _look_at_driver(patient: Patient, need: Need) -> Finding:
    return judge_driver(
        read_nvml(),
        card_present=nvidia_device_present(),
        torch_cuda=torch.version.cuda,
        asked_for_cpu=(patient.settings.device or "").startswith("cpu"),
    )


def _look_at_device(patient: Patient, need: Need) -> Finding:
    limits = read_limits()
    return judge_device(read_device(pick_device(patient.settings.device), limits), need, limits.cores)


def _look_at_memory(patient: Patient, need: Need) -> Finding:
    # Said without starting a device: nothing but a card has memory of its own.
    wanted = patient.settings.device or ("cuda" if nvidia_device_present() or torch.version.hip else "cpu")
    return judge_memory(read_limits(), need, computes_here=not wanted.startswith("cuda"))


def _look_at_disk(patient: Patient, need: Need) -> Finding:
    directory = patient.directory
    there = nearest_existing(directory)
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return judge_disk(directory, free_disk_bytes(directory), writable=writable, need=need)


def _look_at_ip(patient: Patient, need: Need) -> Finding:
    return judge_ip(_source_address("192.0.2.1"), _source_address("2001:db8::1"))


def _examine_run(patient: Patient, target: Target, say: Callable[[str], None]) -> tuple[list[Finding], Need]:
    sockets = Path(tempfile.mkdtemp(prefix=SOCKET_DIRECTORY_PREFIX))
    try:
        findings, notes = run_isolated(
            SWARM_CHECKS,
            lambda report: asyncio.run(_report_run(patient, target, sockets, report, say)),
            patient.settings.wait_seconds + SWARM_SECONDS,
        )
    finally:
        shutil.rmtree(sockets, ignore_errors=True)
    return findings, Need(**notes)


async def _report_run(
    patient: Patient, target: Target, sockets: Path, report: Report, say: Callable[[str], None]
) -> None:
    if not patient.addresses:
        finding, learned = judge_own_manifest(target)
        for check in SWARM_CHECKS:
            if check == "manifest":
                report(finding)
            elif check == "traffic" and learned is not None:
                report(judge_traffic(*learned, 0))
            else:
                report(not_known(check, "It is not known whom to ask.", "Give an invite, or an address with --peer."))
        if learned is not None:
            _note_need(learned[0], learned[1].num_elements, report)
        return
    what = Examined(
        run_id=target.run_id,
        organiser_public_key=target.invite.organiser_public_key if target.invite is not None else None,
        addresses=patient.addresses,
        ours_json=target.manifest.canonical_json() if target.manifest is not None else "",
        host=patient.settings.network.host,
        port=patient.settings.port or remembered_port(patient.directory) or _free_port(patient.settings.network.host),
        wait_seconds=patient.settings.wait_seconds,
    )
    learned = None
    async with aclosing(examine(what, sockets, say)) as facts:  # type: ignore[type-var]
        async for fact in facts:
            if isinstance(fact, Dialled):
                report(judge_dials(fact))
            elif isinstance(fact, ClockCompared):
                report(judge_clock(fact))
            elif isinstance(fact, ManifestFound):
                finding, learned = judge_manifest(fact.signed, target, allow_files=patient.settings.allow_files)
                report(finding)
                if learned is not None:
                    _note_need(learned[0], learned[1].num_elements, report)
            elif isinstance(fact, Seen):
                report(judge_peers(fact.view))
                report(
                    judge_traffic(*learned, len(fact.view.training()))
                    if learned is not None
                    else not_known("traffic", "It follows from the manifest.")
                )
            elif isinstance(fact, DialledBack):
                own = _own_addresses()
                report(judge_port(fact, own))
                report(judge_nat(fact, own))


def _note_need(manifest: RunManifest, num_elements: int, report: Report) -> None:
    for name, value in asdict(need_of(manifest, num_elements)).items():
        report(Note(name=name, value=value))


def _own_addresses() -> frozenset[str]:
    found = (address.address for addresses in psutil.net_if_addrs().values() for address in addresses)
    return frozenset(address.partition("%")[0] for address in found)


def _source_address(destination: str) -> str | None:
    """The address that a connection to the internet would come from; nothing is sent. None without a route."""
    family = socket.AF_INET6 if ":" in destination else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((destination, 9))
            source: str = probe.getsockname()[0]
    except OSError:
        return None
    return source


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, 0), family=family) as probe:
            port: int = probe.getsockname()[1]
    except OSError:
        return SUGGESTED_PORT  # why nobody can listen there is found out, and said, by whoever tries
    return port
