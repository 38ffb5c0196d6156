"""Settings: default < file < environment < flag, and what is said about a value that cannot be used."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, get_args

import pytest

from dht_config.errors import AddressError, DeviceError, ExitCode, P2PTrainerError
from p2p_trainer.settings import (
    ENVIRONMENT_PREFIX,
    CadenceChoice,
    CodecChoice,
    PeerSettings,
    SettingsError,
    load_settings,
    parse_given_addresses,
)
from peers.line import CADENCES, CODECS

PEER_ID = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of the person who runs the tests."""
    for name in [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text("port = 1111\nthreads = 3\neval_seconds = 7.5\n")
    return path


def test_each_source_overrides_the_one_before(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings({}).port == 0
    assert load_settings({}, file).port == 1111
    monkeypatch.setenv("P2P_TRAINER_PORT", "2222")
    assert load_settings({}, file).port == 2222
    assert load_settings({"port": 3333}, file).port == 3333


def test_sources_are_merged_setting_by_setting(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2P_TRAINER_EVAL_SECONDS", "9")
    settings = load_settings({"host": "127.0.0.1"}, file)
    assert (settings.host, settings.eval_seconds, settings.threads, settings.port) == ("127.0.0.1", 9.0, 3, 1111)
    assert settings.checkpoint_seconds == PeerSettings.model_fields["checkpoint_seconds"].default


def test_a_flag_that_was_not_given_leaves_the_file_alone(file: Path) -> None:
    assert load_settings({"port": None, "peer": (), "threads": None}, file).port == 1111


def test_a_flag_of_zero_is_a_value(file: Path) -> None:
    assert load_settings({"port": 0}, file).port == 0


def test_the_users_own_file_is_read_if_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "config" / "p2p-trainer" / "settings.toml"
    path.parent.mkdir(parents=True)
    path.write_text('host = "::1"\n')
    assert load_settings({}).host == "::1"


def test_lists_come_from_every_source(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = (f"/ip4/203.0.113.7/tcp/{port}/p2p/{PEER_ID}" for port in (1, 2, 3))
    file.write_text(f'peer = ["{one}"]\n')
    assert load_settings({}, file).peer == (one,)
    monkeypatch.setenv("P2P_TRAINER_PEER", f"{one}, {two}")
    assert load_settings({}, file).peer == (one, two)
    assert load_settings({"peer": (three,)}, file).peer == (three,)


def test_a_file_that_was_named_must_exist(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"missing\.toml does not exist") as raised:
        load_settings({}, tmp_path / "missing.toml")
    assert raised.value.exit_code == ExitCode.USAGE


def test_choices_are_those_that_peers_have() -> None:
    assert (get_args(CadenceChoice), get_args(CodecChoice)) == (CADENCES, CODECS)


@pytest.mark.parametrize(
    ("name", "value", "choices"),
    [
        ("cadence", 3, "1, 2 or 4"),
        ("cadence", "often", "1, 2 or 4"),
        ("codec", "float32", "int8, int4 or sparse"),
        ("compute_dtype", "int8", "float32, bfloat16 or float16"),
    ],
)
def test_a_choice_that_is_none_is_refused_with_those_there_are(
    name: str, value: Any, choices: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match=f"{value}.? cannot be used, it must be {choices}") as raised:
        load_settings({name: value}, file)
    assert raised.value.exit_code == ExitCode.USAGE
    monkeypatch.setenv(ENVIRONMENT_PREFIX + name.upper(), choices.split(",")[0])
    assert str(getattr(load_settings({}, file), name)) == choices.split(",")[0]


def test_an_unknown_name_in_the_file_is_named(file: Path) -> None:
    file.write_text("prot = 1\n")
    with pytest.raises(SettingsError, match="There is no setting 'prot'") as raised:
        load_settings({}, file)
    assert str(file) in raised.value.problem


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 65536),
        ("port", -1),
        ("port", "any"),
        ("threads", 0),
        ("wait_seconds", -1),
        ("wait_seconds", float("nan")),
        ("wait_seconds", float("inf")),
        ("checkpoint_seconds", 0.5),
        ("eval_seconds", "often"),
        ("eval_samples", -1),
        ("eval_samples", 1.5),
        ("emulate", 0),
        ("emulate", float("inf")),
    ],
)
def test_a_bad_value_is_named_with_the_place_it_comes_from_and_what_is_allowed(
    name: str, value: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag, variable = "--" + name.replace("_", "-"), ENVIRONMENT_PREFIX + name.upper()
    file.write_text(f"{name} = {json.dumps(value).replace('NaN', 'nan').replace('Infinity', 'inf')}\n")
    with pytest.raises(SettingsError) as from_file:
        load_settings({}, file)
    monkeypatch.setenv(variable, str(value))
    with pytest.raises(SettingsError) as from_environment:
        load_settings({}, file)
    with pytest.raises(SettingsError) as from_flag:
        load_settings({name: value}, file)
    places = {flag: from_flag, variable: from_environment, f"{name} in {file}": from_file}
    for place, raised in places.items():
        text = str(raised.value)
        assert text.startswith(place) and str(value) in text and "number" in text
        assert not any(other in text for other in places if other != place)
        assert raised.value.exit_code == ExitCode.USAGE


def test_what_is_allowed_is_said_in_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2P_TRAINER_PORT", "abc")
    with pytest.raises(SettingsError) as raised:
        load_settings({})
    assert raised.value.problem == (
        "P2P_TRAINER_PORT in the environment: 'abc' cannot be used, it must be a whole number from 0 to 65535."
    )
    with pytest.raises(
        SettingsError, match=r"--emulate: 0 cannot be used, it must be a number above 0(\.0)? to 1000000"
    ):
        load_settings({"port": 1, "emulate": 0})
    monkeypatch.setenv("P2P_TRAINER_ALLOW_FILES", "perhaps")
    with pytest.raises(SettingsError, match=r"P2P_TRAINER_ALLOW_FILES .*'perhaps'.* true or false"):
        load_settings({"port": 1})


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("host", "localhost", AddressError),
        ("announce", "peer.example.org:1", AddressError),
        ("peer", "203.0.113.7", AddressError),
        ("peer", f"/ip4/203.0.113.7/tcp/1/p2p/{PEER_ID},/ip4/203.0.113.7", AddressError),
        ("device", "gpu", DeviceError),
    ],
)
def test_an_address_or_device_that_cannot_be_used_is_named_with_its_place(
    name: str, value: str, kind: type[P2PTrainerError], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(f"{name} = {json.dumps(value)}\n")
    with pytest.raises(kind, match=f"^{name} in {file}: ") as raised:
        load_settings({}, file)
    assert value.split(",")[-1] in raised.value.problem and raised.value.remedy
    monkeypatch.setenv(ENVIRONMENT_PREFIX + name.upper(), value)
    with pytest.raises(kind, match=f"^{ENVIRONMENT_PREFIX}{name.upper()} in the environment: "):
        load_settings({}, file)
    with pytest.raises(kind, match=f"^--{name}: "):
        load_settings({name: (value,) if name in ("announce", "peer") else value}, file)


def test_addresses_that_were_typed_are_all_good_or_an_error() -> None:
    good = f"/ip4/203.0.113.7/tcp/1/p2p/{PEER_ID}"
    assert [address.text for address in parse_given_addresses([f' "{good}", ', good], "--peer")] == [good, good]
    for bad in ("", " , ", "nonsense", f"{good} nonsense"):
        with pytest.raises(AddressError, match=r"^--peer: the address"):
            parse_given_addresses([good, bad], "--peer")


@pytest.mark.parametrize("content", [b"port = ", b"\xff\xfe", b"[port]\nx = 1\n"])
def test_a_file_that_cannot_be_read_is_named(content: bytes, file: Path) -> None:
    file.write_bytes(content)
    with pytest.raises(SettingsError) as raised:
        load_settings({}, file)
    assert str(file) in str(raised.value)


def test_an_unknown_name_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2P_TRAINER_PROT", "5")
    with pytest.raises(SettingsError, match=r"P2P_TRAINER_PROT .*Did you mean P2P_TRAINER_PORT\?"):
        load_settings({})


def test_settings_do_not_change_after_they_were_read(file: Path) -> None:
    settings = load_settings({}, file)
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1  # type: ignore[misc]


def test_a_host_that_is_no_ip_address_is_refused_when_the_network_is_set_up() -> None:
    with pytest.raises(AddressError, match="not an IP address"):
        _ = load_settings({"host": "localhost"}).network
    with pytest.raises(AddressError):
        _ = load_settings({"announce": ("nonsense",)}).network


@pytest.mark.parametrize(
    ("flags", "port"),
    [({}, 0), ({"port": 31337}, 31338), ({"port": 65535}, 0), ({"port": 31337, "no_direct": True}, None)],
)
def test_direct_connections_have_the_next_port_if_one_was_given(flags: dict[str, object], port: int | None) -> None:
    assert load_settings(flags).network.direct_port == port


def test_the_network_takes_host_port_and_announced_addresses() -> None:
    network = load_settings({"host": "::", "port": 31337, "announce": ("/dns4/peer.example.org/tcp/1",)}).network
    assert network.listen_maddrs() == ["/ip6/::/tcp/31337"]
    assert network.announce == ("/dns4/peer.example.org/tcp/1",)


def test_every_setting_says_what_it_is_for() -> None:
    source = Path(load_settings.__code__.co_filename).read_text()
    for name in PeerSettings.model_fields:
        declared = source.index(f"    {name}: ")
        after = source[declared:].split("\n", 1)[1]
        assert after.startswith('    """'), f"{name} has no docstring"
