"""From groups of completions to their rewards: which calls are made, which are made again, and what adds up to what."""

import asyncio
import itertools
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

from polyrhythm.rewards.sandbox.calling import Function
from polyrhythm.rewards.sandbox.failure import failure_of
from polyrhythm.rewards.sandbox.frames import GroupScores, GroupToScore, RewardFailure, ScoreReply, ScoreRequest
from polyrhythm.rewards.sandbox.notes import BadResult, Notes

Value = float | RewardFailure | None


@dataclass(frozen=True)
class _Call:
    """A function and the groups that it is called with; each group is a range of rows."""

    function: Function
    groups: list[range]

    @property
    def rows(self) -> range:
        return range(self.groups[0].start, self.groups[-1].stop)

    def parts(self) -> list["_Call"]:
        """The calls that may succeed where this one has failed: for each group, or for each completion of one."""
        if len(self.groups) > 1:
            return [_Call(self.function, [group]) for group in self.groups]
        if len(self.rows) == 1 or self.function.compares_completions:
            return []
        return [_Call(self.function, [range(row, row + 1)]) for row in self.rows]


class Scorer:
    """Calls the functions of a run, one after the other in the thread that calls it; those that are async together."""

    def __init__(self, functions: Sequence[Function]):
        self._functions = functions
        # One event loop for all calls: what an async function opens in one, such as a session, serves the next.
        self._runner = asyncio.Runner()

    def score(self, request: ScoreRequest) -> ScoreReply:
        return _Scoring(self._functions, request, self._runner).reply()


class _Scoring:
    """One request on its way to its reply."""

    def __init__(self, functions: Sequence[Function], request: ScoreRequest, runner: asyncio.Runner):
        self._functions = functions
        self._request = request
        self._runner = runner
        ends = [0, *itertools.accumulate(len(group.completions) for group in request.groups)]
        self._groups = [range(start, stop) for start, stop in itertools.pairwise(ends)]
        self._texts = [text for group in request.groups for text in group.completions]
        self._columns = _columns_of(request.groups)
        self._values: dict[str, list[Value]] = {function.name: [None] * ends[-1] for function in functions}
        self._extra: dict[str, list[Any]] = {}
        self._metrics: dict[str, list[float]] = {}
        self._repeated: dict[int, list[RewardFailure]] = {}

    def reply(self) -> ScoreReply:
        calls = [call for function in self._functions for call in self._first_calls(function)]
        while calls:
            calls = self._make(calls)
        scores = [self._scores_of(rows) for rows in self._groups]
        if self._metrics:  # they are those of the calls, and a call may be for several groups
            scores[0].metrics.update(self._metrics)
        return ScoreReply(scores)

    def _first_calls(self, function: Function) -> list[_Call]:
        if function.per_completion:
            return [_Call(function, [range(row, row + 1)]) for row in range(len(self._texts))]
        n = function.groups_per_call
        return [_Call(function, self._groups[start : start + n]) for start in range(0, len(self._groups), n)]

    def _make(self, calls: list[_Call]) -> list[_Call]:
        """Make the calls and keep what they return; the calls to make instead of those that failed."""
        notes = [Notes(len(call.rows)) for call in calls]
        again = []
        for call, note, result in zip(calls, notes, self._results(calls, notes), strict=True):
            error = result if isinstance(result, BaseException) else self._keep_result(call, result, note)
            if error is None:
                continue
            parts = [] if isinstance(error, BadResult) else call.parts()
            if parts:
                self._repeated.setdefault(call.rows.start, []).append(failure_of(error))
                again += parts
            else:
                self._keep(call, [failure_of(error)] * len(call.rows), Notes(len(call.rows)))
        return again

    def _results(self, calls: list[_Call], notes: list[Notes]) -> list[Any]:
        """What the calls return or raise. What is to be awaited is awaited together, after all that is not."""
        results = [self._begin(call, note) for call, note in zip(calls, notes, strict=True)]
        awaitables = {place: result for place, result in enumerate(results) if isinstance(result, Awaitable)}
        if awaitables:
            for place, result in zip(awaitables, self._runner.run(_all(awaitables.values())), strict=True):
                results[place] = result
        return results

    def _begin(self, call: _Call, notes: Notes) -> Any:
        rows = slice(call.rows.start, call.rows.stop)
        columns = {name: values[rows] for name, values in self._columns.items()}
        try:
            return call.function.call(columns, self._texts[rows], self._request.state, notes)
        except Exception as error:  # the user's code may raise anything; its rollouts are excluded and counted
            return error

    def _keep_result(self, call: _Call, result: Any, notes: Notes) -> Exception | None:
        try:
            self._keep(call, call.function.values(result, len(call.rows), notes), notes)
        except BadResult as error:
            return error

    def _keep(self, call: _Call, values: Sequence[Value], notes: Notes) -> None:
        rows = slice(call.rows.start, call.rows.stop)
        self._values[call.function.name][rows] = values
        for name, column in notes.extra.items():
            self._extra.setdefault(name, [None] * len(self._texts))[rows] = column
        for name, numbers in notes.metrics.items():
            self._metrics.setdefault(name, []).extend(numbers)

    def _scores_of(self, rows: range) -> GroupScores:
        failures = {row - rows.start: failure for row in rows if (failure := self._failure_of(row)) is not None}
        return GroupScores(
            rewards=[None if place in failures else self._sum(row) for place, row in enumerate(rows)],
            scores={
                name: [None if isinstance(value, RewardFailure) else value for value in values[rows.start : rows.stop]]
                for name, values in self._values.items()
            },
            failures=failures,
            repeated=self._repeated.get(rows.start, []),
            extra={name: values[rows.start : rows.stop] for name, values in self._extra.items()},
        )

    def _failure_of(self, row: int) -> RewardFailure | None:
        return next((v for values in self._values.values() if isinstance(v := values[row], RewardFailure)), None)

    def _sum(self, row: int) -> float | None:
        """Over the functions that apply, each times its weight; None if none does."""
        applying = [
            function.weight * value
            for function in self._functions
            if isinstance(value := self._values[function.name][row], float)
        ]
        return sum(applying) if applying else None


def _columns_of(groups: Sequence[GroupToScore]) -> dict[str, list[Any]]:
    """What is offered to a function, as lists with one item for each completion of all groups."""
    names = dict.fromkeys(name for group in groups for name in group.columns)
    columns = {name: [group.columns.get(name) for group in groups for _ in group.completions] for name in names}
    return columns | {
        "prompts": [group.prompt for group in groups for _ in group.completions],
        "completions": [_in_the_form_of(group.prompt, text) for group in groups for text in group.completions],
        "completion_ids": [ids for group in groups for ids in group.completion_ids],
        "finish_reason": [reason for group in groups for reason in group.finish_reason],
    }


def _in_the_form_of(prompt: Any, text: str) -> str | list[dict[str, str]]:
    """Text after text; the assistant's message after messages."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


async def _all(awaitables: Any) -> list[Any]:
    return await asyncio.gather(*awaitables, return_exceptions=True)
