"""The configuration: TOML files below dotted flags, everything checked before anything starts.

`sections` has the keys, `loading` reads and merges them, `mistakes` says what is wrong with them.
"""

from polyrhythm.config.loading import (
    add_flags,
    load_config,
    load_resumed_config,
    read_flags,
    read_saved_config,
    save_config,
)
from polyrhythm.config.mistakes import all_keys
from polyrhythm.config.sections import (
    AlgorithmConfig,
    ClusterConfig,
    ConductorConfig,
    Config,
    EngineConfig,
    ObserveConfig,
    RewardConfig,
    RolloutConfig,
    TaskConfig,
    TrainingConfig,
    WeightsConfig,
)

__all__ = [
    "AlgorithmConfig", "ClusterConfig", "ConductorConfig", "Config", "EngineConfig", "ObserveConfig", "RewardConfig",
    "RolloutConfig", "TaskConfig", "TrainingConfig", "WeightsConfig", "add_flags", "all_keys", "load_config",
    "load_resumed_config", "read_flags", "read_saved_config", "save_config",
]  # fmt: skip
