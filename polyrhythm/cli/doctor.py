"""`polyrhythm doctor`: checks this machine, and an engine and a model if they are named; writes doctor.json."""

import argparse
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from polyrhythm.errors import UserError

if TYPE_CHECKING:
    from polyrhythm.doctor.findings import Check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="plan the memory of this model (folder, hub id or built-in name)")
    parser.add_argument(
        "--engine",
        metavar="URL",
        help="see what an engine that runs there is, what it leaves open and what it computes",
    )
    parser.add_argument(
        "--token-file", type=Path, help="with --engine: tokens.json of its run, or the token that it was started with"
    )
    parser.add_argument("--output", type=Path, default=Path("doctor.json"), help="where all of it is written")


def run(parsed: argparse.Namespace) -> int:
    import msgspec

    from polyrhythm import __version__
    from polyrhythm.doctor.findings import findings_of, in_words

    findings = []
    for about, check in _checks(parsed):
        for finding in findings_of(about, check):
            findings.append(finding)
            print(in_words(finding), flush=True)
    report = msgspec.json.format(msgspec.json.encode({"polyrhythm": __version__, "findings": findings}), indent=2)
    try:
        parsed.output.write_bytes(report + b"\n")
    except OSError as error:
        raise UserError(f"--output {parsed.output} cannot be written: {error.strerror}") from None
    counts = Counter(finding.state for finding in findings)
    print(f"{counts['problem']} problems, {counts['warning']} warnings; all of it is in {parsed.output}")
    return 1 if counts["problem"] else 0


def _checks(parsed: argparse.Namespace) -> "Iterator[tuple[str, Check]]":
    """In the order in which they are shown; torch is imported where it is needed first."""
    from polyrhythm.config import load_config
    from polyrhythm.doctor import devices, machine
    from polyrhythm.weights.pretrained import find_model

    model_dir = find_model(parsed.model) if parsed.model else None
    config = load_config([], {"model": parsed.model} if parsed.model else {})
    yield "machine", machine.check_machine
    yield "kernels", machine.check_kernels
    yield "shared memory", partial(machine.check_shared_memory, config, model_dir)
    yield "ports", machine.check_ports
    yield "torch", devices.check_torch
    yield "devices", devices.check_devices

    from polyrhythm.devices import choose_device
    from polyrhythm.doctor import numerics

    device = choose_device()
    yield "attention", partial(numerics.check_attention, device)
    yield "log-probs", partial(numerics.check_logprobs, device)
    yield "copies", partial(numerics.check_copies, device)
    if parsed.model:
        yield "memory plan", partial(devices.check_memory, config, model_dir)
    if parsed.engine:
        from polyrhythm.doctor.engine import check_engine

        credential = _credential(parsed.token_file) if parsed.token_file else ""
        yield "engine", partial(check_engine, parsed.engine, credential, model_dir)


def _credential(path: Path) -> str:
    from polyrhythm.cluster.member import read_run_credentials
    from polyrhythm.cluster.standalone import read_credential

    return read_run_credentials(path)["admin"] if path.suffix == ".json" else read_credential(path)
