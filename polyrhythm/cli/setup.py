"""`polyrhythm setup`: make the environment of what does not fit into ours, such as vLLM."""

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="vllm: vLLM's build for CPUs, about 3.5 GB in the cache")


def run(parsed: argparse.Namespace) -> int:
    from polyrhythm.environments import environment

    print(environment(parsed.name).make(lambda line: print(line, file=sys.stderr, flush=True)))
    return 0
