"""Faults of every kind that a run of small size is put through: python -m tests.faults."""
