"""The run's status as one JSON object: what the live view and `polyrhythm engines list` show."""

import time
from typing import Any

import msgspec

from polyrhythm.conductor.conductor import Conductor
from polyrhythm.conductor.engine_state import EngineState
from polyrhythm.conductor.pool import Engine
from polyrhythm.wire import Span

NUM_RECENT_SPANS = 300


def run_status(conductor: Conductor) -> dict[str, Any]:
    step = conductor.step
    return {
        "step": step.version if step else 0,
        "num_steps": conductor.config.num_steps,
        "schedule": conductor.config.schedule,
        "policy_version": step.version if step else -1,
        "trainer": {"doing": conductor.trainer.doing, "since_s": time.monotonic() - conductor.trainer_since_s},
        "engines": [engine_status(engine) for engine in conductor.pool.engines],
        "groups": {
            "expected": step.num_groups if step else conductor.config.rollout.groups_per_step,
            "dispatched": step.num_dispatched if step else 0,
            "complete": len(step.finished) if step else 0,
            "taken": step.num_taken if step else 0,
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
        "policy_version": engine.health.policy_version,
        "num_running": status.num_running if status else 0,
        "num_waiting": status.num_waiting if status else 0,
        "tokens_per_s": engine.tokens_per_s,
        "busy": bool(engine.doing),
        "in_flight_groups": engine.num_groups_in_flight,
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
    if len(engines) < conductor.config.engine.num:
        return f"everybody waits for engines: {len(engines)} of {conductor.config.engine.num} joined"
    if step is None:
        return "engines wait for the trainer to open the first step"
    loading = [engine.name for engine in engines if engine.health.state is EngineState.LOADING]
    if loading:
        return f"the trainer waits for {', '.join(loading)} to load version {step.version}"
    if step.is_committed:
        return f"engines wait for the trainer to open step {conductor.next_version}"
    busy = [engine.name for engine in engines if engine.num_groups_in_flight]
    if conductor.trainer.doing == "wait" and step.num_taken == len(step.handed_out):
        return f"the trainer waits for {', '.join(busy) or 'rewards'}"
    if step.is_complete:
        return f"engines wait for the trainer, which has taken {step.num_taken} of {step.num_groups} groups"
    return "nobody"
