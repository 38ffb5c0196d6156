"""Invites survive what people and chat programs do to them, and say so when they did not."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dht_config.errors import AddressError, ExitCode, InviteError
from dht_config.invite import MAX_ADDRESSES, Invite

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

PEER_IDS = (
    "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
    "QmSoLPppuBtQSGwKDZT2M73ULpjvfd3aZ6ha4oFGL1KrGM",
)
INVITE = Invite(
    run_id="stdlib-text-0123456789abcdef",
    organiser_public_key=bytes(range(32)),
    addresses=(
        f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER_IDS[0]}",
        f"/ip6/2001:db8::1/tcp/31337/p2p/{PEER_IDS[0]}",
        f"/dns4/peer.example.org/tcp/31337/p2p/{PEER_IDS[1]}",
    ),
)
CODE = INVITE.encode()

addresses = st.builds(
    "/ip4/{}/tcp/{}/p2p/{}".format,
    st.ip_addresses(v=4).filter(lambda ip: not ip.is_unspecified),
    st.integers(1, 65535),
    st.sampled_from(PEER_IDS),
)
invites = st.builds(
    Invite,
    run_id=st.from_regex(r"[a-z0-9][a-z0-9-]{0,40}-[0-9a-f]{16}", fullmatch=True),
    organiser_public_key=st.binary(min_size=32, max_size=32),
    addresses=st.lists(addresses, min_size=1, max_size=MAX_ADDRESSES).map(tuple),
    good_until=st.none() | st.integers(0, 2**40 - 1),
)


@unhurried
@given(invites)
def test_an_invite_is_one_word_of_letters_and_digits_that_reads_back(invite: Invite) -> None:
    code = invite.encode()
    assert re.fullmatch(r"p2pt[12][a-z2-7]+", code)
    assert Invite.decode(code) == invite


def test_an_invite_with_one_address_is_short_and_a_second_address_of_the_same_peer_is_cheap() -> None:
    one = Invite(run_id=INVITE.run_id, organiser_public_key=INVITE.organiser_public_key, addresses=INVITE.addresses[:1])
    two = Invite(run_id=INVITE.run_id, organiser_public_key=INVITE.organiser_public_key, addresses=INVITE.addresses[:2])
    assert len(one.encode()) < 200
    assert len(two.encode()) - len(one.encode()) < 45


@pytest.mark.parametrize(
    "seen",
    [
        f"  {CODE}\n",
        f'"{CODE}"',
        f"\u201c{CODE}\u201d.",
        f"<{CODE}>",
        f"[{CODE}],",
        f"({CODE})!",
        CODE.upper(),
        "\n".join(CODE[start : start + 60] for start in range(0, len(CODE), 60)),
        "\r\n> ".join(CODE[start : start + 20] for start in range(0, len(CODE), 20)),
        CODE[:50] + "\u200b\u00ad" + CODE[50:],
        f"p2p-trainer join {CODE}",
        f"{CODE} -- see you there, thanks",
        f"Join us: `{CODE}`",
    ],
)
def test_an_invite_survives_chats_mails_and_shells(seen: str) -> None:
    assert Invite.decode(seen) == INVITE


def test_every_way_of_cutting_an_invite_off_is_told_as_such() -> None:
    for length in range(len("p2pt1"), len(CODE)):
        with pytest.raises(InviteError, match="cut off") as caught:
            Invite.decode(CODE[:length])
        assert caught.value.exit_code is ExitCode.INVITE
    with pytest.raises(InviteError, match="not an invite, or its beginning is cut off"):
        Invite.decode(CODE[3:])


@unhurried
@given(
    st.integers(min_value=len("p2pt1"), max_value=len(CODE) - 1),
    st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"),
)
def test_a_changed_letter_is_always_noticed(position: int, letter: str) -> None:
    changed = CODE[:position] + letter + CODE[position + 1 :]
    if changed == CODE:
        return
    with pytest.raises(InviteError, match=r"changed|cut off"):
        Invite.decode(changed)


def test_two_letters_swapped_and_a_letter_no_invite_holds_are_changes() -> None:
    position = next(index for index in range(40, len(CODE)) if CODE[index] != CODE[index + 1])
    swapped = CODE[:position] + CODE[position + 1] + CODE[position] + CODE[position + 2 :]
    for changed in (swapped, CODE[:40] + "0" + CODE[41:]):
        with pytest.raises(InviteError, match="changed"):
            Invite.decode(changed)


@pytest.mark.parametrize("text", ["", "hello", "/ip4/203.0.113.7/tcp/31337", "p2p-trainer", "run.toml", "x" * 70_000])
def test_something_else_is_told_to_be_no_invite(text: str) -> None:
    with pytest.raises(InviteError, match=r"not an invite|too long"):
        Invite.decode(text)


def test_what_only_begins_like_an_invite_is_not_called_cut_off() -> None:
    for rest in ("volunteer", "77777777", "aaaaaaaaaa", "z" * 5000):
        with pytest.raises(InviteError, match="no invite, or it was changed") as caught:
            Invite.decode(f"p2pt1{rest}")
        assert "cut off" not in caught.value.problem


def test_a_text_that_is_too_long_is_told_with_its_length() -> None:
    with pytest.raises(InviteError, match="far too long for an invite: 70000 characters"):
        Invite.decode(CODE + "x" * (70_000 - len(CODE)))


def test_the_longest_invite_reads_back() -> None:
    host = ".".join(["x" * 63] * 3 + ["y" * 61])
    addresses = tuple(f"/dns4/{host}/tcp/{65535 - at}/p2p/{PEER_IDS[at % 2]}" for at in range(MAX_ADDRESSES))
    invite = Invite(run_id="r" * 64, organiser_public_key=bytes(32), addresses=addresses)
    assert Invite.decode(invite.encode()) == invite
    with pytest.raises(InviteError, match="cut off"):
        Invite.decode(invite.encode()[:-1])


def test_an_invite_of_another_version_is_told_from_a_broken_one() -> None:
    with pytest.raises(InviteError, match=r"version 3; this program reads 1 and 2.*Update p2p-trainer"):
        Invite.decode(CODE.replace("p2pt1", "p2pt3"))
    with pytest.raises(InviteError, match="changed"):
        Invite.decode(CODE.replace("p2pt1", "p2pt2"))


def test_an_invite_with_an_expiry_is_good_until_then_and_refused_in_words_afterwards() -> None:
    invite = INVITE.model_copy(update={"good_until": 1_800_000_000})
    code = invite.encode()
    assert code.startswith("p2pt2") and Invite.decode(f"Join us: {code}, thanks") == invite
    invite.refuse_if_expired(1_800_000_000)
    INVITE.refuse_if_expired(1e12)
    with pytest.raises(
        InviteError, match="good until 2027-01-15 08:00 UTC; this machine's clock says 2027-01-15 08:01"
    ):
        invite.refuse_if_expired(1_800_000_060)
    for length in range(5, len(code)):
        with pytest.raises(InviteError, match="cut off"):
            Invite.decode(code[:length])


@unhurried
@given(st.text() | st.text(alphabet="abcdefghijklmnopqrstuvwxyz234567").map(lambda code: f"p2pt1{code}"))
def test_any_text_is_an_invite_or_an_invite_error(text: str) -> None:
    with pytest.raises(InviteError):
        Invite.decode(text)


def test_an_invite_cannot_be_made_of_bad_parts() -> None:
    key, good = INVITE.organiser_public_key, INVITE.addresses
    with pytest.raises(AddressError):
        Invite(run_id="run", organiser_public_key=key, addresses=("nowhere",))
    with pytest.raises(ValidationError):
        Invite(run_id="run", organiser_public_key=key[:31], addresses=good)
    with pytest.raises(ValidationError):
        Invite(run_id="run", organiser_public_key=key, addresses=())
    with pytest.raises(ValidationError):
        Invite(run_id="Run.1", organiser_public_key=key, addresses=good)
