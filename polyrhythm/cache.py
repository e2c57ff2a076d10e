"""Where this user's models and kernels are kept."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """`POLYRHYTHM_CACHE`, or ~/.cache/polyrhythm."""
    return Path(os.environ.get("POLYRHYTHM_CACHE") or "~/.cache/polyrhythm").expanduser()
