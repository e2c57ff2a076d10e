"""What a reward function logs beside its rewards: columns of samples, and numbers for the metrics of the step."""

import math
import re
from collections.abc import Mapping
from typing import Any

MAX_COLUMNS = 32
MAX_TEXT_CHARS = 4000
MAX_NAME_CHARS = 100
NAME = re.compile(rf"[\w.@:+/-]{{1,{MAX_NAME_CHARS}}}")
NOT_IN_NAMES = re.compile(r"[^\w.@:+/-]")


class BadResult(ValueError):
    """What the function returned or logged is wrong in its form: to call it again would not help."""


class Notes:
    """The notes of one call; `log_extra` and `log_metric` are what the function is given under these names."""

    def __init__(self, num_completions: int):
        self._num_completions = num_completions
        self.extra: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    def log_extra(self, column: str, values: Any) -> None:
        """Put a value for each completion into a column of samples.jsonl."""
        values = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(values, list | tuple) or len(values) != self._num_completions:
            raise BadResult(f"log_extra({column!r}, ...) wants a list of one value for each of the "
                             f"{self._num_completions} completions")  # fmt: skip
        self._column(column)[:] = [sendable(value) for value in values]

    def log_metric(self, name: str, value: Any) -> None:
        """Count a number for the mean of the step, `reward_extra/<name>`; one that is not finite is left out."""
        _check_name("log_metric", name)
        if math.isfinite(number := float(value)):
            self.metrics.setdefault(name, []).append(number)

    def log_details(self, row: int, details: Mapping[str, Any]) -> None:
        """The other keys of a dict that holds a `score`: columns of the sample, and metrics if they are numbers."""
        for key, value in details.items():
            name = NOT_IN_NAMES.sub("_", str(key))[:MAX_NAME_CHARS] or "_"  # to verl any key is right
            self._column(name)[row] = plain = sendable(value)
            if isinstance(plain, int | float):
                self.log_metric(name, plain)

    def _column(self, name: str) -> list[Any]:
        _check_name("log_extra", name)
        if name not in self.extra and len(self.extra) == MAX_COLUMNS:
            raise BadResult(f"log_extra({name!r}, ...): there are {MAX_COLUMNS} columns already")
        return self.extra.setdefault(name, [None] * self._num_completions)


def sendable(value: Any) -> Any:
    """Something that a line of samples.jsonl can hold: numbers and short texts as they are, others as text."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or (isinstance(value, int) and abs(value) < 2**63):
        return value
    return str(value)[:MAX_TEXT_CHARS].encode(errors="replace").decode()


def _check_name(where: str, name: Any) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadResult(f"{where}({name!r}, ...): a name is made of at most 100 letters, digits and . _ - / @ : +")
