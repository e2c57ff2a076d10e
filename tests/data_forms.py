"""The same few problems in every form in which people keep data; each writes them into a folder and gives the task's options."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS = [{"question": f"{number} and 1, é?", "answer": f"{number + 1}!"} for number in range(7)]


def jsonl(folder: Path) -> dict[str, Any]:
    path = folder / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return {"path": str(path)}


def json_list(folder: Path) -> dict[str, Any]:
    path = folder / "problems.json"
    path.write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
    return {"path": str(path)}


def csv_file(folder: Path) -> dict[str, Any]:
    path = folder / "problems.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(ROWS)
    return {"path": str(path)}


def parquet(folder: Path) -> dict[str, Any]:
    path = folder / "problems.parquet"
    _table().to_parquet(path)
    return {"path": str(path)}


def verl_parquet(folder: Path) -> dict[str, Any]:
    """As verl's preprocessing scripts write it, but with the prompt as text."""
    from datasets import Dataset

    path = folder / "verl.parquet"
    rows = [
        {
            "data_source": "tests", "prompt": row["question"], "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": row["answer"]}, "extra_info": {"index": index},
        }
        for index, row in enumerate(ROWS)
    ]  # fmt: skip
    Dataset.from_list(rows).to_parquet(path)
    return {"path": str(path)}


def saved_to_disk(folder: Path) -> dict[str, Any]:
    path = folder / "saved"
    _table().save_to_disk(path)
    return {"path": str(path)}


def saved_splits(folder: Path) -> dict[str, Any]:
    from datasets import DatasetDict

    path = folder / "splits"
    DatasetDict(train=_table(), test=_table().select([0])).save_to_disk(path)
    return {"path": str(path)}


def hub_folder(folder: Path) -> dict[str, Any]:
    """What a clone of a hub dataset is: data files with the names of splits."""
    path = folder / "clone"
    (path / "data").mkdir(parents=True)
    _table().to_parquet(path / "data" / "train-00000-of-00001.parquet")
    return {"path": str(path)}


def several_files(folder: Path) -> dict[str, Any]:
    """A list of two forms."""
    (folder / "first.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:3]), encoding="utf-8")
    (folder / "second.json").write_text(json.dumps(ROWS[3:]), encoding="utf-8")
    return {"path": [str(folder / "first.jsonl"), str(folder / "second.json")]}


def _table() -> Any:
    from datasets import Dataset

    return Dataset.from_list(ROWS)


DATA_FORMS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "csv": csv_file,
    "hub folder": hub_folder,
    "json": json_list,
    "jsonl": jsonl,
    "parquet": parquet,
    "save_to_disk": saved_to_disk,
    "save_to_disk with splits": saved_splits,
    "several files": several_files,
    "verl's parquet": verl_parquet,
}
