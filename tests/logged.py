"""What loggers have written for a run, read back from their files: metrics by step, and the text of all samples."""

import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from polyrhythm.observe.loggers.jsonl import SAMPLES_FILE, read_metrics

Steps = dict[int, dict[str, float]]
PROJECT = "a project"


def from_jsonl(run_dir: Path, _: Path) -> tuple[Steps, str]:
    metrics = {row.pop("step"): row for row in read_metrics(run_dir)}
    return metrics, (run_dir / SAMPLES_FILE).read_text()


def from_tensorboard(run_dir: Path, _: Path) -> tuple[Steps, str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    steps: Steps = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert name not in steps.setdefault(event.step, {}), "what is made again after a resume was purged"
            steps[event.step][name] = event.value
    tables = [make_ndarray(event.tensor_proto) for event in events.Tensors("samples")]
    return steps, "".join(cell.decode() for table in tables for cell in table.flatten())


def from_mlflow(run_dir: Path, _: Path) -> tuple[Steps, str]:
    from mlflow import MlflowClient

    client = MlflowClient((run_dir / "mlflow").as_uri())
    experiment = client.get_experiment_by_name(PROJECT)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["rollout.group_size"], "the configuration"
    steps: Steps = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            steps.setdefault(metric.step, {})[name] = metric.value
    tables = sorted((run_dir / "mlflow").rglob("samples/*.json"))
    return steps, "".join(path.read_text() for path in tables)


def from_trackio(_: Path, trackio_dir: Path) -> tuple[Steps, str]:
    (database,) = trackio_dir.glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = list(connection.execute("SELECT run_id, step, metrics FROM metrics ORDER BY id"))
    assert len({run_id for run_id, _, _ in rows}) == 1, "one run"
    steps: Steps = {}
    tables = ""
    for _, step, logged in rows:
        metrics = json.loads(logged)
        tables += json.dumps(metrics.pop("samples", ""), ensure_ascii=False)
        steps.setdefault(step, {}).update({name: _number(value) for name, value in metrics.items()})
    return steps, tables


def from_wandb(run_dir: Path, _: Path) -> tuple[Steps, str]:
    files = sorted((run_dir / "wandb").glob("offline-run-*/*.wandb"))
    assert len({path.name for path in files}) == 1, "one run, also after a resume"
    steps: Steps = {}
    for row in (row for path in files for row in _wandb_rows(path)):
        step = row.pop("step")
        steps.setdefault(step, {}).update({name: _number(value) for name, value in row.items() if name[0] != "_"})
    tables = sorted((run_dir / "wandb").rglob("*.table.json"))
    return steps, "".join(path.read_text() for path in tables)


READERS: dict[str, Callable[[Path, Path], tuple[Steps, str]]] = {
    "jsonl": from_jsonl,
    "mlflow": from_mlflow,
    "tensorboard": from_tensorboard,
    "trackio": from_trackio,
    "wandb": from_wandb,
}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, str | int | float) else float("nan")


def _wandb_rows(path: Path) -> Iterator[dict[str, Any]]:
    from wandb.proto.wandb_internal_pb2 import Record

    for data in _leveldb_records(path.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = ((item.key or ".".join(item.nested_key), item.value_json) for item in record.history.item)
            yield {name: json.loads(value) for name, value in items if not name.startswith("samples")}


def _leveldb_records(data: bytes) -> Iterator[bytes]:
    """LevelDB's log format behind a header of seven bytes: blocks of 32 KiB, chunks with checksum, length and type."""
    first, last = (1, 2), (1, 4)
    position, record = 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        record = (b"" if kind in first else record) + data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in last:
            yield record
