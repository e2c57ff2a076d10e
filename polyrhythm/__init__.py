"""Reinforcement-learning post-training of language models, strictly on-policy and without waiting.

`train.py` says the method in one loop; the folders are the boxes of the diagram in the README.
"""

from typing import TYPE_CHECKING

__version__ = "0.2.0"
__all__ = ["RolloutLoader", "__version__"]

if TYPE_CHECKING:
    from polyrhythm.loader import RolloutLoader


def __getattr__(name: str):  # PEP 562: `import polyrhythm` stays fast, the loader comes when asked for
    if name == "RolloutLoader":
        from polyrhythm.loader import RolloutLoader

        return RolloutLoader
    raise AttributeError(f"module 'polyrhythm' has no attribute {name!r}")
