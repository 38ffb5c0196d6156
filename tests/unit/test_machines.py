import pytest

from dht_config.errors import UsageError
from p2p_trainer.machines import MACHINES
from p2p_trainer.scene import MAX_PEERS, EmulatedPeer, parse_peers


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
