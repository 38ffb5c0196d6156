"""What NVIDIA's management library knows of the cards, and what it means where it refuses.

Every call may refuse: on a laptop card, a virtual one, in a container, after half a driver update. A refusal costs one
figure, which torch or the system then gives; it is never an error here, and a process warns of refusals once. Figures
that cannot be (no memory at all, more free than there is) count as refused.

NVML counts all cards of the machine, torch those that CUDA_VISIBLE_DEVICES leaves, so cards are matched by UUID.
What this does not stop: a driver that hangs inside a call. Whoever cannot wait asks in a process of its own.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pynvml

_log = logging.getLogger(__name__)

NORMAL_REFUSALS = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED})
"""Many cards have no power meter or no fan; nobody needs to hear of it."""

_MIG = re.compile(r"MIG-", re.IGNORECASE)
_HOTTEST_CELSIUS = 200
_MOST_MILLIWATTS = 10_000_000
_FOREIGN_ERRORS = (pynvml.NVMLError, OSError, AttributeError, ValueError, TypeError)
"""Besides its own errors the binding lets through what ctypes and decoding raise; an old driver lacks functions."""

_EXPLANATIONS: Mapping[int, tuple[str, str]] = {
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "the NVIDIA driver was updated while this machine ran: its library and the loaded kernel module differ",
        "Restart the machine.",
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (
        "the NVIDIA driver is installed, but its kernel module is not loaded",
        "Load it (modprobe nvidia), or install the driver anew for this kernel, then see what nvidia-smi says.",
    ),
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        "NVIDIA's library libnvidia-ml.so.1 is not there",
        "Install NVIDIA's driver; a container must be started with `docker run --gpus all`.",
    ),
    pynvml.NVML_ERROR_GPU_IS_LOST: (
        "the card no longer answers: it fell off the bus",
        "Switch the machine off and on again; if it comes back, look at the card's power supply and temperature.",
    ),
    pynvml.NVML_ERROR_RESET_REQUIRED: ("the card must be reset", "Restart the machine."),
    pynvml.NVML_ERROR_NO_PERMISSION: (
        "this user may not use the card",
        "Add the user to the group that owns /dev/nvidia* (often video or render).",
    ),
    pynvml.NVML_ERROR_NOT_FOUND: ("NVIDIA's driver finds no card", "See what nvidia-smi and lspci say."),
}
_FATAL = frozenset(_EXPLANATIONS) - {pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_NO_PERMISSION}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A call that did not give an answer one can use."""

    call: str
    code: int | None
    """NVML's error code; None for an answer that cannot be, or an error that is not NVML's."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """One card, or one MIG instance of it. None or empty: NVML does not say."""

    uuid: str
    """As NVML writes it: GPU-... or MIG-..."""
    name: str = ""
    total_bytes: int | None = None
    free_bytes: int | None = None
    utilisation: float | None = None
    """Share of the last moment in which the card computed, 0 to 1."""
    temperature_celsius: int | None = None
    power_watts: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlFacts:
    """All that NVML says."""

    driver: str = ""
    cards: tuple[CardFacts, ...] = ()
    refusals: tuple[Refusal, ...] = ()

    @property
    def failure(self) -> Refusal | None:
        """The refusal that says why a card, or all of them, cannot be used; None if nothing says so."""
        return next((refusal for refusal in self.refusals if refusal.code in _FATAL), None)


def explain(code: int | None, text: str) -> tuple[str, str]:
    """What an error of NVML means for a person: (cause, remedy)."""
    return _EXPLANATIONS.get(code or 0, (f"NVIDIA's library says: {text}", "See what nvidia-smi says."))


def read_nvml() -> NvmlFacts:
    """Ask for everything. Never raises; warns once in a process of what was refused, unless there is no library."""
    asked = _Asker()
    facts = NvmlFacts()
    with _session(asked) as begun:
        if begun:
            facts = NvmlFacts(driver=_text(asked("nvmlSystemGetDriverVersion")), cards=tuple(_cards(asked)))
    facts = NvmlFacts(driver=facts.driver, cards=facts.cards, refusals=tuple(asked.refusals))
    _warn_once(facts)
    return facts


def match_card(
    cards: Sequence[CardFacts], uuid: str | None, index: int, visible: Sequence[str] | None
) -> CardFacts | None:
    """The card that torch calls ``cuda:index``; None if that is not certain.

    :param uuid: what CUDA says, with or without "GPU-" or "MIG-": of a MIG instance some versions give the instance's,
        some the whole card's
    :param visible: the entries of CUDA_VISIBLE_DEVICES; None if it is not set. Entries may be cut short, as CUDA allows
    """
    entry = visible[index] if visible is not None and index < len(visible) else ""
    if _MIG.match(entry):  # says more than CUDA's UUID may
        return _only(card for card in cards if _same_start(card.uuid, entry))
    if uuid:
        bare = _bare(uuid)
        found = _only(card for card in cards if _bare(card.uuid) == bare)
        if found is not None:
            return found
    if entry and not entry.lstrip("-").isdigit():
        return _only(card for card in cards if _same_start(card.uuid, entry))
    return None


def visible_devices(text: str | None) -> tuple[str, ...] | None:
    """The entries of CUDA_VISIBLE_DEVICES that CUDA heeds; None if it is not set.

    A number below 0 hides all that follow; so do the words that people and programs use for "none".
    """
    if text is None:
        return None
    entries: list[str] = []
    for word in (word.strip() for word in text.split(",")):
        if not word or word.lower() in ("none", "nodevfiles", "void") or re.fullmatch(r"-\d+", word):
            break
        entries.append(word)
    return tuple(entries)


class _Asker:
    """Calls the binding; notes what it refuses."""

    def __init__(self) -> None:
        self.refusals: list[Refusal] = []

    def __call__(self, call: str, *arguments: Any) -> Any:
        """The answer, or None."""
        try:
            function: Callable[..., Any] = getattr(pynvml, call)
            return function(*arguments)
        except _FOREIGN_ERRORS as error:
            code = int(error.value) if isinstance(error, pynvml.NVMLError) else None
            self.refuse(call, code, _described(error))
            return None

    def refuse(self, call: str, code: int | None, text: str) -> None:
        refusal = Refusal(call=call, code=code, text=text)
        if refusal not in self.refusals:
            self.refusals.append(refusal)


@contextmanager
def _session(asked: _Asker) -> Iterator[bool]:
    """Whether NVML began; ends it if it did."""
    before = len(asked.refusals)
    asked("nvmlInit")
    begun = len(asked.refusals) == before
    try:
        yield begun
    finally:
        if begun:
            asked("nvmlShutdown")


def _cards(asked: _Asker) -> Iterator[CardFacts]:
    for index in range(min(asked("nvmlDeviceGetCount") or 0, 256)):
        handle = asked("nvmlDeviceGetHandleByIndex", index)
        if handle is None:
            continue
        whole = _card(asked, handle)
        yield whole
        mode = asked("nvmlDeviceGetMigMode", handle)
        if not mode or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            continue
        for slot in range(min(asked("nvmlDeviceGetMaxMigDeviceCount", handle) or 0, 64)):
            instance = _quietly(asked, "nvmlDeviceGetMigDeviceHandleByIndex", handle, slot)
            if instance is not None:
                # Of an instance NVML has neither temperature nor power: they are the whole card's.
                yield _card(asked, instance, whole)


def _card(asked: _Asker, handle: Any, whole: CardFacts | None = None) -> CardFacts:
    memory = asked("nvmlDeviceGetMemoryInfo", handle)
    total, free = (int(memory.total), int(memory.free)) if memory is not None else (None, None)
    if total is not None and free is not None and not (total > 0 and 0 <= free <= total):
        asked.refuse("nvmlDeviceGetMemoryInfo", None, f"{free} of {total} bytes free")
        total = free = None
    uuid, name = _text(asked("nvmlDeviceGetUUID", handle)), _text(asked("nvmlDeviceGetName", handle))
    if whole is not None:
        return CardFacts(
            uuid=uuid,
            name=name or whole.name,
            total_bytes=total,
            free_bytes=free,
            temperature_celsius=whole.temperature_celsius,
            power_watts=whole.power_watts,
        )
    rates = asked("nvmlDeviceGetUtilizationRates", handle)
    celsius = asked("nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU)
    milliwatts = asked("nvmlDeviceGetPowerUsage", handle)
    return CardFacts(
        uuid=uuid,
        name=name,
        total_bytes=total,
        free_bytes=free,
        utilisation=rates.gpu / 100 if rates is not None and 0 <= rates.gpu <= 100 else None,
        temperature_celsius=celsius if celsius is not None and 0 < celsius < _HOTTEST_CELSIUS else None,
        power_watts=milliwatts / 1000 if milliwatts is not None and 0 < milliwatts < _MOST_MILLIWATTS else None,
    )


def _quietly(asked: _Asker, call: str, *arguments: Any) -> Any:
    """For a place that may be empty: no answer is an answer."""
    before = list(asked.refusals)
    answer = asked(call, *arguments)
    asked.refusals[:] = before
    return answer


_warned = False


def _warn_once(facts: NvmlFacts) -> None:
    global _warned
    unusual = [refusal for refusal in facts.refusals if refusal.code not in NORMAL_REFUSALS]
    without_library = any(refusal.code == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND for refusal in unusual)
    if not unusual or without_library or _warned:
        for refusal in facts.refusals:
            _log.debug("%s: %s", refusal.call, refusal.text)
        return
    _warned = True
    listed = "; ".join(f"{refusal.call}: {refusal.text}" for refusal in unusual[:3])
    _log.warning("NVIDIA's library does not answer everything (%s): torch's and the system's figures are used.", listed)


def _described(error: BaseException) -> str:
    """NVML's own words for its error; the binding may fail while it looks for them."""
    try:
        return " ".join(str(error).split())[:120] or type(error).__name__
    except _FOREIGN_ERRORS:
        return type(error).__name__


def _text(value: Any) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
    return "".join(character for character in " ".join(text.split()) if character.isprintable())


def _bare(uuid: str) -> str:
    return re.sub(r"^(GPU|MIG)-", "", uuid.strip().lower(), flags=re.IGNORECASE)


def _same_start(uuid: str, entry: str) -> bool:
    return bool(uuid) and uuid.lower().startswith(entry.lower())


def _only(found: Iterator[CardFacts]) -> CardFacts | None:
    """The one that was found; None for none and for several."""
    cards = list(found)
    return cards[0] if len(cards) == 1 else None
