"""Settings of one peer on this machine: default < file < ``P2P_TRAINER_*`` environment < command line flag."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import platformdirs
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from dht_config.errors import UsageError
from dht_config.network import NetworkSettings

ENVIRONMENT_PREFIX = "P2P_TRAINER_"


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
    allow_files: bool = False
    """Let a run that was joined by invite read the files that its manifest names on this machine."""

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

    @field_validator("announce", "peer", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value

    @property
    def network(self) -> NetworkSettings:
        """:raises AddressError: for a host or an announced address that cannot be used"""
        return NetworkSettings(host=self.host, port=self.port, announce=self.announce)


def load_settings(flags: dict[str, Any], file: Path | None = None) -> PeerSettings:
    """Merge all sources.

    :param flags: from the command line; None means not given
    :param file: a TOML file; by default the user's, if it exists
    :raises SettingsError: names the setting, its value and where it may have come from
    """
    path = file if file is not None else default_settings_file()
    if file is not None and not file.is_file():
        raise SettingsError(f"The settings file {file} does not exist.", "Check --settings.")

    known = {f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in PeerSettings.model_fields}
    for variable in os.environ:
        if variable.startswith(ENVIRONMENT_PREFIX) and variable.upper() not in known:
            raise SettingsError(f"There is no setting for {variable} in the environment.", "Unset or correct it.")

    class Source(PeerSettings):
        model_config = SettingsConfigDict(toml_file=path)

    given = {name: value for name, value in flags.items() if value not in (None, ())}
    try:
        return Source(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise SettingsError(
                f"There is no setting {name!r} (in {path}).", "Remove it or correct its name."
            ) from error
        raise SettingsError(
            f"The setting {name} = {first['input']!r} cannot be used: {first['msg']}.",
            f"Look at --{name.replace('_', '-')}, {ENVIRONMENT_PREFIX}{name.upper()} and {path}.",
        ) from error
    except (ValueError, OSError) as error:
        raise SettingsError(f"The settings in {path} or the environment cannot be read: {error}.", "") from error
