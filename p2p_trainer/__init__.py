"""What happens on this machine: command line, session, training loop, hardware, tasks, checkpoints, views.

The top of three packages: imports ``peers`` and ``dht_config``, is imported by neither.
"""
