"""Failures a person can act on: one problem, one remedy, one stable exit code.

Network trouble inside a run is an outcome, never one of these; they are for what stops a command.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What the command line exits with. Numbers are a promise to scripts: never reuse or renumber one."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    MANIFEST = 10
    INVITE = 11
    ADDRESS = 12
    UNREACHABLE = 13
    WRONG_PEER_ID = 14
    FINGERPRINT = 15
    DIRECTORY = 16
    PORT_IN_USE = 17
    IDENTITY = 18
    DATA = 19
    CHECKPOINT = 20
    DEVICE = 21
    SWARM_PROCESS_DIED = 22
    REHEARSAL_FAILED = 23
    LIMITS = 24
    CHECKS_FAILED = 25
    DEVICE_LOST = 26
    NO_PLAN = 27
    INTERRUPTED = 130


class P2PTrainerError(Exception):
    """A failure shown to a person as ``problem`` and ``remedy`` on one line, without a traceback."""

    exit_code: ExitCode = ExitCode.UNEXPECTED

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem} {remedy}".strip())
        self.problem = problem
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[P2PTrainerError], tuple[str, str]]:
        # Exceptions travel from the swarm process to the training process through a pipe.
        return type(self), (self.problem, self.remedy)


class UsageError(P2PTrainerError):
    """An option or a setting has a value that cannot be used, or one that is needed is missing."""

    exit_code = ExitCode.USAGE


class ManifestError(P2PTrainerError):
    """The run manifest, or a field in it, cannot be used."""

    exit_code = ExitCode.MANIFEST


class InviteError(P2PTrainerError):
    """The invite is cut off, changed, of another version, or no invite."""

    exit_code = ExitCode.INVITE


class AddressError(P2PTrainerError):
    """A peer address is malformed."""

    exit_code = ExitCode.ADDRESS


class UnreachableError(P2PTrainerError):
    """Nobody answers at any of the given addresses."""

    exit_code = ExitCode.UNREACHABLE


class WrongPeerIdError(P2PTrainerError):
    """Somebody answers at the address, but under another peer id."""

    exit_code = ExitCode.WRONG_PEER_ID


class FingerprintError(P2PTrainerError):
    """This peer's manifest, task code or protocol differs from the run's."""

    exit_code = ExitCode.FINGERPRINT


class DirectoryError(P2PTrainerError):
    """The run directory cannot be used."""

    exit_code = ExitCode.DIRECTORY


class PortInUseError(P2PTrainerError):
    """Another program listens on the port."""

    exit_code = ExitCode.PORT_IN_USE


class IdentityError(P2PTrainerError):
    """The identity file is unusable, or its identity is in use elsewhere."""

    exit_code = ExitCode.IDENTITY


class DataError(P2PTrainerError):
    """Training data are missing or unusable."""

    exit_code = ExitCode.DATA


class CheckpointError(P2PTrainerError):
    """A checkpoint cannot be written or read."""

    exit_code = ExitCode.CHECKPOINT


class DeviceError(P2PTrainerError):
    """The requested device cannot be used."""

    exit_code = ExitCode.DEVICE


class DeviceLostError(P2PTrainerError):
    """The device stopped while it trained."""

    exit_code = ExitCode.DEVICE_LOST


class LimitsError(P2PTrainerError):
    """A limit of the operating system (open files, memory) is too low to run."""

    exit_code = ExitCode.LIMITS


class PlanError(P2PTrainerError):
    """This machine's memory fits none of the ways to train a run."""

    exit_code = ExitCode.NO_PLAN


class SwarmProcessDied(P2PTrainerError):
    """The averaging process or its daemon ended although nobody asked it to, or was frozen and therefore ended."""

    exit_code = ExitCode.SWARM_PROCESS_DIED


START_AGAIN = "Start the same command again: it continues from the last checkpoint."
"""The remedy against that."""


class RehearsalError(P2PTrainerError):
    """A rehearsal could not be carried out."""

    exit_code = ExitCode.REHEARSAL_FAILED


class RecordError(ValueError):
    """A remote record or announcement is invalid. Never shown to a volunteer: its sender is left out."""
