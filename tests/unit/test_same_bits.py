"""Invariant 1 from contributions to digests: one base for all, whatever is averaged, in whatever parts and order.

Averages are made once, and everybody decodes the same bytes and steps from them: so what travelled in random rounds is
kept, and made into bases once more by processes with other CPU kernels than this one's and numbers of threads.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import bases_after
import numpy as np
import pytest
import torch
from bases_after import OUTER, digest_after
from hypothesis import given, settings
from hypothesis import strategies as st
from local_rounds import GROUP_ID, Network, committed, hold, plan_for, whole

from peers.codecs import CODEC_NAMES
from peers.messages import Average, Part
from peers.round_plan import RoundPlan, plan_round

ROOT = Path(__file__).parents[2]
ANSWER_CODECS = [name for name in CODEC_NAMES if name != "sparse"]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A round of random contributions."""

    size: int
    samples: tuple[int, ...]
    """Of each member."""
    speeds: tuple[int, ...]
    part_elements: int
    target_group_size: int
    codec: str
    answer_codec: str
    outer: str
    seed: int

    def plan(self) -> RoundPlan:
        spans = [whole(self.size, samples, 1 + samples // 3) for samples in self.samples]
        return plan_for(spans, self.size, self.part_elements, self.target_group_size, self.speeds)

    def plan_in_another_order(self, seed: int) -> RoundPlan:
        """As the member makes it to whom the leader told the group in this order."""
        plan = self.plan()
        members = list(plan.members)
        random.Random(seed).shuffle(members)
        return plan_round(
            group_id=GROUP_ID,
            tick=plan.tick,
            fragment=plan.fragment,
            size=plan.size,
            members=members,
            target_group_size=self.target_group_size,
            part_elements=self.part_elements,
        )

    def play(self) -> tuple[set[str], list[tuple[int, int, str]]]:
        """The digests on which the members end, and the averages that travelled: their elements and bytes in hex."""
        plan = self.plan()
        travelled: dict[tuple[int, int], bytes] = {}

        def keep(sender: int, receiver: int, message: Part | Average) -> Part | Average:
            if isinstance(message, Average) and message.header is not None:
                share = plan.share_of(sender)
                assert share is not None
                body = bytes(message.body)
                assert travelled.setdefault(share.parts[message.header.part], body) == body, "all get the same bytes"
            return message

        noise = np.random.default_rng(self.seed)
        shape = (len(self.samples), self.size)
        values = noise.standard_normal(shape) * 10 ** noise.uniform(-6, 2, shape)
        contributions = [torch.from_numpy(row) for row in values.astype(np.float32)]
        network = Network(plan, tamper=keep, codec=self.codec, answer_codec=self.answer_codec)
        results = committed(hold(network, contributions))
        digests = {digest_after(self.outer, result.average) for result in results}
        return digests, [(start, stop, body.hex()) for (start, stop), body in sorted(travelled.items())]


members = st.integers(2, 7).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(0, 1000), min_size=count, max_size=count),
        st.lists(st.integers(0, 100_000), min_size=count, max_size=count),
    )
)


@settings(max_examples=25)
@given(
    size=st.integers(1, 600),
    who=members,
    part_elements=st.integers(1, 300),
    target_group_size=st.integers(2, 8),
    codec=st.sampled_from(CODEC_NAMES),
    answer_codec=st.sampled_from(ANSWER_CODECS),
    outer=st.sampled_from(sorted(OUTER)),
    seed=st.integers(0, 2**32 - 1),
)
def test_members_of_any_round_end_on_one_digest_in_whatever_order_they_were_told_of_each_other(
    size: int,
    who: tuple[list[int], list[int]],
    part_elements: int,
    target_group_size: int,
    codec: str,
    answer_codec: str,
    outer: str,
    seed: int,
) -> None:
    samples, speeds = who
    scene = Scene(
        size=size,
        samples=tuple(samples),
        speeds=tuple(speeds),
        part_elements=max(part_elements, size // 40),
        target_group_size=target_group_size,
        codec=codec,
        answer_codec=answer_codec,
        outer=outer,
        seed=seed,
    )
    assert all(scene.plan_in_another_order(order) == scene.plan() for order in range(3))
    digests, _ = scene.play()
    assert len(digests) == 1


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of what travelled in random rounds, and the digest that their members had."""
    folder, chance = tmp_path_factory.mktemp("rounds"), random.Random(0)
    for number in range(16):
        count = chance.randint(2, 6)
        size = chance.choice([chance.randint(1, 5000), 70_001])  # torch shares work among threads from 32768 on
        scene = Scene(
            size=size,
            samples=tuple(chance.randint(0, 1000) for _ in range(count)),
            speeds=tuple(chance.randint(0, 100_000) for _ in range(count)),
            part_elements=chance.randint(1 + size // 20, 1 + size),
            target_group_size=chance.choice([2, 3, 64]),
            codec=chance.choice(CODEC_NAMES),
            answer_codec=ANSWER_CODECS[number % len(ANSWER_CODECS)],
            outer=sorted(OUTER)[number // len(ANSWER_CODECS) % len(OUTER)],
            seed=number,
        )
        (digest,), parts = scene.play()
        facts = {"size": size, "answer_codec": scene.answer_codec, "outer": scene.outer}
        (folder / f"{number:02}.json").write_text(json.dumps({**facts, "parts": parts, "digest": digest}))
    return folder


def test_what_travelled_makes_the_same_bases_with_other_kernels_and_threads(rounds: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    runs = [
        subprocess.Popen(
            [sys.executable, str(Path(bases_after.__file__)), str(rounds), "1", "2"],
            cwd=ROOT,
            env=environment | {"ATEN_CPU_CAPABILITY": capability},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for capability in ("default", "avx2")
    ]
    expected = [json.loads(file.read_text())["digest"] for file in sorted(rounds.iterdir())]
    for run in runs:
        printed, problems = run.communicate(timeout=200)
        assert run.returncode == 0, problems
        capability, *digests = printed.split()
        assert digests == 2 * expected, f"one digest a round with each number of threads, here with {capability}"
