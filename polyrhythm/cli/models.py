"""`polyrhythm models`: which architectures run, which were tested, and why some are refused."""

import argparse

from polyrhythm.models import REFUSED, TESTED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(_: argparse.Namespace) -> int:
    print(f"tested ({len(TESTED)} model types of transformers): {', '.join(TESTED)}")
    for why in dict.fromkeys(REFUSED.values()):
        print(f"refused, because each {why}: {', '.join(name for name in REFUSED if REFUSED[name] == why)}")
    print(
        "any other decoder whose layers call transformers' attention function is tried: when a run starts, engine and "
        "trainer compare a few tokens with the model's own forward pass and refuse it if they differ. See docs/models.md"
    )
    return 0
