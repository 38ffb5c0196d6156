"""A run directory as a peer leaves it, without a peer: for tests of what is done with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dht_config.identity import load_or_create_organiser_key
from dht_config.manifest import RunManifest, parse_manifest
from dht_config.records import SignedManifest, sign_manifest
from p2p_trainer.checkpoint import save_checkpoint
from p2p_trainer.run_model import layout_of
from p2p_trainer.running_statistics import averaged
from p2p_trainer.session import make_initial_bases
from p2p_trainer.target import manifest_target
from peers.arena import SharedArena
from peers.ledger import Ledger
from peers.outer import NO_HISTORY, base_digest, build_outer_optimizer
from peers.pipe import FragmentMeta

SMALL_TEXT = """
[run]
name = "small"
fragments = 3
[task]
name = "text"
[model]
model_type = "llama"
vocab_size = 256
hidden_size = 16
num_hidden_layers = 2
num_attention_heads = 2
intermediate_size = 32
tie_word_embeddings = true
[data]
sequence_length = 32
"""
SMALL_DIGITS = """
[run]
name = "small-digits"
fragments = 2
[task]
name = "digits"
"""


def sign(directory: Path, manifest: RunManifest, digests: list[bytes], task_version: int = 1) -> SignedManifest:
    directory.mkdir(parents=True, exist_ok=True)
    signed = sign_manifest(load_or_create_organiser_key(directory / "organiser.key"), manifest, task_version, digests)
    (directory / "manifest.signed").write_bytes(signed.to_payload())
    return signed


def save_run(directory: Path, text: str, version: int = 7, **meta: Any) -> tuple[RunManifest, SharedArena]:
    """Bases of a version that no rounds made: the untrained ones with noise on them.

    :param meta: takes the place of what the checkpoint says of itself
    """
    manifest = parse_manifest(text, "test")
    target = manifest_target(manifest)
    assert target.task is not None
    model = target.task.build_model()
    layout = layout_of(model, manifest)
    arena = SharedArena.create(layout.num_elements, build_outer_optimizer(manifest.outer_optimizer).states)
    first = make_initial_bases(averaged(model), layout, arena)
    signed = sign(directory, manifest, [meta.digest for meta in first], target.task.version)
    arena.base.add_(0.05 * torch.randn(layout.num_elements))
    fragments = []
    for fragment in range(layout.num_fragments):
        where = layout.slice(fragment)
        total = 1000 * layout.size(fragment)
        digest = base_digest(
            fragment=fragment,
            version=version,
            total_element_samples=total,
            history=NO_HISTORY,
            base=arena.base[where],
            outer_state=arena.outer_state[:, where],
        )
        ledger = Ledger.open(layout.size(fragment)).to_json()
        fragments.append(
            FragmentMeta(version=version, digest=digest, total_element_samples=total, history=NO_HISTORY, ledger=ledger)
        )
    save_checkpoint(
        directory,
        {"base": arena.base.clone(), "outer_state": arena.outer_state.clone()},
        {
            "format": 2,
            "run_id": signed.run_id(),
            "bounds": list(layout.bounds),
            "fragments": [meta.to_json() for meta in fragments],
            **meta,
        },
    )
    return manifest, arena
