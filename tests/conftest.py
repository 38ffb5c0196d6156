"""Hypothesis draws new examples at every run on a developer's machine, and always the same ones where ``CI`` is set."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
