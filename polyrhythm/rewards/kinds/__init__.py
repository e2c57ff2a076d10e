"""The built-in rewards by name: `reward.functions = ["math", "format"]`.

Each is a class whose fields are its options, `reward.options.NAME`, and whose instances are called as TRL calls a reward:
lists of one length as keywords, one number for each completion back, or None where it does not apply.
"""

from collections.abc import Callable, Mapping
from typing import Any

from polyrhythm.user_code import call_with_options, find_kind

REWARDS = {
    "code": "polyrhythm.rewards.kinds.code:Code",
    "exact_match": "polyrhythm.rewards.kinds.exact_match:ExactMatch",
    "format": "polyrhythm.rewards.kinds.format:Format",
    "length": "polyrhythm.rewards.kinds.length:Length",
    "math": "polyrhythm.rewards.kinds.mathematics:Math",
    "overlong": "polyrhythm.rewards.kinds.overlong:Overlong",
    "repetition": "polyrhythm.rewards.kinds.repetition:Repetition",
    "reward_model": "polyrhythm.rewards.kinds.reward_model:RewardModel",
}


def make_reward(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """A built-in reward with its options; every mistake in them is a `UserError`."""
    kind = find_kind("reward.functions", name, REWARDS, "reward")
    return call_with_options(f"reward.options.{name}", kind, options, f"reward {name!r}")
