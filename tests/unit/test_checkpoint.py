import copy
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from dht_config.errors import CheckpointError
from dht_config.manifest import InnerOptimizerSection
from p2p_trainer.checkpoint import (
    DAMAGED_NAME,
    NEWEST_NAME,
    PREVIOUS_NAME,
    load_checkpoint,
    optimizer_from_tensors,
    optimizer_to_tensors,
    save_checkpoint,
)
from p2p_trainer.inner_optimizer import build_inner_optimizer


def save_numbered(directory: Path, number: int) -> None:
    save_checkpoint(directory, {"value": torch.full((1000,), float(number))}, {"number": number})


def load_numbered(directory: Path, warnings: list[str]) -> int | None:
    checkpoint = load_checkpoint(directory, warnings.append)
    if checkpoint is None:
        return None
    number = checkpoint.meta["number"]
    assert torch.equal(checkpoint.tensors["value"], torch.full((1000,), float(number)))
    assert isinstance(number, int)
    return number


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    shared = torch.randn(3, 4)
    tensors = {
        "float": torch.randn(5, 2),
        "half": torch.randn(7).to(torch.bfloat16),
        "integer": torch.tensor(2**40),
        "flag": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 3),
        "transposed": shared.T,
        "tied": shared,
        "tied too": shared,
    }
    meta = {
        "samples": 2**53 + 1,
        "share": 0.1 + 0.2,
        "name": 'Zoë "quoted"\n',
        "spans": [[0, 5, 3]],
        "none": None,
    }
    save_checkpoint(tmp_path / "made" / "for it", tensors, meta)
    checkpoint = load_checkpoint(tmp_path / "made" / "for it", pytest.fail)
    assert checkpoint is not None
    assert checkpoint.meta == meta
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert checkpoint.tensors[name].dtype == tensor.dtype
        assert torch.equal(checkpoint.tensors[name], tensor)


def test_a_directory_without_a_checkpoint_has_none_and_warns_of_nothing(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path, pytest.fail) is None
    assert load_checkpoint(tmp_path / "not there", pytest.fail) is None


def test_the_checkpoint_before_the_newest_is_kept_and_no_other(tmp_path: Path) -> None:
    for number in range(4):
        save_numbered(tmp_path, number)
    assert names(tmp_path) == {NEWEST_NAME, PREVIOUS_NAME}
    (tmp_path / NEWEST_NAME).unlink()
    assert load_numbered(tmp_path, []) == 2


def damage_by_emptying(path: Path) -> None:
    path.write_bytes(b"")


def damage_by_truncating(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def damage_by_losing_the_last_byte(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def damage_by_appending(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def damage_by_flipping_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 4
    path.write_bytes(content)


def damage_by_zeroing_the_start(path: Path) -> None:
    path.write_bytes(bytes(4096) + path.read_bytes()[4096:])


DAMAGES = [
    damage_by_emptying,
    damage_by_truncating,
    damage_by_losing_the_last_byte,
    damage_by_appending,
    damage_by_flipping_a_bit,
    damage_by_zeroing_the_start,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_costs_a_warning_and_the_one_before_it_is_read(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    save_numbered(tmp_path, 1)
    save_numbered(tmp_path, 2)
    damage(tmp_path / NEWEST_NAME)
    warnings: list[str] = []
    assert load_numbered(tmp_path, warnings) == 1
    assert len(warnings) == 1
    assert str(tmp_path / NEWEST_NAME) in warnings[0]
    # The next save must not push the only good one out.
    save_numbered(tmp_path, 3)
    assert names(tmp_path) == {NEWEST_NAME, PREVIOUS_NAME, DAMAGED_NAME}
    damage(tmp_path / NEWEST_NAME)
    assert load_numbered(tmp_path, warnings) == 1


@pytest.mark.parametrize("damage", DAMAGES)
def test_two_damaged_checkpoints_cost_warnings_and_nothing_is_read(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    save_numbered(tmp_path, 1)
    save_numbered(tmp_path, 2)
    damage(tmp_path / NEWEST_NAME)
    damage(tmp_path / PREVIOUS_NAME)
    warnings: list[str] = []
    assert load_numbered(tmp_path, warnings) is None
    assert len(warnings) == 2
    save_numbered(tmp_path, 3)
    assert load_numbered(tmp_path, warnings) == 3


def test_no_flipped_bit_anywhere_goes_unnoticed_or_raises(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, {"a": torch.arange(6.0), "b": torch.ones(2, 2)}, {"number": 7, "list": [1.5]})
    good = (tmp_path / NEWEST_NAME).read_bytes()
    expected = load_checkpoint(tmp_path, pytest.fail)
    assert expected is not None
    for position in range(len(good)):
        for bit in (0, 3, 6):
            flipped = bytearray(good)
            flipped[position] ^= 1 << bit
            (tmp_path / NEWEST_NAME).write_bytes(flipped)
            warnings: list[str] = []
            checkpoint = load_checkpoint(tmp_path, warnings.append)
            if checkpoint is None:
                assert len(warnings) == 1
            else:  # padding of the header: nothing that is used has changed
                assert checkpoint.meta == expected.meta
                assert checkpoint.tensors.keys() == expected.tensors.keys()
                assert all(torch.equal(checkpoint.tensors[n], t) for n, t in expected.tensors.items())


SAVER = """
import os, sys, torch
from pathlib import Path
from p2p_trainer.checkpoint import save_checkpoint
torch.set_num_threads(1)  # a fork would not take torch's threads along
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        number = int(line)
        while True:
            number += 1
            value = torch.full((2_000_000,), float(number))
            save_checkpoint(Path(sys.argv[1]), {"value": value}, {"number": number})
            print(number, flush=True)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""


def test_a_kill_during_a_save_never_costs_the_checkpoint_saved_before(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    number = 0
    with subprocess.Popen(
        [sys.executable, "-c", SAVER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as saver:
        assert saver.stdin is not None
        assert saver.stdout is not None
        for attempt in range(20):
            print(number, file=saver.stdin, flush=True)
            child = int(saver.stdout.readline())
            saved = [int(saver.stdout.readline()) for _ in range(2)]
            # Half of them while the next one is being written, the others wherever it is after a save.
            while attempt % 2 and not any(directory.glob("checkpoint.tmp/*")):
                assert saver.poll() is None
            os.kill(child, signal.SIGKILL)
            while (line := saver.stdout.readline().strip()) != "ended":
                saved.append(int(line))
            checkpoint = load_checkpoint(directory, pytest.fail)
            assert checkpoint is not None
            number = checkpoint.meta["number"]
            assert number in (saved[-1], saved[-1] + 1)
            assert torch.equal(checkpoint.tensors["value"], torch.full((2_000_000,), float(number)))
            assert names(directory) == {NEWEST_NAME, PREVIOUS_NAME}
        saver.stdin.close()


def test_a_full_disk_raises_and_loses_nothing(tmp_path: Path) -> None:
    save_numbered(tmp_path, 1)
    save_numbered(tmp_path, 2)
    with file_size_limit(1000), pytest.raises(CheckpointError) as caught:
        save_numbered(tmp_path, 3)
    assert str(tmp_path / NEWEST_NAME) in caught.value.problem
    assert "too large" in caught.value.problem
    assert names(tmp_path) == {NEWEST_NAME, PREVIOUS_NAME}
    assert load_numbered(tmp_path, []) == 2
    save_numbered(tmp_path, 4)
    assert load_numbered(tmp_path, []) == 4


@pytest.fixture
def tiny_disk() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp())
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(directory)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        directory.rmdir()
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)
        directory.rmdir()


@pytest.mark.skipif(shutil.which("mount") is None, reason="no mount command")
def test_a_really_full_file_system_raises_and_loses_nothing(tiny_disk: Path) -> None:
    save_numbered(tiny_disk, 1)
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tiny_disk, {"value": torch.zeros(100_000)}, {})
    assert "No space left" in caught.value.problem
    assert names(tiny_disk) == {NEWEST_NAME}
    assert load_numbered(tiny_disk, []) == 1


@contextmanager
def without_privileges() -> Iterator[None]:
    """Root may write anywhere: become nobody, as far as files are concerned."""
    euid = os.geteuid()
    if euid == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(euid)


def test_a_read_only_directory_raises_naming_the_path_and_still_loads() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_numbered(directory, 1)
        (directory / NEWEST_NAME).chmod(0o644)
        directory.chmod(0o555)
        with without_privileges():
            with pytest.raises(CheckpointError) as caught:
                save_numbered(directory, 2)
            assert load_numbered(directory, []) == 1
        assert str(directory / NEWEST_NAME) in caught.value.problem
        directory.chmod(0o755)
        assert names(directory) == {NEWEST_NAME}


def test_a_checkpoint_that_may_not_be_read_is_an_error_and_is_not_called_damaged() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        save_numbered(directory, 1)
        (directory / NEWEST_NAME).chmod(0o000)
        with without_privileges(), pytest.raises(CheckpointError) as caught:
            load_checkpoint(directory, pytest.fail)
        assert str(directory / NEWEST_NAME) in caught.value.problem


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    save_numbered(tmp_path, 1)
    (tmp_path / "checkpoint.tmp").mkdir()
    (tmp_path / "checkpoint.tmp" / "new").write_bytes(b"half of a")
    assert load_numbered(tmp_path, []) == 1
    assert names(tmp_path) == {NEWEST_NAME}


def test_a_file_system_without_hard_links_keeps_both_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    for number in range(3):
        save_numbered(tmp_path, number)
    assert load_numbered(tmp_path, []) == 2
    (tmp_path / NEWEST_NAME).unlink()
    assert load_numbered(tmp_path, []) == 1


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=generator)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    "section",
    [
        InnerOptimizerSection(name="adamw", lr=0.01, weight_decay=0.1),
        InnerOptimizerSection(name="sgd", lr=0.01, momentum=0.9),
        InnerOptimizerSection(name="sgd", lr=0.01),
    ],
)
def test_an_optimizer_goes_on_from_a_checkpoint_as_if_never_stopped(
    tmp_path: Path, section: InnerOptimizerSection
) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = build_inner_optimizer(model.parameters(), section)
    train(model, optimizer, 3)

    tensors, meta = optimizer_to_tensors(optimizer)
    save_checkpoint(tmp_path, tensors, meta)
    restored_model = copy.deepcopy(model)
    restored = build_inner_optimizer(restored_model.parameters(), section)
    checkpoint = load_checkpoint(tmp_path, pytest.fail)
    assert checkpoint is not None
    optimizer_from_tensors(restored, checkpoint.tensors, checkpoint.meta)

    train(model, optimizer, 4)
    train(restored_model, restored, 4)
    for ours, theirs in zip(model.parameters(), restored_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_an_optimizer_that_has_not_stepped_yet_is_restored_as_such() -> None:
    model = nn.Linear(2, 2)
    optimizer = build_inner_optimizer(model.parameters(), InnerOptimizerSection())
    tensors, meta = optimizer_to_tensors(optimizer)
    assert tensors == {}
    optimizer_from_tensors(optimizer, tensors, json.loads(json.dumps(meta)))
    train(nn.Sequential(nn.Linear(3, 2), model), optimizer, 1)


def test_restoring_leaves_the_checkpoints_tensors_alone() -> None:
    model = nn.Linear(3, 2)
    optimizer = build_inner_optimizer(model.parameters(), InnerOptimizerSection())
    train(model, optimizer, 1)
    tensors, meta = optimizer_to_tensors(optimizer)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    optimizer_from_tensors(optimizer, tensors, meta)
    train(model, optimizer, 2)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items())


def test_the_state_of_another_model_or_optimizer_is_refused() -> None:
    model = nn.Linear(3, 2)
    optimizer = build_inner_optimizer(model.parameters(), InnerOptimizerSection())
    train(model, optimizer, 1)
    tensors, meta = optimizer_to_tensors(optimizer)
    larger = build_inner_optimizer(nn.Linear(3, 4).parameters(), InnerOptimizerSection())
    with pytest.raises(CheckpointError, match="shapes"):
        optimizer_from_tensors(larger, tensors, meta)
    other = build_inner_optimizer(model.parameters(), InnerOptimizerSection(name="sgd"))
    with pytest.raises(CheckpointError, match="kind"):
        optimizer_from_tensors(other, tensors, meta)
    for name in ("0.exp_avg", "9.exp_avg", "x.exp_avg", "0"):
        with pytest.raises(CheckpointError, match="does not fit"):
            optimizer_from_tensors(optimizer, {**tensors, name: torch.zeros(17)}, meta)
