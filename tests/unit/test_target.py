"""What a person may give as the run to join."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from dht_config.errors import DataError, FingerprintError, InviteError, ManifestError
from dht_config.identity import load_or_create_organiser_key
from dht_config.invite import Invite
from dht_config.manifest import EXAMPLES, example_manifest, run_id
from dht_config.records import SignedManifest, sign_manifest
from p2p_trainer.run_model import check_model, layout_of, refuse_another_layout, refuse_random_frozen
from p2p_trainer.running_statistics import trainable
from p2p_trainer.target import read_target

ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/QmZtmD2qt6fJot32nabSP3CUjicnypEBz7bHVDhPQt9aAy"
INVITE = Invite(run_id="tiny-0123456789abcdef", organiser_public_key=bytes(range(32)), addresses=(ADDRESS,))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_an_invite_says_where_and_which_run_but_not_what() -> None:
    target = read_target(INVITE.encode())
    assert target.run_id == INVITE.run_id
    assert target.invite == INVITE
    assert target.addresses == (ADDRESS,)
    assert target.manifest is None and target.task is None


def test_an_invite_may_come_wrapped_by_a_chat_program() -> None:
    code = INVITE.encode()
    assert read_target(f'  "{code[:60]}\n{code[60:]}"\n').invite == INVITE


def test_a_peers_directory_stands_for_the_invite_in_it(tmp_path: Path) -> None:
    (tmp_path / "door").mkdir()
    (tmp_path / "door/invite").write_text(INVITE.encode() + "\n")
    assert read_target("door").invite == INVITE
    (tmp_path / "door/invite").unlink()
    with pytest.raises(InviteError):
        read_target("door")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_named_without_a_path(name: str) -> None:
    target = read_target(name)
    assert target.manifest is not None and target.task is not None
    assert target.run_id == run_id(target.manifest, target.task.version)
    assert target.invite is None and target.addresses == ()


@pytest.mark.parametrize("file_name", ["run.toml", "RUN.TOML", "manifest"])
def test_a_manifest_file_is_read_whatever_its_name(tmp_path: Path, file_name: str) -> None:
    text = example_manifest("digits").replace("initial_peers = []", f'initial_peers = ["{ADDRESS}"]')
    (tmp_path / file_name).write_text(text)
    target = read_target(file_name)
    assert target.run_id == read_target("digits").run_id, "addresses are not part of what a run is"
    assert target.addresses == (ADDRESS,)


def test_a_file_with_the_name_of_an_example_comes_first(tmp_path: Path) -> None:
    (tmp_path / "digits").write_text(example_manifest("digits").replace('"digits"             # lower', '"mine" #'))
    assert read_target("digits").run_id.startswith("mine-")


def test_a_missing_manifest_is_a_manifest_error() -> None:
    with pytest.raises(ManifestError, match=r"There is no manifest at missing\.toml"):
        read_target("missing.toml")


def test_a_missing_file_is_told_from_a_broken_invite() -> None:
    with pytest.raises(InviteError, match="There is no file runs/mine that can be read, and it is not an invite"):
        read_target("runs/mine")


def test_an_invite_that_lost_its_end_is_said_to_be_cut_off() -> None:
    with pytest.raises(InviteError, match="characters are there"):
        read_target(INVITE.encode()[:-10])


@pytest.mark.parametrize("text", ["", " ", "hello", "x" * 300, "digts", "/" * 300])
def test_nonsense_is_no_invite(text: str) -> None:
    with pytest.raises(InviteError):
        read_target(text)


def test_a_directory_is_no_manifest(tmp_path: Path) -> None:
    (tmp_path / "run.toml").mkdir()
    with pytest.raises(ManifestError, match="cannot be read"):
        read_target("run.toml")
    with pytest.raises(InviteError):
        read_target(str(tmp_path))


def test_a_task_that_is_not_installed_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[run]\nname = "tiny"\n[task]\nname = "chess"\n')
    with pytest.raises((ManifestError, DataError), match="chess"):
        read_target("run.toml")


class OneTask:
    """A task whose model is made by a function; nothing else of it is used."""

    name, version, unit = "one", 1, "samples"

    def __init__(self, build: object) -> None:
        self.build_model = build


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_shipped_model_is_checked_without_drawing_its_values(name: str) -> None:
    target = read_target(name)
    before = torch.get_rng_state()
    check_model(target.manifest, target.task)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_cannot_be_built_without_values_is_built_with_them() -> None:
    def build() -> nn.Module:
        layer = nn.Linear(8, 8)
        assert float(layer.weight.detach().sum()) < 1e6  # a tensor on "meta" has no values
        return layer

    threads = torch.get_num_threads()
    check_model(read_target("digits").manifest, OneTask(build))
    assert torch.get_num_threads() == threads


def test_a_model_with_fewer_parameters_than_fragments_is_refused() -> None:
    manifest = read_target("digits").manifest
    with pytest.raises(ManifestError, match=r"\[run\] fragments = 2"):
        check_model(manifest, OneTask(lambda: nn.Linear(1, 1, bias=False)))


def test_only_what_takes_gradients_is_cut() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    assert list(trainable(model)) == ["1.weight", "1.bias"]
    assert layout_of(model, read_target("digits").manifest).num_elements == 20


def frozen(*layers: int, random: bool = False) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in layers:
        model[layer].requires_grad_(False)
        if not random:
            nn.init.constant_(model[layer].weight, 0.5)
            nn.init.constant_(model[layer].bias, 0.5)
    return model


def test_a_model_of_which_nothing_is_trained_is_refused_at_once() -> None:
    manifest = read_target("digits").manifest
    with pytest.raises(ManifestError, match="nothing to train"):
        check_model(manifest, OneTask(lambda: frozen(0, 1)))


def test_a_manifest_knows_what_is_trained_and_one_from_before_says_nothing(tmp_path: Path) -> None:
    manifest = read_target("digits").manifest
    ours, theirs = layout_of(frozen(0), manifest), layout_of(frozen(1), manifest)
    assert ours.num_elements == theirs.num_elements and ours.digest != theirs.digest
    key = load_or_create_organiser_key(tmp_path / "organiser.key")
    for digest in (ours.digest, None):
        signed = sign_manifest(key, manifest, 1, [bytes(32)] * 2, digest)
        again = SignedManifest.from_payload(signed.to_payload())
        again.verify(key.public_key)
        refuse_another_layout(again, ours)
        if again.layout_digest is not None:
            with pytest.raises(FingerprintError, match="not the run's: its task trains 20 values in 2 tensors"):
                refuse_another_layout(again, theirs)


def test_frozen_values_must_be_the_same_at_every_build() -> None:
    for build in (lambda: frozen(), lambda: frozen(0)):
        refuse_random_frozen(OneTask(build), build())
    with pytest.raises(ManifestError, match=r"freezes 0.weight, which begins with other values"):
        refuse_random_frozen(OneTask(lambda: frozen(0, random=True)), frozen(0, random=True))
