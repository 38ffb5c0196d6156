"""Commands of whoever runs a run: what is done with it apart from training. ``cli`` registers them."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dht_config.errors import DirectoryError, ExitCode, InviteError, UsageError
from p2p_trainer.reporting import Reporting, log_to_stderr

if TYPE_CHECKING:
    from p2p_trainer.proposal import Proposal, Wishes
    from p2p_trainer.target import Target

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens inside, to standard error.")]


_NUMBER = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([kMGB]?)(?:bit/s)?", re.ASCII)
_TIMES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}


def new(
    name: Annotated[str, typer.Argument(help="The run's name: lower-case letters, digits, hyphens.")],
    task: Annotated[str | None, typer.Option(help="text, digits, or an installed task.", show_default="text")] = None,
    parameters: Annotated[
        str | None, typer.Option(help="About how many parameters the model has, such as 10M.", show_default="10M")
    ] = None,
    volunteers: Annotated[int | None, typer.Option(help="How many you expect.", show_default="8")] = None,
    slowest_up: Annotated[
        str | None,
        typer.Option(help="What the slowest tenth of their lines sends, such as 10M (bit/s).", show_default="10M"),
    ] = None,
    fastest: Annotated[
        float | None,
        typer.Option(help="Samples a second of the fastest machine with this model, if measured.", show_default=False),
    ] = None,
    sequence_length: Annotated[int, typer.Option(min=1, max=1_048_576, help="Tokens of one sample of text.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, max=2**20, help="Samples per inner step.")] = 8,
    out: Annotated[
        Path | None, typer.Option(help="The file to write; - for standard output.", show_default="NAME.toml")
    ] = None,
) -> None:
    """Write the manifest of a new run, set to fit its model, its volunteers and their lines, with a forecast.

    In a terminal it asks for what no option says; elsewhere the defaults hold.
    """
    with Reporting(as_json=False):
        asks = sys.stdin.isatty() and sys.stderr.isatty()

        def ask(question: str, given: str | None, default: str) -> str:
            if given is not None or not asks:
                return given if given is not None else default
            return str(typer.prompt(question, default=default, err=True))

        path = out if out is not None else Path(f"{name}.toml")
        if str(path) != "-" and path.exists():
            raise DirectoryError(f"{path} is there already.", "Give another file with --out, or move it away.")
        task = ask("Task (text, digits, or an installed one)", task, "text")
        # The digits task's model is as big as it is.
        wanted = "5k" if task == "digits" else ask("About how many parameters", parameters, "10M")
        expected = ask("How many volunteers", str(volunteers) if volunteers is not None else None, "8")
        up = ask("What the slowest tenth of their lines sends, in bit/s", slowest_up, "10M")

        from p2p_trainer.proposal import Wishes, forecast_lines

        wishes = Wishes(
            name=name,
            task=task,
            parameters=int(_number("--parameters", wanted, least=1000, most=1e12)),
            volunteers=int(_number("--volunteers", expected, least=1, most=1e6)),
            slowest_up_bits_per_second=_number("--slowest-up", up, least=1e3, most=1e12),
            fastest_samples_per_second=None if fastest is None else _number("--fastest", str(fastest), 1e-6, 1e9),
            sequence_length=sequence_length,
            batch_size=batch_size,
        )
        text, proposal = _checked(wishes)
        if str(path) == "-":
            sys.stdout.write(text)
            return
        try:
            path.write_text(text)
        except OSError as error:
            raise DirectoryError(
                f"{path} cannot be written: {error.strerror or error}.", "Give another file with --out."
            ) from error
        print("\n".join([f"{path} is written.", *(f"- {line}" for line in forecast_lines(proposal)), ""]))
        print(f"Open the door with:\n\n  p2p-trainer bootstrap {path}")


def invite(
    doors: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Directories of peers of one run (a bootstrap peer's, a standby's), or invites to it.",
            show_default=False,
        ),
    ],
    address: Annotated[
        list[str] | None,
        typer.Option(
            help="Another address to knock at, such as /dns4/run.example.org/tcp/31337; without /p2p/... it is the "
            "first door's. Repeatable; addresses given here come first.",
            show_default=False,
        ),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="Good for this long: 12h, 30d or 8w; for ever if left out.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make an invite to a run that is open: with several doors, with an expiry.

    Peers that are in already are not asked for a new one when theirs expires.
    """
    with Reporting(as_json):
        from p2p_trainer.invites import combined, door_of, seconds_in

        good_until = int(time.time() + seconds_in(expires)) if expires is not None else None
        made = combined([door_of(text) for text in doors], address or (), good_until)
        if as_json:
            print(
                json.dumps({"invite": made.encode(), **made.model_dump(include={"run_id", "addresses", "good_until"})})
            )
        else:
            print(made.encode())


def show_local(directory: Path | None, *, as_json: bool) -> None:
    """Print what this machine's peers do. :raises typer.Exit: none runs, or one that runs says nothing any more"""
    from p2p_trainer.local_status import is_healthy, line, look, now, peers_below
    from p2p_trainer.settings import default_data_directory, load_settings

    chosen = load_settings({"dir": directory}).dir
    found = [chosen] if chosen is not None else peers_below(default_data_directory())
    peers = [look(path, now()) for path in found]
    healthy = is_healthy(peers)
    if as_json:
        print(json.dumps({"healthy": healthy, "peers": [asdict(peer) for peer in peers]}))
    else:
        for peer in peers:
            print(line(peer))
        if not peers:
            print(f"No peer was ever started below {default_data_directory()}.")
    if not healthy:
        raise typer.Exit(int(ExitCode.CHECKS_FAILED))


def check_door(target: Target, *, standby: bool) -> None:
    """:raises InviteError: :raises UsageError: what a door is started from does not fit"""
    if target.manifest is None and not standby:
        raise InviteError(
            "A bootstrap peer is started from a run manifest.",
            "Give the manifest's path, or --standby for a second door to the invite's run.",
        )
    if target.manifest is not None and standby:
        raise UsageError("A standby follows a run that is open already.", "Give --standby the run's invite.")


def print_unit(
    text: str, flags: Mapping[str, Any], settings_file: Path | None, invite_file: Path | None, *, standby: bool
) -> None:
    """Print the systemd unit of a bootstrap peer with these flags; paths in it are absolute."""
    with Reporting(as_json=False):
        import getpass

        from p2p_trainer.settings import default_data_directory, load_settings
        from p2p_trainer.systemd_unit import unit
        from p2p_trainer.target import read_target

        settings = load_settings(dict(flags), settings_file)
        target = read_target(text)
        check_door(target, standby=standby)
        directory = (settings.dir or default_data_directory() / target.run_id / "bootstrap").absolute()
        is_path = len(text) < 256 and Path(text).exists()
        arguments = ["bootstrap", str(Path(text).absolute()) if is_path else text]
        arguments += ["--plain", "--dir", str(directory)]
        arguments += ["--standby"] if standby else []
        for option, path in (("--settings", settings_file), ("--invite-file", invite_file)):
            arguments += [option, str(path.absolute())] if path is not None else []
        for name, value in flags.items():
            if name != "dir" and value not in (None, ()):
                arguments += _as_flags(name, value)
        program = [sys.executable, "-m", "p2p_trainer"]
        sys.stdout.write(unit(program, arguments, run=target.run_id, user=getpass.getuser(), directory=directory))
        # The directory has to be there before the service may write to it alone.
        print(
            f"# As root: save this as /etc/systemd/system/p2p-trainer-{target.run_id}.service, then\n"
            f"#   install -d -o {getpass.getuser()} {shlex.quote(str(directory))}\n"
            f"#   systemctl enable --now p2p-trainer-{target.run_id}.service"
        )


def _as_flags(name: str, value: object) -> list[str]:
    option = f"--{name.replace('_', '-')}"
    if value is True:
        return [option]
    values = value if isinstance(value, tuple) else (value,)
    return [word for one in values for word in (option, str(one))]


def export(
    run_directory: Annotated[
        Path,
        typer.Argument(help="A peer's directory, or one snapshot of a bootstrap peer's archive.", show_default=False),
    ],
    out: Annotated[Path, typer.Argument(help="The folder to make.", show_default=False)],
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Write a run's newest model as a folder that transformers loads, with a card of the run's facts.

    What is exported is the last checkpoint. A peer may be training in the directory: nothing in it is touched.
    """
    log_to_stderr(verbose)
    with Reporting(as_json):
        from p2p_trainer import export as exporting

        exporting.check_free(out)
        exported = exporting.read_base(run_directory, lambda text: print(text, file=sys.stderr, flush=True))
        exporting.export(exported, out)
        versions = [meta.version for meta in exported.fragments]
        if as_json:
            print(json.dumps({"directory": str(out), **exporting.facts(exported)}))
        else:
            print(
                f"{out}: {exported.signed.run_id()}, versions {min(versions)} to {max(versions)}, "
                f"{exported.layout.num_elements:,} parameters, {exported.total_samples:,} {exported.task.unit} in it."
            )


def _checked(wishes: Wishes) -> tuple[str, Proposal]:
    """The manifest, after it was read as every peer will read it, and the proposal behind it.

    :raises ManifestError: a name or a task that cannot be used
    """
    from dht_config.manifest import parse_manifest
    from p2p_trainer.manifest_template import manifest_text
    from p2p_trainer.proposal import propose
    from p2p_trainer.run_model import check_model
    from p2p_trainer.target import manifest_target

    proposal = propose(wishes, None if wishes.task == "text" else wishes.parameters)
    text = manifest_text(proposal, datetime.now(timezone.utc))
    manifest = parse_manifest(text, "the proposal")
    target = manifest_target(manifest)
    if wishes.task in ("text", "digits") and target.task is not None:
        layout = check_model(manifest, target.task)
        if layout.num_elements != proposal.parameters:  # the digits' own
            proposal = propose(wishes, layout.num_elements)
            text = manifest_text(proposal, datetime.now(timezone.utc))
    return text, proposal


def _number(option: str, text: str, least: float, most: float) -> float:
    """Read ``10M``. :raises UsageError:"""
    match = _NUMBER.fullmatch(text.strip())
    value = float(match[1]) * _TIMES[match[2]] if match else math.nan
    if not least <= value <= most:
        raise UsageError(
            f"{option}: {text!r} cannot be used, it must be a number from {least:g} to {most:g}, such as 8 or 10M.",
            "Correct it or leave it out.",
        )
    return value
