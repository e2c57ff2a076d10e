from polyrhythm.conductor.steps.journal import Journal, Totals
from polyrhythm.types import Completion, Group, Rollout, Trace, Turn


def make_group(step: int, position: int) -> Group:
    single = Trace.of(Completion(token_ids=[1], rollout_logprobs=[-0.125], finish_reason="stop"))
    double = Trace([*single.turns, Turn([7, 8], [9], [-0.25], "length")])
    return Group(step, position, position, [5, 6], [Rollout(0, single, step, 0.5), Rollout(1, double, step, None)])


def test_what_was_written_is_read_by_the_next_process(tmp_path):
    journal = Journal(tmp_path)
    assert (journal.cursor(0), journal.cursor(1)) == (0, None)
    journal.set_cursor(1, 8)
    groups = [make_group(1, position) for position in (3, 1)]
    for group in groups:
        journal.add_group(group)
    again = Journal(tmp_path)
    assert again.cursor(1) == 8
    assert again.groups(1) == groups
    assert again.groups(0) == []


def test_a_frame_that_was_cut_off_is_dropped_and_written_over(tmp_path):
    journal = Journal(tmp_path)
    journal.add_group(make_group(0, 0))
    journal.add_group(make_group(0, 1))
    (path,) = tmp_path.glob("groups-*")
    for num_bytes in (1, 3, 20):
        whole = path.read_bytes()
        path.write_bytes(whole[:-num_bytes])
        assert [group.position for group in Journal(tmp_path).groups(0)] == [0]
        journal.add_group(make_group(0, 1))
        assert path.read_bytes() == whole


def test_a_crash_while_a_cursor_is_written_leaves_the_old_ones(tmp_path, monkeypatch):
    journal = Journal(tmp_path)
    journal.set_cursor(1, 8)
    monkeypatch.setattr("msgspec.json.encode", lambda content: b'{"1": 8, "2')
    monkeypatch.setattr("os.replace", lambda *paths: None)
    journal.set_cursor(2, 16)
    assert (Journal(tmp_path).cursor(1), Journal(tmp_path).cursor(2)) == (8, None)


def test_totals_go_on_in_the_next_process_and_a_step_that_is_made_again_counts_once(tmp_path):
    journal = Journal(tmp_path)
    journal.add_to_totals(0, generated_tokens=10, trained_tokens=8)
    assert journal.add_to_totals(1, generated_tokens=5, trained_tokens=0) == Totals(15, 8)
    assert Journal(tmp_path).add_to_totals(1, generated_tokens=7, trained_tokens=7) == Totals(17, 15)


def test_groups_of_committed_steps_are_forgotten(tmp_path):
    journal = Journal(tmp_path)
    for step in range(3):
        journal.add_group(make_group(step, 0))
    journal.forget_groups_before(2)
    assert [len(journal.groups(step)) for step in range(3)] == [0, 0, 1]
