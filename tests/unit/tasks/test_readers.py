"""Every format gives the same rows, and every mistake in a file is one line with its place."""

import json
import re
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from polyrhythm.errors import UserError
from polyrhythm.tasks.dataset import DatasetTask
from polyrhythm.tasks.readers import Options, read_rows
from tests.data_forms import DATA_FORMS, ROWS


@pytest.mark.parametrize("form", sorted(DATA_FORMS))
def test_every_form_gives_the_same_problems(tmp_path: Path, form: str) -> None:
    task = DatasetTask(**DATA_FORMS[form](tmp_path))
    problems = [task.problem(index) for index in range(task.num_problems)]
    assert [problem.prompt for problem in problems] == [row["question"] for row in ROWS]
    assert [problem.columns["answer"] for problem in problems] == [row["answer"] for row in ROWS]


def test_rows_of_a_table_are_the_same_in_order_and_at_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyrhythm.tasks.readers.tables.NUM_READ_AHEAD", 3)
    (rows,) = read_rows(DATA_FORMS["parquet"](tmp_path)["path"], Options())
    in_order = [rows.row(number) for number in range(len(rows))]
    assert in_order == ROWS
    assert [rows.row(number) for number in (5, 0, 6, 3)] == [ROWS[number] for number in (5, 0, 6, 3)]


def test_a_split_is_chosen_and_train_is_the_default(tmp_path: Path) -> None:
    parts = {name: datasets.Dataset.from_list([{"prompt": name}]) for name in ("test", "train")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "both")
    datasets.DatasetDict(test=parts["test"], validation=parts["train"]).save_to_disk(tmp_path / "others")
    datasets.DatasetDict(test=parts["test"]).save_to_disk(tmp_path / "one")
    assert DatasetTask(path=str(tmp_path / "both")).problem(0).prompt == "train"
    assert DatasetTask(path=str(tmp_path / "both"), split="test").problem(0).prompt == "test"
    assert DatasetTask(path=str(tmp_path / "one")).problem(0).prompt == "test"
    with pytest.raises(UserError, match=r"split='dev' is not one of the splits of .*: test, train"):
        DatasetTask(path=str(tmp_path / "both"), split="dev")
    with pytest.raises(UserError, match=r"split is missing: say which one of the splits of .*: test, validation"):
        DatasetTask(path=str(tmp_path / "others"))


def test_a_name_that_is_nothing_here_is_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, subset: str | None, split: str | None) -> datasets.Dataset:
        asked.append((name, subset, split))
        return datasets.Dataset.from_list([{"question": "q"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert DatasetTask(path="openai/gsm8k", subset="main", split="train[:1]").problem(0).prompt == "q"
    assert asked == [("openai/gsm8k", "main", "train[:1]")]


def test_a_hub_that_cannot_be_reached_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub (LocalEntryNotFoundError)")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        UserError, match=r"'openai/gsm8k' is no file or folder here, and the hub cannot be asked.*local copy"
    ):
        DatasetTask(path="openai/gsm8k")


def test_a_split_that_a_hub_dataset_has_not_is_named_with_those_it_has(tmp_path: Path) -> None:
    folder = Path(DATA_FORMS["hub folder"](tmp_path)["path"])
    with pytest.raises(UserError, match=r"Unknown split .*dev.*train.*\(task.options.split\)"):
        DatasetTask(path=str(folder), split="dev")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"question,answer\na,b\nx,y,z,w\n", "cannot be read as csv: .*line 3, saw 4"),
        ("a.csv", b"question,answer\na,b\n\xe4,y\n", r"a\.csv:3: not UTF-8: .* 0xe4: save the file as UTF-8"),
        ("a.csv", b"question,answer\n", "holds no problems"),
        ("a.json", b"[]", "holds no problems"),
        ("a.json", b'[{"prompt": "a"},\n {"prompt" "b"}]', r"a\.json:2: broken JSON: .*expected ':'"),
        (
            "a.json",
            b'[{"prompt": "a"},\n {"prompt": "\xff"}]',
            r"a\.json:2: not UTF-8: .* 0xff: save the file as UTF-8",
        ),
        ("a.json", b'[{"prompt": "a"}, 5]', r"a\.json, row 2: not a JSON object, but int"),
        ("a.jsonl", b"", "holds no problems: the file is empty"),
        ("a.jsonl", b"\n \n", "holds no problems"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "a", ', r"a\.jsonl:2: broken JSON"),
        ("a.jsonl", b'{"prompt": "a"}\n\n{"prompt": "\xff"}', r"a\.jsonl:3: not UTF-8: .*save the file as UTF-8"),
        ("a.jsonl", b'["prompt"]', r"a\.jsonl:1: not a JSON object"),
        ("a.parquet", b"question,answer", "cannot be read as parquet: .*[Pp]arquet"),
        (
            "a.txt",
            b"hello",
            r"ends in '.txt', which .*: rename it to one of .jsonl, .ndjson, .json, .parquet, .csv, .tsv",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        DatasetTask(path=str(tmp_path / name))
    assert "\n" not in str(caught.value) and name in str(caught.value)


def test_a_missing_file_is_named_with_the_folder_it_was_looked_for_in(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"task\.options\.path=.*cannot be read: No such file"):
        DatasetTask(path=str(tmp_path / "nothing.jsonl"))
    with pytest.raises(
        UserError, match=re.escape(f"'data/of/mine' cannot be read in the working directory {tmp_path}")
    ):
        DatasetTask(path="data/of/mine")


def test_a_file_has_no_splits(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}')
    with pytest.raises(UserError, match=r"split='test': the file .*a\.jsonl has no splits: leave the option out"):
        DatasetTask(path=str(tmp_path / "a.jsonl"), split="test")


def test_a_byte_order_mark_and_windows_line_ends_are_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    task = DatasetTask(path=str(tmp_path / "a.jsonl"))
    assert [task.problem(index).prompt for index in range(task.num_problems)] == ["a", "b"]


def test_only_an_empty_cell_is_none(tmp_path: Path) -> None:
    (tmp_path / "words.csv").write_text("prompt,answer\nWho?,None\nWhich?,NA\nWhat?,\n")
    task = DatasetTask(path=str(tmp_path / "words.csv"))
    assert [task.problem(index).columns["answer"] for index in range(3)] == ["None", "NA", None]


def test_a_column_of_images_is_refused_by_name(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list([{"prompt": "a", "picture": None}]).cast_column("picture", datasets.Image())
    table.save_to_disk(tmp_path / "pictures")
    with pytest.raises(UserError, match="the column 'picture' holds images, and models here read text"):
        DatasetTask(path=str(tmp_path / "pictures"))


def test_json_is_read_without_the_library_and_tables_without_torch(tmp_path: Path) -> None:
    paths = [DATA_FORMS[form](tmp_path)["path"] for form in ("jsonl", "parquet")]
    program = (
        "import sys, json; from polyrhythm.tasks.dataset import DatasetTask; first, second = json.loads(sys.argv[1]);"
        "DatasetTask(path=first).problem(0); assert 'datasets' not in sys.modules;"
        "DatasetTask(path=second).problem(0); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(paths)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
