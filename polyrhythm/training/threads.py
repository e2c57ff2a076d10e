"""The trainer's thread count follows the conductor's decision, between two layers, forward and backward.

OpenMP keeps the number of threads per calling thread, so the compute thread must change it itself.
"""

import logging
import threading
from collections.abc import Callable

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from polyrhythm.errors import RunError

log = logging.getLogger(__name__)


class ThreadFollower:
    """A listener asks for the wanted number; hooks apply it where the compute thread passes by."""

    def __init__(self, ask: Callable[[int], int]):
        self._ask = ask
        self._wanted = torch.get_num_threads()

    def follow(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):  # transformers' decoder layers
                module.register_forward_pre_hook(self._apply)
                module.register_full_backward_pre_hook(self._apply)
        optimizer.register_step_pre_hook(self._apply)
        threading.Thread(target=self._listen, name="threads", daemon=True).start()

    def _apply(self, *_: object) -> None:
        if torch.get_num_threads() != self._wanted:
            torch.set_num_threads(self._wanted)

    def _listen(self) -> None:
        try:
            while wanted := self._ask(self._wanted):
                self._wanted = wanted
        except RunError as error:  # the loader hears of the same trouble and says so
            log.info("the number of threads is no longer followed: %s", error)
