"""Reinforcement-learning post-training of language models, strictly on-policy and without waiting.

`loop.py` says the method in one loop; the folders are the boxes of the diagram in the README.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # so that editors complete
    from polyrhythm.config import (
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
    from polyrhythm.loader import RolloutLoader
    from polyrhythm.runs.rollouts import rollouts
    from polyrhythm.runs.run import Run
    from polyrhythm.runs.training import train

__version__ = "0.4.0"
__all__ = [
    "AlgorithmConfig", "ClusterConfig", "ConductorConfig", "Config", "EngineConfig", "ObserveConfig", "PromptConfig", "RewardConfig",
    "RolloutConfig", "RolloutLoader", "Run", "TaskConfig", "TrainingConfig", "WeightsConfig", "__version__",
    "rollouts", "train",
]  # fmt: skip

_ELSEWHERE = {
    "RolloutLoader": "polyrhythm.loader",
    "Run": "polyrhythm.runs.run",
    "rollouts": "polyrhythm.runs.rollouts",
    "train": "polyrhythm.runs.training",
}
"""Where the public names are, those of the configuration apart."""


def __getattr__(name: str) -> Any:  # PEP 562: `import polyrhythm` stays fast, the parts come when they are asked for
    if name not in __all__:
        raise AttributeError(f"module 'polyrhythm' has no attribute {name!r}")
    return getattr(importlib.import_module(_ELSEWHERE.get(name, "polyrhythm.config")), name)


def __dir__() -> list[str]:
    return __all__
