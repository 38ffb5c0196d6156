"""What one peer does with others: swarm time, membership, rounds, bases and their transfer.

Tensors yes; models, GPUs and the command line no. Imports ``dht_config`` only. Bytes and tensors from remote
peers are touched in ``messages.py``, ``reducer.py``, ``round.py`` and ``transfer.py`` and nowhere else.
"""
