"""Names that people may know from elsewhere: what a key is called here, or why there is none."""

RENAMED = {
    "engine.num": "cluster.num_engines",
    "engine.min": "cluster.min_engines",
    "engine.max": "cluster.max_engines",
    "engine.max_restarts": "cluster.max_restarts",
    "task.options.reward": "reward.functions",
}
RENAMED_VALUES = {("conductor.dispatch", "problem"): "in_order"}
_OFF_POLICY = (
    "completions drawn from a filtered distribution are not the policy's, and training on them is off-policy: remove it"
)
REMOVED = {"rollout.top_p": _OFF_POLICY, "rollout.top_k": _OFF_POLICY}


def explain_name(key: str) -> str | None:
    """What became of this dotted key, in one line; None if it never was one."""
    if new := RENAMED.get(key):
        return f"{key} was renamed to {new}"
    if why := REMOVED.get(key):
        return f"{key} does not exist: {why}"
    return None


def explain_value(key: str, value: object) -> str | None:
    """What became of this value of a key; None if it never was one."""
    new = RENAMED_VALUES.get((key, value)) if isinstance(value, str) else None
    return f'{key} = "{value}" was renamed to {key} = "{new}"' if new else None
