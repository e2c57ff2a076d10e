"""What every logger is told and what it can be asked: the one Protocol, and the run it is about."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

DEFAULT_PROJECT = "polyrhythm"


class Logger(Protocol):
    """Keeps or passes on what each step measured; the first step is 1.

    Any method may raise, and may take its time: `Loggers` keeps both from the run.
    """

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def log_samples(self, step: int, samples: Sequence[dict[str, Any]]) -> None: ...

    def close(self) -> None: ...


class LoggedRun(NamedTuple):
    """The run that a logger is made for."""

    folder: Path
    project: str = DEFAULT_PROJECT
    name: str = ""
    config: dict[str, Any] = {}
    """The whole configuration, nested as in `config.json`."""
    num_finished_steps: int = 0
    """Steps that were logged before; above 0 when the run goes on after `--resume`."""

    @property
    def parameters(self) -> dict[str, Any]:
        """The configuration with dotted keys, as the flags have them."""
        return dict(_dotted(self.config))

    def recall(self, key: str) -> str | None:
        """What `remember` kept in the run folder, before the run was resumed."""
        path = self._memory(key)
        return path.read_text() if path.exists() else None

    def remember(self, key: str, value: str) -> None:
        """Keep what is needed to go on in the same run of a logger, such as its id."""
        path = self._memory(key)
        path.parent.mkdir(exist_ok=True)
        path.write_text(value)

    def _memory(self, key: str) -> Path:
        return self.folder / "loggers" / key


def rows_of(samples: Sequence[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """The samples as a table: column names, and rows of text and numbers. What is neither is written as JSON."""
    columns = list(dict.fromkeys(name for sample in samples for name in sample))
    return columns, [[_cell(sample.get(name)) for name in columns] for sample in samples]


def _cell(value: Any) -> str | float | None:
    return value if isinstance(value, str | int | float | None) else msgspec.json.encode(value).decode()


def _dotted(nested: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in nested.items():
        if isinstance(value, dict) and value:
            yield from _dotted(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value
