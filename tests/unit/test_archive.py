"""The archive of a run: what stays as it grows, and that what is lost is never more than the newest snapshot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dht_config.errors import CheckpointError
from p2p_trainer.archive import Archive, thinned
from p2p_trainer.checkpoint import read_checkpoint


def grown(slots: list[int], newest: int) -> set[int]:
    """What is left when snapshots come one by one and each thins out the others."""
    kept: set[int] = set()
    for slot in slots:
        kept = thinned({*kept, slot}, newest)
    return kept


slots = st.lists(st.integers(0, 2000), min_size=1, max_size=300, unique=True).map(sorted)


@given(slots, st.integers(2, 8))
@example([0, 256, 441, 1081, 1536], 5)
def test_the_first_and_the_newest_stay_and_older_ones_get_sparser(slots: list[int], newest: int) -> None:
    kept = grown(slots, newest)
    last = slots[-1]
    assert kept <= set(slots) and slots[0] in kept
    assert {slot for slot in slots if last - slot < newest} <= kept
    levels = ((last - slots[0]) // newest).bit_length()
    assert len(kept) <= (newest + 2) * (levels + 1)
    for slot in slots:  # of every moment there is one from shortly before, compared with how long ago it is
        age = last - slot
        # Stretches are nested, so what took its place may have lost its own to one of the next size; no more than that.
        assert any(0 <= slot - other <= 2 * (age // (newest - 1) + 1) for other in kept), slot


@given(slots, st.integers(1, 8))
def test_thinning_out_again_takes_nothing_more(slots: list[int], newest: int) -> None:
    kept = thinned(slots, newest)
    assert thinned(kept, newest) == kept


def test_how_many_snapshots_a_long_run_keeps() -> None:
    assert sorted(grown(list(range(11)), 2)) == [0, 4, 8, 9, 10]
    assert len(grown(list(range(3000)), 5)) < 60


def save(archive: Archive, version: int) -> None:
    archive.save(version, torch.full((10,), float(version)), {"version": version})


def test_a_snapshot_is_due_once_every_so_many_versions_also_after_a_restart(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "archive", every=10, newest=3)
    assert archive.due(0)
    for version in (0, 13, 25):
        assert archive.due(version)
        save(archive, version)
        assert not archive.due(version) and not archive.due(version // 10 * 10 + 9)
    again = Archive(tmp_path / "archive", every=10, newest=3)
    assert again.versions() == [0, 13, 25]
    assert not again.due(29) and again.due(30)
    assert float(read_checkpoint(again.path(13)).tensors["base"][0]) == 13
    assert not Archive(tmp_path / "archive", every=0, newest=3).due(10**6)


def test_a_killed_save_leaves_nothing_that_counts(tmp_path: Path) -> None:
    (tmp_path / "archive/checkpoint.tmp").mkdir(parents=True)
    (tmp_path / "archive/checkpoint.tmp/new").write_bytes(b"half")
    archive = Archive(tmp_path / "archive", every=1, newest=3)
    assert archive.versions() == []
    save(archive, 4)
    assert [path.name for path in archive.directory.iterdir()] == ["version-0000000004.safetensors"]


SAVER = """
import itertools, sys, torch
from pathlib import Path
from p2p_trainer.archive import Archive
archive = Archive(Path(sys.argv[1]), every=1, newest=3)
for version in itertools.count(max(archive.versions(), default=0) + 1):
    archive.save(version, torch.full((1_000_000,), float(version)), {"version": version})
    print(version, flush=True)
"""


def test_who_is_killed_while_it_saves_loses_no_snapshot_that_it_had(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "archive", every=1, newest=3)
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", SAVER, str(archive.directory)], stdout=subprocess.PIPE) as saver:
            assert saver.stdout is not None
            saved = [int(saver.stdout.readline()) for _ in range(5)]
            while not list(archive.directory.glob("checkpoint.tmp/*")):
                assert saver.poll() is None
            saver.kill()
            saved += [int(line) for line in saver.stdout]
        kept = archive.versions()
        assert kept[0] == 1 and set(kept) >= {version for version in saved if saved[-1] - version < 2}
        for version in kept:
            assert float(read_checkpoint(archive.path(version)).tensors["base"].mean()) == version


def test_where_it_cannot_be_written_the_others_stay_and_the_next_slot_tries_again(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "archive", every=1, newest=3)
    save(archive, 1)
    (tmp_path / "archive/checkpoint.tmp").write_bytes(b"")  # a file where a directory must be made
    with pytest.raises(CheckpointError, match="those before it are kept"):
        save(archive, 2)
    assert archive.versions() == [1]
    assert not archive.due(2) and archive.due(3)
    (tmp_path / "archive/checkpoint.tmp").unlink()
    save(archive, 3)
    assert archive.versions() == [1, 3]
