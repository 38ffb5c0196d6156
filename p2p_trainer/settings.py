"""Settings of one peer on this machine: default < file < ``P2P_TRAINER_*`` environment < command line flag."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import platformdirs
from annotated_types import Ge, Gt, Le
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from dht_config.address import Address, parse_addresses
from dht_config.errors import AddressError, DeviceError, UsageError
from dht_config.network import NetworkSettings
from p2p_trainer.machines import read_memory, read_rate

StrategyName = Literal["full", "checkpoint", "host_optimizer", "fragments", "stream"]
"""Ways to train in little memory; what they are is said in ``p2p_trainer/strategies``, which takes torch to import."""
ComputeDtype = Literal["float32", "bfloat16", "float16"]
CadenceChoice = Literal[1, 2, 4]
CodecChoice = Literal["int8", "int4", "sparse"]
"""As in ``peers/line.py``, which takes torch to import."""

ENVIRONMENT_PREFIX = "P2P_TRAINER_"
_DEVICE = re.compile(r"cpu(:0)?|mps(:0)?|cuda(:[0-9]{1,3})?")


class SettingsError(UsageError):
    """A setting has a value that cannot be used."""


def default_settings_file() -> Path:
    """Where settings are read from if no file is named; it need not exist."""
    return Path(platformdirs.user_config_dir("p2p-trainer", appauthor=False)) / "settings.toml"


def default_data_directory() -> Path:
    """Below this, each run has a directory of its own."""
    return Path(platformdirs.user_data_dir("p2p-trainer", appauthor=False)) / "runs"


class PeerSettings(BaseSettings):
    """What a person may set for a peer; nothing here is part of the run's fingerprint."""

    model_config = SettingsConfigDict(env_prefix=ENVIRONMENT_PREFIX, extra="forbid", frozen=True)

    dir: Path | None = None
    """Where this peer keeps its identity, checkpoints and metrics; by default below the user's data directory."""
    host: str = "0.0.0.0"
    """IP address to listen on."""
    port: int = Field(default=0, ge=0, le=65535)
    """TCP port to listen on; 0 takes a free one and keeps it for later starts if it can."""
    no_direct: bool = False
    """Rounds go through the p2p daemon alone; otherwise also over direct connections, to the port after ``port``."""
    announce: Annotated[tuple[str, ...], NoDecode] = ()
    """Addresses that others should dial instead, such as /dns4/peer.example.org/tcp/31337; commas between several."""
    peer: Annotated[tuple[str, ...], NoDecode] = ()
    """Addresses of peers to ask besides the invite's; commas between several."""
    device: str | None = None
    """cpu, cuda, cuda:1, mps; by default the best one there is."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads for training."""
    wait_seconds: float = Field(default=600.0, ge=0, le=1e7)
    """How long to try to reach anybody before giving up."""
    checkpoint_seconds: float = Field(default=300.0, ge=1, le=1e6)
    """Time between two checkpoints."""
    eval_seconds: float = Field(default=60.0, ge=1, le=1e6)
    """Time between two evaluations of the base on held-out data."""
    eval_samples: int = Field(default=64, ge=0, le=10**6)
    """Held-out samples per evaluation; 0 for none."""
    emulate: float | None = Field(default=None, gt=0, le=1e6)
    """Pretend to be a slower machine: at most this many samples per second (for rehearsals)."""
    memory: str | None = None
    """All that this peer may take of the device's memory (on a CPU, of the machine's), such as 8G or 512M."""
    micro_batch: int | None = Field(default=None, ge=1, le=2**20)
    """Samples that go through the model at once."""
    batch: int | None = Field(default=None, ge=1, le=2**20)
    """Samples of an inner step; at most the run's, with the learning rate that goes with fewer."""
    strategy: StrategyName | None = None
    """How to save memory: full, checkpoint, host_optimizer, fragments or stream; by default the first that fits."""
    compute_dtype: ComputeDtype | None = None
    """float32, bfloat16 or float16: what matrices are multiplied in; by default as the device does best."""
    compile: bool | None = None
    """Whether to try torch.compile, which is kept where it is measured to be faster; by default on graphics cards."""
    train_fragments: int | None = Field(default=None, ge=1, le=256)
    """With the strategies fragments and stream: how many to train at a time; by default as many as fit."""
    snapshot_versions: int = Field(default=100, ge=0, le=10**6)
    """A bootstrap peer keeps a snapshot of the model every so many versions; 0 for none."""
    snapshot_keep: int = Field(default=5, ge=1, le=1000)
    """How many of the newest snapshots are all kept; before them ever fewer are."""
    allow_files: bool = False
    """Let a run that was joined by invite read the files that its manifest names on this machine."""
    cadence: CadenceChoice | None = None
    """Take part in every round (1), every 2nd or every 4th; by default as often as the line carries."""
    codec: CodecChoice | None = None
    """int8, int4 or sparse: the codec of contributions in a run that leaves it to its peers; by default by the line."""
    upload_limit: str | None = None
    """What rounds and bases may send, on average, in bits a second, such as 5M; by default what the line carries."""
    daily_traffic: str | None = None
    """What rounds and bases may move in a day (UTC), both ways together, such as 10G; then training goes on alone."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @field_validator("cadence", mode="before")
    @classmethod
    def _number(cls, value: object) -> object:
        return int(value) if isinstance(value, str) and value.strip().isdecimal() else value

    @field_validator("announce", "peer", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value

    @property
    def up_bits_per_second(self) -> float | None:
        """:raises ValueError: the limit is no rate"""
        return read_rate(self.upload_limit) if self.upload_limit is not None else None

    @property
    def up_bytes_per_second(self) -> float | None:
        """:raises ValueError: the limit is no rate"""
        return self.up_bits_per_second / 8 if self.up_bits_per_second is not None else None

    @property
    def daily_bytes(self) -> int | None:
        """:raises ValueError: it is no size"""
        return read_memory(self.daily_traffic) if self.daily_traffic is not None else None

    @property
    def memory_bytes(self) -> int | None:
        """:raises ValueError: it is no size"""
        return read_memory(self.memory) if self.memory is not None else None

    @property
    def network(self) -> NetworkSettings:
        """:raises AddressError: for a host or an announced address that cannot be used"""
        next_port = self.port + 1 if 0 < self.port < 65535 else 0
        return NetworkSettings(
            host=self.host,
            port=self.port,
            direct_port=None if self.no_direct else next_port,
            announce=self.announce,
        )


def load_settings(flags: dict[str, Any], file: Path | None = None) -> PeerSettings:
    """Merge all sources.

    :param flags: from the command line; None means not given
    :param file: a TOML file; by default the user's, if it exists
    :raises SettingsError: names the flag, the variable, or the file and key; its value; and what is allowed
    :raises AddressError: likewise, for a host or an address that cannot be used
    :raises DeviceError: likewise, for what is no device
    """
    path = file if file is not None else default_settings_file()
    if file is not None and not os.path.isfile(file):  # as a Path it would raise where it may not be looked for
        raise SettingsError(f"The settings file {file} does not exist, or may not be looked at.", "Check --settings.")
    _refuse_unknown_variables()
    given = {name: value for name, value in flags.items() if value not in (None, ())}

    class Source(PeerSettings):
        model_config = SettingsConfigDict(toml_file=path)

    def where(name: str) -> str:
        return _where(name, given, path)

    try:
        settings = Source(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        if first["type"] == "extra_forbidden":
            raise SettingsError(
                f"There is no setting {name!r} (in {path}).",
                f"{_suggestion(name, PeerSettings.model_fields)}Remove it or correct its name.",
            ) from error
        raise SettingsError(
            f"{where(name)}: {_shown(first['input'])} cannot be used, it must be {_allowed(name, first['msg'])}.",
            "Correct it or leave it out.",
        ) from error
    except (ValueError, OSError) as error:
        raise SettingsError(
            f"The settings file {path} cannot be read: {error}.", "Correct it as a TOML file of UTF-8 text."
        ) from error
    _check(settings, where)
    return settings


def parse_given_addresses(texts: Iterable[str], where: str) -> list[Address]:
    """Addresses that a person typed: a bad one is an error, where one that somebody else wrote is left out.

    :raises AddressError: says where it was typed
    """
    addresses = []
    for text in texts:
        good, bad = parse_addresses([text])
        if bad:
            raise _placed(bad[0], where)
        if not good:
            raise AddressError(f"{where}: the address {text!r} is empty.", "Give an address, or leave it out.")
        addresses += good
    return addresses


def _check(settings: PeerSettings, where: Callable[[str], str]) -> None:
    """What pydantic does not know of. :raises AddressError: :raises DeviceError:"""
    for name in ("host", "announce"):
        try:
            NetworkSettings.model_validate({name: getattr(settings, name)})
        except AddressError as error:
            raise _placed(error, where(name)) from None
        except ValidationError as error:
            raise SettingsError(f"{where(name)}: {error.errors()[0]['msg']}.", "Correct it or leave it out.") from error
    parse_given_addresses(settings.peer, where("peer"))
    for name, value in (
        ("upload_limit", "up_bytes_per_second"),
        ("daily_traffic", "daily_bytes"),
        ("memory", "memory_bytes"),
    ):
        try:
            getattr(settings, value)
        except ValueError as error:
            raise SettingsError(
                f"{where(name)}: {getattr(settings, name)!r} cannot be used, {error}.", "Correct it or leave it out."
            ) from None
    if settings.device is not None and not _DEVICE.fullmatch(settings.device):
        raise DeviceError(f"{where('device')}: {settings.device!r} is no device.", "Use cpu, cuda, cuda:1 or mps.")


def _placed(error: AddressError, where: str) -> AddressError:
    return AddressError(f"{where}: {error.problem[:1].lower()}{error.problem[1:]}", error.remedy)


def _where(name: str, given: Mapping[str, Any], path: Path) -> str:
    """Where the value in force was set, in the words a person finds it by."""
    if name in given:
        return f"--{name.replace('_', '-')}"
    for variable in os.environ:
        if variable.upper() == f"{ENVIRONMENT_PREFIX}{name.upper()}":
            return f"{variable} in the environment"
    return f"{name} in {path}"


def _allowed(name: str, complaint: str) -> str:
    """What a setting may be: "a whole number from 0 to 65535"."""
    field = PeerSettings.model_fields.get(name)
    kinds = {field.annotation, *get_args(field.annotation)} if field is not None else set()
    if bool in kinds:
        return "true or false"
    choices = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())
    if choices:
        return f"{', '.join(str(one) for one in choices[:-1])} or {choices[-1]}"
    if field is None or not kinds & {int, float}:
        return f"something else ({complaint[:1].lower()}{complaint[1:]})"
    least = next((item.ge for item in field.metadata if isinstance(item, Ge)), None)
    above = next((item.gt for item in field.metadata if isinstance(item, Gt)), None)
    most = next((item.le for item in field.metadata if isinstance(item, Le)), None)
    start = f"above {above}" if above is not None else f"from {least}"
    return f"a {'whole ' if int in kinds else ''}number {start} to {most:.0f}"


def _refuse_unknown_variables() -> None:
    """:raises SettingsError:"""
    known = [f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in PeerSettings.model_fields]
    for variable in os.environ:
        if variable.startswith(ENVIRONMENT_PREFIX) and variable.upper() not in known:
            raise SettingsError(
                f"There is no setting for {variable} in the environment.",
                f"{_suggestion(variable.upper(), known)}Unset or correct it.",
            )


def _suggestion(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"Did you mean {close[0]}? " if close else ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
