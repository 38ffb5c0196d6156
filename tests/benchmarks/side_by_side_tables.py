"""The tables of ``side_by_side.py``: one for the terminal, the same in Markdown; where a rival wins, they say so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from side_by_side_scenes import OURS

NOT_REACHED = "-"
LESS_IS_BETTER = {
    "final_loss": "loss at equal samples",
    "loss_at_end": "loss at the end",
    "bytes_per_parameter_up": "bytes up",
    "bytes_per_parameter_down": "bytes down",
    "kilobytes_per_second_up": "kB/s up",
    "kilobytes_per_second_down": "kB/s down",
    "seconds_to_recover": "recovery",
}


def rows(document: Mapping[str, Any]) -> list[list[str]]:
    """The header and a line for each contender."""
    losses = [f"{loss:g}" for loss in document["losses"]]
    header = [
        *("", "efficiency", *(f"s to loss {loss}" for loss in losses), "x ours"),
        *(f"loss at {document['equal_samples']:.0f} samples", "loss at the end"),
        *("B/param. and round up", "down", "kB/s up", "down", "compute / waiting / rejected", "CPU (all that ran)"),
    ]
    return [header, *(_row(name, table, losses) for name, table in document["contenders"].items())]


def _row(name: str, table: Mapping[str, Any], losses: list[str]) -> list[str]:
    ratios = table["seconds_to_loss_over_ours"]
    parts = (100 * table["compute"], 100 * table["waiting"], 100 * table["rejected"])
    return [
        f"{name} (ended: {table['ended']})" if table["ended"] else name,
        _with_spread(table["efficiency"], table["spread"]["efficiency"], 3),
        *(_number(table["seconds_to_loss"][loss], 1) for loss in losses),
        " / ".join(_number(ratios[loss], 1) for loss in losses),
        _with_spread(table["final_loss"], table["spread"]["final_loss"], 2),
        _with_spread(table["loss_at_end"], table["spread"]["loss_at_end"], 2),
        *(_number(table[f"bytes_per_parameter_{way}"], 1) for way in ("up", "down")),
        *(_number(table[f"kilobytes_per_second_{way}"], 0) for way in ("up", "down")),
        " / ".join(f"{part:.0f} %" for part in parts),
        f"{100 * table['cpu_share']:.0f} % ({100 * table['machine_share']:.0f} %)",
    ]


def notes(document: Mapping[str, Any]) -> list[str]:
    """What the table does not show: where rivals are ahead, and the figures that only some scenes have."""
    contenders = document["contenders"]
    ours = contenders.get(OURS)
    found = []
    if ours is not None:
        for name, table in contenders.items():
            if name != OURS and (ahead := _ahead(table, ours, document["losses"])):
                found.append(f"{name} is ahead of ours in: {', '.join(ahead)}.")
        if ours["cursed_ratio"] is not None:
            found.append(f"Ours with ÷ without the cursed peer: {ours['cursed_ratio']:.3f} of the rate.")
        found.append(f"Ours: {_number(ours['seconds_to_first_credit'], 1)} s from `join` to the first credited sample.")
    for name, table in contenders.items():
        recovered = table["seconds_to_recover"]
        when = f"after {recovered:.0f} s" if recovered is not None else "not"
        if document["killed"]:
            found.append(f"{name}: {when} at 95 % of the survivors' sum again.")
        if document["throttled"]:
            found.append(
                f"{name}: whose line is as it was does {_number(table['least_own_rate'], 3)} of its own rate or more; "
                f"who was throttled is {when} at 95 % of its own again."
            )
        if document["scene"] == "lines" and table["slow_credited"] is not None:
            found.append(f"{name}: {table['slow_credited']:.3f} of what the peer on the slowest line did is credited.")
    busiest = max((table["machine_share"] for table in contenders.values()), default=0.0)
    found.append(f"All that ran on this machine took up to {100 * busiest:.0f} % of its {document['cores']} cores.")
    return found


def _ahead(table: Mapping[str, Any], ours: Mapping[str, Any], losses: list[float]) -> list[str]:
    ahead = ["efficiency"] if table["efficiency"] > ours["efficiency"] else []
    for loss in (f"{loss:g}" for loss in losses):
        theirs, own = table["seconds_to_loss"][loss], ours["seconds_to_loss"][loss]
        if theirs is not None and (own is None or theirs < own):
            ahead.append(f"seconds to loss {loss}")
    return ahead + [
        words
        for name, words in LESS_IS_BETTER.items()
        if table[name] is not None and (ours[name] is None or table[name] < ours[name])
    ]


def print_tables(document: Mapping[str, Any]) -> None:
    console = Console(width=200)
    if not document["contenders"]:
        console.print("No run has finished.")
        return
    header, *lines = rows(document)
    table = Table(title=f"{document['scene']}, {document['seconds']:g} s", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, title in enumerate(header):
        table.add_column(title, justify="left" if index == 0 else "right", overflow="fold")
    for line in lines:
        table.add_row(*map(escape, line))
    console.print(table)
    for note in notes(document):
        console.print(note, highlight=False, markup=False)


def print_markdown(document: Mapping[str, Any]) -> None:
    header, *lines = rows(document)
    print("\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *lines]))
    print()
    print("\n".join(notes(document)))


def _number(value: float | None, digits: int) -> str:
    return NOT_REACHED if value is None else f"{value:.{digits}f}"


def _with_spread(value: float | None, spread: list[float] | None, digits: int) -> str:
    if value is None or spread is None or spread[0] == spread[1]:
        return _number(value, digits)
    return f"{value:.{digits}f} ({spread[0]:.{digits}f} to {spread[1]:.{digits}f})"
