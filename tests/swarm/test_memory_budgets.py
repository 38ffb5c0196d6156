"""Four peers with 1, 0.6, 0.4 and 0.25 of the memory that training everything takes: all train, none is killed.

What is shared out is the memory of the model and its training. Programs take what they take, and so do what the kernel
counts beside them (files, page tables) and the process that measures: a quarter of all that a peer of such a small
model takes would not hold the programs.
"""

from __future__ import annotations

import json
import math

import pytest
from harness import Swarm, assert_no_traceback

from p2p_trainer.metrics import read_metrics
from p2p_trainer.planning.plan import FIT
from p2p_trainer.rehearsal.memory_limits import MemoryLimits, MemoryLimitsUnavailable

pytestmark = [pytest.mark.swarm, pytest.mark.slow]

SHARES = (1.0, 0.6, 0.4, 0.25)
ROOM_MEGABYTES = 150
WIDE_AND_NARROW = """
[run]
name = "budgets"
tick_seconds = 5.0
fragments = 4
[task]
name = "text"
[model]                   # activations take most of it
model_type = "llama"
vocab_size = 256
hidden_size = 16
intermediate_size = 2048
num_hidden_layers = 32
num_attention_heads = 2
max_position_embeddings = 512
tie_word_embeddings = true
[data]
sequence_length = 512
[inner_optimizer]
batch_size = 1
"""


def test_peers_with_little_memory_save_it_as_far_as_they_must(swarm: Swarm) -> None:
    try:
        MemoryLimits({"trial": 1 << 30}).__enter__().close()
    except MemoryLimitsUnavailable as reason:
        pytest.skip(f"memory cannot be limited here: {reason}")
    manifest = swarm.path / "budgets.toml"
    manifest.write_text(WIDE_AND_NARROW)
    asked = swarm.run("plan", "plan", str(manifest), "--strategy", "full", "--threads", "1", "--json")
    assert asked.exit_code() == 0, asked.text
    plain = json.loads(asked.text.splitlines()[-1])
    for_the_model = (plain["predicted_bytes"] - plain["program_bytes"]) / FIT
    budgets = [math.ceil((plain["program_bytes"] + share * for_the_model) / 2**20) + ROOM_MEGABYTES for share in SHARES]
    directory, report_file = swarm.path / "rehearsal", swarm.path / "report.json"
    rehearsal = swarm.run(
        "rehearsal",
        *("rehearse", str(manifest), "--peers", ",".join(f"1:mem={budget}M" for budget in budgets)),
        *("--seconds", "45", "--json", str(report_file), "--dir", str(directory)),
    )
    assert rehearsal.exit_code(within_seconds=500) == 0, rehearsal.text
    report = json.loads(report_file.read_text())
    strategies = []
    for peer, budget in zip(report["peers"], budgets, strict=True):
        # The kernel may have taken a probe; without its averaging process a peer would not end with 0.
        assert (peer["exit_code"], peer["memory_limit_bytes"]) == (0, budget << 20)
        assert peer["rounds_committed"] > 0 and peer["samples_add_up"]
        (plan,) = [
            event
            for event in read_metrics(directory / f"peer-{peer['name']}" / "metrics.jsonl")
            if event["event"] == "plan"
        ]
        assert plan["predicted_bytes"] <= budget << 20
        printed = (directory / f"peer-{peer['name']}.log").read_text()
        assert f"Plan: {plan['reasons'][0]}" in printed
        assert f"{peer['name']} planned: {plan['reasons'][0]}" in rehearsal.text
        strategies.append(plan["strategy"])
        assert ("plain" in plan["reasons"][0]) == (plan["strategy"] != "full")
    assert strategies[0] == "full" and "full" not in strategies[1:]
    assert report["digests_agree"] and report["leftovers"] == []
    assert_no_traceback(rehearsal)
