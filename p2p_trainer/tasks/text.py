"""Causal language modelling on this machine's files: any transformers architecture, bytes or a tokenizer.

Without ``files`` it reads the sources of the running Python's standard library: some 30 MB of real text that
are present on every machine that can run this program. Nothing here ever asks a network for anything: the
model is built from its configuration, untrained, and a tokenizer is a file.

What it does not protect against: ``files`` in a stranger's manifest name files of *this* machine, and what is
learned from them leaves it. Whoever joins by an invite must be asked before such a manifest is followed.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional

from dht_config.errors import DataError, ManifestError
from p2p_trainer.tasks.base import Batch, Indices, is_held_out, parse_section, shuffled_batches, unknown_key

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HELD_OUT_FRACTION = 0.05
BYTE_VALUES = 256

_SKIPPED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "__pycache__"})

# `dtype` because bases are float32 on every peer; the others could make transformers look for code or
# weights.
_REFUSED_MODEL_KEYS = frozenset({"dtype", "torch_dtype", "auto_map", "quantization_config", "architectures"})

_NESTED_MODEL_KEYS = frozenset({"rope_parameters", "rope_scaling"})

Tokens = npt.NDArray[np.uint8] | npt.NDArray[np.int32]


class TextModel(BaseModel):
    """``[model]`` of the text task: any further key is one of the transformers configuration's."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    model_type: str
    """A transformers architecture with a causal language model: "llama", "gpt2", "qwen3" …"""
    attn_implementation: Literal["eager", "sdpa"] | None = None
    """None leaves it to transformers. Others are refused: transformers fetches some of them as code."""


class TextData(BaseModel):
    """``[data]`` of the text task."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    files: tuple[str, ...] = ()
    """Paths or globs (``**`` descends); empty for the sources of the standard library."""
    sequence_length: int = Field(default=64, strict=True, ge=1, le=1_048_576)
    """Tokens that one sample predicts; it holds one more."""
    tokenizer: str | None = None
    """Path to a tokenizers JSON file; None for bytes."""
    tokenizer_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """Digest of the tokenizer file, so that the run's fingerprint covers it; needed with ``tokenizer``."""


@dataclass(frozen=True, slots=True)
class _Corpus:
    train: Tokens
    held_out: Tokens


class TextTask:
    """Predict each next token of a sequence."""

    name = "text"
    version = 1
    unit = "sequences"

    def __init__(self, model: TextModel, data: TextData) -> None:
        self._model = model
        self._data = data

    def build_model(self) -> nn.Module:
        from_config, config = _configure(self._model)
        positions = getattr(config, "max_position_embeddings", None)
        if isinstance(positions, int) and positions < self._data.sequence_length:
            raise ManifestError(
                problem=f"[data] sequence_length = {self._data.sequence_length} is more than the model's "
                f"max_position_embeddings = {positions}.",
                remedy="Shorten the one or raise the other.",
            )
        self._check_vocabulary(config.vocab_size)
        config.use_cache = False
        options = {"attn_implementation": self._model.attn_implementation}
        try:
            model: nn.Module = from_config(config, **{key: v for key, v in options.items() if v is not None})
        except (ValueError, TypeError, KeyError, ArithmeticError, RuntimeError, ImportError) as error:
            raise ManifestError(
                problem=f"[model] describes no causal language model: {_first_line(error)}.",
                remedy="Correct it by the transformers documentation of this model_type.",
            ) from error
        return model.float()

    def batches(self, seed: int, batch_size: int) -> Iterator[Batch]:
        tokens, length = self._corpus.train, self._data.sequence_length

        def epoch(generator: np.random.Generator) -> Indices:
            # Other window bounds in every epoch, so that no token is forever at the start of its context.
            offset = generator.integers(0, min(length, len(tokens) - length))
            return generator.permutation(_window_starts(len(tokens), length, int(offset)))

        order = shuffled_batches(epoch, seed, batch_size)
        return (_windows(tokens, starts, length) for starts in order)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        (tokens,) = batch
        logits = model(input_ids=tokens[:, :-1]).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def held_out(self, batch_size: int, max_samples: int) -> list[Batch]:
        tokens, length = self._corpus.held_out, self._data.sequence_length
        starts = _window_starts(len(tokens), length, 0)
        if len(starts) > max_samples:  # spread over all held-out files rather than the first few
            starts = starts[np.arange(max_samples, dtype=np.int64) * len(starts) // max_samples]
        return [_windows(tokens, starts[at : at + batch_size], length) for at in range(0, len(starts), batch_size)]

    def save_tokenizer(self, directory: Path) -> None:
        """Write the tokenizer beside an exported model, so that ``AutoTokenizer`` gives what the model was trained on.

        Raises OSError.
        """
        from transformers import PreTrainedTokenizerFast

        tokenizer = self._tokenizer if self._tokenizer is not None else byte_tokenizer()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False).save_pretrained(
            directory
        )

    @cached_property
    def _corpus(self) -> _Corpus:
        documents = _user_documents(self._data.files) if self._data.files else _library_documents()
        train = [path for name, path in documents if not is_held_out(name, HELD_OUT_FRACTION)]
        held_out = [path for name, path in documents if is_held_out(name, HELD_OUT_FRACTION)]
        if train and held_out:
            corpus = _Corpus(train=self._read(train), held_out=self._read(held_out))
        else:  # too few files to choose among: the end of the text is held out
            tokens = self._read(train + held_out)
            cut = len(tokens) - max(
                round(len(tokens) * HELD_OUT_FRACTION), min(self._data.sequence_length + 1, len(tokens) // 2)
            )
            corpus = _Corpus(train=tokens[:cut], held_out=tokens[cut:])
        if min(len(corpus.train), len(corpus.held_out)) <= self._data.sequence_length:
            raise DataError(
                problem=f"[data] files hold {len(corpus.train) + len(corpus.held_out)} tokens: too few for "
                f"training and held-out sequences of {self._data.sequence_length + 1}.",
                remedy="Name more text, or shorten sequence_length.",
            )
        return corpus

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        if self._data.tokenizer is None:
            return None
        return _load_tokenizer(self._data.tokenizer, self._data.tokenizer_sha256)

    def _read(self, paths: list[Path]) -> Tokens:
        contents = [_read_file(path) for path in paths]
        if self._tokenizer is None:
            return np.frombuffer(b"\n".join(contents), dtype=np.uint8)
        texts = [content.decode("utf-8", errors="replace") for content in contents]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return np.concatenate([np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings])

    def _check_vocabulary(self, vocab_size: int) -> None:
        needed = BYTE_VALUES if self._tokenizer is None else self._tokenizer.get_vocab_size()
        if vocab_size < needed:
            what = "bytes" if self._tokenizer is None else self._data.tokenizer
            raise ManifestError(
                problem=f"[model] vocab_size = {vocab_size} is too small: {what} needs {needed}.",
                remedy=f"Set vocab_size = {needed}.",
            )


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose token ids are the bytes of the text in UTF-8, 0 to 255."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # A byte-level tokenizer shows each byte as a printable character: itself where it is one, else one from 256 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(BYTE_VALUES) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable}
    vocabulary |= {chr(BYTE_VALUES + rank): byte for rank, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def create(model: Mapping[str, Any], data: Mapping[str, Any]) -> TextTask:
    """Make the task from a manifest's ``[model]`` and ``[data]``.

    Keys that only transformers knows are checked when the model is built: importing it takes seconds.
    Raises ManifestError naming the key.
    """
    model_section = parse_section(TextModel, "model", model)
    data_section = parse_section(TextData, "data", data)
    vocab_size = model.get("vocab_size")
    if isinstance(vocab_size, int) and data_section.tokenizer is None and vocab_size < BYTE_VALUES:
        raise ManifestError(
            problem=f"[model] vocab_size = {vocab_size} is too small: bytes need {BYTE_VALUES}.",
            remedy=f"Set vocab_size = {BYTE_VALUES}, or name a [data] tokenizer.",
        )
    return TextTask(model_section, data_section)


def _configure(section: TextModel) -> tuple[Any, Any]:
    """Check ``[model]`` against transformers; returns (the constructor of models, the configuration)."""
    # Set before the import, where huggingface_hub reads it once: a model from a configuration needs no
    # network.
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()

    options = section.__pydantic_extra__ or {}
    try:
        defaults = AutoConfig.for_model(section.model_type)
    except ValueError as error:
        raise ManifestError(
            problem=f"[model] model_type = {section.model_type!r} is unknown to the installed transformers.",
            remedy='Use one of its causal language models, such as "llama" or "gpt2".',
        ) from error
    known = [key for key in defaults.to_dict() if key not in _REFUSED_MODEL_KEYS]
    for key, value in options.items():
        if key in _REFUSED_MODEL_KEYS or key.startswith("_") or not hasattr(defaults, key):
            raise unknown_key("model", key, known)
        if isinstance(value, Mapping) and key not in _NESTED_MODEL_KEYS:
            raise ManifestError(
                problem=f"[model] {key} is a table, which the text task cannot use.", remedy="Leave it out."
            )
    try:
        config = AutoConfig.for_model(section.model_type, **options)
    except Exception as error:  # huggingface_hub's validation errors derive from nothing narrower
        raise ManifestError(
            problem=f"[model] is refused by transformers: {_last_line(error)}.",
            remedy="Correct it by the transformers documentation of this model_type.",
        ) from error
    if not hasattr(config, "vocab_size"):
        raise ManifestError(
            problem=f"[model] model_type = {section.model_type!r} is not a language model.",
            remedy='Use a causal language model, such as "llama" or "gpt2".',
        )
    return AutoModelForCausalLM.from_config, config


def _window_starts(tokens: int, length: int, offset: int) -> Indices:
    # Windows share one token: the last one predicted is the next one's first context.
    return np.arange(offset, tokens - length, length, dtype=np.int64)


def _windows(tokens: Tokens, starts: Indices, length: int) -> Batch:
    window = tokens[starts[:, None] + np.arange(length + 1)]
    return (torch.from_numpy(window.astype(np.int64)),)


def _library_documents() -> list[tuple[str, Path]]:
    """Find the standard library's sources: (path relative to it, path), sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in _SKIPPED_DIRECTORIES]
        paths = [Path(directory, name) for name in names if name.endswith(".py")]
        documents += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    if not documents:
        raise DataError(
            problem=f"This Python has no sources of its standard library in {root}.",
            remedy="Name other text with [data] files, or use a Python that comes with its sources.",
        )
    return sorted(documents)


def _user_documents(patterns: tuple[str, ...]) -> list[tuple[str, Path]]:
    """Find the files a manifest names: (path relative to their common directory, path), sorted."""
    paths: set[Path] = set()
    missing = []
    for pattern in patterns:
        expanded = os.path.expanduser(pattern)
        matches = glob.glob(expanded, recursive=True) if glob.has_magic(expanded) else [expanded]
        found = [Path(match).absolute() for match in matches if Path(match).is_file()]
        if not found:
            missing.append(pattern)
        paths.update(found)
    if missing:
        raise DataError(
            problem=f"[data] files: nothing on this machine matches {', '.join(missing)}.",
            remedy=f"Put the files there (looked from {Path.cwd()}), or correct the manifest.",
        )
    root = os.path.commonpath([path.parent for path in paths])
    return sorted((path.relative_to(root).as_posix(), path) for path in paths)


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            problem=f"{path} cannot be read ({error.strerror}).", remedy="Make it readable for this user."
        ) from error


def _load_tokenizer(path: str, expected_sha256: str | None) -> Tokenizer:
    content = _read_file(Path(path).expanduser())
    actual_sha256 = hashlib.sha256(content).hexdigest()
    if expected_sha256 is None:
        raise ManifestError(
            problem="[data] tokenizer_sha256 is missing: peers with different tokenizers could meet.",
            remedy=f'Add tokenizer_sha256 = "{actual_sha256}".',
        )
    if expected_sha256 != actual_sha256:
        raise DataError(
            problem=f"{path} is not this run's tokenizer: its sha256 is {actual_sha256}.",
            remedy=f"Get the file whose sha256 is {expected_sha256} from the organiser.",
        )
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the tokenizers library raises bare Exception for a file it cannot parse
        raise DataError(
            problem=f"{path} is not a tokenizers JSON file ({_first_line(error)}).",
            remedy="Save one with Tokenizer.save().",
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _last_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip().rstrip(".")
