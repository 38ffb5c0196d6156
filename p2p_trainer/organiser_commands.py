"""Commands of whoever runs a run: what is done with it apart from training. ``cli`` registers them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from p2p_trainer.reporting import Reporting, log_to_stderr

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens inside, to standard error.")]


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
