"""Publishing a model of transformers as the trainer does, and what the model says of a probe."""

from collections.abc import Sequence

import torch

from polyrhythm.weights.export import exported
from polyrhythm.weights.proof import probe_of
from polyrhythm.weights.store import WeightStore


@torch.no_grad()
def own_logprobs(model, sequences: Sequence[Sequence[int]]) -> list[float]:
    ids = torch.tensor(sequences)
    logprobs = model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    return logprobs.gather(2, ids[:, 1:, None]).flatten().tolist()


def publish(store: WeightStore, model, version: int) -> None:
    store.publish(exported(model), version, probe_of(model, version))
