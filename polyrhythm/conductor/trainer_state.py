"""What the ranks of the trainer are doing, as they have reported it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from polyrhythm.observe.activity import Activity, ActivityReport

TRAINER_WAITS_AT = frozenset(
    {Activity.WAIT, Activity.LOAD, Activity.START, Activity.COMMIT, Activity.AGREE, Activity.REDUCE}
)  # fmt: skip


@dataclass
class RankState:
    doing: Activity = Activity.START
    since_s: float = field(default_factory=time.monotonic)


class TrainerState:
    """The ranks by name; the trainer as a whole works while one of them does."""

    def __init__(self, names: Sequence[str]):
        self.ranks = {name: RankState() for name in names}

    @property
    def whole(self) -> RankState:
        """The first rank that works or, if all wait, the first rank."""
        states = list(self.ranks.values()) or [RankState()]
        return next((state for state in states if state.doing not in TRAINER_WAITS_AT), states[0])

    def forget(self, name: str) -> None:
        """It is gone."""
        self.ranks.pop(name, None)

    def observe(self, report: ActivityReport) -> bool:
        """Take a report; whether anything has happened.

        To have waited is no event: ranks wait in short polls, for ever if nothing comes.
        """
        state = self.ranks.setdefault(report.process, RankState())
        is_other = report.doing != state.doing
        if is_other:
            self.ranks[report.process] = RankState(report.doing)
        return is_other or any(span.activity is not Activity.WAIT for span in report.spans)
