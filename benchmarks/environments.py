"""Make the environments of the frameworks we are measured against: `python benchmarks/environments.py trl vllm`.

Each has a virtual environment of its own, because their pins exclude ours and each other's; `polyrhythm.environments` makes it.
"""

import argparse
import sys
from pathlib import Path

from polyrhythm.environments import PINS, Environment

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = {
    "trl": Environment("trl", HERE / "constraints-trl.txt"),
    "vllm": Environment("vllm", PINS["vllm"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=ENVIRONMENTS, metavar="name", help=" or ".join(ENVIRONMENTS))
    for name in parser.parse_args().names:
        print(make_environment(name))


def make_environment(name: str) -> Path:
    """The Python of the environment; built when it is missing or its pins have changed."""
    return ENVIRONMENTS[name].make(lambda line: print(f"{name}: {line}", file=sys.stderr, flush=True))


if __name__ == "__main__":
    main()
