"""What the model as it is in use now says of a probe: the same prefill, layers and head as in every request."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from polyrhythm.engine.embedded.kv_cache import KvRange

NUMBER_FORMAT = "float32"


@torch.inference_mode()
def probe_logprobs(runner: Any, sequences: Sequence[Sequence[int]]) -> list[float]:
    """Log-probabilities of every token but the first of each sequence. `runner` is of either kind."""
    cache = runner.new_cache(sum(map(len, sequences)))
    parts, first_slot = [], 0
    for sequence in sequences:
        part = runner.prefill(cache, KvRange(first_slot, len(sequence), 0, 0), list(sequence), 0)
        parts.append(replace(part, kept=slice(0, len(sequence) - 1)))
        first_slot += len(sequence)
    hidden = torch.cat(runner.run(parts))
    logits = runner.logits(hidden)[: len(hidden)]
    targets = torch.tensor([token for sequence in sequences for token in sequence[1:]], device=logits.device)
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].tolist()
