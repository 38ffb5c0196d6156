"""What an earlier start knew of the line: the plan and the first rounds rest on it, for a week."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from p2p_trainer.planning.plan_facts import Link
from peers.known_line import FILE_NAME, KEPT_SECONDS, keep_line, known_line
from peers.line import FORGOTTEN_ROUNDS, LineRate, LinkRate

NOW = 1_800_000_000.0
HOME = LineRate(up=1.25e6, down=6e6, round_trip_seconds=0.04)


@pytest.mark.parametrize("rate", [HOME, LineRate(up=2e5), LineRate(down=2e5, round_trip_seconds=0.3), LineRate()])
def test_a_line_is_known_for_a_week(tmp_path: Path, rate: LineRate) -> None:
    assert known_line(tmp_path, NOW) == LineRate()
    keep_line(tmp_path, rate, NOW)
    assert known_line(tmp_path, NOW) == known_line(tmp_path, NOW + KEPT_SECONDS) == rate
    assert known_line(tmp_path, NOW + KEPT_SECONDS + 1) == LineRate()
    assert known_line(tmp_path, NOW - 3600) == LineRate(), "the clock was set back: nobody knows how old it is"


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "7", '{"up": null}', '{"up": -1}', '{"up": "NaN"}', '{"up": [1]}', '{"up": {"0": 1}}'),
        '{"up": [1' + 400 * "0" + ", 1800000000.0]}",
        *(json.dumps({"up": [1.0, NOW], **wrong}) for wrong in ({"round_trip_seconds": [math.inf, NOW]},)),
        *(json.dumps({"up": [1.0, NOW], "down": wrong}) for wrong in ([0, NOW], [1.0, math.nan], ["x", NOW])),
    ],
)
def test_a_note_that_makes_no_sense_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    assert known_line(tmp_path, NOW) == LineRate()


def test_what_was_not_measured_again_does_not_become_younger(tmp_path: Path) -> None:
    """A way up that was slow for a day has the peer send next to nothing, which measures nothing: it would stay so."""
    keep_line(tmp_path, HOME, NOW)
    later = NOW + KEPT_SECONDS / 2
    link = LinkRate(known_line(tmp_path, later))
    link.note(LineRate(down=9e6))
    keep_line(tmp_path, link.measured, later, known=link.rate)
    assert known_line(tmp_path, later) == LineRate(up=HOME.up, down=9e6)
    assert known_line(tmp_path, NOW + KEPT_SECONDS + 1) == LineRate(down=9e6)
    for _ in range(FORGOTTEN_ROUNDS):
        link.note(LineRate())
    keep_line(tmp_path, link.measured, later, known=link.rate)
    assert known_line(tmp_path, later) == LineRate(), "what is not reckoned with any more is not kept"


def test_what_rounds_measure_takes_the_place_of_what_was_known() -> None:
    link = LinkRate(HOME)
    assert link.rate == LineRate(up=HOME.up, down=HOME.down)
    link.note(LineRate(up=1e5))
    assert link.rate == LineRate(up=1e5, down=HOME.down)
    for _ in range(FORGOTTEN_ROUNDS):
        link.note(LineRate())
    assert link.rate == LineRate(), "as anything that was not measured for so long"


def test_what_a_person_says_counts_more_than_what_was_known() -> None:
    assert Link.of(LineRate()) == Link()
    known = Link.of(HOME)
    assert (known.up, known.down, known.remembered, known.round_trip_seconds) == (1e7, 4.8e7, True, 0.04)
    said = Link.of(HOME, up=5e6)
    assert (said.up, said.down, said.remembered) == (5e6, 4.8e7, True)
    assert not Link.of(HOME, up=5e6, down=1e7).remembered


def test_what_a_person_leaves_of_the_line_is_not_said_to_be_measured() -> None:
    limited = Link.of(LineRate(), up_limit=5e6)
    assert (limited.up, limited.down, limited.remembered) == (5e6, None, False)
    assert Link.of(LineRate(up=1.25e6), up_limit=5e6) == Link(up=5e6)
    assert Link.of(HOME, up_limit=2e7) == Link.of(HOME), "the line carries less"
    assert Link.of(HOME, up=4e6, up_limit=5e6).up == 4e6
