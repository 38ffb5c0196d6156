"""A peer of another version, for tests: ``python other_version.py ARGUMENTS OF THE PROGRAM``.

OTHER_PROTOCOL is the protocol version that it speaks, OTHER_PRODUCT the version that it says it is.
"""

from __future__ import annotations

import os
from importlib import metadata

import dht_config.manifest

if __name__ == "__main__":
    dht_config.manifest.PROTOCOL_VERSION = int(os.environ.get("OTHER_PROTOCOL", dht_config.manifest.PROTOCOL_VERSION))
    version = metadata.version
    metadata.version = lambda name: os.environ["OTHER_PRODUCT"] if name == "p2p-trainer" else version(name)
    from p2p_trainer.cli import main

    main()
