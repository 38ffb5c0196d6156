"""``python -m p2p_trainer`` is the command line."""

from p2p_trainer.cli import main

main()
