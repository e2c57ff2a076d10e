"""`polyrhythm init`: write a commented configuration for a model and a dataset."""

import argparse
from pathlib import Path

from polyrhythm.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="a local folder, a hub id, or smollm2-135m")
    parser.add_argument("--data", default="", help="a file, a folder of save_to_disk, or a hub id; none: addition")
    parser.add_argument("-o", "--output", type=Path, default=Path("run.toml"), help="the file to write (run.toml)")


def run(parsed: argparse.Namespace) -> int:
    from polyrhythm.runs.first_file import OWN_REWARD, REWARD_SOURCE, file_for, look_at, needs_own_reward

    path: Path = parsed.output
    seen = look_at(parsed.model, parsed.data)
    _write(path, file_for(parsed.model, parsed.data, seen, path))
    beside = path.parent / OWN_REWARD
    if needs_own_reward(parsed.data, seen) and not beside.exists():
        _write(beside, REWARD_SOURCE)
    print(f"now: polyrhythm train {path} --dry-run")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} is there already: give another name with -o") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    print(f"written: {path}")
