"""Importing what a peer needs: seconds of a core, in which nothing that can be collected is made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """While modules are imported, look for no garbage, and for none among what they made afterwards.

    To import torch, hivemind and torch's compiler took 5.9 s of a core so, and 6.9 s otherwise. A forked process shares
    with its parent what neither of them touches, which a collection does.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
