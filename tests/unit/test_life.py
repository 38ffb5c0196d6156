"""The life of a peer: one transition function, what it says, and the diagram of it in the README."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from peers.life import BIRTH, STATES, WHATS, Happening, Life, State, duration, transition

happenings = st.builds(Happening, st.sampled_from(WHATS), st.text(max_size=20))
README = Path(__file__).parents[2] / "README.md"
ARROW = re.compile(r"(?P<sources>[a-z, ]+?) ─+ (?P<what>[a-z ]+?) ─+► (?P<target>[a-z]+)")


@given(state=st.sampled_from(STATES), happening=happenings)
def test_whatever_happens_in_whatever_state_leads_to_a_state_with_a_reason_or_changes_nothing(
    state: State, happening: Happening
) -> None:
    after = transition(state, happening)
    assert after.state in STATES
    assert after.reason or after.state == state


def reachable(start: State) -> set[State]:
    found, fresh = {start}, [start]
    while fresh:
        state = fresh.pop()
        for what in WHATS:
            after = transition(state, Happening(what, "why")).state
            if after not in found:
                found.add(after)
                fresh.append(after)
    return found


def test_every_state_is_reached_and_leads_to_leaving_at_once_and_nothing_leads_out_of_it() -> None:
    assert reachable(BIRTH.state) == set(STATES)
    for state in STATES:
        assert transition(state, Happening("stopped", "terminated")).state == "leaving"
    assert reachable("leaving") == {"leaving"}


def test_a_way_back_into_training_leads_through_a_look_at_the_bases() -> None:
    sources = {state for state in STATES for what in WHATS if transition(state, Happening(what)).state == "training"}
    assert sources == {"syncing", "training"}


@given(st.lists(happenings))
def test_a_life_tells_of_each_change_once_and_ends_where_it_says(happened: list[Happening]) -> None:
    told: list[tuple[State, State]] = []
    life = Life(lambda before, state, reason: told.append((before, state)))
    changes = sum(life.happens(one.what, one.about) for one in happened)
    assert len(told) == changes
    assert all(before != state for before, state in told)
    assert [BIRTH.state, *(state for _, state in told)] == [*(before for before, _ in told), life.state]
    assert life.reason


def test_silence_that_goes_on_changes_its_reason_alone() -> None:
    told: list[str] = []
    life = Life(lambda before, state, reason: told.append(state))
    for what in ("found", "measured", "caught up"):
        life.happens(what)  # type: ignore[arg-type]
    for seconds in (12, 40, 200):
        life.happens("silent", duration(seconds))
    assert (life.state, life.reason) == ("isolated", "nobody has answered for 3 min")
    assert told == ["measuring", "syncing", "training", "isolated"]


def test_the_readme_draws_every_transition_and_no_other() -> None:
    block = README.read_text().partition("### The life of a peer")[2].partition("```text\n")[2].partition("```")[0]
    drawn = {
        (source.strip(), arrow["what"], arrow["target"])
        for arrow in ARROW.finditer(block)
        for source in arrow["sources"].split(",")
    }
    real = {
        (state, what, transition(state, Happening(what, "why")).state)
        for state in STATES
        for what in WHATS
        if transition(state, Happening(what, "why")).reason
    }
    assert drawn == real
