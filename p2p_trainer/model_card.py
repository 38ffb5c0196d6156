"""The card of an exported model: a run's facts for people, as Markdown with the head that model hubs read (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Library = Literal["transformers", "pytorch"]

_TRANSFORMERS = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")"""

_PYTORCH = """\
import json

from safetensors.torch import load_model

from p2p_trainer.tasks import load_task

config = json.load(open("config.json"))
model = load_task(config["task"]["name"], config["model"], config["data"]).build_model()
load_model(model, "model.safetensors")"""


def model_card(run: Mapping[str, Any], *, library: Library, not_averaged: int) -> str:
    """The text of the folder's ``README.md``.

    :param run: as ``export.facts`` gives them
    :param library: what loads the folder
    :param not_averaged: elements of the model that no base holds
    """
    return "\n".join(
        [
            *_head(run, library),
            "```python",
            _TRANSFORMERS if library == "transformers" else _PYTORCH,
            "```",
            "",
            *_not_averaged(not_averaged),
            *_bases(run),
        ]
    )


def _head(run: Mapping[str, Any], library: Library) -> list[str]:
    return [
        "---",
        f"library_name: {library}",
        "tags:",
        "- p2p-trainer",
        "---",
        "",
        f"# {run['name']}",
        "",
        "Trained by volunteers, peer to peer, with p2p-trainer.",
        "",
        "| | |",
        "|---|---|",
        f"| run | `{run['run_id']}` |",
        f"| organiser's key | `{run['organiser_public_key']}` |",
        f"| task | {run['task']} |",
        f"| parameters | {run['parameters']:,} |",
        f"| {run['unit']} in the model | {run['total_samples']:,} |",
        f"| held-out loss | {_loss(run)} |",
        f"| started with | p2p-trainer {run['started_with']} |",
        f"| exported with | p2p-trainer {run['exported_with']}, {run['exported_at']} |",
        "",
        "License: to be added by the organiser.",
        "",
    ]


def _loss(run: Mapping[str, Any]) -> str:
    if run["held_out_loss"] is None:
        return "not measured by the peer that exported it"
    return f"{run['held_out_loss']:.4f} at version {run['held_out_loss_version']}"


def _not_averaged(elements: int) -> list[str]:
    if not elements:
        return []
    return [
        f"{elements:,} elements of the model (counters, frozen parameters) are no part of what the run averages: they",
        "are as they were initialised.",
        "",
    ]


def _bases(run: Mapping[str, Any]) -> list[str]:
    return [
        "## Bases",
        "",
        f"The model was averaged in {len(run['fragments'])} fragments. Every peer of the run that holds one of these",
        "versions holds the same bits; the digest covers the fragment's parameters and the outer optimizer's state.",
        "The run's manifest is in `run.json`.",
        "",
        f"| fragment | version | {run['unit']} | SHA-256 |",
        "|---|---|---|---|",
        *(
            f"| {index} | {row['version']} | {row['total_samples']:,} | `{row['digest']}` |"
            for index, row in enumerate(run["fragments"])
        ),
        "",
    ]
