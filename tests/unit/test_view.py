import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from p2p_trainer.view import (
    LiveView,
    Output,
    PeerView,
    address_line,
    farewell,
    farewell_of_a_door,
    only_inside,
    sentence,
)

NOW = 1_800_000_000.0
AVERAGING = PeerView(
    run_id="words-0123",
    peers_in_swarm=4,
    last_round_at=NOW - 2.4,
    last_group_size=4,
    last_share=0.27,
    loss=2.4096,
    samples_per_second=80.2,
    processed_samples=1200,
    credited_samples=1100.4,
    pending_samples=99.6,
)


def test_the_sentence_says_all_that_a_volunteer_asks() -> None:
    assert sentence(AVERAGING, NOW) == (
        "In the swarm with 3 others · averaged 2 s ago in a group of 4 · your share 27 % · loss 2.41 · "
        "80 samples/s · 92 % of 1,200 samples credited"
    )


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5, "just now"),
        (0.5, "just now"),
        (59.9, "59 s ago"),
        (60, "1 min ago"),
        (3599, "59 min ago"),
        (7300, "2 h ago"),
        (100_000, "27 h ago"),
        (200_000, "2 days ago"),
    ],
)
def test_how_long_ago_is_told_in_the_unit_that_people_use(seconds: float, words: str) -> None:
    assert f"averaged {words} in" in sentence(replace(AVERAGING, last_round_at=NOW - seconds), NOW)


def test_a_peer_that_is_alone_is_told_so_and_why() -> None:
    view = PeerView(run_id="words-0123", samples_per_second=8.25)
    assert sentence(view, NOW) == (
        "Alone in the swarm: no other peer is training yet · not averaged yet · 8.2 samples/s"
    )
    view.note = "the others are still fetching the model"
    view.last_round_at, view.last_group_size = NOW - 3, 1
    assert sentence(view, NOW) == (
        "Alone in the swarm: the others are still fetching the model · last round 3 s ago, alone · 8.2 samples/s"
    )


def test_a_peer_that_has_not_averaged_yet_is_told_why() -> None:
    view = PeerView(run_id="words-0123", peers_in_swarm=2)
    assert sentence(view, NOW).startswith(
        "In the swarm with 1 other · not averaged yet: the first round is still to come · 0 samples/s"
    )
    view.note = "no group came together"
    assert "not averaged yet: no group came together · 0 samples/s" in sentence(view, NOW)


def test_a_note_and_a_state_other_than_training_are_said() -> None:
    view = replace(AVERAGING, state="leaving", note="saving a checkpoint")
    assert sentence(view, NOW).startswith("Leaving · In the swarm with 3 others")
    assert sentence(view, NOW).endswith(" · saving a checkpoint")


def test_a_peer_that_hears_of_nobody_is_isolated_not_alone() -> None:
    why = "nobody has answered for 40 s"
    text = sentence(replace(AVERAGING, state="isolated", reason=why, note=why, peers_in_swarm=1), NOW)
    assert text.startswith(f"Isolated: {why} · training goes on by itself · averaged ")
    assert text.count(why) == 1 and "lone" not in text


@pytest.mark.parametrize(
    ("share", "words"), [(0.0, "0 %"), (0.001, "under 1 %"), (0.99, "99 %"), (0.999, "over 99 %"), (1.0, "100 %")]
)
def test_a_share_is_never_rounded_to_nothing_or_to_everything(share: float, words: str) -> None:
    assert f"your share {words} ·" in sentence(replace(AVERAGING, last_share=share), NOW)


@pytest.mark.parametrize(
    ("speed", "words"), [(0.0, "0"), (0.354, "0.35"), (4.0, "4"), (4.26, "4.3"), (80.4, "80"), (1234.5, "1,234")]
)
def test_a_speed_is_told_with_the_digits_that_matter(speed: float, words: str) -> None:
    assert f"· {words} samples/s" in sentence(replace(AVERAGING, samples_per_second=speed), NOW)


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def plain_view() -> tuple[LiveView, io.StringIO, Clock]:
    output, clock = io.StringIO(), Clock()
    return LiveView(Console(file=output, width=40), clock=clock), output, clock


def test_plain_updates_are_printed_every_ten_seconds_and_once_more_at_the_end() -> None:
    view, output, clock = plain_view()
    with view:
        for second in range(16):
            clock.now = NOW + second
            view.update(replace(AVERAGING, processed_samples=second + 1, credited_samples=0.0))
    lines = output.getvalue().splitlines()
    assert [line.split("0 % of ")[1].split()[0] for line in lines] == ["1", "11", "16"]
    view.close()
    assert output.getvalue().splitlines() == lines


def test_plain_lines_are_not_wrapped_and_brackets_in_them_are_kept() -> None:
    view, output, _ = plain_view()
    text = "Waiting for somebody at [/ip4/203.0.113.7/tcp/31337] " + "x" * 100
    view.status(text)
    assert output.getvalue() == f"{text}\n"


def test_a_peer_whose_lines_nobody_reads_any_more_goes_on() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as output:
        view = LiveView(Output(file=output), plain=True)
        view.status("Somebody reads this.")
        assert os.read(reading, 100) == b"Somebody reads this.\n"
        os.close(reading)
        view.status("And nobody this,")
        view.status("nor this.")
        view.close()


def test_the_same_status_is_not_repeated() -> None:
    view, output, _ = plain_view()
    for text in ("Connecting ...", "Connecting ...", "Waiting ...", "Connecting ..."):
        view.status(text)
    assert output.getvalue().splitlines() == ["Connecting ...", "Waiting ...", "Connecting ..."]


def test_plain_progress_is_told_at_its_beginning_and_its_end() -> None:
    view, output, _ = plain_view()
    for fraction in (0.0, 0.3, 0.9, 1.0):
        view.measuring(fraction)
    for received in (0, 1_000_000, 2_500_000):
        view.syncing(received, 2_500_000)
    assert output.getvalue().splitlines() == [
        "Measuring this machine ...",
        "This machine is measured.",
        "Fetching the model from other peers (2.5 MB) ...",
        "The model is here: 2.5 MB fetched.",
    ]


def test_a_long_plain_download_says_every_ten_seconds_how_far_it_is_and_never_less_than_before() -> None:
    view, output, clock = plain_view()
    for second, received in enumerate([*range(0, 25_000_000, 1_000_000), 3_000_000, *([26_000_000] * 10), 80_000_000]):
        clock.now = NOW + second
        view.syncing(received, 80_000_000)
    assert output.getvalue().splitlines() == [
        "Fetching the model from other peers (80.0 MB) ...",
        "Fetching the model from other peers: 10.0 MB of 80.0 MB, 1.0 MB/s, about 70 s left",
        "Fetching the model from other peers: 20.0 MB of 80.0 MB, 1.0 MB/s, about 60 s left",
        "Fetching the model from other peers: 26.0 MB of 80.0 MB, 0.6 MB/s, about 62 s left",
        "The model is here: 80.0 MB fetched.",
    ]


def test_a_download_that_stands_still_promises_nothing() -> None:
    view, output, clock = plain_view()
    view.syncing(0, 5_000_000)
    clock.now += 10
    view.syncing(0, 5_000_000)
    assert output.getvalue().splitlines()[-1].endswith(": 0.0 MB of 5.0 MB, 0.0 MB/s")


def test_a_download_of_unknown_size_is_told_as_well() -> None:
    view, output, _ = plain_view()
    view.syncing(0, 0)
    view.syncing(3_000_000, 0)
    view.syncing(3_000_000, 3_000_000)
    assert output.getvalue().splitlines() == [
        "Fetching the model from other peers ...",
        "The model is here: 3.0 MB fetched.",
    ]


def test_a_terminal_gets_bars_and_a_line_in_place_and_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def no_threads(*arguments: object, **options: object) -> None:
        pytest.fail("a thread was started")

    monkeypatch.setattr("threading.Thread.start", no_threads)
    output = io.StringIO()
    with LiveView(Console(file=output, force_terminal=True, width=200), clock=Clock()) as view:
        assert view.interactive
        view.status("Connecting ...")
        view.measuring(0.0)
        view.measuring(1.0)
        for received in (0, 1_500_000, 500_000, 2_000_000):
            monkeypatch.setattr("p2p_trainer.view.REDRAW_SECONDS", 0.0)
            view.syncing(received, 2_000_000)
        view.update(AVERAGING)
        view.status("A checkpoint could not be saved.")
        view.update(replace(AVERAGING, loss=2.22))
    shown = output.getvalue()
    assert "0.5/2.0 MB" not in shown, "never backwards"
    for words in (
        "Connecting ...",
        "Measuring this machine",
        "1.5/2.0 MB",
        "2.0/2.0 MB",
        "B/s",
        "0:00",
        "Ctrl-C leaves",
        "not be saved",
    ):
        assert words in shown
    assert "loss 2.22" in shown.splitlines()[-2]  # drawn at the end although it came too soon after the one before
    assert shown.rstrip("\n").endswith("\x1b[?25h")  # the cursor is back


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_terminals_that_want_plain_lines_get_them(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(variable, value)
    output = io.StringIO()
    with LiveView(Console(file=output, force_terminal=True), clock=Clock()) as view:
        assert not view.interactive
        view.update(AVERAGING)
    assert output.getvalue().count("\n") == 1


def test_plain_lines_can_be_asked_for_on_a_terminal() -> None:
    assert not LiveView(Console(file=io.StringIO(), force_terminal=True), plain=True).interactive


def test_the_last_line_tells_what_was_done_and_whether_it_is_kept() -> None:
    kept = farewell(AVERAGING, Path("/data/peer"), "")
    assert kept == (
        "Left the run: 1,200 samples processed, 1,100 credited; progress saved in /data/peer. "
        "The same command continues."
    )
    lost = farewell(AVERAGING, Path("/data/peer"), "The checkpoint cannot be written: No space left on device.")
    assert "progress NOT saved (The checkpoint cannot be written: No space left on device): /data/peer has" in lost
    assert "saved in" not in lost


def test_a_door_says_likewise() -> None:
    assert farewell_of_a_door(Path("/data/door"), "").startswith("Stopped serving; bases saved in /data/door.")
    assert "bases NOT saved (it did not end)" in farewell_of_a_door(Path("/data/door"), "it did not end")


def test_a_door_that_only_its_network_can_dial_says_what_opens_it() -> None:
    assert "--port 31337 --announce /ip4/ITS-PUBLIC-ADDRESS/tcp/31337" in only_inside(31337)


def test_addresses_are_told_whole_and_with_their_reach() -> None:
    text = "/ip4/203.0.113.7/tcp/31337/p2p/QmZtmD2qt6fJot32nabSP3CUjicnypEBz7bHVDhPQt9aAy"
    output = io.StringIO()
    LiveView(Console(file=output, width=40)).status(address_line([text, text], "inside this network"))
    assert text in output.getvalue() and "(inside this network)" in output.getvalue()
    assert "--peer" in address_line([text], "") and "(" not in address_line([text], "")


def test_a_peer_that_trains_a_part_of_the_model_is_told_so() -> None:
    view = replace(AVERAGING, trained_share=0.375, credited_samples=441.0)
    assert sentence(view, NOW).endswith("98 % of 1,200 samples credited for 38 % of the model")
    assert "1,200 samples processed for 38 % of the model, 441 credited" in farewell(view, Path("/runs/x"), "")
    assert "of the model" not in sentence(AVERAGING, NOW)
