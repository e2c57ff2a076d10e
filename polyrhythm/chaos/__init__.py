"""Faults on purpose: the plan of a run, and what it does to each kind of process."""
