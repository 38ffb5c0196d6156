"""Invites made of invites: several doors to one run, an expiry."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from dht_config.address import parse_address
from dht_config.errors import InviteError, UsageError
from dht_config.invite import MAX_ADDRESSES, Invite
from p2p_trainer.run_files import INVITE_NAME

_SPAN = re.compile(r"(\d{1,4})([hdw])", re.ASCII)
_SECONDS = {"h": 3600, "d": 86400, "w": 7 * 86400}


def door_of(text: str) -> Invite:
    """The invite that a peer's directory holds, or the one that was given.

    Raises InviteError.
    """
    directory = Path(text)
    if len(text) < 256 and directory.is_dir():
        try:
            return Invite.decode((directory / INVITE_NAME).read_text())
        except OSError as error:
            raise InviteError(
                f"There is no invite in {directory} ({error.strerror or error}).",
                "Start the peer there once: it writes one as soon as others can dial it.",
            ) from error
        except UnicodeDecodeError as error:
            raise InviteError(
                f"{directory / INVITE_NAME} is damaged: it is not UTF-8 text.",
                "Start the peer there once more: it writes the invite anew.",
            ) from error
    if "/" in text and len(text) < 256:
        raise InviteError(f"There is no directory {text}, and it is not an invite.", "Give a peer's directory.")
    return Invite.decode(text)


def combined(doors: Sequence[Invite], addresses: Sequence[str], good_until: int | None) -> Invite:
    """One invite with all addresses, those given before those of the doors, each once.

    :param addresses: one without a peer id is the first door's

    Raises InviteError if the doors lead to different runs, AddressError for an address that is none.
    """
    first = doors[0]
    for other in doors[1:]:
        if (other.run_id, other.organiser_public_key) != (first.run_id, first.organiser_public_key):
            raise InviteError(
                f"These are doors to different runs: {first.run_id} and {other.run_id}"
                + (", of another organiser." if other.run_id == first.run_id else "."),
                "Give doors to one run only.",
            )
    peer_id = parse_address(first.addresses[0]).peer_id
    texts = [text if "/p2p/" in text else f"{text}/p2p/{peer_id}" for text in addresses]
    texts = [parse_address(text).text for text in texts]
    # In turns, so that every door is in it however many addresses each has.
    for rank in range(MAX_ADDRESSES):
        texts += [door.addresses[rank] for door in doors if rank < len(door.addresses)]
    chosen = list(dict.fromkeys(texts))[:MAX_ADDRESSES]
    peers = [parse_address(text).peer_id for text in chosen]
    # One peer's addresses side by side make a shorter invite.
    chosen = [text for _, text in sorted(zip(peers, chosen, strict=True), key=lambda pair: peers.index(pair[0]))]
    return Invite(
        run_id=first.run_id,
        organiser_public_key=first.organiser_public_key,
        addresses=tuple(chosen),
        good_until=good_until,
    )


def seconds_in(text: str) -> int:
    """Read ``12h``, ``30d`` or ``8w``. :raises UsageError:"""
    match = _SPAN.fullmatch(text.strip())
    if match is None or not int(match[1]):
        raise UsageError(f"--expires: {text!r} is no time.", "Give hours, days or weeks: 12h, 30d, 8w.")
    return int(match[1]) * _SECONDS[match[2]]
