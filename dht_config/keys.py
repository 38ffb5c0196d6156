"""Every DHT key and RPC name of a run, on one page.

hivemind's matchmaking builds its own key, ``{prefix}.0b{bits}``, and a prefix may hold no dot
(key_manager.py:13).
"""

from __future__ import annotations

MAX_FRAGMENTS = 256


def manifest_key() -> str:
    """Signed manifests of any run, subkey = run id: only a directory, which strangers can fill.

    One key for all runs: a peer whose manifest differs still finds the run it knocked at, and says which
    field differs.
    """
    return "p2p-trainer/manifest"


def run_manifest_key(run_id: str) -> str:
    """The signed manifest of this run alone, subkey = run id: strangers' manifests cannot crowd it out."""
    return f"{run_id}/manifest"


def profiles_key(run_id: str) -> str:
    """PeerProfile of every peer, subkey = peer id bytes."""
    return f"{run_id}/profiles"


def states_key(run_id: str) -> str:
    """SwarmState of every peer, subkey = peer id bytes."""
    return f"{run_id}/states"


def matchmaking_prefix(run_id: str, fragment: int) -> str:
    """The prefix that hivemind's Matchmaking is given for one fragment.

    Raises: ValueError for a fragment that no validator knows the key of.
    """
    if not 0 <= fragment < MAX_FRAGMENTS:
        raise ValueError(f"fragment must be 0 to {MAX_FRAGMENTS - 1}, got {fragment}")
    return f"{run_id}-f{fragment}"


def matchmaking_key(run_id: str, fragment: int) -> str:
    """Where the peers of one fragment's round look for each other, subkey = peer id bytes, value = bool.

    There are no group bits: every peer of a run can meet every other.
    """
    return f"{matchmaking_prefix(run_id, fragment)}.0b"


def rpc_namespace(run_id: str) -> str:
    """Namespace of this run's RPC handlers, so that two runs on one DHT cannot call each other."""
    return f"p2p-trainer-{run_id}"
