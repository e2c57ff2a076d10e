"""The end of an update: divide the summed gradients once, clip, AdamW with warm-up."""

import math

import torch

from polyrhythm.config import TrainingConfig
from polyrhythm.errors import RunError
from polyrhythm.training.policy.accumulate import gradient_of


class Optimizer:
    """AdamW over fp32 gradient sums; `step(divisor)` makes the one division of the update."""

    def __init__(self, model: torch.nn.Module, config: TrainingConfig):
        self.config = config
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.names, self.parameters = list(named), list(named.values())
        self.num_updates = 0
        self.adamw = torch.optim.AdamW(
            self.parameters, lr=config.learning_rate, betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=config.weight_decay, fused=True,
        )  # fmt: skip

    def learning_rate(self) -> float:
        """Of the next update."""
        num_warm_updates = self.config.warmup_steps * self.config.updates_per_step
        warm = min(1.0, (self.num_updates + 1) / num_warm_updates) if num_warm_updates else 1.0
        return self.config.learning_rate * warm

    def gradients(self) -> list[torch.Tensor]:
        """Zeros where no rollout gave one: the moments must move alike in a new process and in one that has trained before."""
        return [gradient_of(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self, divisor: float) -> dict[str, float]:
        learning_rate = self.learning_rate()
        gradients = self.gradients()
        gradient_norm = float(torch.nn.utils.get_total_norm(gradients)) / divisor
        if not math.isfinite(gradient_norm):
            raise RunError(
                f"the gradient of update {self.num_updates} is not finite ({gradient_norm}): nothing was updated; go on from "
                "the last checkpoint with a lower training.learning_rate"
            )
        clip = min(1.0, self.config.max_grad_norm / (gradient_norm + 1e-6))
        torch._foreach_mul_(gradients, clip / divisor)  # pyright: ignore  # the division and the clipping in one pass over memory
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        torch._foreach_zero_(gradients)  # pyright: ignore  # kept, not freed: fresh pages cost more than zeroing
        self.num_updates += 1
        return {"train/grad_norm": gradient_norm, "train/learning_rate": learning_rate}

    def moments(self) -> dict[str, torch.Tensor]:
        """AdamW's state by name, for a checkpoint; made as AdamW would make it if there was no update yet."""
        moments = {}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            state = self.adamw.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            moments |= {f"{name}.{key}": value for key, value in state.items()}
        return moments
