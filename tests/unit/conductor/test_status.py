"""The status of a run as the conductor makes it."""

from polyrhythm.conductor.status import prompt_text
from polyrhythm.observe.status import MAX_CURVE_STEPS, Curves


def test_of_chat_messages_the_last_one_is_shown():
    assert prompt_text([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]) == "u"


async def test_before_the_first_step_nothing_is_finished_and_there_is_no_policy_version(make_stage):
    stage = await make_stage()
    status = await stage.status()
    assert (status.num_finished_steps, status.step_number, status.policy_version) == (0, 1, None)


async def test_steps_are_counted_from_one_and_a_finished_run_says_so(make_stage):
    stage = await make_stage(num_steps=1)
    await stage.open(0)
    assert (await stage.status()).step_number == 1
    await stage.all_groups(0)
    await stage.commit(0)
    status = await stage.status()
    assert (status.num_finished_steps, status.step_number, status.num_steps) == (1, 1, 1)
    assert status.waiting == "nobody: all steps are done"
    assert [step for step, _ in stage.logger.rows] == [1]


async def test_a_resumed_run_counts_on_and_remembers_its_curves(make_stage):
    stage = await make_stage(num_steps=5)
    stage.conductor.first_step = 3
    stage.conductor.step_log.curves = Curves([{"step": step, "reward/mean": step / 10} for step in (1, 2, 3)])
    stage.conductor._journal.set_cursor(3, 12)
    assert (await stage.status()).num_finished_steps == 3
    await stage.open(3)
    status = await stage.status()
    assert (status.num_finished_steps, status.step_number, status.policy_version) == (3, 4, 3)
    await stage.all_groups(3)
    await stage.commit(3)
    status = await stage.status()
    assert (status.first_step, status.num_finished_steps) == (3, 4)
    assert status.curves["reward/mean"][:3] == [0.1, 0.2, 0.3] and len(status.curves["reward/mean"]) == 4
    assert status.curves["train/entropy"][:3] == [None, None, None]


async def test_a_metric_that_is_no_number_does_not_break_the_status(make_stage):
    stage = await make_stage()
    await stage.open(0)
    await stage.all_groups(0)
    await stage.commit(0, **{"train/grad_norm": float("nan")})
    assert (await stage.status()).last_metrics["train/grad_norm"] is None


def test_curves_keep_the_last_steps_only():
    curves = Curves([{"reward/mean": 1.0}] * (MAX_CURVE_STEPS + 5))
    curves.add({"reward/mean": 2.0})
    assert len(curves.values["reward/mean"]) == MAX_CURVE_STEPS and curves.values["reward/mean"][-1] == 2.0
