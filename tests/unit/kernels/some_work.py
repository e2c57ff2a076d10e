"""A tiny model scores and generates in a process of its own: `python -m tests.unit.kernels.some_work FILE`.

Leaves log-probabilities, gradients, what was generated, and how many kernels were loaded.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from polyrhythm.config import EngineConfig
from polyrhythm.engine.embedded.engine import InferenceEngine
from polyrhythm.kernels import compiling
from polyrhythm.messages import GenerateRequest
from polyrhythm.training.packing.layout import pack
from polyrhythm.training.packing.scoring import prepare_model, score
from polyrhythm.training.policy.tri_model import load_policy
from polyrhythm.types import Sampling
from tests.tiny_model import save_tiny_model

GROUPS = [([3, 1, 4, 1, 5], [[9, 2, 6], [5, 3, 5, 8]]), ([9, 7], [[9, 3, 2]])]


def scored(model_dir: Path) -> dict[str, Tensor]:
    model = load_policy(model_dir)
    prepare_model(model, "always")
    (layout,) = pack(GROUPS, share_prompt=True, max_tokens=64)
    scores = score(model, layout)
    scores.logprobs_N.sum().backward()
    gradients = {f"gradient/{name}": parameter.grad for name, parameter in model.named_parameters()}
    return {"logprobs": scores.logprobs_N.detach(), "entropy": scores.entropy_N, **gradients}


async def generated(model_dir: Path) -> dict[str, Tensor]:
    config = EngineConfig(threads=1, max_batch=8, kv_tokens=400)
    request = GenerateRequest("r", 0, [5, 6, 7, 8], [1, 2, 3], Sampling(max_tokens=12))
    async with InferenceEngine(model_dir, config, stop_at_eos=False) as engine:
        completions = (await engine.generate(request)).completions
    return {
        "generated_ids": torch.tensor([completion.token_ids for completion in completions]),
        "generated_logprobs": torch.tensor([completion.rollout_logprobs for completion in completions]),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model_dir = save_tiny_model(Path(folder))
        results = scored(model_dir) | asyncio.run(generated(model_dir))
    results["num_kernels"] = torch.tensor(compiling._loaded.cache_info().currsize)
    save_file(results, sys.argv[1])
