"""What a process can be doing: one enum for spans, metrics, faults, the stall check, the core balance and the views."""

from enum import StrEnum

import msgspec


class Activity(StrEnum):
    """What one process does at a time. The values are seen by users: in metrics, in chaos plans, on the screen."""

    START = "start"
    """Load the model, find the others."""
    LOAD = "load"
    """Engines load the step's weights; a rank waits for that."""
    GENERATE = "generate"
    SCORE = "score"
    WAIT = "wait"
    """A rank has nothing to train on yet."""
    FORWARD_BACKWARD = "forward_backward"
    AGREE = "agree"
    """A rank has trained on its groups and waits for the others."""
    REDUCE = "reduce"
    """The ranks add up their gradients."""
    UPDATE = "update"
    PUBLISH = "publish"
    COMMIT = "commit"
    CHECKPOINT = "checkpoint"
    VERIFY = "verify"
    """A rank proves that its weights are those that were published."""
    SAVE = "save"
    """Write the trained model."""
    IDLE = "idle"
    """An engine has nothing to generate."""


def seconds_metric(activity: Activity) -> str:
    """The metric of the seconds that the trainer's first rank spent in an activity of a step."""
    return f"time/trainer_{activity}_s"


class Span(msgspec.Struct, frozen=True):
    """A stretch of time in which a process did one thing; seconds since the epoch."""

    process: str
    activity: Activity
    start_s: float
    end_s: float


class ActivityReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a process is doing now, and its finished spans since the last report."""

    process: str
    doing: Activity
    spans: list[Span]
