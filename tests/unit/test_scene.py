from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht_config.errors import UsageError
from p2p_trainer.machines import MACHINES, memory_text, read_memory
from p2p_trainer.rehearsal.scene import (
    MAX_PEERS,
    EmulatedPeer,
    Life,
    Scene,
    SceneError,
    Stay,
    parse_churn,
    parse_peers,
)
from p2p_trainer.rehearsal.scene_file import load_scene


def speeds(text: str) -> list[float]:
    return [peer.samples_per_second for peer in parse_peers(text)]


def names(text: str) -> list[str]:
    return [peer.name for peer in parse_peers(text)]


def test_numbers_are_samples_a_second_in_the_order_given() -> None:
    assert parse_peers("80,40, 20 ,8.5") == (
        EmulatedPeer(name="80", samples_per_second=80.0),
        EmulatedPeer(name="40", samples_per_second=40.0),
        EmulatedPeer(name="20", samples_per_second=20.0),
        EmulatedPeer(name="8.5", samples_per_second=8.5),
    )


def test_machines_are_emulated_in_proportion_to_their_published_speed() -> None:
    assert speeds("4090,3090,3060,t4") == [80.0, 34.5, 12.3, 7.8]
    assert speeds("laptop-cpu") == [0.3]
    assert all(machine.source and machine.samples_per_second > 0 for machine in MACHINES.values())


def test_a_machine_has_its_memory_and_a_number_as_much_as_there_is() -> None:
    memories = [peer.memory_bytes for peer in parse_peers("4090,0.5xRTX 3060-12G,8,3090.0,3080:mem=2G")]
    assert memories == [24 << 30, 12 << 30, None, None, 2 << 30]
    assert all(1 << 30 <= machine.memory_bytes <= 256 << 30 for machine in MACHINES.values())


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("2G", 2 << 30), ("2GB", 2 << 30), ("2 GiB", 2 << 30), ("512M", 512 << 20), ("1.5G", 3 << 29)],
)
def test_a_memory_is_read_as_people_write_it(text: str, size_bytes: int) -> None:
    assert read_memory(text) == size_bytes
    assert read_memory(memory_text(size_bytes)) == size_bytes


def test_a_name_wins_over_a_number_and_is_read_as_people_write_it() -> None:
    assert names("RTX 3090, rtx-3090, T4") == ["3090", "3090-2", "t4"]
    assert speeds("3090.0") == [3090.0]


def test_a_star_makes_several_peers_with_names_of_their_own() -> None:
    assert names("8*3,4090*2,8") == ["8", "8-2", "8-3", "4090", "4090-2", "8-4"]
    assert speeds("8 * 2") == [8.0, 8.0]


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("80,fast", "'fast'"),
        ("80,,20", "''"),
        ("", "''"),
        ("80,0", "'0'"),
        ("-3", "'-3'"),
        ("nan", "'nan'"),
        ("80,inf", "'inf'"),
        ("1e7", "'1e7'"),
        ("80*", "'80*'"),
        ("80*0", "'80*0'"),
        ("80*1.5", "'80*1.5'"),
        ("80*²", "'80*²'"),
        ("80*2*2", "'80*2*2'"),
        ("80*-1", "'80*-1'"),
        ("4090x2", "'4090x2'"),
    ],
)
def test_a_piece_that_cannot_be_read_is_named(text: str, piece: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_peers(text)
    assert piece in caught.value.problem
    assert "4090" in caught.value.remedy


def test_a_misspelt_machine_is_corrected() -> None:
    with pytest.raises(UsageError, match="laptop-cpu"):
        parse_peers("laptop-cpus")


def test_too_many_peers_are_refused() -> None:
    assert len(parse_peers(f"8*{MAX_PEERS}")) == MAX_PEERS
    with pytest.raises(UsageError, match="'40'"):
        parse_peers(f"8*{MAX_PEERS},40")
    with pytest.raises(UsageError):
        parse_peers("8*999999999999")


# --- shares, links and lives


def peer_of(text: str, seconds: float = 300.0) -> EmulatedPeer:
    (peer,) = parse_peers(text, seconds)
    return peer


def test_a_share_of_a_machine_is_a_speed() -> None:
    assert names("0.5x4090, 0.5xRTX 3060-12G") == ["0.5x4090", "0.5x3060-12g"]
    assert speeds("0.5x4090,1x4090") == [40.0, 80.0]


def test_a_number_that_reads_like_an_unknown_card_is_no_speed() -> None:
    with pytest.raises(SceneError, match=r"5090\.0"):
        parse_peers("5090")
    assert speeds("5090.0,1000") == [5090.0, 1000.0]


def test_a_link_follows_the_colon() -> None:
    peers = parse_peers("4090:500M/20ms,3060-12G:10M/2M/60ms/5ms/1%*2,8")
    assert [peer.name for peer in peers] == ["4090", "3060-12g", "3060-12g-2", "8"]
    assert [str(peer.link) for peer in peers] == ["500M/20ms", *2 * ["10M/2M/60ms/5ms/1%"], "None"]


def test_nat_and_memory_follow_in_any_order() -> None:
    peers = parse_peers("laptop-cpu:2M/80ms:nat,8:NAT:mem=512M*2,8:mem=1.5G:1M:nat@30-,8:mem=2G")
    assert [(peer.behind_nat, peer.memory_bytes, str(peer.link)) for peer in peers] == [
        (True, 16 << 30, "2M/80ms"),
        *2 * [(True, 512 << 20, "None")],
        (True, 3 << 29, "1M"),
        (False, 2 << 30, "None"),
    ]
    assert peers[3].life == Life(stays=(Stay(30.0),))
    assert Scene(peers=parse_peers("8:nat")).has_links and not Scene(peers=parse_peers("8:mem=2G")).has_links


@pytest.mark.parametrize(
    ("text", "life"),
    [
        ("8", Life()),
        ("8@30-", Life(stays=(Stay(30.0),))),
        ("8@-60", Life(stays=(Stay(0.0, 60.0),))),
        ("8!60", Life(stays=(Stay(0.0, 60.0, killed=True),))),
        ("8:1M@ 30 - !60.5", Life(stays=(Stay(30.0, 60.5, killed=True),))),
        ("8!60@90-", Life(stays=(Stay(0.0, 60.0, killed=True), Stay(90.0)))),
        ("8@-60@90-120", Life(stays=(Stay(0.0, 60.0), Stay(90.0, 120.0)))),
        ("8~20-25~30-40", Life(frozen=((20.0, 25.0), (30.0, 40.0)))),
        ("8~0-25", Life(frozen=((0.0, 25.0),))),
        ("8@10-~20-25!60", Life(stays=(Stay(10.0, 60.0, killed=True),), frozen=((20.0, 25.0),))),
    ],
)
def test_a_life_follows_the_link(text: str, life: Life) -> None:
    assert peer_of(text).life == life


def test_a_life_is_played_in_order() -> None:
    moments = peer_of("8@10-~20-60!60@90-").life.moments()
    assert [(moment.at_seconds, moment.action) for moment in moments] == [
        (10.0, "start"),
        (20.0, "freeze"),
        (60.0, "thaw"),
        (60.0, "kill"),
        (90.0, "start"),
    ]
    assert Life().moments() == []


@pytest.mark.parametrize(
    ("text", "piece", "words"),
    [
        ("8,fast:1M", "fast", "no machine"),
        ("8,0", "0", "above 0"),
        ("2x4090", "2x4090", "4090*2"),
        ("0x4090", "0x4090", "above 0"),
        ("8:10X/20ms,8", "10X", "neither a rate"),
        ("8:10M/1k/20ms", "1k", "one packet a second"),
        ("8:11k", "11k", "one packet a second"),
        ("8:20ms/100%", "100%", "nothing would ever arrive"),
        ("8:", "", "neither a rate"),
        ("8:mem=0", "mem=0", "512M or 2G"),
        ("8:mem=0.0G", "mem=0.0G", "above 0"),
        ("8:mem=12X", "mem=12X", "512M or 2G"),
        ("8:1M:mem=,8", "mem=", "512M or 2G"),
        ("8:mem=-1G", "mem=-1G", "512M or 2G"),
        ("8:memory=1G", "memory=1G", "mem=2G"),
        ("8:nat:1M:nat", "nat", "already"),
        ("8:mem=1G:mem=2G", "mem=2G", "already"),
        ("8:1M:2M", "2M", "already"),
        ("8:1M:nta", "nta", "already"),
        ("8@30-!20", "!20", "dies before it joins"),
        ("8@30-20", "@30-20", "leaves before it joins"),
        ("8!0", "!0", "dies before it joins"),
        ("8@-60@50-", "@50-", "comes back before it was gone"),
        ("8@30-@60-", "@60-", "comes back before it was gone"),
        ("8!20!30", "!30", "not there then"),
        ("8~10-20~15-30", "~15-30", "overlap"),
        ("8~20-10", "~20-10", "thaws before it freezes"),
        ("8@-10~10-20", "~10-20", "not there then"),
        ("8!20~15-30", "~15-30", "not there then"),
        ("8@400-", "@400-", "over after 300 s"),
        ("8!300", "!300", "over after 300 s"),
        ("8~300-310", "~300-310", "over after 300 s"),
        ("8@x-", "@x-", "@FROM-TO"),
        ("8@30", "@30", "@FROM-TO"),
        ("8!", "!", "@FROM-TO"),
        ("8~20-", "~20-", "@FROM-TO"),
        ("8@-1e3", "@-1e3", "@FROM-TO"),
        ("8*0", "*0", "whole number"),
    ],
)
def test_what_is_wrong_is_underlined(text: str, piece: str, words: str) -> None:
    with pytest.raises(SceneError) as caught:
        parse_peers(text, 300.0)
    assert words in caught.value.problem
    shown, carets = caught.value.excerpt.split("\n")
    assert shown == text
    start = len(carets) - len(carets.lstrip())
    assert shown[start : start + len(carets.strip())] == piece or (not piece and start == len(shown))


def test_of_a_long_text_the_surroundings_are_shown() -> None:
    text = ",".join(["80"] * 30 + ["fast"] + ["80"] * 30)
    with pytest.raises(SceneError) as caught:
        parse_peers(text)
    shown, carets = caught.value.excerpt.split("\n")
    assert len(shown) <= 80 and shown.startswith("... ") and shown.endswith(" ...")
    assert shown[carets.index("^") : len(carets)] == "fast"


@given(st.text(alphabet="0123489.:@!~*,-/xkMG%ms natem=", max_size=40))
def test_whatever_is_written_is_read_or_refused(text: str) -> None:
    try:
        peers = parse_peers(text, 300.0)
    except SceneError as error:
        assert error.excerpt.count("\n") == 1 and error.excerpt.endswith("^")
    else:
        assert len({peer.name for peer in peers}) == len(peers)
        assert all(peer.life.complaint(300.0) is None for peer in peers)


# --- churn


def test_churn_takes_a_share_of_the_peers_away_and_brings_them_back() -> None:
    scene = Scene(peers=parse_peers("80*10"), seconds=300.0, churn=0.2, seed=1).with_churn()
    moved = [peer.life for peer in scene.peers if not peer.life.is_whole]
    assert len(moved) == 2
    for life in moved:
        assert life.complaint(300.0) is None
        first, second = life.stays
        assert first.from_seconds == 0 and 30 < first.until_seconds < second.from_seconds < 250
    again = Scene(peers=parse_peers("80*10"), seconds=300.0, churn=0.2, seed=1).with_churn()
    assert again == scene
    assert Scene(peers=parse_peers("80*10"), seconds=300.0, churn=0.2, seed=2).with_churn() != scene


def test_churn_rounds_up_leaves_other_lives_alone_and_may_take_all() -> None:
    few = Scene(peers=parse_peers("80,8!20"), churn=0.01).with_churn()
    assert [peer.life.is_whole for peer in few.peers] == [False, False]
    assert few.peers[1].life == parse_peers("8!20")[0].life
    everyone = Scene(peers=parse_peers("8*3"), churn=1.0).with_churn()
    assert not any(peer.life.is_whole for peer in everyone.peers)
    nobody = Scene(peers=parse_peers("8*3")).with_churn()
    assert all(peer.life.is_whole for peer in nobody.peers)


@pytest.mark.parametrize("text", ["101%", "120%", "20", "-5%", "%", "many", "", "1e1%"])
def test_a_churn_that_cannot_be_is_underlined(text: str) -> None:
    assert parse_churn(" 20 % ") == 0.2
    with pytest.raises(SceneError) as caught:
        parse_churn(text)
    assert caught.value.excerpt == f"{text}\n{'^' * max(1, len(text))}"


# --- files

FILE = """\
run = "digits"
minutes = 5
churn = "20%"
seed = 3

[[peers]]
speed = "4090"
link = "500M/20ms"  # fibre
count = 2

[[peers]]
speed = 8
joins_at = 30
killed_at = 60.5
returns_at = 90
frozen = [[40, 45]]

[[peers]]
speed = 8
nat = true
memory = "2GB"
"""


def test_a_scene_file_says_the_same_as_the_line(tmp_path: Path) -> None:
    path = tmp_path / "scene.toml"
    path.write_text(FILE)
    scene = load_scene(path)
    assert scene == Scene(
        peers=parse_peers("4090:500M/20ms*2,8@30-~40-45!60.5@90-,8:nat:mem=2G"),
        seconds=300.0,
        churn=0.2,
        seed=3,
        run="digits",
    )
    assert load_scene(path, seconds=200.0).seconds == 200.0
    path.write_text('run = "mine.toml"\npeers = [{speed = 80}, {speed = "0.5x4090", leaves_at = 30}]')
    assert load_scene(path) == Scene(peers=parse_peers("80,0.5x4090@-30"), run=str(tmp_path / "mine.toml"))


@pytest.mark.parametrize(
    ("before", "after", "line", "piece", "words"),
    [
        ('"4090"', '"4099x"', 7, "4099x", "no machine"),
        ("500M/20ms", "500M/1k", 8, "1k", "one packet"),
        ("= 8\njoins", "= 0\njoins", 12, "0", "above 0"),
        ("= 8\njoins", "= nan\njoins", 12, "nan", "above 0"),
        ("= 8\njoins", "= true\njoins", 12, "true", "not a number"),
        ("= 90", "= nan", 15, "nan", "finite"),
        ("= 90", "= true", 15, "true", "number"),
        ("60.5", "20 # s", 14, "20", "dies before it joins"),
        ("60.5", "60.5\nleaves_at = 50", 14, "60.5", "leaves and is killed"),
        ("killed_at = 60.5\n", "", 14, "90", "neither leaves nor is killed"),
        ("= 90", "= 50", 15, "50", "comes back before"),
        ("= 90", "= 300", 15, "300", "over after 300 s"),
        ("[[40, 45]]", "[[40, 45], [44, 50]]", 16, "[[40, 45], [44, 50]]", "overlap"),
        ("[[40, 45]]", "[40, 45]", 16, "[40, 45]", "tuple"),
        ('"20%"', '"120%"', 3, "120%", "over 100%"),
        ('"20%"', "0.2", 3, "0.2", "string"),
        ("= 5", "= 0", 2, "0", "greater than 0"),
        ("= 2\n", "= true\n", 9, "true", "integer"),
        ("= 2\n", "= 64\n", 0, "", "more than 64"),
        ("= true", "= 1", 20, "1", "boolean"),
        ('"2GB"', '"2TB"', 21, "2TB", "512M or 2G"),
        ('"2GB"', "2", 21, "2", "string"),
        ('"2GB"', '"0G"', 21, "0G", "above 0"),
        ("speed = 8\njoins", "sped = 8\njoins", 12, "8", "no such key"),
        ("speed = 8\njoins", "joins", 11, "[[peers]]", "missing"),
        ("= 60.5", "=", 14, "", "not TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_underlined(
    tmp_path: Path, before: str, after: str, line: int, piece: str, words: str
) -> None:
    path = tmp_path / "scene.toml"
    path.write_text(FILE.replace(before, after))
    with pytest.raises(SceneError) as caught:
        load_scene(path)
    assert words in caught.value.problem and str(path) in caught.value.problem
    if line:
        assert f"line {line}" in caught.value.problem
    shown, carets = caught.value.excerpt.split("\n")
    if piece:
        assert shown[len(carets) - len(carets.strip()) : len(carets)] == piece


@pytest.mark.parametrize("content", [b"", b"peers = []", b"\xff", None])
def test_a_file_without_a_scene_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "scene.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SceneError, match=r"scene\.toml"):
        load_scene(path)
