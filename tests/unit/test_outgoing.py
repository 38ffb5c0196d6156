"""A contribution that is made as it is sent: of what there is then, until it is held."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from local_rounds import Network, peer, plan_for, whole

from peers.closing import ClosingTimes
from peers.contribution import Contribution, Difference, GradientSum, Outgoing
from peers.ledger import PendingSpan
from peers.reducer import Rules
from peers.round import Round, RoundVoid

SIZE = 24


@st.composite
def spans_of(draw: st.DrawFn) -> tuple[PendingSpan, ...]:
    """What may be pending of ``SIZE`` elements: spans side by side, some of no samples."""
    cuts = sorted(draw(st.sets(st.integers(1, SIZE - 1), max_size=5)))
    counts = draw(st.lists(st.integers(0, 3), min_size=len(cuts) + 1, max_size=len(cuts) + 1))
    borders = zip([0, *cuts], [*cuts, SIZE], counts, strict=True)
    return tuple(PendingSpan(start=start, stop=stop, samples=count, steps=count) for start, stop, count in borders)


@pytest.mark.parametrize("kind", [Difference, GradientSum])
@given(spans=spans_of(), low=st.integers(0, SIZE), high=st.integers(0, SIZE), seed=st.integers(0, 2**31))
def test_a_part_is_what_the_whole_has_there(
    kind: type[Contribution], spans: Sequence[PendingSpan], low: int, high: int, seed: int
) -> None:
    dice = torch.Generator().manual_seed(seed)
    snapshot, base = torch.randn(SIZE, generator=dice), torch.randn(SIZE, generator=dice)
    outgoing = kind().outgoing(snapshot, base, spans)
    start, stop = min(low, high), max(low, high)
    assert torch.equal(outgoing.part(start, stop), outgoing.whole()[start:stop])
    for span in spans:
        assert span.samples or not outgoing.part(span.start, span.stop).any()


def test_what_is_held_does_not_follow_its_source() -> None:
    source = torch.arange(4.0)
    outgoing = Outgoing(4, lambda start, stop: source[start:stop].clone())
    source += 1
    assert outgoing.part(1, 3).tolist() == [2.0, 3.0], "made when it is asked for"
    outgoing.hold()
    source.zero_()
    outgoing.hold()
    assert outgoing.whole().tolist() == [1.0, 2.0, 3.0, 4.0]


def test_holding_waits_for_a_part_that_is_being_made() -> None:
    """Else that part would be made of a source that whoever holds is about to change."""
    began, may_end = threading.Event(), threading.Event()
    order = []

    def make(start: int, stop: int) -> torch.Tensor:
        began.set()
        assert may_end.wait(30)
        order.append((start, stop))
        return torch.zeros(stop - start)

    outgoing = Outgoing(4, make)
    sending = threading.Thread(target=outgoing.part, args=(1, 2))
    sending.start()
    assert began.wait(30)
    holding = threading.Thread(target=outgoing.hold)
    holding.start()
    may_end.set()
    for thread in (sending, holding):
        thread.join(30)
    assert order == [(1, 2), (0, 4)]


def test_a_void_round_holds_what_it_still_owes_the_others() -> None:
    """Its sender goes on until the deadline; meanwhile another base may replace the one that it differs from."""
    plan = plan_for([whole(SIZE, 5)] * 3, SIZE)
    values = torch.arange(float(SIZE))
    outgoing = Outgoing(SIZE, lambda start, stop: values[start:stop].clone())

    async def scene() -> None:
        network = Network(plan, silent_reducers={1, 2})
        times = ClosingTimes(grace_seconds=0.05, deadline_seconds=0.1)
        network.rounds[0] = Round(plan, peer(0), outgoing, network.caller(0), times, Rules())
        with pytest.raises(RoundVoid):
            await network.rounds[0].run()
        for pump in network.pumps:
            pump.cancel()
        await asyncio.gather(*network.pumps, return_exceptions=True)

    asyncio.run(scene())
    values.zero_()
    assert outgoing.whole().tolist() == list(range(SIZE))
