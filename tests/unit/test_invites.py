"""Invites made of invites: all doors of one run in one word, and what does not fit together is one line."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dht_config.errors import ExitCode
from dht_config.invite import MAX_ADDRESSES, Invite
from p2p_trainer.cli import app
from p2p_trainer.invites import combined, seconds_in

PEERS = ("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "QmSoLPppuBtQSGwKDZT2M73ULpjvfd3aZ6ha4oFGL1KrGM")

pytestmark = pytest.mark.usefixtures("untouched")


def door(peer: int, *hosts: str, run_id: str = "a-0123456789abcdef", key: bytes = bytes(32)) -> Invite:
    addresses = tuple(f"/ip4/{host}/tcp/31337/p2p/{PEERS[peer]}" for host in hosts)
    return Invite(run_id=run_id, organiser_public_key=key, addresses=addresses)


def invite(*arguments: str, code: ExitCode = ExitCode.OK) -> str:
    result = CliRunner().invoke(app, ["invite", *arguments])
    assert result.exit_code == int(code), result.output
    if code:
        assert result.stderr.count("\n") == 1 and result.stderr.startswith("p2p-trainer: ")
        return result.stderr
    return result.stdout.strip()


def test_all_doors_are_in_one_invite_the_given_addresses_first(tmp_path: Path) -> None:
    first, second = door(0, "203.0.113.7", "203.0.113.8"), door(1, "198.51.100.1")
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer/invite").write_text(first.encode() + "\n")
    made = Invite.decode(
        invite(str(tmp_path / "peer"), second.encode(), "--address", "/dns4/run.example.org/tcp/31337")
    )
    assert made.addresses == (f"/dns4/run.example.org/tcp/31337/p2p/{PEERS[0]}", *first.addresses, *second.addresses)
    assert made.good_until is None


def test_an_invite_file_that_is_damaged_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "invite").write_bytes(b"\xff\xfejunk")
    said = invite(str(tmp_path), code=ExitCode.INVITE)
    assert f"{tmp_path / 'invite'} is damaged" in said


def test_no_door_is_crowded_out_by_another_ones_addresses() -> None:
    many = door(0, *(f"203.0.113.{host}" for host in range(1, MAX_ADDRESSES + 1)))
    made = combined([many, door(1, "198.51.100.1")], (), None)
    assert len(made.addresses) == MAX_ADDRESSES and any(PEERS[1] in text for text in made.addresses)


def test_an_expiry_is_counted_from_now() -> None:
    before = time.time()
    told = json.loads(invite(door(0, "203.0.113.7").encode(), "--expires", "30d", "--json"))
    made = Invite.decode(told["invite"])
    assert made.good_until == told["good_until"]
    assert int(before) + 30 * 86400 <= told["good_until"] <= time.time() + 30 * 86400
    assert [seconds_in(text) for text in ("12h", "1d", "8w")] == [43200, 86400, 8 * 604800]


def test_what_makes_no_invite_is_one_line(tmp_path: Path) -> None:
    good = door(0, "203.0.113.7").encode()
    other_run = door(1, "198.51.100.1", run_id="b-0123456789abcdef").encode()
    other_key = door(1, "198.51.100.1", key=bytes(range(32))).encode()
    (tmp_path / "empty").mkdir()
    assert "different runs" in invite(good, other_run, code=ExitCode.INVITE)
    assert "another organiser" in invite(good, other_key, code=ExitCode.INVITE)
    assert "There is no invite in" in invite(str(tmp_path / "empty"), code=ExitCode.INVITE)
    assert "no directory" in invite("some/where", code=ExitCode.INVITE)
    assert "not an invite" in invite("hello", code=ExitCode.INVITE)
    invite(good, "--address", "nowhere", code=ExitCode.ADDRESS)
    for wrong in ("soon", "0d", "30", "-1d", "30 days"):
        assert "30d" in invite(good, "--expires", wrong, code=ExitCode.USAGE)


def test_joining_by_an_expired_invite_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    expired = door(0, "203.0.113.7").model_copy(update={"good_until": 1_000_000_000}).encode()
    result = CliRunner().invoke(app, ["join", expired, "--dir", str(tmp_path / "peer"), "--plain"])
    assert result.exit_code == int(ExitCode.INVITE)
    assert "good until 2001-09-09" in result.stderr and "new one" in result.stderr
    assert not (tmp_path / "peer").exists()


def test_joining_by_an_invite_of_another_version_says_so_in_one_line(tmp_path: Path) -> None:
    theirs = door(0, "203.0.113.7").encode().replace("p2pt1", "p2pt9", 1)
    result = CliRunner().invoke(app, ["join", theirs, "--dir", str(tmp_path / "peer"), "--plain"])
    assert result.exit_code == int(ExitCode.INVITE)
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("p2p-trainer: "))
    assert "version 9" in line and "Update p2p-trainer" in line
    assert not (tmp_path / "peer").exists()
