"""The configuration: TOML files below dotted flags, everything checked before anything starts.

`sections` has the keys, `loading` reads and merges them, `code_places` finds files of code that they name, `mistakes` says what is wrong with them, `other_names` what
old and foreign names are called here, `reference` what each key means.
"""

from polyrhythm.config.loading import (
    add_flags,
    load_config,
    load_resumed_config,
    merged_config,
    read_flags,
    read_saved_config,
    save_config,
)
from polyrhythm.config.mistakes import explain_unknown
from polyrhythm.config.other_names import explain_name, explain_value
from polyrhythm.config.reference import describe_keys
from polyrhythm.config.sections import (
    AlgorithmConfig,
    ClusterConfig,
    ConductorConfig,
    Config,
    EngineConfig,
    ObserveConfig,
    PromptConfig,
    RewardConfig,
    RolloutConfig,
    TaskConfig,
    TrainingConfig,
    WeightsConfig,
)

__all__ = [
    "AlgorithmConfig", "ClusterConfig", "ConductorConfig", "Config", "EngineConfig", "ObserveConfig", "PromptConfig", "RewardConfig",
    "RolloutConfig", "TaskConfig", "TrainingConfig", "WeightsConfig", "add_flags", "describe_keys", "explain_name", "explain_unknown",
    "explain_value", "load_config", "load_resumed_config", "merged_config", "read_flags", "read_saved_config", "save_config",
]  # fmt: skip
