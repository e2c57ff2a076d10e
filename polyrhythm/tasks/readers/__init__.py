"""Rows from wherever people keep them: `read_rows` finds the reader for a path, each row knows the place it comes from.

JSON is read here, so that a mistake is found to the line; everything else is read by the library `datasets`, which one file
imports when it is needed.
"""

from polyrhythm.tasks.readers.finding import Options, read_rows
from polyrhythm.tasks.readers.rows import Rows

__all__ = ["Options", "Rows", "read_rows"]
