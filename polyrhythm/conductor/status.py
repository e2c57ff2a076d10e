"""The run's status: what the views and `polyrhythm engines list` show, and who waits for whom."""

import time
from typing import Any

from polyrhythm.conductor.conductor import Conductor
from polyrhythm.conductor.engines.health import EngineState
from polyrhythm.conductor.engines.pool import Engine
from polyrhythm.conductor.steps.step import Step
from polyrhythm.conductor.trainer_state import RankState
from polyrhythm.observe.activity import Activity, Span
from polyrhythm.observe.status import EngineView, GroupCounts, RankView, RunStatus, SampleView

NUM_RECENT_SPANS = 300
MAX_SAMPLES = 16  # no screen has room for more


def run_status(conductor: Conductor) -> RunStatus:
    step, config = conductor.step, conductor.config
    return RunStatus(
        num_steps=config.num_steps,
        first_step=conductor.first_step,
        num_finished_steps=step.version + step.is_committed if step else conductor.first_step,
        schedule=config.schedule,
        policy_version=step.version if step else None,
        trainer=_rank_view("trainer", conductor.trainer.whole),
        ranks=_rank_views(conductor),
        lost_ranks=dict(conductor.elastic.lost_at) if conductor.elastic else {},
        num_expected_engines=config.cluster.num_engines,
        engines=[engine_view(engine) for engine in conductor.pool.engines],
        groups=_group_counts(step) if step else GroupCounts(config.rollout.groups_per_step),
        last_metrics=dict(conductor.step_log.last_metrics),
        curves=conductor.step_log.curves.values,
        samples=[_sample_view(sample) for sample in conductor.step_log.last_samples[:MAX_SAMPLES]],
        waiting=who_waits(conductor),
        spans=recent_spans(conductor),
        failure=conductor.failure,
        notes=list(conductor.step_log.notes),
    )


def engine_view(engine: Engine) -> EngineView:
    status, version = engine.status, engine.health.policy_version
    return EngineView(
        name=engine.name,
        url=engine.url,
        state=engine.health.state,
        cause=engine.health.cause,
        is_dismissed=engine.is_dismissed,
        policy_version=version if version >= 0 else None,
        num_running=status.num_running if status else 0,
        num_waiting=status.num_waiting if status else 0,
        tokens_per_s=engine.tokens_per_s,
        is_busy=engine.doing is not None,
        num_in_flight_groups=engine.num_in_flight,
    )


def _rank_view(name: str, state: RankState, place: str = "") -> RankView:
    return RankView(name, state.doing, time.monotonic() - state.since_s, place)


def _rank_views(conductor: Conductor) -> list[RankView]:
    states = conductor.trainer.ranks
    if conductor.elastic is None:
        return [_rank_view(name, state) for name, state in states.items()]
    present = conductor.elastic.members.present
    return [_rank_view(rank.name, states.get(rank.name) or RankState(), rank.state) for rank in present]


def _group_counts(step: Step) -> GroupCounts:
    return GroupCounts(step.num_groups, step.num_dispatched, len(step.finished), step.assignment.num_taken)


def _sample_view(sample: dict[str, Any]) -> SampleView:
    return SampleView(prompt_text(sample["prompt"]), sample["completion"], sample["reward"])


def prompt_text(prompt: Any) -> str:
    """The prompt, or the last of its chat messages."""
    if isinstance(prompt, list):
        return str(prompt[-1].get("content", "")) if prompt else ""
    return str(prompt)


def recent_spans(conductor: Conductor) -> list[Span]:
    """Finished spans, then those still going on, which end now."""
    now_s = time.time()
    going_on = [
        Span(engine.name, engine.doing, engine.doing_since_s, now_s)
        for engine in conductor.pool.engines
        if engine.doing
    ]
    return list(conductor.pool.spans)[-NUM_RECENT_SPANS:] + going_on


def who_waits(conductor: Conductor) -> str:
    """One sentence: who waits for whom."""
    step = conductor.step
    engines = conductor.pool.present
    if conductor.failure is not None:
        return "nobody: the run has failed"
    if not engines:
        return f"everybody waits for engines: {conductor.config.cluster.num_engines} are expected, none is there"
    if step is None and conductor.membership.missing:
        return f"everybody waits for {', '.join(conductor.membership.missing)} to join"
    if step is None:
        return "engines wait for the trainer to publish the first weights"
    if step.is_committed:
        return "nobody: all steps are done"
    if step.dispatched_at_s is None:
        return f"the trainer waits for {_names_of_loading(engines)} to load version {step.version}"
    busy = [engine.name for engine in engines if engine.requests]
    doing = conductor.trainer.whole.doing
    if doing is Activity.WAIT and not step.is_complete:
        return f"the trainer waits for {', '.join(busy) or 'rewards'}"
    if step.is_complete:
        return f"engines wait for the trainer, which has taken {step.assignment.num_taken} of {step.num_groups} groups"
    return f"nobody: engines generate, the trainer is at {doing}"


def _names_of_loading(engines: list[Engine]) -> str:
    loading = [engine.name for engine in engines if engine.health.state is EngineState.LOADING]
    return ", ".join(loading or [engine.name for engine in engines])


def dump(conductor: Conductor) -> str:
    """Everybody and what they wait for, one line each: for the log when nothing happens any more."""
    now_s = time.monotonic()
    lines = [who_waits(conductor)]
    lines += [
        f"{name}: {state.doing} for {now_s - state.since_s:.0f} s" for name, state in conductor.trainer.ranks.items()
    ]
    for engine in conductor.pool.engines:
        health = engine.health
        lines.append(
            f"engine {engine.name}: {health.state} for {now_s - health.since_s:.0f} s "
            f"at version {health.policy_version}, alive {now_s - health.last_alive_s:.0f} s ago {health.cause}"
        )
        lines += [f"  has position {f.position} for {now_s - f.started_s:.0f} s" for f in engine.requests]
    if conductor.step is not None:
        lines += _step_lines(conductor.step, conductor)
    return "\n".join(lines)


def _step_lines(step: Step, conductor: Conductor) -> list[str]:
    flying = {request.position for engine in conductor.pool.engines for request in engine.requests}
    open_positions = [position for position in range(step.num_groups) if position not in step.finished]
    generated = [position for position in open_positions if not step.ledger.missing(position)]
    waiting = [position for position in open_positions if position not in flying and position not in generated]
    return [
        f"step {step.number}: {len(step.finished)} of {step.num_groups} groups finished, {step.assignment.num_taken} taken",
        f"  positions that wait for an engine: {waiting}",
        f"  positions that wait for their rewards: {generated}",
    ]
