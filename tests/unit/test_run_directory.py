"""The directory of one peer: checked, locked, and what it remembers."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dht_config.errors import DirectoryError, ExitCode
from dht_config.identity import load_or_create_organiser_key
from dht_config.manifest import parse_manifest
from dht_config.records import sign_manifest
from p2p_trainer.metrics import MetricsWriter
from p2p_trainer.run_directory import RunDirectory

MANIFEST = parse_manifest('[run]\nname = "tiny"\nfragments = 2\n[task]\nname = "text"\n', source="run.toml")


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "deep" / "run")


def test_a_directory_is_made_with_its_parents(directory: RunDirectory) -> None:
    assert directory.path.is_dir()


def test_a_second_peer_in_the_same_directory_is_refused(directory: RunDirectory) -> None:
    with pytest.raises(DirectoryError, match="Another peer is running in") as raised:
        RunDirectory(directory.path)
    assert "--dir" in raised.value.remedy
    directory.close()
    RunDirectory(directory.path).close()


def test_a_lock_is_held_against_other_processes_and_ends_with_its_own(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from p2p_trainer.run_directory import RunDirectory\n"
        "kept = RunDirectory(Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2],
    ) as other:  # fmt: skip
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(DirectoryError):
            RunDirectory(tmp_path)
        other.kill()
    RunDirectory(tmp_path).close()


@pytest.mark.parametrize(
    ("below", "problem", "remedy"),
    [
        ("", "{file} is a file, not a directory.", "a name that does not exist yet"),
        ("deeper", "The directory {file}/deeper cannot be made: {file} is a file.", "leads through no file"),
        ("deeper/still", "The directory {file}/deeper/still cannot be made: {file} is a file.", "through no file"),
    ],
)
def test_a_path_that_is_or_goes_through_a_file_is_refused(
    tmp_path: Path, below: str, problem: str, remedy: str
) -> None:
    file = tmp_path / "file"
    file.write_text("not a directory")
    with pytest.raises(DirectoryError) as raised:
        RunDirectory(file / below)
    assert raised.value.problem == problem.format(file=file)
    assert remedy in raised.value.remedy and "--dir" in raised.value.remedy
    assert raised.value.exit_code == ExitCode.DIRECTORY
    assert file.read_text() == "not a directory"


def test_a_directory_that_may_only_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "read-only"
    place.mkdir()
    if os.geteuid() == 0:  # root may write everywhere, except where nobody may
        place = Path("/proc/sys")
    else:
        place.chmod(0o500)
    with pytest.raises(DirectoryError, match="cannot be written to"):
        RunDirectory(place)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EACCES, "Make {place} writable for this user"),
        (errno.EROFS, "a file system that can be written to"),
        (errno.ENOSPC, "Free some space"),
        (errno.ENAMETOOLONG, "Choose another directory with --dir"),
    ],
)
@pytest.mark.parametrize("exists", [True, False], ids=["there", "not there"])
def test_the_remedy_fits_what_is_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str, exists: bool
) -> None:
    path = tmp_path if exists else tmp_path / "deep" / "run"

    def refused(self: Path, *arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(DirectoryError) as raised:
        RunDirectory(path)
    done = "written to" if exists else f"made in {tmp_path}"
    assert raised.value.problem == f"The directory {path} cannot be {done}: {os.strerror(number)}."
    assert remedy.format(place=tmp_path) in raised.value.remedy and "--dir" in raised.value.remedy


def test_starts_are_counted_also_after_damage(directory: RunDirectory) -> None:
    assert [directory.count_start() for _ in range(3)] == [0, 1, 2]
    (directory.path / "starts").write_text("nonsense")
    assert [directory.count_start() for _ in range(2)] == [0, 1]


@pytest.mark.parametrize(("text", "port"), [("31337", 31337), ("0", 0), ("-5", 0), ("65536", 0), ("x", 0), ("", 0)])
def test_a_remembered_port_is_a_port_or_none(directory: RunDirectory, text: str, port: int) -> None:
    assert directory.remembered_port() == 0
    (directory.path / "port").write_text(text)
    assert directory.remembered_port() == port


def test_a_port_is_remembered(directory: RunDirectory) -> None:
    directory.remember_port(4242)
    assert directory.remembered_port() == 4242


def test_a_manifest_is_kept_and_a_changed_one_is_not_believed(directory: RunDirectory, tmp_path: Path) -> None:
    assert directory.signed_manifest() is None
    key = load_or_create_organiser_key(tmp_path / "key")
    signed = sign_manifest(key, MANIFEST, 1, [bytes(32), bytes(32)])
    directory.keep_signed_manifest(signed)
    assert directory.signed_manifest() == signed
    directory.keep_signed_manifest(signed.model_copy(update={"task_version": 2}))
    assert directory.signed_manifest() is None
    (directory.path / "manifest.signed").write_bytes(b"\xc1damaged")
    assert directory.signed_manifest() is None


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("lock", lambda path: RunDirectory(path)),
        ("manifest.signed", lambda path: RunDirectory(path).signed_manifest()),
        ("metrics.jsonl", lambda path: MetricsWriter(RunDirectory(path).metrics_path)),
    ],
)
def test_a_file_of_another_user_is_named(
    name: str, use: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a volume that a container filled as another user. Root may open anything, so refusing is played."""
    (tmp_path / name).write_text("")
    refuse(monkeypatch, tmp_path / name)
    with pytest.raises(DirectoryError, match=name) as raised:
        use(tmp_path)
    assert raised.value.remedy


def refuse(monkeypatch: pytest.MonkeyPatch, refused: Path) -> None:
    """Let nobody open this file."""
    opened, opened_low = Path.open, os.open

    def low(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(path) == refused:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(refused))
        return opened_low(path, *arguments, **options)

    def high(self: Path, *arguments: Any, **options: Any) -> Any:
        if self == refused:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(refused))
        return opened(self, *arguments, **options)

    monkeypatch.setattr(os, "open", low)
    monkeypatch.setattr(Path, "open", high)


def test_a_note_of_sockets_that_another_user_left_is_replaced(directory: RunDirectory) -> None:
    directory.socket_note_path.mkdir()
    with pytest.raises(DirectoryError, match="sockets"):
        directory.socket_directory()
    directory.socket_note_path.rmdir()
    directory.socket_note_path.write_text("not ours")
    directory.socket_note_path.chmod(0o400)
    assert directory.socket_directory().name in directory.socket_note_path.read_text()


def test_a_temporary_directory_that_is_full_or_missing_is_named(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(DirectoryError, match=str(tmp_path / "gone")) as raised:
        directory.socket_directory()
    assert "TMPDIR" in raised.value.remedy


def test_identities_are_made_once(directory: RunDirectory) -> None:
    assert directory.identity().peer_id == directory.identity().peer_id
    assert directory.organiser_key().public_key == directory.organiser_key().public_key


def test_a_write_is_whole_or_not_at_all(directory: RunDirectory) -> None:
    directory.write_atomically("note", b"old")
    (directory.path / ".note.partial").mkdir()  # makes the next write fail
    with pytest.raises(DirectoryError, match="note cannot be written"):
        directory.write_atomically("note", b"new")
    assert (directory.path / "note").read_bytes() == b"old"


def test_a_socket_directory_is_fresh_and_the_one_before_is_removed(directory: RunDirectory) -> None:
    first = directory.socket_directory()
    (first / "left.sock").write_text("")
    second = directory.socket_directory()
    assert second != first
    assert second.is_dir() and not first.exists()
    second.rmdir()
