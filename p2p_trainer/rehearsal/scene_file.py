"""A scene as a TOML file, for ``rehearse --scene``:

    run = "stdlib-text"     # a manifest's path (from this file's directory), or a shipped example
    minutes = 5
    churn = "20%"
    seed = 1

    [[peers]]
    speed = "4090"          # a machine, a share of one ("0.5x4090"), or samples a second
    link = "500M/20ms"
    count = 2

    [[peers]]
    speed = 8
    link = "2M/80ms"
    nat = true              # nobody can dial it
    memory = "2GB"          # all that it may take; a machine with a name has its own without this
    joins_at = 30           # seconds after training began, as all below
    killed_at = 60          # or leaves_at
    returns_at = 90
    frozen = [[40, 45]]

Only ``[[peers]]`` and ``speed`` are needed.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, ValidationError

from dht_config.manifest import EXAMPLES
from p2p_trainer.machines import memory_of, read_memory, read_speed
from p2p_trainer.rehearsal.scene import (
    DEFAULT_SECONDS,
    MAX_PEERS,
    MAX_SECONDS,
    EmulatedPeer,
    Life,
    LinkPieceError,
    Names,
    Scene,
    SceneError,
    Stay,
    parse_churn,
    read_link,
    underlined,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_HEADER = re.compile(r"\s*\[\[\s*peers\s*\]\]")
_PLACE = re.compile(r"\s*\(at line (\d+), column (\d+)\)")

Moment = Annotated[StrictFloat, Field(ge=0, le=MAX_SECONDS)]


class PeerTable(BaseModel):
    """One ``[[peers]]``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    speed: Any
    """As ``read_speed`` reads its text."""
    link: StrictStr | None = None
    nat: StrictBool = False
    memory: StrictStr | None = None
    count: StrictInt = Field(default=1, ge=1, le=MAX_PEERS)
    joins_at: Moment = 0
    leaves_at: Moment | None = None
    killed_at: Moment | None = None
    returns_at: Moment | None = None
    frozen: tuple[tuple[Moment, Moment], ...] = ()


class SceneTable(BaseModel):
    """The whole file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    peers: tuple[PeerTable, ...] = Field(min_length=1, max_length=MAX_PEERS)
    minutes: StrictFloat = Field(default=DEFAULT_SECONDS / 60, gt=0, le=MAX_SECONDS / 60)
    churn: StrictStr = "0%"
    seed: StrictInt = Field(default=0, ge=0)
    run: StrictStr = EXAMPLES[0]


def load_scene(path: Path, seconds: float | None = None) -> Scene:
    """Read a scene.

    :param seconds: how long to train instead of the file's ``minutes``
    Raises: SceneError naming file, line and key, with what is wrong underlined.
    """
    return _SceneText(path, seconds).scene()


class _SceneText:
    """A scene file and what it says."""

    def __init__(self, path: Path, seconds: float | None) -> None:
        self._path, self._seconds = path, seconds
        try:
            self._text = path.read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise SceneError(f"The scene {path} cannot be read: {why}.", "Check --scene.") from error

    def scene(self) -> Scene:
        table = self._table()
        seconds = self._seconds if self._seconds is not None else 60.0 * table.minutes
        peers: list[EmulatedPeer] = []
        names = Names()
        for index, peer in enumerate(table.peers):
            if len(peers) + peer.count > MAX_PEERS:
                self._refuse(f"more than {MAX_PEERS} peers", ("peers", index, "count"), peer.count)
            peers += [self._peer(index, peer, seconds, names) for _ in range(peer.count)]
        try:
            churn = parse_churn(table.churn)
        except SceneError as error:
            self._refuse(error.problem.partition(": ")[2].rstrip("."), ("churn",), table.churn)
        run = table.run if table.run in EXAMPLES else str(self._path.parent / table.run)
        return Scene(peers=tuple(peers), seconds=seconds, churn=churn, seed=table.seed, run=run)

    def _table(self) -> SceneTable:
        try:
            return SceneTable.model_validate(tomllib.loads(self._text))
        except tomllib.TOMLDecodeError as error:
            match = _PLACE.search(str(error))
            if match is None:
                raise SceneError(f"The scene {self._path} is not TOML: {error}.", "Correct it.") from error
            number, column = int(match[1]), int(match[2])
            line = self._text.splitlines()[number - 1]
            raise SceneError(
                f"The scene {self._path}, line {number}, is not TOML: {_PLACE.sub('', str(error))}.",
                "Correct it.",
                underlined(line, min(column - 1, len(line)), len(line)),
            ) from error
        except ValidationError as error:
            # A key that nobody knows explains the one that is missing.
            errors = error.errors()
            first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
            # What follows the key tells which of a union's kinds was tried, or where in a list.
            location = tuple(first["loc"][: 3 if first["loc"][:1] == ("peers",) else 1])
            if first["type"] == "missing":
                self._refuse("it is missing", location, None)
            if first["type"] == "extra_forbidden":
                self._refuse("there is no such key", location, first["input"])
            self._refuse(_lowered(first["msg"]), location, first["input"])

    def _peer(self, index: int, table: PeerTable, seconds: float, names: Names) -> EmulatedPeer:
        try:
            label, samples_per_second = read_speed(str(table.speed))
        except ValueError as error:
            self._refuse(str(error), ("peers", index, "speed"), table.speed)
        link = None
        if table.link is not None:
            try:
                link = read_link(table.link)
            except LinkPieceError as error:
                self._refuse(str(error), ("peers", index, "link"), table.link[error.start : error.end])
        memory_bytes = memory_of(str(table.speed))
        if table.memory is not None:
            try:
                memory_bytes = read_memory(table.memory)
            except ValueError as error:
                self._refuse(str(error), ("peers", index, "memory"), table.memory)
        life = self._life(index, table, seconds)
        return EmulatedPeer(
            name=names.next(label),
            samples_per_second=samples_per_second,
            link=link,
            behind_nat=table.nat,
            memory_bytes=memory_bytes,
            life=life,
        )

    def _life(self, index: int, table: PeerTable, seconds: float) -> Life:
        def refuse(complaint: str, key: str) -> NoReturn:
            self._refuse(complaint, ("peers", index, key), getattr(table, key))

        if table.leaves_at is not None and table.killed_at is not None:
            refuse("it leaves and is killed", "killed_at")
        end_key = "killed_at" if table.killed_at is not None else "leaves_at"
        end = table.killed_at if table.killed_at is not None else table.leaves_at
        stays = [Stay(table.joins_at, math.inf if end is None else end, killed=table.killed_at is not None)]
        if table.returns_at is not None:
            if end is None:
                refuse("it neither leaves nor is killed before", "returns_at")
            stays.append(Stay(table.returns_at))
        life = Life(stays=tuple(stays), frozen=table.frozen)
        if (complaint := life.complaint(seconds)) is not None:
            place, words = complaint
            keys = ["joins_at" if end is None else end_key, "returns_at"][: len(stays)]
            refuse(words, [*keys, *["frozen"] * len(table.frozen)][place])
        return life

    def _refuse(self, complaint: str, location: tuple[Any, ...], value: Any) -> NoReturn:
        """:param location: of what is wrong in the file's tables: keys and indices"""
        key = str(location[-1]) if not isinstance(location[-1], int) else "peers"
        number = location[1] if len(location) > 1 else None
        line_number, line, start, end = self._place(number, key, value)
        where = f", line {line_number}" if line_number else ""
        raise SceneError(
            f"The scene {self._path}{where}: {key}: {complaint}.",
            "Correct it; README.md shows a scene.",
            underlined(line, start, end),
        )

    def _place(self, number: int | None, key: str, value: Any) -> tuple[int, str, int, int]:
        """Where a key's value stands: the line's number (0: written in another way), the line, start and end in it."""
        peer = -1
        header: tuple[int, str, int, int] | None = None
        wanted = -1 if number is None else number
        assignment = re.compile(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=\s*([^#]*[^#\s])")
        for line_number, line in enumerate(self._text.splitlines(), start=1):
            if match := _HEADER.match(line):
                peer += 1
                if peer == wanted:
                    header = line_number, line, *match.span()
            elif peer == wanted and (match := assignment.match(line)):
                start, end = match.span(1)
                if isinstance(value, str) and value and value in match[1]:  # without quotes, or a part of a link
                    start += match[1].index(value)
                    end = start + len(value)
                return line_number, line, start, end
        if header is not None:
            return header
        written = f"{key} = {value!r}" if value is not None else key
        return 0, written, 0, len(written)


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]
