"""How token losses become one number: the weight of a token, and the divisor of the update. docs/losses.md has the table.

Lengths are counted in sampled tokens: what a rollout was given is in no loss, and weighs nothing.
"""


def token_weight(aggregation: str, num_sampled: int, num_group_sampled: int, max_tokens: int) -> float:
    """What one token of a rollout of `num_sampled` in a group of `num_group_sampled` counts."""
    if aggregation == "token_mean":
        return 1.0
    if aggregation == "sequence_mean":
        return 1.0 / num_sampled
    if aggregation == "constant":
        return 1.0 / max_tokens
    if aggregation == "group_token_mean":
        return 1.0 / num_group_sampled
    raise ValueError(f"unknown aggregation {aggregation!r}")


def group_divisor(aggregation: str, num_rollouts: int, num_group_sampled: int) -> float:
    """What a group adds to the number that the update's gradient is divided by."""
    if aggregation == "token_mean":
        return float(num_group_sampled)
    if aggregation in ("sequence_mean", "constant"):
        return float(num_rollouts)
    if aggregation == "group_token_mean":
        return 1.0 if num_rollouts else 0.0
    raise ValueError(f"unknown aggregation {aggregation!r}")
