"""`polyrhythm fetch`: get a model into the cache and check that it can be trained."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="smollm2-135m, a hub id or a local folder")


def run(parsed: argparse.Namespace) -> int:
    from polyrhythm.weights.pretrained import resolve_model

    print(resolve_model(parsed.model))
    return 0
