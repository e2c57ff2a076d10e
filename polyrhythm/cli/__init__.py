"""The commands, one per file; `main` has the list and imports only the one that is asked for."""
