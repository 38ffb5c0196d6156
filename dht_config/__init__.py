"""What the swarm agrees on: run manifest, invite, identities, DHT keys, signed records and their validators.

No model, no GPU, no tensors. ``peers`` and ``p2p_trainer`` build on it; it imports neither.
"""
