"""Hypothesis draws new examples at every run on a developer's machine, and always the same ones where ``CI`` is set.

Ctrl-C's signal means what it does in a terminal: what a shell runs in the background ignores it, and so would every
process that tests start.
"""

from __future__ import annotations

import os
import signal

from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
