import hashlib
import itertools
import os
import socket
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from dht_config.errors import DataError, ManifestError
from p2p_trainer import tasks
from p2p_trainer.tasks import Task, digits, installed_tasks, load_task, mean_loss
from p2p_trainer.tasks.base import is_held_out, shuffled_batches

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 256,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def library_text() -> Task:
    return load_task("text", LLAMA, {"sequence_length": 32})


@pytest.fixture
def counting_file(tmp_path: Path) -> Path:
    """A text in which no two sequences are alike: the numbers from 0, in four digits each."""
    path = tmp_path / "numbers.txt"
    path.write_text("".join(f"{number:04d}" for number in range(2000)))
    return path


def rows(task: Task, seed: int, count: int) -> list[tuple[int, ...]]:
    flat = itertools.chain.from_iterable(batch[0].tolist() for batch in task.batches(seed, 5))
    return [tuple(row) for row in itertools.islice(flat, count)]


# Sampling


@given(
    samples=st.integers(1, 40),
    batch_size=st.integers(1, 50),
    seed=st.integers(-(2**70), 2**70),
    epochs=st.integers(1, 4),
)
def test_every_sample_comes_once_before_any_comes_again(samples: int, batch_size: int, seed: int, epochs: int) -> None:
    order = shuffled_batches(lambda rng: rng.permutation(samples), seed, batch_size)
    needed = -(-samples * epochs // batch_size)
    batches = list(itertools.islice(order, needed))
    assert all(len(batch) == batch_size for batch in batches)
    read = np.concatenate(batches)[: samples * epochs].reshape(epochs, samples)
    assert (np.sort(read, axis=1) == np.arange(samples)).all()


def test_ten_samples_are_read_in_three_peers_own_orders_and_shuffled_again() -> None:
    orders = []
    for seed in range(3):
        order = shuffled_batches(lambda rng: rng.permutation(10), seed, 10)
        orders += [tuple(next(order)) for _ in range(2)]
    assert len(set(orders)) == 6


def test_a_seed_gives_the_same_order_again_and_another_seed_another(library_text: Task) -> None:
    first, again, other = (rows(library_text, seed, 40) for seed in (7, 7, 8))
    assert first == again
    assert not set(first) & set(other)


@given(st.text(), st.floats(0, 1))
def test_what_is_held_out_depends_on_the_name_and_grows_with_the_fraction(name: str, fraction: float) -> None:
    assert is_held_out(name, fraction) == is_held_out(name, fraction)
    assert not is_held_out(name, 0.0)
    assert is_held_out(name, 1.0)
    assert not is_held_out(name, fraction) or is_held_out(name, min(1.0, fraction * 2))


def test_what_is_held_out_is_the_same_in_every_release() -> None:
    assert [at for at in range(200) if is_held_out(f"file {at}", 0.05)] == [39, 49, 119, 122, 128]


# Text


def test_the_standard_library_is_megabytes_of_text_with_a_twentieth_held_out(library_text: Task) -> None:
    corpus = library_text._corpus  # type: ignore[attr-defined]
    total = len(corpus.train) + len(corpus.held_out)
    assert total > 5_000_000
    assert 0.02 < len(corpus.held_out) / total < 0.10
    assert corpus.train.dtype == np.uint8


def test_other_packages_are_not_part_of_the_standard_library(library_text: Task) -> None:
    assert b"pytest.mark.parametrize" not in library_text._corpus.train.tobytes()  # type: ignore[attr-defined]


def test_a_batch_of_text_is_sequences_of_tokens_and_one_more(library_text: Task) -> None:
    (tokens,) = next(library_text.batches(0, 6))
    assert tokens.shape == (6, 33)
    assert tokens.dtype == torch.int64
    assert bytes(tokens[0].tolist()) in library_text._corpus.train.tobytes()  # type: ignore[attr-defined]


def test_an_untrained_model_knows_nothing_and_learns(library_text: Task) -> None:
    torch.manual_seed(0)
    model = library_text.build_model()
    held_out = library_text.held_out(16, 64)
    untrained = mean_loss(library_text, model, held_out)
    assert untrained == pytest.approx(np.log(256), abs=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in itertools.islice(library_text.batches(0, 8), 60):
        optimizer.zero_grad()
        library_text.loss(model, batch).backward()
        optimizer.step()
    assert mean_loss(library_text, model, held_out) < untrained - 1.0
    assert model.training


def test_the_loss_is_the_mean_negative_log_likelihood_of_the_next_token(library_text: Task) -> None:
    model = library_text.build_model().eval()
    (tokens,) = next(library_text.batches(0, 3))
    with torch.no_grad():
        log_probabilities = model(input_ids=tokens).logits.log_softmax(-1)
        picked = [-log_probabilities[row, at, tokens[row, at + 1]] for row in range(3) for at in range(32)]
        assert float(library_text.loss(model, (tokens,))) == pytest.approx(float(torch.stack(picked).mean()), rel=1e-5)


def test_held_out_text_is_the_same_at_every_call_and_never_trained_on(library_text: Task) -> None:
    first, again = library_text.held_out(8, 20), library_text.held_out(8, 20)
    assert [len(batch[0]) for batch in first] == [8, 8, 4]
    assert all(torch.equal(one[0], two[0]) for one, two in zip(first, again, strict=True))
    train = library_text._corpus.train.tobytes()  # type: ignore[attr-defined]
    repeated = sum(bytes(row.tolist()) in train for batch in first for row in batch[0])
    assert repeated <= 5  # licence texts and the like stand in more than one file


def test_the_windows_of_an_epoch_do_not_overlap_and_later_epochs_cut_elsewhere(counting_file: Path) -> None:
    task = load_task("text", LLAMA, {"files": [str(counting_file)], "sequence_length": 40})
    text = counting_file.read_bytes()
    held_out = b"".join(bytes(row[:-1].tolist()) for batch in task.held_out(4, 10**6) for row in batch[0])
    assert held_out
    assert held_out in text[-len(held_out) - 50 :]
    count = (len(text) - len(text) // 20) // 40 - 1
    starts = [text.index(bytes(row)) for row in rows(task, 3, count)]
    assert len(set(starts)) == count
    assert len({start % 40 for start in starts}) == 1
    assert len({text.index(bytes(row)) % 40 for row in rows(task, 3, 6 * count)}) > 1
    assert max(starts) + 41 <= len(text) - len(held_out)


def test_globs_find_files_and_the_split_does_not_depend_on_where_they_lie(tmp_path: Path) -> None:
    sizes = []
    for place in ("here", "far/away"):
        root = tmp_path / place
        for number in range(60):
            (root / f"{number % 3}").mkdir(parents=True, exist_ok=True)
            (root / f"{number % 3}" / f"{number}.txt").write_text(f"{number:03d} " * (20 + number))
        task = load_task("text", LLAMA, {"files": [f"{root}/**/*.txt"], "sequence_length": 8})
        corpus = task._corpus  # type: ignore[attr-defined]
        sizes.append((len(corpus.train), len(corpus.held_out)))
    assert sizes[0] == sizes[1]
    assert sizes[0][0] > sizes[0][1] > 0


def test_missing_files_are_named(tmp_path: Path, counting_file: Path) -> None:
    patterns = [str(counting_file), str(tmp_path / "absent.txt"), str(tmp_path / "none/*.md"), str(tmp_path)]
    with pytest.raises(DataError) as caught:
        load_task("text", LLAMA, {"files": patterns}).batches(0, 1)
    for pattern in patterns[1:]:
        assert pattern in caught.value.problem
    assert str(counting_file) not in caught.value.problem


def test_too_little_text_is_an_error(tmp_path: Path) -> None:
    for content in (b"", b"a", b"ab" * 30):
        (tmp_path / "small").write_bytes(content)
        with pytest.raises(DataError, match="too few"):
            load_task("text", LLAMA, {"files": [str(tmp_path / "small")], "sequence_length": 32}).batches(0, 1)


def test_less_text_than_a_batch_still_fills_batches(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(bytes(range(100)))
    task = load_task("text", LLAMA, {"files": [str(tmp_path / "small")], "sequence_length": 20})
    assert [batch[0].shape for batch in itertools.islice(task.batches(0, 16), 3)] == [(16, 21)] * 3


@pytest.mark.parametrize(
    ("model", "data", "named", "remedy"),
    [
        ({**LLAMA, "vocab_size": 255}, {}, "[model] vocab_size = 255", "256"),
        ({k: v for k, v in LLAMA.items() if k != "model_type"}, {}, "[model] model_type is missing", ""),
        ({**LLAMA, "attn_implementation": "someone/kernels"}, {}, "[model] attn_implementation", ""),
        (LLAMA, {"sequence_lenght": 9}, "[data] sequence_lenght", "Did you mean sequence_length?"),
        (LLAMA, {"sequence_length": 0}, "[data] sequence_length = 0", ""),
        (LLAMA, {"sequence_length": "64"}, "[data] sequence_length = '64'", ""),
        (LLAMA, {"files": "*.py"}, "[data] files", ""),
    ],
)
def test_a_bad_key_of_the_text_task_is_named_at_once(
    model: dict[str, Any], data: dict[str, Any], named: str, remedy: str
) -> None:
    with pytest.raises(ManifestError) as caught:
        load_task("text", model, data)
    assert named in caught.value.problem
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("model", "data", "named"),
    [
        ({**LLAMA, "model_type": "lama"}, {}, "[model] model_type = 'lama'"),
        ({**LLAMA, "model_type": "vit"}, {}, "[model]"),
        ({**LLAMA, "hiden_size": 16}, {}, "[model] hiden_size"),
        ({**LLAMA, "hidden_size": "16"}, {}, "hidden_size"),
        ({**LLAMA, "hidden_size": 17}, {}, "17"),
        ({**LLAMA, "hidden_act": "none such"}, {}, "[model]"),
        ({**LLAMA, "dtype": "bfloat16"}, {}, "[model] dtype"),
        ({**LLAMA, "auto_map": {"AutoModelForCausalLM": "evil.py"}}, {}, "[model] auto_map"),
        ({**LLAMA, "_attn_implementation": "someone/kernels"}, {}, "[model] _attn_implementation"),
        ({**LLAMA, "id2label": {"0": "x"}}, {}, "[model] id2label"),
        ({**LLAMA, "max_position_embeddings": 31}, {"sequence_length": 32}, "[data] sequence_length = 32"),
        ({"model_type": "gpt2", "vocab_size": 300, "n_embd": 16, "n_head": 3}, {}, "[model]"),
    ],
)
def test_a_bad_key_of_the_model_is_named_when_it_is_built(
    model: dict[str, Any], data: dict[str, Any], named: str
) -> None:
    with pytest.raises(ManifestError) as caught:
        load_task("text", model, data).build_model()
    assert named in caught.value.problem


@pytest.mark.parametrize(
    "model",
    [
        {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 256},
        {
            "model_type": "gpt2",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "vocab_size": 256,
        },
        {**LLAMA, "model_type": "qwen3", "head_dim": 8, "num_key_value_heads": 1},
        {**LLAMA, "attn_implementation": "eager"},
    ],
)
def test_other_architectures_train_too(library_text: Task, model: dict[str, Any]) -> None:
    task = load_task("text", model, {"sequence_length": 8})
    built = task.build_model()
    assert {param.dtype for param in built.parameters()} == {torch.float32}
    task.loss(built, (torch.randint(0, 256, (2, 9)),)).backward()
    assert any(param.grad is not None for param in built.parameters())


def test_nothing_asks_a_network(monkeypatch: pytest.MonkeyPatch, counting_file: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was attempted")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load_task("text", LLAMA, {"files": [str(counting_file)]}).build_model()
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_loading_a_task_does_not_import_transformers_or_scikit_learn() -> None:
    code = (
        "import sys; from p2p_trainer.tasks import load_task; "
        "load_task('text', {'model_type': 'llama'}, {}); "
        "load_task('digits', {}, {}); sys.exit('transformers' in sys.modules or 'sklearn' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"[UNK]": 0, **{f"{number:04d}": number + 1 for number in range(500)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(3)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_tokenizer_file_makes_the_tokens(tmp_path: Path, tokenizer_file: Path) -> None:
    (tmp_path / "words").write_text(" ".join(f"{number:04d}" for number in range(600)))
    data = {
        "files": [str(tmp_path / "words")],
        "tokenizer": str(tokenizer_file),
        "tokenizer_sha256": sha256(tokenizer_file),
        "sequence_length": 9,
    }
    task = load_task("text", {**LLAMA, "vocab_size": 501}, data)
    corpus = task._corpus  # type: ignore[attr-defined]
    assert corpus.train.dtype == np.int32
    assert corpus.train[:500].tolist() == list(range(1, 501))
    assert next(task.batches(0, 2))[0].dtype == torch.int64
    with pytest.raises(ManifestError, match=r"vocab_size = 500 .* 501"):
        load_task("text", {**LLAMA, "vocab_size": 500}, data).build_model()


def test_a_tokenizer_must_be_the_runs(tmp_path: Path, tokenizer_file: Path) -> None:
    with pytest.raises(ManifestError) as missing:
        load_task("text", LLAMA, {"tokenizer": str(tokenizer_file)}).batches(0, 1)
    assert sha256(tokenizer_file) in missing.value.remedy
    with pytest.raises(DataError, match="not this run's tokenizer"):
        load_task("text", LLAMA, {"tokenizer": str(tokenizer_file), "tokenizer_sha256": "0" * 64}).batches(0, 1)
    (tmp_path / "broken.json").write_bytes(b'{"version": \xff')
    with pytest.raises(DataError, match="not a tokenizers JSON file"):
        load_task(
            "text",
            LLAMA,
            {
                "tokenizer": str(tmp_path / "broken.json"),
                "tokenizer_sha256": sha256(tmp_path / "broken.json"),
            },
        ).batches(0, 1)
    with pytest.raises(DataError, match=r"absent\.json"):
        load_task("text", LLAMA, {"tokenizer": str(tmp_path / "absent.json")}).batches(0, 1)


# Digits


def test_digits_are_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    task = load_task("digits", {"hidden_sizes": [32, 16]}, {})
    model = task.build_model()
    held_out = task.held_out(64, 10_000)
    assert mean_loss(task, model, held_out) > 2.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in itertools.islice(task.batches(0, 32), 150):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    assert mean_loss(task, model, held_out) < 0.5


def test_a_batch_of_digits_is_images_between_zero_and_one_with_their_labels() -> None:
    pixels, labels = next(load_task("digits", {}, {}).batches(0, 50))
    assert pixels.shape == (50, 64)
    assert pixels.dtype == torch.float32
    assert (float(pixels.min()), float(pixels.max())) == (0.0, 1.0)
    assert labels.dtype == torch.int64
    assert set(labels.tolist()) <= set(range(10))


def test_about_a_seventh_of_the_digits_is_held_out_and_never_trained_on() -> None:
    task = load_task("digits", {}, {})
    held_out = {tuple(row.tolist()) for batch in task.held_out(100, 10_000) for row in batch[0]}
    assert 0.12 < len(held_out) / 1797 < 0.18
    read = itertools.islice(task.batches(0, 100), 17)
    assert not held_out & {tuple(row.tolist()) for batch in read for row in batch[0]}
    assert [len(batch[0]) for batch in task.held_out(8, 20)] == [8, 8, 4]


def test_the_digits_are_scikit_learns_and_it_need_not_be_imported() -> None:
    code = (
        "import sys; from p2p_trainer.tasks import load_task; task = load_task('digits', {}, {}); "
        "next(task.batches(0, 8)); task.held_out(8, 8); sys.exit('sklearn' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    pixels, labels = digits._read_digits()
    theirs = load_digits(return_X_y=True)
    assert np.array_equal(pixels, theirs[0]) and np.array_equal(labels, theirs[1])
    assert (pixels.dtype, labels.dtype) == (np.float64, np.int64)


def test_digits_that_lie_elsewhere_are_read_by_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    at = digits._read_digits()
    monkeypatch.setattr(digits, "find_spec", lambda name: ModuleSpec(name, None, is_package=True))
    again = digits._read_digits()
    assert all(np.array_equal(*pair) for pair in zip(at, again, strict=True))
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="needs scikit-learn"):
        digits._read_digits()


@pytest.mark.parametrize(
    ("model", "data", "named"),
    [
        ({"hidden_sizes": [0]}, {}, "[model] hidden_sizes.0 = 0"),
        ({"hidden_size": [3]}, {}, "[model] hidden_size"),
        ({}, {"files": []}, "[data] files"),
    ],
)
def test_a_bad_key_of_the_digits_task_is_named(model: dict[str, Any], data: dict[str, Any], named: str) -> None:
    with pytest.raises(ManifestError) as caught:
        load_task("digits", model, data)
    assert named in caught.value.problem


# Tasks of others


def test_a_task_that_is_not_installed_names_those_that_are() -> None:
    with pytest.raises(ManifestError) as caught:
        load_task("txt", {}, {})
    assert "'txt'" in caught.value.problem
    assert "digits, text" in caught.value.remedy


def install(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    entry_point = EntryPoint(name=name, value=value, group=tasks.ENTRY_POINT_GROUP)
    monkeypatch.setattr(tasks, "entry_points", lambda group: (entry_point,))


def test_an_installed_task_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("a_volunteers_task")
    module.create = lambda model, data: (model, data)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_volunteers_task", module)
    install(monkeypatch, "own", "a_volunteers_task:create")
    assert installed_tasks() == ("digits", "own", "text")
    assert load_task("own", {"a": 1}, {"b": 2}) == ({"a": 1}, {"b": 2})


@pytest.mark.parametrize("value", ["no_such_module:create", "json:no_such_name"])
def test_an_installed_task_whose_code_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    install(monkeypatch, "own", value)
    with pytest.raises(ManifestError, match=value):
        load_task("own", {}, {})


def test_a_built_in_name_cannot_be_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "digits", "json:loads")
    assert load_task("digits", {}, {}).name == "digits"
