"""What rounds move over a peer's line (pure): matchmaking, the DHT and fetching bases come on top."""

from __future__ import annotations

from collections.abc import Iterable

from peers.codecs import get_codec

DAY_SECONDS = 86400.0


def cycle_bytes(codec: str, answer_codec: str, fragment_sizes: Iterable[int], members: int) -> float:
    """Bytes that a member sends, and about as many that it receives, until every fragment was averaged once.

    It sends its contribution to the other reducers, and the average of its share to the other members: with equal
    shares (N - 1) / N of a contribution and as much of an average, for each fragment.

    :param fragment_sizes: elements of each fragment
    :param members: of every round, itself included
    """
    sizes = list(fragment_sizes)
    whole = sum(get_codec(name).encoded_bytes(size) for name in (codec, answer_codec) for size in sizes)
    return whole * (members - 1) / members
