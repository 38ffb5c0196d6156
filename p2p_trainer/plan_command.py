"""``p2p-trainer plan``: what this machine, or one with less memory or another line, would do in a run, and why."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dht_config.address import parse_addresses
from dht_config.errors import UsageError
from p2p_trainer.machines import memory_text, read_rate
from p2p_trainer.reporting import Reporting, log_to_stderr
from p2p_trainer.settings import PeerSettings, load_settings, parse_given_addresses
from p2p_trainer.target import Target, read_target

if TYPE_CHECKING:
    from dht_config.manifest import RunManifest
    from p2p_trainer.planning.plan_facts import Link, Plan, SwarmFacts
    from p2p_trainer.planning.probe import Prober
    from p2p_trainer.tasks import Task

Cadence = Annotated[
    int | None,
    typer.Option(help="Take part in every round (1), every 2nd or every 4th; by default as the line carries."),
]
Codec = Annotated[
    str | None,
    typer.Option(help="int8, int4 or sparse, if the run leaves it to its peers; by default by the line."),
]


def plan(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="An invite, the path of a run manifest, or an example: stdlib-text, digits.",
            show_default=False,
        ),
    ],
    memory: Annotated[
        str | None,
        typer.Option(
            help="All that a peer may take of the device's memory (on a CPU, of the machine's), such as 2GB; "
            "by default what is free.",
            show_default=False,
        ),
    ] = None,
    up: Annotated[
        str | None, typer.Option(help="What the line carries up, such as 10M (bit/s).", show_default=False)
    ] = None,
    down: Annotated[str | None, typer.Option(help="What it carries down, such as 50M.", show_default=False)] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 or mps; by default the best there is.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads to train with.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Samples that go through the model at once.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples of an inner step; at most the run's.")] = None,
    strategy: Annotated[
        str | None, typer.Option(help="full, checkpoint, host_optimizer, fragments or stream.", show_default=False)
    ] = None,
    train_fragments: Annotated[
        int | None, typer.Option(help="With fragments and stream: how many to train at a time.", show_default=False)
    ] = None,
    compute_dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; by default as the device does best.")
    ] = None,
    compile: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Try torch.compile; by default on cards.", show_default=False),
    ] = None,
    cadence: Cadence = None,
    codec: Codec = None,
    settings_file: Annotated[
        Path | None, typer.Option("--settings", help="A TOML file with settings; flags and environment override it.")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option("--peer", help="Address of a peer to ask as well. Repeatable.")
    ] = None,
    wait_seconds: Annotated[float, typer.Option(help="How long to try to reach anybody.")] = 15.0,
    allow_files: Annotated[
        bool, typer.Option("--allow-files", help="As for join: an invited run may read the files it names.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log what happens inside, to standard error.")
    ] = False,
) -> None:
    """Show what this machine would do in a run, and why: micro-batch, memory strategy, cadence.

    Measures the machine for a few seconds, unless it has been measured before. The line is as rounds measured it in the
    last week, if you took part in this run, or as you say. With an invite the swarm is asked for
    the run's manifest, and nothing else.
    """
    log_to_stderr(verbose)
    with Reporting(as_json):
        settings = load_settings(
            {
                "memory": memory,
                "device": device,
                "threads": threads,
                "micro_batch": micro_batch,
                "batch": batch,
                "strategy": strategy,
                "train_fragments": train_fragments,
                "compute_dtype": compute_dtype,
                "compile": compile,
                "cadence": cadence,
                "codec": codec,
                "peer": tuple(peer or ()),
                "wait_seconds": wait_seconds,
                "allow_files": allow_files or None,
            },
            settings_file,
        )
        rates = _rate(up, "--up"), _rate(down, "--down")
        run = read_target(target)

        from p2p_trainer.logs import quiet_libraries
        from p2p_trainer.planning.plan_facts import Link
        from p2p_trainer.planning.probe import start_prober
        from p2p_trainer.settings import default_data_directory
        from peers.known_line import known_line

        quiet_libraries(verbose=verbose)
        directory = settings.dir or default_data_directory() / run.run_id / "peer"
        prober = start_prober()
        try:
            manifest, task, swarm = _look_up(run, settings)
            known = known_line(directory, time.time())
            link = Link.of(known, up=rates[0], down=rates[1], up_limit=settings.up_bits_per_second)
            made = _plan(manifest, task, swarm, settings, prober, link)
        finally:
            prober.close()
        if as_json:
            print(json.dumps(made.to_json()))
        else:
            print("\n".join(made.reasons))


def _rate(text: str | None, option: str) -> float | None:
    """Bits a second. :raises UsageError:"""
    try:
        return read_rate(text) if text is not None else None
    except ValueError as error:
        raise UsageError(f"{option}: {text!r} cannot be used: {error}.", "Correct it or leave it out.") from None


def _look_up(run: Target, settings: PeerSettings) -> tuple[RunManifest, Task, SwarmFacts]:
    """The run's manifest and task, and what its records show if it was given as an invite."""
    from p2p_trainer.planning.plan_facts import SwarmFacts
    from p2p_trainer.run_model import checked_manifest
    from peers.observer import observe

    if run.manifest is not None and run.task is not None:
        return run.manifest, run.task, SwarmFacts()
    known, problems = parse_addresses(run.addresses)
    for problem in problems:
        print(f"Ignored: {problem}", file=sys.stderr)
    seen = asyncio.run(
        observe(
            run.run_id,
            run.invite.organiser_public_key if run.invite is not None else None,
            [*parse_given_addresses(settings.peer, "--peer"), *known],
            wait_seconds=settings.wait_seconds,
            on_waiting=lambda text: print(text, file=sys.stderr),
        )
    )
    manifest, task = checked_manifest(seen.signed_manifest, run, allow_files=settings.allow_files)
    return manifest, task, SwarmFacts(training_peers=len(seen.view.training()))


def _plan(
    manifest: RunManifest,
    task: Task,
    swarm: SwarmFacts,
    settings: PeerSettings,
    prober: Prober,
    link: Link,
) -> Plan:
    from p2p_trainer.devices import pick_device
    from p2p_trainer.hardware import read_hardware
    from p2p_trainer.planning.planner import Planner, machine_of, model_of, tries_compiling, wishes_of
    from p2p_trainer.planning.probe_cache import ProbeCache, default_cache_directory
    from p2p_trainer.run_model import blank_model
    from p2p_trainer.settings import default_data_directory

    chosen = pick_device(settings.device)
    hardware = read_hardware(chosen, settings.dir or default_data_directory())
    machine = machine_of(
        chosen, hardware, settings.memory_bytes, settings.emulate, manifest.averaging.mode, settings.compute_dtype
    )
    if settings.memory_bytes is not None and (machine.budget_bytes or 0) < settings.memory_bytes:
        print(f"Only {memory_text(machine.budget_bytes or 0)} are free here: planned for that.", file=sys.stderr)
    told = False

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    def alive(share: float) -> None:
        nonlocal told
        if not told:
            print("Measuring this machine ...", file=sys.stderr, flush=True)
        told = True

    planner = Planner(
        manifest=manifest,
        task_version=task.version,
        model=model_of(blank_model(task), manifest, chosen, settings.strategy),
        machine=machine,
        hardware=hardware,
        threads=settings.threads,
        seed=0,
        prober=prober,
        cache=ProbeCache(default_cache_directory(), say),
        alive=alive,
        say=say,
        compile=tries_compiling(chosen, manifest, settings, say),
    )
    return planner.plan(link, swarm, wishes_of(settings))
