"""Which base is the swarm's: newcomers, stragglers, rival histories and quorums."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.lineage import MANY_MEMBERS, Claim, choose_base, has_quorum, held_again

PLENTY = 2**40


def claim(version: int, total_samples: int, name: str = "a") -> Claim:
    return Claim(version=version, digest=name.encode().ljust(32, b"\0"), total_samples=total_samples)


claims = st.builds(claim, st.integers(0, 6), st.integers(0, 200), st.sampled_from("abc"))
peer_names = st.text("abcdefgh", min_size=1, max_size=3)


def test_a_newcomer_takes_what_most_peers_announce() -> None:
    popular, richer = claim(5, 100), claim(6, 900)
    announced = {"p": popular, "q": popular, "r": richer}
    assert choose_base(None, announced, possible_versions=PLENTY) == popular


def test_a_newcomer_takes_the_richer_one_of_two_that_are_equally_popular() -> None:
    assert choose_base(None, {"p": claim(5, 100), "q": claim(5, 101, "b")}, possible_versions=PLENTY) == claim(
        5, 101, "b"
    )


def test_a_newcomer_finds_nothing_where_nobody_announces_anything_possible() -> None:
    assert choose_base(None, {}, possible_versions=PLENTY) is None
    assert choose_base(None, {"liar": claim(9, 10**15)}, possible_versions=8) is None


@given(others=st.dictionaries(peer_names, claims, min_size=1, max_size=8))
def test_a_newcomers_choice_has_as_many_announcers_as_any(others: dict[str, Claim]) -> None:
    chosen = choose_base(None, others, possible_versions=PLENTY)
    announced = list(others.values())
    assert chosen is not None
    assert announced.count(chosen) == max(announced.count(other) for other in announced)


@given(
    own=st.none() | claims,
    others=st.dictionaries(peer_names, claims, max_size=6),
    liar=peer_names,
    excess=st.integers(1, 2**30),
    groupmate=st.booleans(),
)
def test_an_impossible_version_never_wins(
    own: Claim | None, others: dict[str, Claim], liar: str, excess: int, groupmate: bool
) -> None:
    lie = claim(6 + excess, 2**60, "x")
    mates = {liar} if groupmate else set()
    chosen = choose_base(own, {**others, liar: lie}, possible_versions=6, groupmates=mates)
    assert chosen != lie
    honest = {peer: other for peer, other in others.items() if peer != liar}
    assert chosen == choose_base(own, honest, possible_versions=6, groupmates=mates)


@given(own=claims, others=st.dictionaries(peer_names, claims, max_size=8), mates=st.sets(peer_names))
def test_a_peer_moves_only_to_a_richer_history_or_to_that_of_most(
    own: Claim, others: dict[str, Claim], mates: set[str]
) -> None:
    chosen = choose_base(own, others, possible_versions=PLENTY, groupmates=mates)
    if chosen is not None and chosen.rank <= own.rank:
        assert chosen != own
        assert 2 * list(others.values()).count(chosen) > len(others) + 1


def test_one_announcer_does_not_move_a_peer_whose_base_others_hold() -> None:
    own = claim(5, 100)
    assert choose_base(own, {"p": own, "liar": claim(6, 10**12)}, possible_versions=PLENTY) is None


def test_two_announcers_move_a_peer() -> None:
    own, new = claim(5, 100), claim(6, 150)
    assert choose_base(own, {"p": own, "q": new, "r": new}, possible_versions=PLENTY) == new


def test_one_announcer_moves_a_peer_that_is_alone_with_its_base() -> None:
    assert choose_base(claim(5, 100), {"p": claim(6, 150)}, possible_versions=PLENTY) == claim(6, 150)


def test_a_groupmate_whose_round_we_missed_moves_us_by_one_version_only() -> None:
    own, next_one, far = claim(5, 100), claim(6, 150), claim(7, 200)
    announced = {"p": own, "mate": next_one}
    assert choose_base(own, announced, possible_versions=PLENTY, groupmates={"mate"}) == next_one
    assert choose_base(own, announced, possible_versions=PLENTY, groupmates={"other"}) is None
    assert choose_base(own, {"p": own, "mate": far}, possible_versions=PLENTY, groupmates={"mate"}) is None


def converged(holdings: Mapping[str, Claim]) -> dict[str, Claim]:
    """Let every peer look at what the others announce, one after the other, until nobody moves any more."""
    held = dict(holdings)
    for _ in range(10 * len(held)):
        moved = False
        for peer, own in sorted(held.items()):
            others = {other: held[other] for other in held if other != peer}
            better = choose_base(own, others, possible_versions=PLENTY)
            if better is not None:
                held[peer], moved = better, True
        if not moved:
            return held
    raise AssertionError("they move for ever")


@given(
    left=st.sets(st.integers(0, 19), min_size=1, max_size=5),
    right=st.sets(st.integers(0, 19), min_size=1, max_size=5),
    versions=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    samples=st.tuples(st.integers(0, 100), st.integers(0, 100)),
)
def test_two_histories_become_one_on_both_sides(
    left: set[int], right: set[int], versions: tuple[int, int], samples: tuple[int, int]
) -> None:
    """The richer one wins if at least half are on it, else the one that most are on: it alone can go on."""
    histories = claim(versions[0], samples[0], "l"), claim(versions[1], samples[1], "r")
    held = {f"p{peer:02}": histories[0] for peer in left} | {f"p{peer:02}": histories[1] for peer in right - left}
    richer = max(set(held.values()), key=lambda history: history.rank)
    supporters = list(held.values()).count(richer)
    expected = richer if 2 * supporters >= len(held) else min(set(held.values()), key=lambda history: history.rank)
    assert set(converged(held).values()) == {expected}


def test_two_lone_peers_agree_on_one_history() -> None:
    assert set(converged({"p": claim(4, 80, "l"), "q": claim(5, 70, "r")}).values()) == {claim(4, 80, "l")}


def test_a_peer_is_not_moved_while_those_who_made_its_base_have_not_announced_it_yet() -> None:
    own, rival = claim(6, 150), claim(6, 160, "r")
    announced = {"p": claim(5, 100), "q": rival}
    assert choose_base(own, announced, possible_versions=PLENTY) == rival
    assert choose_base(own, announced, possible_versions=PLENTY, backers={"p"}) is None
    assert choose_base(own, {**announced, "r": rival}, possible_versions=PLENTY, backers={"p"}) == rival


def test_a_round_that_others_held_again_is_known_by_what_is_in_their_base() -> None:
    def again(*claims: Claim) -> bool:
        return held_again(8, 100, claims, possible_versions=9, round_size=MANY_MEMBERS - 1)

    assert not again()
    assert not again(claim(7, 60), claim(8, 100)), "they have its base, or none yet"
    assert again(claim(7, 60), claim(8, 90))
    assert again(claim(9, 130)), "whatever that stands on, ours is of the past"
    assert not again(claim(10, 130)), "no base can be of that version yet"


def test_one_that_lies_does_not_have_the_others_give_up_a_round_of_many() -> None:
    def again(*claims: Claim) -> bool:
        return held_again(8, 100, claims, possible_versions=9, round_size=MANY_MEMBERS)

    honest = [claim(7, 60)] * 3
    for lie in (claim(8, 2**60), claim(9, 130)):
        assert not again(*honest, lie)
        assert again(*honest[1:], lie, lie)


@given(present=st.sets(peer_names, min_size=1, max_size=8), data=st.data())
def test_two_disjoint_groups_of_one_membership_never_both_have_a_quorum(present: set[str], data: st.DataObject) -> None:
    ordered = sorted(present)
    sides = data.draw(st.lists(st.sampled_from("lrn"), min_size=len(ordered), max_size=len(ordered)))
    left = {peer for peer, side in zip(ordered, sides, strict=True) if side == "l"}
    right = {peer for peer, side in zip(ordered, sides, strict=True) if side == "r"}
    assert not (has_quorum(left, present) and has_quorum(right, present))


@given(present=st.sets(peer_names, min_size=2, max_size=8))
def test_everyone_together_is_a_quorum(present: set[str]) -> None:
    assert has_quorum(present, present)


@given(data=st.data(), names=st.sets(peer_names, min_size=2, max_size=8))
def test_quorums_of_consecutive_ticks_share_a_member_whoever_is_due(data: st.DataObject, names: set[str]) -> None:
    """Else the second could make, from the base before, a rival of what the first made."""
    first, second = (set(data.draw(st.sets(st.sampled_from(sorted(names))))) for _ in range(2))
    if has_quorum(first, names) and has_quorum(second, names):
        assert first & second


@pytest.mark.parametrize(
    ("members", "present", "expected"),
    [
        ("a", "a", True),  # nobody else is there
        ("a", "ab", False),  # else nobody makes a version in a group of one
        ("ab", "abcd", True),  # exactly half, with the smallest id
        ("cd", "abcd", False),
        ("bcd", "abcd", True),
        ("ab", "abcde", False),
        ("bcd", "abcde", True),
        ("ab", "", True),  # a member that is not known yet counts as present
    ],
)
def test_quorums(members: str, present: str, expected: bool) -> None:
    assert has_quorum(set(members), set(present)) is expected


def test_a_minority_joins_the_majority_even_from_a_richer_line() -> None:
    rich = Claim(version=7, digest=b"r" * 32, total_samples=2000)
    common = Claim(version=7, digest=b"c" * 32, total_samples=1000)
    claims = {"a": common, "b": common, "c": common}
    assert choose_base(rich, claims, possible_versions=100) == common
    assert choose_base(common, {"a": common, "b": common, "d": rich}, possible_versions=100) is None


def test_nobody_goes_back_to_an_earlier_base_of_its_own_line_however_many_are_still_there() -> None:
    before = Claim(version=7, digest=b"b" * 32, total_samples=1000)
    after = Claim(version=8, digest=b"a" * 32, total_samples=1100)
    claims = {"a": before, "b": before, "c": before}
    assert choose_base(after, claims, possible_versions=100, ancestors={before.digest}) is None


def test_those_who_made_a_base_with_us_stand_behind_it_before_their_records_say_so() -> None:
    own = Claim(version=8, digest=b"o" * 32, total_samples=1000)
    lone = Claim(version=9, digest=b"l" * 32, total_samples=2**50)
    assert choose_base(own, {"hostile": lone}, possible_versions=100, backers={"a", "b"}) is None
    assert choose_base(own, {"honest": lone}, possible_versions=100) == lone


@given(newcomers=st.integers(1, 20), versions=st.integers(1, 3))
def test_however_many_newcomers_come_at_once_they_go_on_with_whom_they_have_their_base_from(
    newcomers: int, versions: int
) -> None:
    """A peer that trains alone makes a version in the moment in which two come that hold the one before."""
    old, new = claim(5, 100), claim(5 + versions, 150, "b")
    others = {f"newcomer-{number}": old for number in range(newcomers - 1)}
    assert choose_base(old, {**others, "lone": new}, possible_versions=PLENTY, origin={"lone"}) == new
    trainers = {f"newcomer-{number}": old for number in range(newcomers)}
    assert choose_base(new, trainers, possible_versions=PLENTY, ancestors={old.digest}) is None
    followed = {**others, "lone": new}
    assert choose_base(new, followed, possible_versions=PLENTY, ancestors={old.digest}, origin={"lone"}) is None


def test_of_several_from_whom_a_newcomer_has_its_base_one_alone_leads_it_nowhere() -> None:
    old, lie, richer = claim(5, 100), claim(6, 10**9, "x"), claim(6, 150, "b")
    for other in (old, richer):
        announced = {"honest": other, "liar": lie, "newcomer": old}
        assert choose_base(old, announced, possible_versions=PLENTY, origin={"honest", "liar"}) is None
    gone = {"liar": lie, "newcomer": old}
    assert choose_base(old, gone, possible_versions=PLENTY, origin={"honest", "liar"}) is None


@given(
    versions=st.lists(st.integers(4, 6), min_size=4, max_size=9), own_version=st.integers(4, 6), ahead=st.integers(1, 9)
)
def test_after_a_round_of_many_one_announcer_alone_leads_nobody_to_another_version(
    versions: list[int], own_version: int, ahead: int
) -> None:
    """Whatever the others hold, as after a reducer gave each of them another average."""
    own, lie = claim(own_version, 100 + own_version, "own"), claim(own_version + ahead, 2**50, "lie")
    others = {f"p{number}": claim(version, 100 + version, str(number)) for number, version in enumerate(versions)}
    mates = {*others, "liar"}
    chosen = choose_base(
        own, {**others, "liar": lie}, possible_versions=PLENTY, groupmates=mates, round_size=MANY_MEMBERS
    )
    assert chosen != lie


def test_where_few_are_left_one_announcer_leads_the_others_whatever_round_they_come_from() -> None:
    own, new = claim(5, 100), claim(9, 900, "b")
    announced = {"p": new, "q": claim(5, 90, "c"), "r": claim(5, 80, "d")}
    assert choose_base(own, announced, possible_versions=PLENTY, round_size=MANY_MEMBERS) == new
