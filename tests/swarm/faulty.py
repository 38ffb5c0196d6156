"""A peer with a fault, for tests: ``python faulty.py ARGUMENTS OF THE PROGRAM``.

It is the program with a hook at every await of a round. What goes wrong, and where, stands in the file that the
environment variable FAULT_ORDER names: ``POINT KIND``, which happens once, or lines of ``POINT KIND always``. The file
of an order that is carried out is renamed to ``FILE.done`` before, so that who gave it knows when.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import peers.rounds
from p2p_trainer.cli import main
from peers.fragment_state import FragmentState
from peers.messages import Part
from peers.reducer import PartReducer
from peers.round import Round
from peers.round_plan import RoundPlan
from peers.rounds import RoundKeeper

ORDER = Path(os.environ["FAULT_ORDER"])
SLOW_SECONDS = 6.0
"""Longer than a cycle: whoever waits for it must give up."""


def ordered(point: str) -> str:
    """The kind of fault that is due here, or nothing."""
    with suppress(OSError):
        for line in ORDER.read_text().splitlines():
            where, kind, *always = line.split()
            if where == point:
                if not always:
                    ORDER.rename(ORDER.with_suffix(".done"))
                return kind
    return ""


async def reached(point: str) -> bool:
    """Suffer what is due here; whether it is to hand out garbage."""
    kind = ordered(point)
    if kind == "kill":
        os.killpg(0, signal.SIGKILL)
    if kind == "freeze":
        os.killpg(0, signal.SIGSTOP)
    if kind == "slow":
        await asyncio.sleep(SLOW_SECONDS)
    return kind == "garbage"


find_group = RoundKeeper._find_group
plan_round = peers.rounds.plan_round
sign_announcement = peers.rounds.sign_announcement
parts_for = Round._parts_for
count = PartReducer._add
averaged = PartReducer._averaged
commit = RoundKeeper._commit
garbage: set[str] = set()


async def find_group_with_fault(self: RoundKeeper, *arguments: Any) -> Any:
    if await reached("before-join"):
        garbage.add("announcement")
    found = await find_group(self, *arguments)
    if await reached("after-join"):
        garbage.add("plan")
    return found


def sign_with_fault(*arguments: Any) -> bytes:
    if "announcement" in garbage:
        garbage.discard("announcement")
        return os.urandom(200)
    return sign_announcement(*arguments)


def plan_with_fault(**arguments: Any) -> RoundPlan:
    """One that no other member makes: with parts of other sizes."""
    if "plan" in garbage:
        garbage.discard("plan")
        arguments["part_elements"] = 100
    return plan_round(**arguments)


async def parts_with_fault(self: Round, *arguments: Any) -> AsyncIterator[Part]:
    async for part in parts_for(self, *arguments):
        if await reached("mid-send"):
            part.body = os.urandom(len(part.body))
        yield part


async def count_with_fault(self: PartReducer, *arguments: Any) -> None:
    if await reached("mid-reduce"):
        self.answers_garbage = True  # type: ignore[attr-defined]
    await count(self, *arguments)


def averaged_with_fault(self: PartReducer, *arguments: Any) -> Any:
    right = averaged(self, *arguments)
    return replace(right, payload=os.urandom(len(right.payload))) if hasattr(self, "answers_garbage") else right


async def commit_with_fault(
    self: RoundKeeper, state: FragmentState, plan: RoundPlan, average: torch.Tensor, *arguments: Any
) -> Any:
    if await reached("before-commit"):
        average = average + torch.rand(state.size)
    done = await commit(self, state, plan, average, *arguments)
    if await reached("after-commit"):
        state.digest = os.urandom(32)
        state.total_element_samples += 10**9
    return done


RoundKeeper._find_group = find_group_with_fault  # type: ignore[method-assign]
peers.rounds.sign_announcement = sign_with_fault
peers.rounds.plan_round = plan_with_fault
Round._parts_for = parts_with_fault  # type: ignore[method-assign]
PartReducer._add = count_with_fault  # type: ignore[method-assign]
PartReducer._averaged = averaged_with_fault  # type: ignore[method-assign]
RoundKeeper._commit = commit_with_fault  # type: ignore[method-assign]

if __name__ == "__main__":
    main()
