"""`polyrhythm engine`: an inference engine, of a run or by itself."""

import argparse
from pathlib import Path

from polyrhythm.errors import UserError
from polyrhythm.runs.joining import join_run, serve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, dest="run_dir", help="the run folder")
    parser.add_argument("--join", metavar="URL", help="serve the run whose conductor listens there")
    parser.add_argument("--name", help="its name in the run (default: made from host and process)")
    parser.add_argument(
        "--model", help="serve this model (folder, hub id or built-in name); with --join: where its copy is here"
    )
    parser.add_argument(
        "--download", action="store_true", help="with --join: get weights over HTTP, never from a shared folder"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to bind; 0 takes a free one")
    parser.add_argument(
        "--token-file", type=Path, help="the token that clients of --model must send; with --join: tokens.json"
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 takes all cores")
    parser.add_argument(
        "--kind", choices=["embedded", "vllm"], help="with --join: another kind than the run's own engines"
    )
    parser.add_argument("--python", default="", help="with --join, kind vllm: the interpreter that has vLLM")
    parser.add_argument("--vllm-url", default="", help="with --join, kind vllm: a server that you run on this machine")


def run(parsed: argparse.Namespace) -> int:
    if not 0 <= parsed.port <= 65535:
        raise UserError(f"--port {parsed.port}: from 1 to 65535, or 0 for a free one")
    if parsed.threads < 0:
        raise UserError(f"--threads {parsed.threads}: at least 1, or 0 for all cores")
    if parsed.join:
        return _joining_engine(parsed)
    if _kind_of(parsed):
        raise UserError("--kind, --python and --vllm-url go with --join; a run's own engines are of its engine.kind")
    if (parsed.run_dir is None) == (parsed.model is None):
        raise UserError("an engine needs one of --run RUN, --join URL and --model MODEL")
    if parsed.model:
        return _standalone_engine(parsed)
    from polyrhythm.cluster.member import own_engine

    folder, config = join_run(parsed)
    return serve(own_engine(folder, config, parsed.name or "engine-0"))


def _joining_engine(parsed: argparse.Namespace) -> int:
    from polyrhythm.cluster.member import joining_engine

    if parsed.run_dir or not parsed.token_file:
        raise UserError("--join URL goes with --token-file FILE, a copy of the run's tokens.json, and without --run")
    return serve(
        joining_engine(
            parsed.join.rstrip("/"), token_file=parsed.token_file, name=parsed.name, model=parsed.model,
            host=parsed.host, port=parsed.port, num_threads=parsed.threads, always_download=parsed.download,
            of_kind=_kind_of(parsed),
        )
    )  # fmt: skip


def _kind_of(parsed: argparse.Namespace) -> dict[str, str]:
    chosen = {"kind": parsed.kind, "python": parsed.python, "url": parsed.vllm_url}
    return {key: value for key, value in chosen.items() if value}


def _standalone_engine(parsed: argparse.Namespace) -> int:
    from polyrhythm.cluster.standalone import standalone_engine

    return serve(
        standalone_engine(
            parsed.model, host=parsed.host, port=parsed.port, token_file=parsed.token_file, num_threads=parsed.threads
        )
    )
