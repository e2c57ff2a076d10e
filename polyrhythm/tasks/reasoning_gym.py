"""Problems of the library reasoning-gym by name, scored by its own rules; the only import of that library."""

import difflib
import functools
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from polyrhythm.errors import UserError
from polyrhythm.tasks.task import Part
from polyrhythm.types import ChatMessage, Problem

RESERVED_OPTIONS = ("name", "weight", "size", "seed")
COMPARE_TUPLES = ("arc_agi", "rearc")
"""Datasets whose rule takes a list for wrong where they made a tuple."""


class ReasoningGym:
    """`size` problems of each `dataset`: a name such as "chain_sum", with the dataset's own options beside it, or a list.

    An entry of a list is a name or {name = "chain_sum", weight = 2, max_terms = 3}: weights say how much of a run each is.
    `seed` selects another set of problems.
    """

    reward = "polyrhythm.tasks.reasoning_gym:score"
    stop = ()
    correct_above = 0.99

    def __init__(self, dataset: Any, size: int = 500, seed: int = 0, **options: Any) -> None:
        for name, number, smallest in (("size", size, 1), ("seed", seed, 0)):
            if type(number) is not int or number < smallest:
                raise UserError(f"task.options.{name}={number!r} must be a whole number from {smallest} on")
        entries = dataset if isinstance(dataset, list) else [{"name": dataset} | options]
        if isinstance(dataset, list) and options:
            raise UserError(
                f"task.options.{next(iter(options))}: options of the datasets of a list stand in its entries, such as "
                '{name = "chain_sum", max_terms = 3}'
            )
        self._size = size
        self._sources = [_Source(entry, size, seed) for entry in entries]
        if not self._sources:
            raise UserError("task.options.dataset=[] is empty: name a dataset of reasoning-gym, such as chain_sum")
        mixed = self._sources if len(self._sources) > 1 else []
        self.parts = [Part(range(i * size, (i + 1) * size), source.weight) for i, source in enumerate(mixed)]

    @property
    def num_problems(self) -> int:
        return self._size * len(self._sources)

    def problem(self, index: int) -> Problem:
        part, number = divmod(index, self._size)
        return self._sources[part].problem(number, index)


class _Source:
    """One dataset with its options."""

    def __init__(self, entry: Any, size: int, seed: int) -> None:
        entry = {"name": entry} if isinstance(entry, str) else entry
        if not (isinstance(entry, dict) and isinstance(entry.get("name"), str)):
            raise UserError(
                f"task.options.dataset has {entry!r}: give the name of a dataset of reasoning-gym, such as chain_sum"
            )
        self.name, self.weight = entry["name"], entry.get("weight", 1)
        if type(self.weight) not in (int, float) or not self.weight > 0:
            raise UserError(f"task.options.dataset: the weight {self.weight!r} of {self.name} must be a number above 0")
        self._options = {name: value for name, value in entry.items() if name not in RESERVED_OPTIONS}
        self._dataset = make_dataset(self.name, size=size, seed=seed, **self._options)

    def problem(self, number: int, index: int) -> Problem:
        entry = self._dataset[number]
        # What the reward in its worker will see: tuples have become lists, and fractions text.
        metadata = msgspec.json.decode(msgspec.json.encode(entry["metadata"], enc_hook=str))
        columns = {"question": entry["question"], "answer": entry["answer"], "metadata": metadata}
        source = {"name": self.name, "options": self._options}
        return Problem(index=index, prompt=entry["question"], columns=columns | {"reasoning_gym": source})


def make_dataset(name: str, **options: Any) -> Any:
    """The dataset that reasoning-gym has under this name; UserError if it has none, or does not take the options."""
    library = _library()
    known = library.factory.DATASETS
    if name not in known:
        close = difflib.get_close_matches(name, known, n=5, cutoff=0.4) or sorted(known)[:10]
        raise UserError(
            f"task.options.dataset={name!r} is not one of the {len(known)} datasets of reasoning-gym; "
            f"close to it are {', '.join(close)}"
        )
    # Values of a TOML file are lists where its configurations have tuples; they take both.
    try:
        return library.create_dataset(name, **options)
    except TypeError as error:
        fields = [field for field in known[name][1].__dataclass_fields__ if field not in ("size", "seed")]
        raise UserError(
            f"task.options: {name} of reasoning-gym has the options {', '.join(fields)}: {error}"
        ) from error
    except (AssertionError, ValueError) as error:
        raise UserError(f"task.options: {name} of reasoning-gym refuses {options!r}: {error}") from error


def score(
    completions: Sequence[str | list[ChatMessage]],
    question: Sequence[str],
    answer: Sequence[str],
    metadata: Sequence[dict[str, Any]],
    reasoning_gym: Sequence[dict[str, Any]],
    **_: Any,
) -> list[float]:
    """What the dataset's own rule gives for the answer in each completion: 1 if it is right, less for some that are not."""
    scores = []
    for completion, *entry, source in zip(completions, question, answer, metadata, reasoning_gym, strict=True):
        asked, expected, about = entry
        about = _with_tuples(about) if source["name"] in COMPARE_TUPLES else about
        rule = _scorer(source["name"], json.dumps(source["options"], sort_keys=True))
        made = {"question": asked, "answer": expected, "metadata": about}
        scores.append(float(rule(find_answer(completion), made)))
    return scores


def find_answer(completion: str | list[ChatMessage]) -> str:
    """What is in the last <answer> tag; without one, the last line that is not empty."""
    text = completion if isinstance(completion, str) else str(completion[-1].get("content", ""))
    head, tag, after = text.rpartition("<answer>")
    if tag:
        return after.partition("</answer>")[0].strip()
    return next((line.strip() for line in reversed(head.splitlines() or after.splitlines()) if line.strip()), "")


def _with_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_with_tuples, value))
    return {key: _with_tuples(inner) for key, inner in value.items()} if isinstance(value, dict) else value


@functools.lru_cache(maxsize=256)
def _scorer(name: str, options: str) -> Any:
    return make_dataset(name, **json.loads(options)).score_answer


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError(
            "task.name='reasoning_gym' needs the library of this name: pip install 'polyrhythm[reasoning-gym]'"
        ) from error
    return reasoning_gym
