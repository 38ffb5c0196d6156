"""What this machine does in a run, and why: measured in processes of its own, decided by one pure function."""
