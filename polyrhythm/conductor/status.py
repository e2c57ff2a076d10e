"""The run's status as one JSON object: what the live view and `polyrhythm engines list` show."""

import time
from typing import Any

import msgspec

from polyrhythm.conductor.conductor import Conductor
from polyrhythm.conductor.engines.health import EngineState
from polyrhythm.conductor.engines.pool import Engine
from polyrhythm.conductor.steps.step import Step
from polyrhythm.conductor.trainer_state import RankState
from polyrhythm.observe.activity import Activity, Span

NUM_RECENT_SPANS = 300


def run_status(conductor: Conductor) -> dict[str, Any]:
    step = conductor.step
    return {
        "step": step.version if step else 0,
        "num_steps": conductor.config.num_steps,
        "schedule": conductor.config.schedule,
        "policy_version": step.version if step else -1,
        "trainer": _rank_status("trainer", conductor.trainer.whole),
        "ranks": [_rank_status(name, state) for name, state in conductor.trainer.ranks.items()],
        "engines": [engine_status(engine) for engine in conductor.pool.engines],
        "groups": {
            "expected": step.num_groups if step else conductor.config.rollout.groups_per_step,
            "dispatched": step.num_dispatched if step else 0,
            "complete": len(step.finished) if step else 0,
            "taken": step.assignment.num_taken if step else 0,
        },
        "last": conductor.last_metrics,
        "history": conductor.history,
        "samples": conductor.last_samples,
        "waiting": who_waits(conductor),
        "spans": [msgspec.to_builtins(span) for span in recent_spans(conductor)],
        "failure": conductor.failure,
    }


def engine_status(engine: Engine) -> dict[str, Any]:
    status = engine.status
    return {
        "name": engine.name,
        "url": engine.url,
        "state": engine.health.state,
        "cause": engine.health.cause,
        "dismissed": engine.is_dismissed,
        "policy_version": engine.health.policy_version,
        "num_running": status.num_running if status else 0,
        "num_waiting": status.num_waiting if status else 0,
        "tokens_per_s": engine.tokens_per_s,
        "busy": bool(engine.doing),
        "in_flight_groups": engine.num_in_flight,
    }


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


def _rank_status(name: str, state: RankState) -> dict[str, Any]:
    return {"name": name, "doing": state.doing, "since_s": time.monotonic() - state.since_s}


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
        f"step {step.version}: {len(step.finished)} of {step.num_groups} groups finished, {step.assignment.num_taken} taken",
        f"  positions that wait for an engine: {waiting}",
        f"  positions that wait for their rewards: {generated}",
    ]
