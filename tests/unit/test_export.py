"""Exporting: what other programs load is the run's base, bit for bit, or there is nothing but one line."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model
from saved_run import SMALL_DIGITS, SMALL_TEXT, save_run
from typer.testing import CliRunner

from dht_config.errors import ExitCode
from p2p_trainer.archive import Archive
from p2p_trainer.checkpoint import NEWEST_NAME, read_checkpoint
from p2p_trainer.cli import app
from p2p_trainer.run_model import layout_of
from p2p_trainer.running_statistics import trainable
from p2p_trainer.target import manifest_target
from p2p_trainer.tasks import load_task, mean_loss
from peers.fragments import gather_fragment, load_fragment

pytestmark = pytest.mark.usefixtures("untouched")


def export(*arguments: Path | str) -> str:
    result = CliRunner().invoke(app, ["export", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def fails(code: ExitCode, *arguments: Path, says: str) -> None:
    result = CliRunner().invoke(app, ["export", *map(str, arguments)])
    assert result.exit_code == int(code), result.output
    assert says in result.stderr
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("p2p-trainer: ")


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_transformers_loads_an_exported_language_model_with_the_runs_held_out_loss(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    manifest, arena = save_run(tmp_path / "run", SMALL_TEXT)
    before = contents(tmp_path / "run")
    assert "versions 7 to 7" in export(tmp_path / "run", tmp_path / "out")
    assert contents(tmp_path / "run") == before

    task = manifest_target(manifest).task
    assert task is not None
    runs = task.build_model()
    layout = layout_of(runs, manifest)
    for fragment in range(layout.num_fragments):
        load_fragment(trainable(runs), layout, fragment, arena.base[layout.slice(fragment)])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    held_out = task.held_out(8, 16)
    assert mean_loss(task, loaded, held_out) == mean_loss(task, runs, held_out)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "déf f(x):\n\treturn '☃' \x00\x7f"
    assert tokenizer(text).input_ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.vocab_size == 256


def test_another_tasks_model_comes_with_what_builds_it(tmp_path: Path) -> None:
    manifest, arena = save_run(tmp_path / "run", SMALL_DIGITS)
    export(tmp_path / "run", tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    model = load_task(config["task"]["name"], config["model"], config["data"]).build_model()
    load_model(model, str(tmp_path / "out/model.safetensors"))
    layout = layout_of(model, manifest)
    for fragment in range(layout.num_fragments):
        found = torch.empty(layout.size(fragment))
        gather_fragment(trainable(model), layout, fragment, found)
        assert torch.equal(found, arena.base[layout.slice(fragment)])


def test_the_card_says_what_is_known_of_the_run(tmp_path: Path) -> None:
    save_run(tmp_path / "run", SMALL_TEXT, version=9)
    events = [{"event": "eval", "version": version, "loss": loss} for version, loss in ((8, 2.5), (9, 2.25), (10, 1.0))]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    facts = json.loads(export(tmp_path / "run", tmp_path / "out", "--json"))
    card = (tmp_path / "out/README.md").read_text()
    assert facts["held_out_loss"] == 2.25
    for said in (facts["run_id"], facts["organiser_public_key"], "2.2500 at version 9", "| 1,000 |", "from_pretrained"):
        assert said in card
    assert all(row["digest"] in card and row["version"] == 9 for row in facts["fragments"])
    stored = json.loads((tmp_path / "out/run.json").read_text())
    assert stored["manifest"]["run"]["name"] == "small"


def test_a_snapshot_of_the_archive_is_exported_as_it_was(tmp_path: Path) -> None:
    save_run(tmp_path / "run", SMALL_DIGITS, version=20)
    newest = read_checkpoint(tmp_path / "run" / NEWEST_NAME)
    rows = [{**row, "version": 10} for row in newest.meta["fragments"]]
    archive = Archive(tmp_path / "run/archive", every=10, newest=2)
    archive.save(10, newest.tensors["base"] + 1, {**newest.meta, "fragments": rows})
    assert "versions 10 to 10" in export(archive.path(10), tmp_path / "out")
    elsewhere = tmp_path / "version-0000000010.safetensors"
    elsewhere.write_bytes(archive.path(10).read_bytes())
    fails(ExitCode.DIRECTORY, elsewhere, tmp_path / "other", says="not lie in a run directory")


def test_a_directory_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    fails(ExitCode.CHECKPOINT, tmp_path / "run", tmp_path / "out", says="There is no checkpoint")
    fails(ExitCode.DIRECTORY, tmp_path / "none", tmp_path / "out", says="There is no directory")
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    save_run(tmp_path / "run", SMALL_DIGITS)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("mine")
    for name in ("file", "full"):
        fails(ExitCode.DIRECTORY, tmp_path / "run", tmp_path / name, says="is there already")
    assert contents(tmp_path / "full") == {"mine": b"mine"}
    (tmp_path / "empty").mkdir()
    export(tmp_path / "run", tmp_path / "empty")
    assert (tmp_path / "empty/README.md").exists()


@contextmanager
def no_file_above(size_bytes: int) -> Iterator[None]:
    """Stands for a disk that fills up: a write past it fails, as the kernel says so."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    save_run(tmp_path / "run", SMALL_TEXT)
    (tmp_path / "place").mkdir()
    with no_file_above(4096):
        fails(ExitCode.DIRECTORY, tmp_path / "run", tmp_path / "place/out", says="cannot be written")
    assert os.listdir(tmp_path / "place") == []


def test_a_base_that_is_not_what_its_digest_says_is_not_exported(tmp_path: Path) -> None:
    save_run(tmp_path / "run", SMALL_DIGITS)
    other, _ = tmp_path / "other", save_run(tmp_path / "other", SMALL_DIGITS)
    meta = json.loads(_header(other / NEWEST_NAME))["__metadata__"]["meta"]
    save_run(tmp_path / "run", SMALL_DIGITS, fragments=json.loads(meta)["fragments"])
    fails(ExitCode.CHECKPOINT, tmp_path / "run", tmp_path / "out", says="does not fit its digest")
    (tmp_path / "run" / NEWEST_NAME).write_bytes(b"torn")
    (tmp_path / "run" / "checkpoint.previous.safetensors").unlink(missing_ok=True)
    result = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(tmp_path / "out")])
    assert result.exit_code == int(ExitCode.CHECKPOINT) and "is damaged" in result.stderr
    assert (tmp_path / "run" / NEWEST_NAME).read_bytes() == b"torn", "another process's directory is left as it is"


def test_a_checkpoint_beside_another_runs_manifest_is_not_exported(tmp_path: Path) -> None:
    save_run(tmp_path / "run", SMALL_DIGITS, run_id="other-0123456789abcdef")
    fails(ExitCode.CHECKPOINT, tmp_path / "run", tmp_path / "out", says="another run")
    (tmp_path / "run/manifest.signed").unlink()
    fails(ExitCode.CHECKPOINT, tmp_path / "run", tmp_path / "out", says="manifest")


def _header(path: Path) -> str:
    data = path.read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")].decode()
