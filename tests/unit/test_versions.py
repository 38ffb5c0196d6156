"""Programs of different versions: both are named, with the command that helps, and no stranger writes that command."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from saved_run import SMALL_DIGITS, sign

from dht_config.errors import FingerprintError, RecordError
from dht_config.identity import load_or_create_organiser_key
from dht_config.keys import manifest_key, run_manifest_key
from dht_config.manifest import PROTOCOL_VERSION, parse_manifest
from dht_config.records import _MANIFEST_DOMAIN, SignedManifest, software_version
from dht_config.versions import install_command, other_protocol
from p2p_trainer.run_model import checked_manifest
from p2p_trainer.target import Target, manifest_target
from peers import door

MANIFEST = parse_manifest(SMALL_DIGITS, "test")


def signed_by(directory: Path, **changed: Any) -> SignedManifest:
    """A run's manifest as a program of another version signs it."""
    signed = sign(directory, MANIFEST, [bytes(32), bytes(32)]).model_copy(
        update={"software_version": "7.8.9", **changed}
    )
    key = load_or_create_organiser_key(directory / "organiser.key")
    return signed.model_copy(update={"signature": key.sign(signed.signed_bytes())})


@pytest.mark.parametrize("protocol", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_a_refusal_names_both_versions_and_the_command(tmp_path: Path, protocol: int) -> None:
    signed = signed_by(tmp_path, protocol_version=protocol)
    with pytest.raises(FingerprintError) as refused:
        checked_manifest(signed, Target(run_id=signed.run_id()), allow_files=False)
    for said in (
        f"protocol version {protocol} (p2p-trainer 7.8.9)",
        f"program {PROTOCOL_VERSION} (p2p-trainer {software_version()})",
    ):
        assert said in refused.value.problem
    assert 'pip install --upgrade "p2p-trainer==7.8.9"' in refused.value.remedy


@pytest.mark.parametrize("protocol", [PROTOCOL_VERSION, PROTOCOL_VERSION + 1])
def test_what_a_later_version_adds_to_a_manifest_is_signed_for_and_does_not_make_it_unreadable(
    tmp_path: Path, protocol: int
) -> None:
    signed = signed_by(tmp_path, protocol_version=protocol)
    key = load_or_create_organiser_key(tmp_path / "organiser.key")
    fields = {**signed.model_dump(exclude={"signature", "layout_digest"}), "purpose": b"new", "much": 2.5}
    signature = key.sign(_MANIFEST_DOMAIN + msgpack.packb(fields))
    read = SignedManifest.from_payload(msgpack.packb({**fields, "signature": signature}))
    read.verify(key.public_key)
    assert (other_protocol(read) is None) == (protocol == PROTOCOL_VERSION)
    assert SignedManifest.from_payload(read.to_payload()) == read, "whoever passes it on drops nothing"
    changed = SignedManifest.from_payload(msgpack.packb({**fields, "purpose": "other", "signature": signature}))
    with pytest.raises(RecordError, match="signature"):
        changed.verify()
    deep: Any = 1
    for _ in range(500):
        deep = [deep]
    for wrong in (deep, float("inf"), {"a": 1}):
        with pytest.raises(RecordError):
            SignedManifest.from_payload(msgpack.packb({**fields, "purpose": wrong, "signature": signature}))


def test_another_product_version_with_the_same_protocol_is_welcome(tmp_path: Path) -> None:
    signed = signed_by(tmp_path)
    assert other_protocol(signed) is None
    manifest, _ = checked_manifest(signed, Target(run_id=signed.run_id()), allow_files=False)
    assert manifest == MANIFEST


def test_another_version_of_the_task_names_both_as_well(tmp_path: Path) -> None:
    signed = signed_by(tmp_path, task_version=5)
    with pytest.raises(FingerprintError, match=r"task digits: ours 1, theirs 5.*p2p-trainer==7.8.9"):
        checked_manifest(signed, Target(run_id=signed.run_id()), allow_files=False)


def test_who_comes_with_the_manifest_of_a_run_in_another_protocol_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = signed_by(tmp_path, protocol_version=PROTOCOL_VERSION + 1)
    ours = manifest_target(MANIFEST).run_id
    entry = SimpleNamespace(value=theirs.to_payload())

    class Node:
        async def get_many(self, keys: list[str], expiration: float) -> dict[str, Any]:
            assert keys == [run_manifest_key(ours), manifest_key()]
            return {keys[0]: None, keys[1]: SimpleNamespace(value={theirs.run_id(): entry})}

    async def still_there() -> None:
        pass

    there: Callable[[], Awaitable[object]] = still_there
    with pytest.raises(FingerprintError, match=r"protocol version .* \(p2p-trainer 7.8.9\)"):
        asyncio.run(door.fetch_manifest(Node(), ours, None, still_there=there, attempts=1))  # type: ignore[arg-type]


@pytest.mark.parametrize("version", ["1; rm -rf ~", "$(id)", "", "latest", "1 2", '1"', "-e.", "1\n"])
def test_what_a_person_is_told_to_paste_is_never_a_strangers_text(version: str) -> None:
    assert install_command(version) == "pip install --upgrade p2p-trainer"


def test_images_are_labelled_with_the_products_version() -> None:
    dockerfile = (Path(__file__).parents[2] / "docker/Dockerfile").read_text()
    assert f"\nARG VERSION={software_version()}\n" in dockerfile
