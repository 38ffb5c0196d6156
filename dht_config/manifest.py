"""The run manifest: everything that all peers of a run must agree on, as data.

A manifest names an installed task and its settings. It never carries code. Its fingerprint covers all that
must be equal for two peers to average with each other, so peers with different fingerprints have different
run ids and cannot meet.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from dht_config.errors import ManifestError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROTOCOL_VERSION: int = 6
"""What peers say to each other. Part of the fingerprint: peers of different versions cannot meet."""

EXAMPLES: tuple[str, ...] = ("stdlib-text", "digits")
"""Names of the manifests that are shipped with the package."""

MAX_MANIFEST_BYTES = 48 * 1024
"""Canonical JSON above this would not fit, together with the base digests, into one signed record."""

_MAX_TABLE_DEPTH = 4


class _Section(BaseModel):
    # Strict: `fragments = "4"` is a mistake to be told, not a number to be guessed.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def _in_utc(moment: datetime) -> datetime:
    return moment.astimezone(timezone.utc)


def _plain_table(table: dict[str, Any]) -> dict[str, Any]:
    """Admit only what TOML and JSON write alike, so that a free-form table has one fingerprint."""
    for key, value in table.items():
        complaint = _plain_complaint(value, depth=1)
        if complaint:
            raise ValueError(f"{key} = {_shown(value)}: {complaint}")
    return table


def _plain_complaint(value: object, depth: int) -> str:
    """What is wrong with a value of a free-form table, or nothing."""
    if depth > _MAX_TABLE_DEPTH:
        return f"tables and lists may be nested {_MAX_TABLE_DEPTH} deep at most"
    if isinstance(value, Mapping):
        return next(filter(None, (_plain_complaint(item, depth + 1) for item in value.values())), "")
    if isinstance(value, list | tuple):
        return next(filter(None, (_plain_complaint(item, depth + 1) for item in value)), "")
    if isinstance(value, float):
        return "" if math.isfinite(value) else "numbers must be finite"
    if isinstance(value, int):  # bool is one of them; 64 bits are what TOML promises
        return "" if -(2**63) <= value < 2**63 else "whole numbers must fit into 64 bits"
    return "" if isinstance(value, str) else "values must be strings, numbers, booleans, lists or tables"


_Decay = Annotated[float, Field(ge=0, lt=1)]
Table = Annotated[dict[str, Any], AfterValidator(_plain_table)]


class RunSection(_Section):
    """What the run is called and when its ticks fall."""

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=40)
    """a short name of lower-case letters, digits and hyphens, such as "my-run"; it starts the run id."""

    start: Annotated[AwareDatetime, AfterValidator(_in_utc)] = datetime(2026, 1, 1, tzinfo=timezone.utc)
    """when tick 0 begins, a TOML date with its offset, such as 2026-01-01T00:00:00Z; any past moment does."""

    tick_seconds: float = Field(default=1.0, ge=0.1, le=3600)
    """seconds from one round to the next (0.1 to 3600); a fragment's own next one is fragments times that."""

    fragments: int = Field(default=4, ge=1, le=256)
    """how many pieces the model is cut into (1 to 256); one piece is averaged per tick."""


class TaskSection(_Section):
    """What is trained."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")
    """name of an installed task, such as "text" or "digits"."""


class InnerOptimizerSection(_Section):
    """The optimizer that each peer steps on its own, between rounds."""

    name: Literal["adamw", "sgd"] = "adamw"
    """"adamw" or "sgd"."""

    lr: float = Field(default=1e-3, gt=0, le=100)
    """learning rate at the top of the schedule, above 0."""

    betas: Annotated[tuple[_Decay, _Decay], Field(strict=False)] = (0.9, 0.95)
    """adamw only: decay of the first and second moment, two numbers in [0, 1), such as [0.9, 0.95]."""

    momentum: float = Field(default=0.0, ge=0, lt=1)
    """sgd only: momentum in [0, 1)."""

    weight_decay: float = Field(default=0.0, ge=0, le=10)
    """decoupled weight decay, 0 or more."""

    clip_norm: float | None = Field(default=None, gt=0)
    """largest gradient norm of an inner step, above 0; leave it out for no clipping."""

    batch_size: int = Field(default=8, ge=1, le=2**20)
    """samples per inner step, alike on every peer; a peer with little memory cuts it into micro-batches."""

    schedule: Literal["constant", "cosine"] = "constant"
    """"constant" or "cosine", driven by the samples that all peers together have processed."""

    warmup_samples: int = Field(default=0, ge=0, le=2**60)
    """total samples over which the learning rate rises from 0; 0 for no warm-up."""

    decay_samples: int = Field(default=0, ge=0, le=2**60)
    """cosine only: total samples at which the learning rate has reached its final value."""

    final_lr_fraction: float = Field(default=0.1, ge=0, le=1)
    """cosine only: the final learning rate as a fraction of lr, 0 to 1."""

    @model_validator(mode="after")
    def _cosine_has_an_end(self) -> InnerOptimizerSection:
        if self.schedule == "cosine" and self.decay_samples <= self.warmup_samples:
            raise ValueError(
                f"the cosine schedule needs decay_samples ({self.decay_samples}) above "
                f"warmup_samples ({self.warmup_samples})"
            )
        return self


class OuterOptimizerSection(_Section):
    """The optimizer that applies averaged contributions to the base (DiLoCo, arXiv:2311.08105).

    The defaults were chosen with ``tests/benchmarks/learning.py``: 8 peers up to 20 times apart, like data. Held-out
    loss with ``--quick --compare outer`` (135 k parameters, 100 rounds of each fragment, one seed), the update landing
    at once, half a cycle and a cycle late:

    =========  =====  =====  =====      =========  =====  =====  =====
    lr / mom.  0      1/2    1          lr / mom.  0      1/2    1
    =========  =====  =====  =====      =========  =====  =====  =====
    0.4 / 0.6  1.901  2.033  2.080      0.7 / 0.9  2.288  2.296  2.342
    0.4 / 0.8  1.951  2.076  2.131      1.0 / 0.6  2.055  2.130  2.118
    0.4 / 0.9  2.162  2.174  2.205      1.0 / 0.8  2.187  2.314  2.319
    0.7 / 0.6  1.935  2.051  2.077      1.0 / 0.9  2.324  2.401  2.469
    0.7 / 0.8  2.116  2.171  2.203      1.0 / 0.0  1.919  2.029  2.079
    =========  =====  =====  =====      =========  =====  =====  =====

    With ``--rounds 400``, half a cycle late, mean of the seeds: 0.7 / 0.6 1.702 (3 seeds, standard deviation 0.024),
    0.4 / 0.6 1.705 and 1.0 / 0.0 1.713 (2 seeds, 0.002 and 0.006), 0.7 / 0.8 2.033 (2 seeds, 0.029). So lr / (1 -
    momentum) should be from 1 to 2; which pair makes it was not seen to matter.

    Without ``--quick`` (1.03 M parameters, 400 rounds, ``results/learning-full.json``), one seed, at once, half a cycle
    and a cycle late: 0.4 / 0.6 1.519, 1.527 and 1.552, 0.7 / 0.6 1.616, 1.624 and 1.643, 1.0 / 0.0 1.508, 1.533 and
    1.560, all others more than 1.68. Half a cycle late, mean of three seeds: 0.4 / 0.6 1.530 (standard deviation
    0.003), 0.7 / 0.6 1.629 (0.005), 1.0 / 0.0 1.533 (0.009). So 0.4 / 0.6 is the better choice for all but the
    smallest models, and is to become the default together with the figures that were measured with this one.
    """

    name: Literal["nesterov", "adamw"] = "nesterov"
    """"nesterov", or "adamw" for averaged gradients."""

    lr: float = Field(default=0.7, gt=0, le=10)
    """outer learning rate, above 0; for "nesterov" 0.7 suits most runs, 1.0 with momentum 0 is plain averaging."""

    momentum: float = Field(default=0.6, ge=0, lt=1)
    """nesterov only: outer momentum in [0, 1)."""

    betas: Annotated[tuple[_Decay, _Decay], Field(strict=False)] = (0.9, 0.95)
    """adamw only: decay of the first and second moment, two numbers in [0, 1), such as [0.9, 0.95]."""

    eps: float = Field(default=1e-8, gt=0, le=1)
    """adamw only: what keeps the step finite where gradients vanish, above 0."""

    weight_decay: float = Field(default=0.0, ge=0, le=10)
    """adamw only: decoupled weight decay, 0 or more."""

    @model_validator(mode="after")
    def _adamw_has_its_own_learning_rate(self) -> OuterOptimizerSection:
        if self.name == "adamw" and "lr" not in self.model_fields_set:
            raise ValueError('with name = "adamw" the key lr must be given, such as lr = 1e-3')
        return self


class AveragingSection(_Section):
    """How a round is held."""

    mode: Literal["local", "gradient"] = "local"
    """"local": peers make inner steps of their own and average pseudo-gradients; "gradient": they average gradients."""

    global_batch: int = Field(default=0, ge=0, le=2**40)
    """gradient only: samples in one outer step, split among the peers by their throughput; must be given."""

    delayed: bool = False
    """gradient only: true lets peers compute on during a round, at the price of gradients that are one round old."""

    matchmaking_seconds: float = Field(default=1.5, ge=0.2, le=600)
    """seconds that peers wait to find each other; raise it if rounds start without peers that were there."""

    part_bytes: int = Field(default=2 * 1024 * 1024, ge=16 * 1024, le=8 * 1024 * 1024)
    """bytes per message of the all-reduce (16 KiB to 8 MiB); bigger is faster on good links."""

    target_group_size: int = Field(default=16, ge=2, le=64)
    """peers that exchange contributions directly (2 to 64); more than that in one round make several groups, which
    end on the same base."""

    codec: Literal["float32", "float16", "int8", "int4", "sparse", "auto"] = "float32"
    """how contributions travel: "float32", "float16", "int8", "int4" or "sparse": 4 to 0.03 bytes a parameter; or
    "auto": each peer encodes its own as strongly as its line needs, "int8" if it can."""

    answer_codec: Literal["float32", "float16", "int8", "int4"] = "float32"
    """how averages travel: "float32", "float16", "int8" or "int4"."""

    weighting: Literal["samples_times_batch", "samples", "fednova", "sqrt", "uniform"] = "samples_times_batch"
    """local only: how samples and steps weigh: "samples_times_batch", "samples", "fednova", "sqrt" or "uniform"."""


class NetworkSection(_Section):
    """Where to knock first. Not part of the fingerprint: addresses change, runs do not."""

    initial_peers: Annotated[tuple[str, ...], Field(strict=False, max_length=64)] = ()
    """addresses of peers to join through, such as ["/ip4/203.0.113.7/tcp/31337/p2p/Qm..."]."""


class RunManifest(_Section):
    """One run, as written by its organiser."""

    run: RunSection
    task: TaskSection
    model: Table = Field(default_factory=dict)
    """free-form; the task checks it."""
    data: Table = Field(default_factory=dict)
    """free-form; the task checks it."""
    inner_optimizer: InnerOptimizerSection = InnerOptimizerSection()
    outer_optimizer: OuterOptimizerSection = OuterOptimizerSection()
    averaging: AveragingSection = AveragingSection()
    network: NetworkSection = NetworkSection()

    @model_validator(mode="after")
    def _rounds_of_a_fragment_do_not_overlap(self) -> RunManifest:
        cycle_seconds = self.run.tick_seconds * self.run.fragments
        if self.averaging.matchmaking_seconds >= cycle_seconds:
            raise ValueError(
                f"[averaging] matchmaking_seconds = {self.averaging.matchmaking_seconds} must be below the "
                f"{cycle_seconds:g} s between two rounds of a fragment ([run] tick_seconds * fragments)"
            )
        return self

    @model_validator(mode="after")
    def _mode_and_its_keys_agree(self) -> RunManifest:
        averaging = self.averaging
        if averaging.mode == "gradient" and not averaging.global_batch:
            raise ValueError('[averaging] mode = "gradient" needs global_batch, the samples of one outer step')
        if averaging.mode == "gradient" and self.inner_optimizer.clip_norm is not None:
            raise ValueError('[inner_optimizer] clip_norm is for [averaging] mode = "local" only')
        if averaging.mode == "gradient" and averaging.weighting not in ("samples_times_batch", "samples"):
            raise ValueError('[averaging] weighting is for mode = "local" only: gradients weigh by samples')
        if averaging.mode == "local" and (averaging.global_batch or averaging.delayed):
            raise ValueError('[averaging] global_batch and delayed are for mode = "gradient" only')
        if averaging.mode == "local" and self.outer_optimizer.name == "adamw":
            raise ValueError('[outer_optimizer] name = "adamw" is for [averaging] mode = "gradient" only')
        return self

    def canonical_json(self) -> str:
        """The one text of this manifest that is hashed, signed and published; [network] is left out."""
        table = self.model_dump(mode="json", exclude={"network"})
        return json.dumps(table, sort_keys=True, separators=(",", ":"), allow_nan=False)


def load_manifest(path: Path | str) -> RunManifest:
    """Read a manifest from a TOML file.

    Raises: ManifestError naming file, field, value and remedy.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ManifestError(
            problem=f"There is no manifest at {path}.",
            remedy=f"Check the path, or start from a shipped example ({', '.join(EXAMPLES)}).",
        ) from None
    except OSError as error:
        raise ManifestError(
            problem=f"The manifest {path} cannot be read: {error.strerror or error}.",
            remedy="Give the path of a TOML file that you may read.",
        ) from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ManifestError(
            problem=f"The manifest {path} is not UTF-8 text.", remedy="Save it as a UTF-8 TOML file."
        ) from None
    return parse_manifest(text, source=str(path))


def parse_manifest(text: str, source: str) -> RunManifest:
    """Build a manifest from TOML text.

    :param source: what to call the text in an error, usually its path.
    Raises: ManifestError naming source, field, value and remedy.
    """
    try:
        # Beside its own TOMLDecodeError: ValueError for a number of 5000 digits, RecursionError for absurd
        # nesting.
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(
            problem=f"{source} is not valid TOML: {error}.",
            remedy="Strings stand in double quotes, true and false in lower case, sections in [brackets].",
        ) from None
    try:
        manifest = RunManifest.model_validate(table)
    except ValidationError as error:
        raise _explained(error, source) from None
    size_bytes = len(manifest.canonical_json())
    if size_bytes > MAX_MANIFEST_BYTES:
        raise ManifestError(
            problem=f"{source} is too big: {size_bytes} bytes, the limit is {MAX_MANIFEST_BYTES}.",
            remedy="Move long lists from [model] and [data] into files that the task reads.",
        )
    return manifest


def example_manifest(name: str) -> str:
    """The TOML text of a shipped example, comments included.

    Raises: ManifestError for a name that is not in EXAMPLES.
    """
    if name not in EXAMPLES:
        raise ManifestError(
            problem=f"There is no example manifest called {name!r}.",
            remedy=f"{_suggestion(name, EXAMPLES)}Shipped examples: {', '.join(EXAMPLES)}.",
        )
    return (resources.files("dht_config") / "examples" / f"{name}.toml").read_text(encoding="utf-8")


def fingerprint(manifest: RunManifest, task_version: int) -> str:
    """Hex SHA-256 over the protocol version, the task's own version and the manifest without [network]."""
    return fingerprint_of_json(manifest.canonical_json(), PROTOCOL_VERSION, task_version)


def fingerprint_of_json(canonical_json: str, protocol_version: int, task_version: int) -> str:
    """The fingerprint of a manifest that may be of another protocol version, so that a joiner can name it."""
    header = f"p2p-trainer run\nprotocol {protocol_version}\ntask {task_version}\n"
    return hashlib.sha256((header + canonical_json).encode()).hexdigest()


def run_id(manifest: RunManifest, task_version: int) -> str:
    """The run's id, ``{name}-{16 hex digits}``: only [a-z0-9-], as hivemind's prefixes may hold no dot."""
    return f"{manifest.run.name}-{fingerprint(manifest, task_version)[:16]}"


def differing_fields(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """What to tell a joiner whose fingerprint differs: ``section.key: ours X, theirs Y``, sorted by key.

    Both are manifests as plain tables (the parsed ``canonical_json``); [network] is not compared.
    """
    our_fields, their_fields = dict(_flattened(ours)), dict(_flattened(theirs))
    lines = []
    for key in sorted(our_fields.keys() | their_fields.keys()):
        if key.split(".", 1)[0] == "network":
            continue
        our_text = _shown(our_fields[key]) if key in our_fields else "nothing"
        their_text = _shown(their_fields[key]) if key in their_fields else "nothing"
        if our_text != their_text:
            lines.append(f"{key}: ours {our_text}, theirs {their_text}")
    return lines


def _flattened(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, f"{prefix}{key}.")
        elif not isinstance(value, Mapping):
            yield f"{prefix}{key}", value


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _suggestion(word: str, known: tuple[str, ...] | list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f'Did you mean "{close[0]}"? ' if close else ""


def _explained(error: ValidationError, source: str) -> ManifestError:
    """Turn pydantic's first complaint into one line a person can act on."""
    # A misspelt key also makes the right one missing: name the misspelling.
    details = sorted(error.errors(include_url=False), key=lambda detail: detail["type"] != "extra_forbidden")
    first = details[0]
    location = [str(part) for part in first["loc"]]
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    sections = list(RunManifest.model_fields)
    if not location:
        return ManifestError(problem=f"{source}: {message}{more}.", remedy=f"Change one of them in {source}.")
    if len(location) == 1 or location[0] not in sections:
        return _explained_section(first["type"], location[0], message, f"{source}: ", more)

    section, key = location[0], location[1]
    model = RunManifest.model_fields[section].annotation
    fields = model.model_fields if isinstance(model, type) and issubclass(model, BaseModel) else {}
    where = f"{source}: [{section}] {key}"
    if first["type"] == "extra_forbidden":
        known = list(fields)
        return ManifestError(
            problem=f"{where} is not a known key{more}.",
            remedy=f"{_suggestion(key, known)}Keys of [{section}]: {', '.join(known)}.",
        )
    description = fields[key].description if key in fields else None
    meaning = f"{key}: {description}" if description else f"Change {key} in {source}."
    if first["type"] == "missing" and len(location) == 2:
        return ManifestError(problem=f"{where} is missing{more}.", remedy=f"Add {meaning}")
    return ManifestError(problem=f"{where} = {_shown(first['input'])}: {message}{more}.", remedy=meaning)


def _explained_section(kind: str, section: str, message: str, source_prefix: str, more: str) -> ManifestError:
    sections = list(RunManifest.model_fields)
    if kind == "extra_forbidden":
        return ManifestError(
            problem=f"{source_prefix}[{section}] is not a known section{more}.",
            remedy=f"{_suggestion(section, sections)}Sections: {', '.join(sections)}.",
        )
    if kind in ("model_type", "dict_type"):
        return ManifestError(
            problem=f"{source_prefix}{section} is not a section{more}.",
            remedy=f"Write [{section}] on a line of its own, and its keys below it.",
        )
    if kind == "missing":
        return ManifestError(
            problem=f"{source_prefix}the section [{section}] is missing{more}.",
            remedy=f'Add [{section}] with its keys; "name" is one of them.',
        )
    return ManifestError(
        problem=f"{source_prefix}[{section}]: {message}{more}.", remedy=f"Change it under [{section}]."
    )
