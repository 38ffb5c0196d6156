"""What the files of a run directory are called.

Apart from ``run_directory``: a health check looks at them often, and must not load torch, which hivemind brings along.
"""

from __future__ import annotations

SIGNED_MANIFEST_NAME = "manifest.signed"
STATE_NAME = "state.json"
METRICS_NAME = "metrics.jsonl"
INVITE_NAME = "invite"
LOCK_NAME = "lock"
