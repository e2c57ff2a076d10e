"""Updates of elastic ranks: whoever comes, goes, fails or repeats itself, every group counts exactly once."""

import itertools
import random

import pytest

from polyrhythm.conductor.ranks.members import Members, by_number
from polyrhythm.conductor.ranks.transaction import Attempt, Update
from polyrhythm.conductor.refusals import Conflict
from polyrhythm.conductor.steps.assignment import GroupAssignment
from tests.conftest import make_group

NUM_GROUPS = 12
GROUPS = [make_group(position) for position in range(NUM_GROUPS)]


class Scene:
    """A step of two updates, and ranks that do what a rank does, one call at a time."""

    def __init__(self, names=("a-0", "a-1"), num_updates=1, in_turn=False):
        self.members = Members(lease_s=10)
        self.assignment = GroupAssignment([], 1, lambda group: 1, in_turn=in_turn)
        self.epochs = itertools.count(1)
        self.per_update = NUM_GROUPS // num_updates
        self.update = Update(self.members, self.assignment, self.per_update, lambda: next(self.epochs))
        self.trained: dict[str, list[int]] = {}
        self.num_received: dict[str, int] = {}
        self.committed: list[list[int]] = []
        for name in names:
            self.enter(name)
            self.members.named(name).has_state = True

    def enter(self, name: str, id: str = "") -> str:
        member = self.members.add(id or name, name, now_s=0)
        member.has_entered = True
        self.assignment.add(member.id)
        self.trained[member.id], self.num_received[member.id] = [], 0
        return member.id

    def take(self, id: str, num_ready: int = NUM_GROUPS) -> bool:
        groups, is_last = self.assignment.share(GROUPS[:num_ready], id, self.num_received[id], self.update.until)
        self.trained[id] += [group.position for group in groups]
        self.num_received[id] += len(groups)
        return is_last

    def ready(self, id: str) -> Attempt | bool | None:
        self.update.ready(id, self.trained[id], id.encode())
        return self.update.decision(id)

    def lose(self, id: str) -> list[int]:
        self.members.remove(id)
        return self.update.lose(id)

    def has_state_without(self, id: str) -> bool:
        """Whether the run can go on without this one."""
        return any(member.has_state for member in self.members.entered if member.id != id)

    def take_all(self) -> None:
        unfinished = [member.id for member in self.members.entered]
        while unfinished:
            unfinished = [id for id in unfinished if not self.take(id)]

    def commit(self) -> list[int]:
        """Everybody has said so: the positions that count, and the next update."""
        counted = sorted(position for id in self.update.attempt.members for position in self.trained[id])
        self.trained = {member.id: [] for member in self.members.present}
        until = self.update.until + self.per_update
        self.update = Update(self.members, self.assignment, until, lambda: next(self.epochs))
        return counted


def test_all_are_ready_then_all_hold_one_sum_then_it_counts():
    scene = Scene()
    scene.take_all()
    assert scene.ready("a-0") is None, "the other is not ready"
    attempt = scene.ready("a-1")
    assert attempt == Attempt(1, ["a-0", "a-1"], [], [b"a-0", b"a-1"]) == scene.update.decision("a-0")
    scene.update.reduced("a-1", 1, "sum")
    assert scene.update.verdict(1) is None and not scene.update.is_committed
    scene.update.reduced("a-0", 1, "sum")
    assert scene.update.verdict(1) is True
    assert scene.commit() == list(range(NUM_GROUPS))


def test_only_the_groups_of_the_lost_rank_are_dealt_again_and_first():
    scene = Scene()
    for _ in range(2):
        scene.take("a-0", num_ready=6)
        scene.take("a-1", num_ready=6)
    lost, kept = scene.trained["a-1"], list(scene.trained["a-0"])
    assert len(lost) == 2
    assert scene.lose("a-1") == lost and scene.assignment.num_returned == 2
    while not scene.take("a-0"):
        pass
    assert scene.trained["a-0"][: len(kept) + 2] == kept + lost
    assert scene.ready("a-0").members == ["a-0"]
    assert sorted(scene.trained["a-0"]) == list(range(NUM_GROUPS))


def test_without_anybody_who_holds_the_state_of_the_optimizer_no_update_is_made():
    scene = Scene(names=())
    scene.enter("a-1")  # from elsewhere, in a run that was resumed: what the optimizer remembers is in the run's folder
    scene.take_all()
    assert scene.ready("a-1") is None and scene.update.attempt is None
    scene.members.get(scene.enter("a-0")).has_state = True
    assert scene.take("a-0")
    assert scene.ready("a-0").without_state == ["a-1"]


def test_a_rank_that_is_ready_is_told_to_look_for_more_when_another_is_lost():
    scene = Scene()
    scene.take_all()
    assert scene.ready("a-0") is None
    scene.lose("a-1")
    assert scene.update.decision("a-0") is True
    while not scene.take("a-0"):
        pass
    assert scene.ready("a-0").epoch == 1


def test_a_rank_lost_in_the_reduction_ends_the_epoch_and_who_has_reduced_does_it_again():
    scene = Scene()
    scene.take_all()
    scene.ready("a-0"), scene.ready("a-1")
    scene.update.reduced("a-0", 1, "sum")
    scene.lose("a-1")
    assert scene.update.verdict(1) is False
    assert scene.update.decision("a-0") is True
    while not scene.take("a-0"):
        pass
    assert scene.ready("a-0") == Attempt(2, ["a-0"], [], [b"a-0"])
    scene.update.reduced("a-0", 1, "sum")
    assert not scene.update.is_committed, "what is said of an epoch that is over counts for nothing"
    scene.update.reduced("a-0", 2, "sum")
    assert scene.update.is_committed


def test_who_is_lost_after_the_commit_costs_nothing():
    scene = Scene()
    scene.take_all()
    scene.ready("a-0"), scene.ready("a-1")
    scene.update.reduced("a-0", 1, "sum"), scene.update.reduced("a-1", 1, "sum")
    assert scene.lose("a-1") == [] and scene.assignment.num_returned == 0
    assert scene.update.verdict(1) is True
    assert scene.assignment.num_taken == NUM_GROUPS


def test_a_failed_reduction_is_tried_again_in_the_next_epoch_without_training_again():
    scene = Scene()
    scene.take_all()
    scene.ready("a-0"), scene.ready("a-1")
    scene.update.failed("a-0", 1)
    scene.update.failed("a-1", 1)
    assert scene.ready("a-0") is None
    assert scene.ready("a-1").epoch == 2
    scene.update.failed("a-0", 1)
    assert scene.update.attempt is not None, "of the epoch before"


def test_sums_that_differ_are_no_update():
    scene = Scene()
    scene.take_all()
    scene.ready("a-0"), scene.ready("a-1")
    scene.update.reduced("a-0", 1, "one"), scene.update.reduced("a-1", 1, "another")
    assert scene.update.verdict(1) is False and scene.update.num_disagreements == 1


def test_no_update_without_a_rank_that_joins_while_others_are_ready_and_it_is_sent_the_state():
    scene = Scene(names=["a-0"])
    scene.take_all()
    scene.enter("a-2")
    assert scene.ready("a-0") is None
    scene.take("a-2")
    assert scene.ready("a-2") == Attempt(1, ["a-0", "a-2"], ["a-2"], [b"a-0", b"a-2"])


def test_who_has_trained_what_another_owns_is_refused():
    scene = Scene()
    scene.take_all()
    with pytest.raises(Conflict, match="would count twice"):
        scene.update.ready("a-0", scene.trained["a-1"], b"")


def test_members_are_ordered_by_the_number_in_their_name():
    assert sorted(["trainer-10", "trainer-9", "trainer"], key=by_number) == ["trainer", "trainer-9", "trainer-10"]


@pytest.mark.parametrize("seed", range(150))
def test_every_group_counts_exactly_once_whatever_happens(seed):
    draw = random.Random(seed)
    num_updates = draw.choice([1, 2, 3])
    scene = Scene(num_updates=num_updates, in_turn=draw.random() < 0.5)
    num_ready, num_joined, counted, has_all = 0, 2, [], set()
    for _ in range(3000):
        if len(counted) == num_updates:
            break
        num_ready = min(NUM_GROUPS, num_ready + draw.randint(0, 1))
        ids = [member.id for member in scene.members.entered]
        attempt = scene.update.attempt
        event = draw.choice(["take"] * 8 + ["ready"] * 6 + ["reduced"] * 6 + ["fail", "lose", "join"])
        id = draw.choice(ids)
        if event == "join" and attempt is None and not counted and len(ids) < 5:
            scene.enter(f"a-{num_joined}")
            num_joined += 1
        elif event == "lose" and scene.has_state_without(id) and draw.random() < 0.5:
            scene.lose(id)
            has_all.clear()
        elif event == "take" and attempt is None and scene.take(id, num_ready):
            has_all.add(id)
        elif event == "ready" and id in has_all and scene.ready(id) is True:
            has_all.discard(id)
        elif event == "fail" and attempt is not None and draw.random() < 0.3:
            scene.update.failed(id, attempt.epoch - draw.randint(0, 1))
        elif event == "reduced" and attempt is not None:
            scene.update.reduced(id, attempt.epoch, "sum" if draw.random() < 0.95 else id)
            if scene.update.is_committed:
                if len(scene.members.entered) > 1 and draw.random() < 0.3:
                    assert scene.lose(draw.choice(attempt.members)) == []
                    scene.trained = {id: scene.trained[id] for id in attempt.members} | scene.trained
                counted.append(scene.commit())
                has_all.clear()
    assert len(counted) == num_updates, "it comes to an end"
    assert sorted(itertools.chain(*counted)) == list(range(NUM_GROUPS))
    for number, positions in enumerate(counted):
        assert len(positions) == scene.per_update, number
    assert scene.assignment.num_taken == NUM_GROUPS
