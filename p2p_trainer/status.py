"""What ``p2p-trainer status`` says of a run, for programs and for people."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from peers.observer import Observation


def status_report(run_id: str, observation: Observation) -> dict[str, Any]:
    """The run as JSON-able values: ``run_id``, ``manifest`` facts, and ``peers``, best contributor first."""
    view = observation.view
    credited = {peer: member.profile.credited_samples for peer, member in view.members.items()}
    total = sum(credited.values())
    peers = [
        {
            "peer_id": peer,
            "status": member.profile.status,
            "device": member.profile.device,
            "samples_per_second": member.profile.samples_per_second,
            "micro_batch": member.profile.micro_batch,
            "processed_samples": member.profile.processed_samples,
            "credited_samples": member.profile.credited_samples,
            "share": credited[peer] / total if total else 0.0,
            "versions": [claim.version for claim in member.claims],
            "digests": [claim.digest.hex() for claim in member.claims],
            "total_samples": [claim.total_samples for claim in member.claims],
            "software_version": member.profile.software_version,
            "seconds_in_run": max(0.0, view.read_at - member.profile.joined_at),
            "addresses": list(member.profile.addresses),
        }
        for peer, member in sorted(view.members.items(), key=lambda item: -credited[item[0]])
    ]
    manifest = observation.signed_manifest.manifest()
    return {
        "run_id": run_id,
        "task": manifest.task.name,
        "fragments": manifest.run.fragments,
        "tick_seconds": manifest.run.tick_seconds,
        "training": sum(peer["status"] == "training" for peer in peers),
        "samples_per_second": sum(
            member.profile.samples_per_second for member in view.members.values() if member.profile.status == "training"
        ),
        "peers": peers,
    }


def status_table(report: dict[str, Any]) -> Table:
    """The same for a terminal, of 80 columns or more: numbers are never cut, a device's name is folded."""
    table = Table(
        title=f"{report['run_id']}: {report['training']} training, {report['samples_per_second']:.1f} samples/s in all",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading, justify in (
        ("peer", "left"),
        ("status", "left"),
        ("samples/s", "right"),
        ("version", "right"),
        ("processed", "right"),
        ("credited", "right"),
        ("share", "right"),
    ):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("device", overflow="fold", min_width=6)
    for peer in report["peers"]:
        versions = peer["versions"]
        span = f"{min(versions)}-{max(versions)}" if versions else "-"
        table.add_row(
            "…" + peer["peer_id"][-6:],
            peer["status"],
            f"{peer['samples_per_second']:.1f}",
            span,
            str(peer["processed_samples"]),
            f"{peer['credited_samples']:.0f}",
            f"{peer['share']:.0%}",
            peer["device"],
        )
    return table
