"""What a model does to its logits after the head: scale them, or cap them softly. Engine and trainer do the same."""

from typing import Any, NamedTuple

from torch import Tensor


class LogitsRule(NamedTuple):
    """logits = head(hidden) * scale, then softcap * tanh(logits / softcap) if there is a cap."""

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """In place."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


def logits_rule(config: Any) -> LogitsRule:
    """By the names that transformers' configurations have for it; whoever uses it compares a probe with the model itself."""
    config = config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite
    softcap = getattr(config, "final_logit_softcapping", None)  # Gemma
    return LogitsRule(scale, float(softcap) if softcap else None)
