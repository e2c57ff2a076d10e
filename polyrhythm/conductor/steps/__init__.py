"""One step from its problems to its groups: dispatch, ledger, journal, and which rank gets what."""
