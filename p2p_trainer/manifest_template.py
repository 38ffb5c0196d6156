"""A proposal written as a manifest that explains itself (pure). What it writes, ``parse_manifest`` reads."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from datetime import datetime

from p2p_trainer.proposal import STEPS_A_CYCLE, Proposal, forecast_lines, start_of

WARMUP_STEPS = 100
"""Of a peer alone, as in the shipped example."""
_WHAT_CODECS_COST = "float32 4, int8 1, int4 0.5, sparse 0.03 bytes a parameter"


def manifest_text(proposal: Proposal, now: datetime, addresses: Sequence[str] = ()) -> str:
    """The TOML text of a run's manifest.

    :param now: with its time zone
    :param addresses: where to knock first, for peers that join by this file
    """
    wishes = proposal.wishes
    forecast = "\n".join(_comment(line) for line in forecast_lines(proposal))
    start = start_of(now).strftime("%Y-%m-%dT%H:%M:%SZ")
    matchmaking = min(1.5, round(proposal.cycle_seconds / 4, 2))
    cycle, least, most = f"{proposal.cycle_seconds:g}", STEPS_A_CYCLE - 5, STEPS_A_CYCLE + 5
    knock = ", ".join(f'"{address}"' for address in addresses)
    return f"""\
# The run {wishes.name}, as `p2p-trainer new` proposes it for {wishes.volunteers} volunteers whose slowest lines send at
# {wishes.slowest_up_bits_per_second / 1e6:g} Mbit/s. Change what you like, then open the door with this file:
#   p2p-trainer bootstrap {wishes.name}.toml
#
# Everything here except [network] is part of the run's fingerprint: all peers of a run have exactly these values.
# Change one of them after volunteers have joined, and you have made another run.
#
# What to expect:
{forecast}

[run]
name = "{wishes.name}"
start = {start}  # tick 0; every peer counts ticks from here, so any past moment will do
tick_seconds = {proposal.tick_seconds:g}  # one round per tick
fragments = {proposal.fragments}  # the model in this many pieces: each is averaged every {cycle} s
# That time should be {least} to {most} inner steps of the fastest machine, or more where lines need it.

[task]
name = "{wishes.task}"

{_model_and_data(proposal)}
[inner_optimizer]  # what each peer does on its own between rounds
{_inner(proposal)}
# Samples per inner step, alike on every peer; small memories cut it into micro-batches:
batch_size = {wishes.batch_size}

[outer_optimizer]  # what a round does with the averaged progress
name = "nesterov"
lr = 0.7
momentum = 0.6

[averaging]
mode = "local"  # inner steps of one's own, then an average of the differences
matchmaking_seconds = {matchmaking:g}  # how long peers look for each other
# How contributions travel: {_WHAT_CODECS_COST}; auto: as each line needs.
codec = "{proposal.codec_setting}"
answer_codec = "{proposal.answer_codec}"  # how averages travel
weighting = "samples_times_batch"  # with equal batches: a contribution counts as much as the samples in it

[network]  # not part of the fingerprint
initial_peers = [{knock}]  # addresses of peers to join through; an invite brings its own
"""


def _comment(line: str) -> str:
    return textwrap.fill(line, 118, initial_indent="# - ", subsequent_indent="#   ")


def _model_and_data(proposal: Proposal) -> str:
    wishes, shape = proposal.wishes, proposal.shape
    if wishes.task == "digits":
        return "[model]\nhidden_sizes = [64, 32]     # units of each hidden layer\n\n[data]\n"
    if shape is None:
        return "[model]  # what the task asks for\n\n[data]\n"
    return f"""\
[model]  # checked by the task: a transformers configuration; here {proposal.parameters:,} parameters
model_type = "llama"
vocab_size = 256  # bytes: no tokenizer file is needed
hidden_size = {shape.hidden_size}
num_hidden_layers = {shape.layers}
num_attention_heads = {shape.heads}
intermediate_size = {shape.intermediate_size}
max_position_embeddings = {wishes.sequence_length}
tie_word_embeddings = true

[data]  # without files it reads the sources of Python's standard library
# files = ["corpus/**/*.txt"]  # text that every volunteer has in this place, and agrees to with --allow-files
sequence_length = {wishes.sequence_length}  # tokens (here bytes) per sample
"""


def _inner(proposal: Proposal) -> str:
    if proposal.wishes.task == "digits":
        return 'name = "sgd"\nlr = 0.05\nmomentum = 0.9'
    return f"""\
name = "adamw"
lr = {proposal.lr:g}
clip_norm = 1.0
# Samples of all peers together over which the learning rate rises:
warmup_samples = {WARMUP_STEPS * proposal.wishes.batch_size}"""
