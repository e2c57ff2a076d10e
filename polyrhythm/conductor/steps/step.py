"""One step as the conductor keeps it: its problems, its ledger, and the groups that are ready for the trainer."""

from dataclasses import dataclass, field
from typing import Literal

from polyrhythm.conductor.change import Change
from polyrhythm.conductor.steps.assignment import GroupAssignment, Rank
from polyrhythm.conductor.steps.ledger import Ledger
from polyrhythm.conductor.steps.reward_record import RewardRecord
from polyrhythm.rewards.sandbox.frames import GroupScores, TrainingState
from polyrhythm.types import Group, Problem, Rollout


@dataclass(eq=False)
class Step:
    """`handed_out` is the order in which the trainer sees groups: as they finish, or by position."""

    version: int
    cursor: int
    """Problems taken before this step."""
    problems: list[Problem]
    ledger: Ledger
    schedule: Literal["periodic", "sync"]
    order: Literal["completion", "problem"]
    assignment: GroupAssignment
    opened_at_s: float
    """When its weights were published."""
    last_group_before_s: float | None = None
    """When the last group of the step before was finished; None for the first step of this process."""
    changed: Change = field(default_factory=Change)
    handed_out: list[Group] = field(default_factory=list)
    finished: dict[int, Group] = field(default_factory=dict)
    finished_at_s: dict[int, float] = field(default_factory=dict)
    dispatched_at_s: float | None = None
    """When the engines were ready and the first group could go out."""
    num_dispatched: int = 0
    """Groups that went out at least once."""
    num_retries: int = 0
    num_hedged: int = 0
    num_replaced: int = 0
    training_state: TrainingState = field(default_factory=TrainingState)
    """What reward functions are told of the run."""
    reward_record: RewardRecord = field(default_factory=RewardRecord)
    metrics: dict[str, float] | None = None
    """What was logged for it; None until it is committed."""

    @property
    def number(self) -> int:
        """How users count it: the first step is 1."""
        return self.version + 1

    @property
    def num_groups(self) -> int:
        return len(self.problems)

    @property
    def next_cursor(self) -> int:
        """Problems taken so far, those that replaced others included."""
        return self.cursor + self.num_groups + self.num_replaced

    @property
    def is_complete(self) -> bool:
        return len(self.finished) == self.num_groups

    @property
    def is_committed(self) -> bool:
        return self.metrics is not None

    @property
    def have_all_rewards_failed(self) -> bool:
        """Of every rollout: one to which no function applies has not failed."""
        return all(len(group.failed) == len(group.rollouts) for group in self.finished.values())

    @property
    def has_signal(self) -> bool:
        """Whether any rollout has a reward."""
        return any(rollout.reward is not None for group in self.finished.values() for rollout in group.rollouts)

    def finish(self, position: int, prompt_ids: list[int], scores: GroupScores, now_s: float) -> Group:
        """All rollouts of a position are in and scored: its group is ready."""
        rollouts = [
            Rollout(index=index, trace=trace, policy_version=self.version, reward=reward)
            for index, (trace, reward) in enumerate(zip(self.ledger.traces(position), scores.rewards, strict=True))
        ]
        problem, failed = self.problems[position].index, sorted(scores.failures)
        return self._add(Group(self.version, position, problem, prompt_ids, rollouts, scores.scores, failed), now_s)

    def _add(self, group: Group, now_s: float) -> Group:
        position = group.position
        self.finished[position] = group
        self.finished_at_s[position] = now_s
        if self.order == "completion":
            self.handed_out.append(group)
        else:
            while len(self.handed_out) in self.finished:
                self.handed_out.append(self.finished[len(self.handed_out)])
        self.changed.set()
        return group

    def restore(self, group: Group, now_s: float) -> bool:
        """Take a group that an earlier process of this run finished, if it is one that this step expects."""
        expected = 0 <= group.position < self.num_groups and group.step == self.version
        if (
            not expected
            or self.problems[group.position].index != group.problem_index
            or group.position in self.finished
            or len(group.failed) == len(group.rollouts)  # the reward may have been mended since
        ):
            return False
        for rollout in group.rollouts:
            self.ledger.accept(group.position, rollout.index, rollout.policy_version, rollout.trace)
        if self.ledger.missing(group.position):
            self.ledger.forget(group.position)
            return False
        self.num_dispatched += 1
        self._add(group, now_s)
        return True

    def replace(self, position: int, problem: Problem) -> None:
        """Generate another problem at this position: the one that was there cannot be."""
        self.problems[position] = problem
        self.ledger.forget(position)
        self.num_replaced += 1

    def share(self, rank: Rank, offset: int, until: int) -> tuple[list[Group], bool]:
        """The next groups of a rank among the step's first `until`, and whether they are its last of those.

        This is all that the schedules differ in: sync gives nothing away before all groups are finished.
        """
        num_taken = self.assignment.num_taken
        ready = self.handed_out if self.schedule == "periodic" or self.is_complete else []
        groups, is_last = self.assignment.share(ready, rank, offset, until)
        if self.assignment.num_taken > num_taken:
            self.changed.set()  # another rank may have waited for what this one got
        return groups, is_last
