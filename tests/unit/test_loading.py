"""Importing without looking for garbage, and the collector afterwards as before."""

from __future__ import annotations

import gc

import pytest

from p2p_trainer.loading import loading


def test_nothing_is_collected_meanwhile_and_what_was_made_is_never_looked_at() -> None:
    frozen = gc.get_freeze_count()
    try:
        with loading():
            assert not gc.isenabled()
            made: list[object] = []
            made.append(made)
        assert gc.isenabled() and gc.get_freeze_count() > frozen
        assert not any(one is made for one in gc.get_objects())
    finally:
        gc.unfreeze()


def test_who_collects_nothing_still_does_not_afterwards_and_an_import_may_fail() -> None:
    gc.disable()
    try:
        with pytest.raises(ImportError), loading():
            raise ImportError
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
