"""Which programs understand each other, and what a person does when two of them do not.

The signed manifest is what a newcomer reads first, and its form is the same in every version: it names the protocol the
run speaks and the program that started it. A newcomer of another protocol stops there. It has no run id in common with
the run, so it can call none of the peers' handlers and write none of their records: nobody in the run notices.
"""

from __future__ import annotations

import re

from dht_config.errors import FingerprintError
from dht_config.manifest import PROTOCOL_VERSION
from dht_config.records import SignedManifest, software_version

_VERSION = re.compile(r"[0-9][0-9A-Za-z.+!-]{0,63}", re.ASCII)


def other_protocol(signed: SignedManifest) -> FingerprintError | None:
    """The refusal of a run that speaks another protocol than this program, or None."""
    if signed.protocol_version == PROTOCOL_VERSION:
        return None
    ours, theirs = software_version(), signed.software_version
    return FingerprintError(
        f"The run {signed.run_id()} speaks protocol version {signed.protocol_version} (p2p-trainer {theirs}), this "
        f"program {PROTOCOL_VERSION} (p2p-trainer {ours}): they cannot average with each other.",
        f"Install the run's version: {install_command(theirs)} (in a container: take the image of that version).",
    )


def install_command(version: str) -> str:
    """What brings a version of this program.

    :param version: from a record, so a stranger may have written it: what a person is told to paste must be a version
    """
    if _VERSION.fullmatch(version):
        return f'pip install --upgrade "p2p-trainer=={version}"'
    return "pip install --upgrade p2p-trainer"
