"""The command line: a few commands, one line per failure, stable exit codes."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from dht_config.address import parse_addresses
from dht_config.errors import DirectoryError, ExitCode, P2PTrainerError, RehearsalError, UsageError
from dht_config.invite import Invite
from dht_config.manifest import EXAMPLES, example_manifest
from p2p_trainer import comeback, organiser_commands, plan_command
from p2p_trainer.json_lines import JsonLines
from p2p_trainer.loading import loading
from p2p_trainer.reporting import Reporting, log_to_stderr
from p2p_trainer.settings import PeerSettings, load_settings, parse_given_addresses
from p2p_trainer.target import Target as RunTarget
from p2p_trainer.target import read_target

MAX_WAIT_SECONDS = 10**7

app = typer.Typer(
    name="p2p-trainer",
    help="Train one model together on unlike machines, peer to peer.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(asked: bool) -> None:
    if asked:
        from dht_config.records import software_version

        print(f"p2p-trainer {software_version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version, and end.")
    ] = False,
) -> None:
    pass


Target = Annotated[
    str,
    typer.Argument(
        help="An invite, the path of a run manifest, or an example: stdlib-text, digits.", show_default=False
    ),
]
Directory = Annotated[
    Path | None,
    typer.Option("--dir", help="Where this peer keeps its identity, checkpoints and metrics.", show_default=False),
]
SettingsFile = Annotated[
    Path | None, typer.Option("--settings", help="A TOML file with settings; flags and environment override it.")
]
Host = Annotated[str | None, typer.Option(help="IP address to listen on (0.0.0.0: every interface).")]
Port = Annotated[
    int | None,
    typer.Option(help="TCP port to listen on, and the next one for direct connections; 0 takes free ones."),
]
NoDirect = Annotated[
    bool, typer.Option("--no-direct", help="No direct connections: rounds go through the p2p daemon alone.")
]
Announce = Annotated[
    list[str] | None,
    typer.Option(help="Address that others should dial instead, such as /dns4/peer.example.org/tcp/31337. Repeatable."),
]
KnownPeer = Annotated[list[str] | None, typer.Option("--peer", help="Address of a peer to ask as well. Repeatable.")]
Wait = Annotated[float | None, typer.Option("--wait-seconds", help="How long to try to reach anybody.")]
Plain = Annotated[bool, typer.Option("--plain", help="Plain lines instead of a live display.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
EventsAsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object a line for programs; text goes to standard error.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens inside, to standard error.")]


@app.command()
def join(
    target: Target,
    directory: Directory = None,
    settings_file: SettingsFile = None,
    host: Host = None,
    port: Port = None,
    no_direct: NoDirect = False,
    announce: Announce = None,
    peer: KnownPeer = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 or mps; by default the best there is.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads to train with.")] = None,
    wait_seconds: Wait = None,
    checkpoint_seconds: Annotated[float | None, typer.Option(help="Time between checkpoints.")] = None,
    eval_seconds: Annotated[float | None, typer.Option(help="Time between evaluations on held-out data.")] = None,
    eval_samples: Annotated[int | None, typer.Option(help="Held-out samples per evaluation; 0 for none.")] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="All that this peer may take of the device's memory (on a CPU, of the machine's): 8G, 512M."),
    ] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Samples that go through the model at once.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples of an inner step; at most the run's.")] = None,
    emulate: Annotated[
        float | None, typer.Option(help="Pretend to be slower: at most this many samples per second.")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(help="How to save memory: full, checkpoint, host_optimizer, fragments or stream."),
    ] = None,
    train_fragments: Annotated[
        int | None, typer.Option(help="With the strategies fragments and stream: how many to train at a time.")
    ] = None,
    compute_dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; by default as the device does best.")
    ] = None,
    compile: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Try torch.compile; by default on cards.", show_default=False),
    ] = None,
    cadence: plan_command.Cadence = None,
    codec: plan_command.Codec = None,
    allow_files: Annotated[
        bool, typer.Option("--allow-files", help="Let an invited run read the files it names on this machine.")
    ] = False,
    upload_limit: Annotated[
        str | None, typer.Option(help="Send at most this on average, in bits a second, such as 5M.")
    ] = None,
    daily_traffic: Annotated[
        str | None, typer.Option(help="Move at most this in a day, both ways together, such as 10G.")
    ] = None,
    invite_file: Annotated[Path | None, typer.Option(help="Write an invite to this peer into this file.")] = None,
    as_json: EventsAsJson = False,
    plain: Plain = False,
    verbose: Verbose = False,
) -> None:
    """Join a run and train with it, or start one from its manifest.

    Measures this machine, fetches the model from the other peers, trains, averages, and leaves cleanly on Ctrl-C.
    Start it again in the same directory and it continues where it left off.
    """
    flags = {
        "dir": directory,
        "host": host,
        "port": port,
        "no_direct": no_direct or None,
        "announce": tuple(announce or ()),
        "peer": tuple(peer or ()),
        "device": device,
        "threads": threads,
        "wait_seconds": wait_seconds,
        "checkpoint_seconds": checkpoint_seconds,
        "eval_seconds": eval_seconds,
        "eval_samples": eval_samples,
        "memory": memory,
        "micro_batch": micro_batch,
        "batch": batch,
        "emulate": emulate,
        "strategy": strategy,
        "train_fragments": train_fragments,
        "compute_dtype": compute_dtype,
        "compile": compile,
        "cadence": cadence,
        "codec": codec,
        "allow_files": allow_files or None,
        "upload_limit": upload_limit,
        "daily_traffic": daily_traffic,
    }
    _live("training", target, flags, settings_file, invite_file, as_json=as_json, plain=plain, verbose=verbose)


@app.command()
def bootstrap(
    target: Target,
    directory: Directory = None,
    settings_file: SettingsFile = None,
    host: Host = None,
    port: Port = None,
    no_direct: NoDirect = False,
    announce: Announce = None,
    peer: KnownPeer = None,
    checkpoint_seconds: Annotated[float | None, typer.Option(help="Time between saves of the bases.")] = None,
    snapshot_versions: Annotated[
        int | None, typer.Option(help="Keep a snapshot of the model every so many versions; 0 for none.")
    ] = None,
    snapshot_keep: Annotated[
        int | None, typer.Option(help="So many of the newest snapshots all stay, older ones ever fewer.")
    ] = None,
    standby: Annotated[
        bool, typer.Option("--standby", help="A second door to a run that is open: give its invite.")
    ] = False,
    systemd: Annotated[
        bool, typer.Option("--systemd", help="Print a service unit that runs this command, and end.")
    ] = False,
    invite_file: Annotated[Path | None, typer.Option(help="Write the invite into this file.")] = None,
    as_json: EventsAsJson = False,
    plain: Plain = False,
    verbose: Verbose = False,
) -> None:
    """Open the door to a run: publish its manifest, print the invite, keep the current model.

    It is a door, not a coordinator: when it is gone, training goes on. Start it again in the same directory and it is
    the same door. A standby needs no key of the organiser's: whoever has the invite can keep one.
    """
    flags = {
        "dir": directory,
        "host": host,
        "port": port,
        "no_direct": no_direct or None,
        "announce": tuple(announce or ()),
        "peer": tuple(peer or ()),
        "checkpoint_seconds": checkpoint_seconds,
        "snapshot_versions": snapshot_versions,
        "snapshot_keep": snapshot_keep,
    }
    if systemd:
        organiser_commands.print_unit(target, flags, settings_file, invite_file, standby=standby)
        return
    _live(
        "serving",
        target,
        flags,
        settings_file,
        invite_file,
        standby=standby,
        as_json=as_json,
        plain=plain,
        verbose=verbose,
    )


@app.command()
def status(
    target: Annotated[
        str | None,
        typer.Argument(
            help="The run's invite; or its manifest or the name of an example, with a --peer to ask.",
            show_default=False,
        ),
    ] = None,
    peer: KnownPeer = None,
    wait_seconds: Annotated[float, typer.Option(help="How long to try to reach anybody.")] = 15.0,
    local: Annotated[
        bool,
        typer.Option("--local", help="Only this machine's peers, from their directories; ends with 25 if none runs."),
    ] = False,
    directory: Directory = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Show who is in a run: how fast, at which version, and how much each contributed."""
    log_to_stderr(verbose)
    with Reporting(as_json):
        if local:
            organiser_commands.show_local(directory, as_json=as_json)
            return
        if target is None:
            raise UsageError("Of which run?", "Give its invite, or --local for the peers of this machine.")
        if not 0 <= wait_seconds <= MAX_WAIT_SECONDS:
            raise UsageError(
                f"--wait-seconds: {wait_seconds:g} cannot be used, it must be a number from 0 to {MAX_WAIT_SECONDS}.",
                "Correct it or leave it out.",
            )
        given = parse_given_addresses(peer or (), "--peer")
        run = read_target(target)

        import asyncio

        from p2p_trainer.logs import quiet_libraries
        from p2p_trainer.status import status_report, status_table
        from peers.observer import observe

        quiet_libraries(verbose=verbose)
        known, problems = parse_addresses(run.addresses)
        for problem in problems:
            print(f"Ignored: {problem}", file=sys.stderr)
        if not given and not known:
            raise UsageError(
                f"This says which run it is ({run.run_id}), but not where.",
                "Give the address of one of its peers with --peer, or the run's invite instead.",
            )
        observation = asyncio.run(
            observe(
                run.run_id,
                run.invite.organiser_public_key if run.invite is not None else None,
                [*given, *known],
                ours_json=run.manifest.canonical_json() if run.manifest is not None else "",
                wait_seconds=wait_seconds,
                on_waiting=lambda text: print(text, file=sys.stderr),
            )
        )
        report = status_report(run.run_id, observation)
        if as_json:
            print(json.dumps(report))
        else:
            from rich.console import Console

            Console().print(status_table(report))


@app.command()
def doctor(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="INVITE",
            help="The run's invite, or its manifest; without it only the machine is looked at.",
            show_default=False,
        ),
    ] = None,
    directory: Directory = None,
    settings_file: SettingsFile = None,
    host: Host = None,
    port: Port = None,
    peer: KnownPeer = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 or mps; by default the best there is.")] = None,
    wait_seconds: Annotated[float, typer.Option(help="How long to try to reach anybody.")] = 15.0,
    allow_files: Annotated[
        bool, typer.Option("--allow-files", help="As for join: an invited run may read the files it names.")
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Find out what keeps this machine from training, or from training well: one line each, with cause and remedy.

    Looks at the device, memory and limits; with an invite also at the clock, the run, who is in it, whether others can
    reach this machine, and how much it would transfer. Ends with 0 if nothing is wrong, with 25 if something is.
    """
    log_to_stderr(verbose)
    with Reporting(as_json):
        flags = {
            "dir": directory,
            "host": host,
            "port": port,
            "peer": tuple(peer or ()),
            "device": device,
            "wait_seconds": wait_seconds,
            "allow_files": allow_files or None,
        }
        settings = load_settings(flags, settings_file)

        given = parse_given_addresses(settings.peer, "--peer")
        run = read_target(target) if target is not None else None

        from p2p_trainer.logs import quiet_libraries

        quiet_libraries(verbose=verbose)
        known, problems = parse_addresses(run.addresses if run is not None else ())
        for problem in problems:
            print(f"Ignored: {problem}", file=sys.stderr)

        from p2p_trainer import doctor as surgery

        patient = surgery.Patient(settings=settings, target=run, addresses=(*given, *known))
        findings = surgery.examine_everything(patient, say=lambda text: print(text, file=sys.stderr, flush=True))
        if as_json:
            print(json.dumps(surgery.as_json(findings)))
        else:
            for finding in findings:
                print(surgery.line(finding))
        if code := surgery.exit_code(findings):
            raise typer.Exit(int(code))


@app.command()
def rehearse(
    run: Annotated[
        str | None,
        typer.Argument(help="A run manifest, or an example: stdlib-text (if left out), digits.", show_default=False),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="Machines, each SPEED[:LINK][:nat][:mem=SIZE][LIFE][*N]: samples per second, a name (4090, 3060-12G, "
            "laptop-cpu) or a share (0.5x4090); a link such as 50M/40ms or 10M/2M/60ms/1% (down, up, round trip, "
            "loss); nat: nobody can dial it; mem=2G: its memory; @30-90 is there from 30 to 90 s, !60 is killed at "
            "60 s, ~20-25 is frozen; *2 makes two. By default 80,40,20,8.",
            show_default=False,
        ),
    ] = None,
    scene: Annotated[
        Path | None, typer.Option(help="A TOML file with the machines, instead of --peers.", show_default=False)
    ] = None,
    churn: Annotated[
        str | None,
        typer.Option(help="Share of the machines that leave or are killed, and come back: 20%.", show_default=False),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="How long to train once all peers have begun.", show_default="1.5")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="The same in seconds.", show_default="90")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Decides who goes away and when, and which packets are lost.")
    ] = None,
    run_option: Annotated[str | None, typer.Option("--run", help="The same as RUN.", show_default=False)] = None,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate",
            help="Only simulate decisions, traffic and DHT load, without network or model. A whole number for --peers "
            "is then how many there are (1000: random machines and lines), and smaller swarms are shown as well.",
        ),
    ] = False,
    virtual_time: Annotated[
        bool,
        typer.Option(
            "--virtual-time",
            help="Train for real, but on a virtual clock, in this process and without waiting; --minutes is virtual.",
        ),
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report into this file.")] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Write the report into this file as a page to look at.")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Keep logs and state here; by default a directory that is removed.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Do not remove the directory.")] = False,
    verbose: Verbose = False,
) -> None:
    """Try a run on this computer: a bootstrap peer and unequal peers on unequal lines, real processes, real text.

    Prints what each peer achieved alone and in the swarm, how much of it counted, and what such a machine on such a
    line is to the swarm.
    """
    log_to_stderr(verbose)
    with Reporting(as_json=False):
        if minutes is not None and seconds is not None:
            raise UsageError("--minutes and --seconds say the same.", "Give one of them.")
        if run is not None and run_option is not None:
            raise UsageError("RUN and --run say the same.", "Give one of them.")
        if minutes is not None and not 0 < minutes <= MAX_WAIT_SECONDS:
            raise UsageError(f"--minutes {minutes:g} cannot be used.", "Give a number of minutes above 0.")
        if simulate and virtual_time:
            raise UsageError("--simulate and --virtual-time are two things.", "Give one of them.")
        if simulate or virtual_time:
            instrument = "--simulate" if simulate else "--virtual-time"
            useless = {"--dir": directory is not None, "--keep": keep, "--html": html_file is not None}
            for option in (option for option, given in useless.items() if given):
                raise UsageError(f"{option} is of no use with {instrument}.", "Leave it out.")
        from p2p_trainer.rehearsal.rehearse import RehearseOptions
        from p2p_trainer.rehearsal.rehearse import rehearse as carry_out

        options = RehearseOptions(
            peers=peers,
            scene_path=scene,
            churn=churn,
            seconds=60 * minutes if minutes is not None else seconds,
            seed=seed,
            run=run if run is not None else run_option,
            json_path=json_file,
            html_path=html_file,
            directory=directory,
            keep=keep,
        )
        if simulate or virtual_time:
            from rich.console import Console

            from p2p_trainer.simulation.simulate import simulate as play
            from p2p_trainer.simulation.virtual_time import rehearse_in_virtual_time

            if simulate:
                play(options, Console())
            else:
                rehearse_in_virtual_time(options, Console())
            return
        report = carry_out(options)
        broken = not (report.digests_agree and all(peer.samples_add_up for peer in report.peers))
        if broken or report.leftover_processes:
            raise RehearsalError("The rehearsal broke a promise; see the verdict above.", "Please report it.")


@app.command()
def example(
    name: Annotated[str | None, typer.Argument(help="stdlib-text or digits; without it, both names.")] = None,
) -> None:
    """Print a shipped run manifest, to make your own from: p2p-trainer example stdlib-text > run.toml"""
    with Reporting(as_json=False):
        sys.stdout.write(example_manifest(name) if name is not None else "".join(f"{one}\n" for one in EXAMPLES))


for command in (plan_command.plan, organiser_commands.new, organiser_commands.invite, organiser_commands.export):
    app.command()(command)


def _live(
    role: Any,
    text: str,
    flags: dict[str, Any],
    settings_file: Path | None,
    invite_file: Path | None,
    *,
    standby: bool = False,
    as_json: bool,
    plain: bool,
    verbose: bool,
) -> None:
    """Run one peer until it is asked to leave."""
    log_to_stderr(verbose)
    with Reporting(as_json) as reporting:
        settings = load_settings(flags, settings_file)
        target = read_target(text)
        if role == "serving":
            organiser_commands.check_door(target, standby=standby)
        starts = target.manifest is not None

        with loading():  # seconds of a core: torch, hivemind; what is mistyped is known by now
            from p2p_trainer.logs import quiet_libraries
            from p2p_trainer.session import Listener, Session, leave_on_signal
            from p2p_trainer.training import LeaveRequested
            from p2p_trainer.view import LiveView, Output

        quiet_libraries(verbose=verbose)
        lines = JsonLines()
        began = time.monotonic()
        again: comeback.Comeback | None = None

        def announce(invite: Invite) -> None:
            code = invite.encode()
            if invite_file is not None:
                partial = invite_file.with_name(f".{invite_file.name}.partial")
                try:
                    partial.write_text(code + "\n")
                    partial.replace(invite_file)
                except OSError as error:
                    raise DirectoryError(
                        f"The invite cannot be written to {invite_file}: {error.strerror}.", "Check --invite-file."
                    ) from error
            if as_json:
                lines.write({"event": "invite", "invite": code, "run_id": invite.run_id, "addresses": invite.addresses})
            elif role == "serving" or starts:
                view.status(f"Volunteers join with:\n\n  p2p-trainer join {code}\n")

        with leave_on_signal() as leave:
            # With --json, standard output is for programs alone.
            with LiveView(Output(stderr=as_json), plain=plain or as_json) as view:
                listener = Listener(invite=announce, event=lines.event) if as_json else Listener(invite=announce)
                session = Session(target, settings, role, view, leave, listener)
                try:
                    session.run()
                except P2PTrainerError as error:
                    again = comeback.next_comeback(error, time.monotonic() - began)
                    if again is None or leave.is_set:
                        reporting.look_into = partial(_machines_part, error, settings, target)
                        raise
                    view.close()  # its line tells of the life that has ended
                    view.status(f"{error.problem} Coming back from the last checkpoint in {again.wait_seconds:g} s ...")
                    with suppress(LeaveRequested):
                        comeback.wait(again, leave.check)
            if again is not None:
                comeback.let_threads_end()
                if not leave.is_set:
                    comeback.start_again(again)
            view.status(session.farewell)
        if leave.requests > 1:
            raise typer.Exit(ExitCode.INTERRUPTED)


def _machines_part(error: P2PTrainerError, settings: PeerSettings, target: RunTarget) -> list[str]:
    """What ``doctor`` finds wrong with this machine that may have to do with a failure."""
    from p2p_trainer.doctor import Patient, failing_lines

    return failing_lines(error, Patient(settings=settings, target=target, addresses=()))


def main() -> None:
    """Entry point of the console script."""
    from p2p_trainer.ending import end_at_once

    try:
        app()
    except SystemExit as end:  # what typer ends with
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        end_at_once(end.code if isinstance(end.code, int) else int(end.code is not None))
