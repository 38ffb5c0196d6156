"""A base that is put together from pieces: what donors can do wrong, and that nothing which came is asked for again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from local_bases import (
    BASE,
    CLAIM,
    FRAGMENT,
    SIZE,
    claim_of,
    false_answer,
    frozen_base,
    header_of,
    history_of,
    honest_answer,
    partial_base,
    receipt,
)

from peers.lineage import Claim
from peers.messages import BaseAnswer, BasePieceHeader, BaseRefusalHeader, Receipt
from peers.outer import NO_HISTORY
from peers.transfer import (
    HEADER,
    LEAST_PIECE_BYTES,
    MOST_PIECE_BYTES,
    PIECES,
    FetchedBase,
    FrozenBase,
    LiveBytes,
    PartialBase,
    Piece,
    Refused,
    TransferFailed,
)

Answer = Callable[[Piece], BaseAnswer]


def take_all(partial: PartialBase, donor: str = "d", answer: Answer = honest_answer) -> None:
    """The donor sends all that is missing."""
    while (piece := partial.ask(donor)) is not None:
        partial.put(donor, answer(piece))
    partial.give_back(donor)


def fetched_from(answer: Answer, claim: Claim = CLAIM) -> FetchedBase | None:
    partial = partial_base(claim)
    take_all(partial, answer=answer)
    return partial.verify()


def with_header(**changes: object) -> Answer:
    changed = BaseAnswer(header_of().model_copy(update=changes))
    return lambda piece: changed if piece == HEADER else honest_answer(piece)


# ----------------------------------------------------------------- what is verified


def test_a_base_arrives_bit_for_bit_with_its_receipts() -> None:
    fetched = fetched_from(honest_answer)
    assert fetched is not None
    assert fetched.base.numpy().tobytes() + fetched.outer_state.numpy().tobytes() == BASE.payload
    assert (fetched.claim, fetched.donors) == (CLAIM, ("d",))
    assert fetched.total_element_samples == BASE.total_element_samples
    assert fetched.receipts == BASE.receipts
    assert (fetched.history, fetched.history_before) == (BASE.history, NO_HISTORY)
    assert fetched.bytes_received == len(BASE.payload)


@pytest.mark.parametrize("total", [3 * SIZE + 12, 3 * SIZE])
def test_a_false_total_of_samples_does_not_have_the_digest(total: int) -> None:
    assert fetched_from(with_header(total_element_samples=total.to_bytes(16, "little"))) is None


def test_a_base_of_another_total_than_announced_is_refused() -> None:
    """Or a liar could announce the honest digest with a greater total, and win."""
    with pytest.raises(TransferFailed, match="sent a base of 3 samples instead of 4"):
        fetched_from(honest_answer, dataclasses.replace(CLAIM, total_samples=4))


@pytest.mark.parametrize(
    "receipts",
    [
        [receipt(5), receipt(6), receipt(7, contributors=2)],
        [receipt(6), receipt(7)],
        [receipt(4), receipt(5), receipt(6), receipt(7)],
        [],
    ],
    ids=["changed", "left out", "invented", "none"],
)
def test_forged_receipts_do_not_have_the_digest(receipts: list[Receipt]) -> None:
    assert fetched_from(with_header(receipts=receipts)) is None


@pytest.mark.parametrize("versions", [[5, 7], [7, 6, 5], [6, 7, 8], [7, 7]])
def test_receipts_that_are_not_of_the_versions_before_are_refused(versions: list[int]) -> None:
    with pytest.raises(TransferFailed, match="sent receipts of other versions"):
        fetched_from(with_header(receipts=[receipt(version) for version in versions]))


def test_receipts_that_were_left_out_count_through_their_history() -> None:
    """A donor sends only the newest of many: what came before is a hash."""
    before = history_of(BASE.receipts[:2])
    fetched = fetched_from(with_header(receipts=[receipt(7)], history=before))
    assert fetched is not None
    assert (fetched.history, fetched.history_before) == (BASE.history, before)


def test_the_digest_of_another_fragment_with_the_same_bytes_is_another() -> None:
    other = Claim(version=7, digest=frozen_base(fragment=FRAGMENT + 1).digest, total_samples=3)
    assert fetched_from(honest_answer, other) is None


def test_another_version_than_announced_is_refused() -> None:
    with pytest.raises(TransferFailed, match="sent version 7 instead of 8"):
        fetched_from(honest_answer, dataclasses.replace(CLAIM, version=8))


# ------------------------------------------------------------- what a donor may send


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (BaseAnswer(None), "malformed"),
        (honest_answer(HEADER), "not asked for"),
        (BaseAnswer(BasePieceHeader(start=0), b""), "not asked for"),
        (BaseAnswer(BasePieceHeader(start=0), BASE.payload[:LEAST_PIECE_BYTES]), "not asked for"),
        (BaseAnswer(BasePieceHeader(start=LEAST_PIECE_BYTES), b"too little"), "not asked for"),
        (BaseAnswer(BasePieceHeader(start=LEAST_PIECE_BYTES), bytes(LEAST_PIECE_BYTES + 1)), "not asked for"),
        (BaseAnswer(BasePieceHeader(start=2**40), bytes(LEAST_PIECE_BYTES)), "not asked for"),
    ],
    ids=["malformed", "header again", "empty", "piece again", "too little", "too much", "far away"],
)
def test_a_donor_may_send_only_what_it_was_asked_for(answer: BaseAnswer, words: str) -> None:
    partial = partial_base()
    for _ in range(2):
        piece = partial.ask("d")
        assert piece is not None
        partial.put("d", honest_answer(piece))
    assert partial.ask("d") == Piece(LEAST_PIECE_BYTES, 2 * LEAST_PIECE_BYTES)
    with pytest.raises(TransferFailed, match=words):
        partial.put("d", answer)
    partial.give_back("d")
    take_all(partial)
    assert partial.verify() is not None


def test_pieces_come_in_the_order_in_which_they_were_asked_for() -> None:
    partial = partial_base()
    first, second = partial.ask("d"), partial.ask("d")
    assert first == HEADER and second is not None
    with pytest.raises(TransferFailed, match="not asked for"):
        partial.put("d", honest_answer(second))


def test_nobody_sends_anything_unasked() -> None:
    with pytest.raises(TransferFailed, match="not asked for"):
        partial_base().put("stranger", honest_answer(HEADER))


@pytest.mark.parametrize("busy", [True, False])
def test_a_refusal_says_whether_to_come_again(busy: bool) -> None:
    with pytest.raises(Refused) as refused:
        partial_base().put("d", BaseAnswer(BaseRefusalHeader(busy=busy)))
    assert refused.value.busy is busy


# ---------------------------------------------------------------------- who sends what


@pytest.mark.parametrize("size", [1, 7, LEAST_PIECE_BYTES, 3_000_000, 50_000_000])
def test_pieces_cover_a_base_and_are_as_many_as_its_size_deserves(size: int) -> None:
    partial = partial_base(size=size)
    pieces = []
    while (piece := partial.ask("d")) is not None:
        pieces.append(piece)
    assert pieces[0] == HEADER
    lengths = [piece.stop - piece.start for piece in pieces[1:]]
    assert [piece.start for piece in pieces[1:]] == [sum(lengths[:index]) for index in range(len(lengths))]
    assert sum(lengths) == 8 * size
    assert max(lengths) <= MOST_PIECE_BYTES
    assert len(lengths) <= PIECES or max(lengths) == MOST_PIECE_BYTES
    assert len(lengths) == 1 or max(lengths) >= LEAST_PIECE_BYTES


def test_what_a_donor_leaves_undone_is_asked_of_others_in_order_and_the_rest_stays() -> None:
    partial = partial_base()
    asked = [partial.ask("one") for _ in range(5)]
    for piece in asked[:2]:
        assert piece is not None
        partial.put("one", honest_answer(piece))
    here = partial.bytes_here
    partial.give_back("one")
    assert [partial.ask("two") for _ in range(3)] == asked[2:]
    assert partial.bytes_here == here > 0
    partial.give_back("two")
    take_all(partial, "three")
    fetched = partial.verify()
    assert fetched is not None
    assert fetched.donors == ("one", "three")
    assert fetched.bytes_received == len(BASE.payload), "nothing came twice"


def test_at_the_end_an_idle_donor_is_asked_for_what_a_slow_one_would_send_last() -> None:
    partial = partial_base()
    slow = [partial.ask("slow") for _ in range(3)]
    while (piece := partial.ask("fast")) is not None and piece not in slow:
        partial.put("fast", honest_answer(piece))
    assert piece == slow[-1]
    assert partial.ask("fast") is None, "one such piece at a time"
    assert not partial.has_work_for("slow")
    assert partial.has_work_for("third")
    assert partial.ask("third") == slow[1], "never three for one piece"
    assert partial.put("fast", honest_answer(piece)) > 0
    for one in slow:
        assert one is not None
        assert (partial.put("slow", honest_answer(one)) == 0) is (one in (HEADER, piece))
    assert partial.complete
    assert partial.put("third", honest_answer(slow[1])) == 0  # type: ignore[arg-type]
    assert partial.verify() is not None


SMALL = frozen_base(size=100_000, receipts=[receipt(7)])


@given(data=st.data())
def test_whatever_order_donors_work_fail_and_lie_in_the_base_is_right_or_refused(data: st.DataObject) -> None:
    partial = partial_base(claim_of(SMALL), size=100_000)
    donors = ["a", "b", "c"]
    liars = data.draw(st.sets(st.sampled_from(donors), max_size=2))
    asked: dict[str, list[Piece]] = {donor: [] for donor in donors}
    came = 0
    for _ in range(200):
        if partial.complete:
            break
        donor = data.draw(st.sampled_from(donors))
        action = data.draw(st.sampled_from(["ask", "ask", "send", "send", "send", "leave"]))
        if action == "ask" and (piece := partial.ask(donor)) is not None:
            assert piece not in asked[donor]
            asked[donor].append(piece)
        elif action == "send" and asked[donor]:
            piece = asked[donor].pop(0)
            before = partial.bytes_here
            new = partial.put(donor, (false_answer if donor in liars else honest_answer)(piece, SMALL))
            assert partial.bytes_here == before + new
            came += new
        elif action == "leave":
            partial.give_back(donor)
            asked[donor].clear()
    for donor in donors:
        partial.give_back(donor)
    take_all(partial, "last", lambda piece: honest_answer(piece, SMALL))
    assert partial.bytes_here == partial.num_bytes == len(SMALL.payload)
    false = set(partial.senders) & liars
    fetched = partial.verify()
    assert (fetched is None) == bool(false)
    if fetched is not None:
        assert fetched.base.numpy().tobytes() == bytes(SMALL.payload)[:400_000]


# ------------------------------------------------------------------------- who lied


def test_a_false_base_of_one_donor_is_its_fault() -> None:
    partial = partial_base()
    take_all(partial, "liar", false_answer)
    assert partial.verify() is None
    assert partial.liars == {"liar"}
    assert not partial.one_donor


@pytest.mark.parametrize("false_pieces", [[0], [3], [1, 2]], ids=["header", "piece", "pieces"])
def test_who_of_several_lied_is_found_by_the_first_base_that_is_right(false_pieces: list[int]) -> None:
    partial = partial_base()
    number = 0
    while not partial.complete:
        donor = ("liar", "honest")[number % 2] if number not in false_pieces else "liar"
        piece = partial.ask(donor)
        assert piece is not None
        partial.put(donor, (false_answer if number in false_pieces else honest_answer)(piece))
        number += 1
    assert partial.verify() is None
    assert (partial.liars, partial.one_donor) == (frozenset(), True)
    for donor in partial.senders:
        partial.give_back(donor)
    partial.start_over()
    assert partial.bytes_here == 0
    take_all(partial, "third")
    assert partial.verify() is not None
    assert partial.liars == {"liar"}


def test_a_donor_that_remembers_fewer_receipts_is_no_liar() -> None:
    partial = partial_base()
    assert partial.ask("short") == HEADER
    shorter = header_of().model_copy(update={"receipts": [receipt(7)], "history": history_of(BASE.receipts[:2])})
    partial.put("short", BaseAnswer(shorter))
    take_all(partial, "liar", false_answer)
    assert partial.verify() is None
    partial.start_over()
    take_all(partial, "third")
    assert partial.verify() is not None
    assert partial.liars == {"liar"}


def test_a_frozen_base_of_a_view_of_memory_is_as_good_as_one_of_bytes() -> None:
    viewed = dataclasses.replace(BASE, payload=memoryview(BASE.payload))
    assert isinstance(viewed, FrozenBase)
    assert fetched_from(lambda piece: honest_answer(piece, viewed)) is not None


@given(size=st.integers(1, 40), states=st.integers(1, 2), seed=st.integers(0, 99), data=st.data())
def test_bytes_of_a_live_base_are_those_of_its_copy(size: int, states: int, seed: int, data: st.DataObject) -> None:
    torch.manual_seed(seed)
    base, outer_state = torch.rand(size), torch.rand(states, size)
    live, whole = LiveBytes(base, outer_state), torch.cat((base, outer_state.flatten())).numpy().tobytes()
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert (len(live), live[start:stop]) == (len(whole), whole[start:stop])
    kept = dataclasses.replace(BASE, payload=live).copied()
    base.zero_()
    assert kept.payload == whole
