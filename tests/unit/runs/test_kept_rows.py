"""Rows that a script gave are kept in the run folder in a form that the dataset task reads."""

import json

import pytest

from polyrhythm.errors import UserError
from polyrhythm.runs.data import is_rows, keep_rows


def test_a_list_of_dicts_becomes_a_file_of_lines(tmp_path):
    rows = [{"prompt": "ä\n", "answer": 4}, {"prompt": [{"role": "user", "content": "x"}], "answer": None}]
    path = keep_rows(rows, tmp_path)
    assert [json.loads(line) for line in path.read_text().split("\n")[:-1]] == rows


def test_a_dataset_keeps_its_own_form(tmp_path):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list([{"prompt": "2+2=", "answer": 4}])
    kept = keep_rows(dataset, tmp_path)
    assert datasets.load_from_disk(str(kept)).to_list() == dataset.to_list()
    assert not is_rows(dataset.to_iterable_dataset())
    with pytest.raises(UserError, match=r"dataset has the splits train: give one of them, such as dataset\['train'\]"):
        keep_rows(datasets.DatasetDict(train=dataset), tmp_path)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["2+2="], "dataset[0] is '2+2=': a row is a dict"),
        ([{"prompt": "x"}, {"prompt": {1, 2}}], "dataset[1] cannot be kept in the run folder"),
        ([{"prompt": "x", "score": float("nan")}], "dataset[0] cannot be kept in the run folder"),
    ],
)
def test_what_cannot_be_kept_is_named(tmp_path, rows, said):
    with pytest.raises(UserError) as caught:
        keep_rows(rows, tmp_path)
    assert said in str(caught.value)


def test_text_is_no_row_of_characters():
    assert not is_rows("rows.jsonl") and is_rows([]) and is_rows(({"prompt": "x"},))
