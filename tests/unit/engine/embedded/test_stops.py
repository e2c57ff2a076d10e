import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from polyrhythm.engine.embedded.stops import StopStrings
from polyrhythm.engine.refusals import Refused


@pytest.fixture
def stops_of(model_dir: Path):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    finder = StopStrings(model_dir, vocab_size=300)

    def completed(text: str, *stops: str) -> bool:
        finder.prepare(stops)
        return list(finder.completed(np.array([tokenizer(text).input_ids]), stops)) == [0]

    return completed


def test_a_stop_string_is_found_when_its_last_token_arrives(stops_of):
    assert stops_of("3 + 4 = 7\n", "\n")
    assert stops_of("Answer: done. END", "STOP", " END")
    assert not stops_of("Answer: done. EN", " END")


def test_a_stop_string_of_several_bytes_per_character_is_found(stops_of):
    assert stops_of("x" * 50 + "caf\u00e9 \U0001f600", "\u00e9 \U0001f600")
    assert not stops_of("x" * 50 + "caf\u00e9 \U0001f601", "\u00e9 \U0001f600")


def test_a_stop_string_that_ends_in_a_space_is_found(stops_of):
    assert stops_of("one two ", "two ")


def test_requests_that_come_at_once_load_one_tokenizer(model_dir: Path, monkeypatch):
    loads: list[Path] = []
    load = AutoTokenizer.from_pretrained

    def slow_load(folder: Path):
        loads.append(folder)
        time.sleep(0.1)
        return load(folder)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", slow_load)
    finder = StopStrings(model_dir, vocab_size=300)
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(finder.prepare, [("\n",)] * 6))
    assert len(loads) == 1
    assert not finder._may_complete(("\n",)).all()


def test_stop_strings_without_a_tokenizer_are_refused(tmp_path: Path):
    with pytest.raises(Refused, match="tokenizer"):
        StopStrings(tmp_path, vocab_size=300).prepare(("a",))
