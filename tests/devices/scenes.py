"""What is run on the pretend device, in a process of its own: `python -m tests.devices.scenes FILE` leaves JSON there.

Each scene is run on the CPU too, by the same code, and says what differs.
"""

from tests.devices import pretend_device  # isort: skip  # before anything else: it changes what torch is

import asyncio
import hashlib
import json
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from polyrhythm.algorithms.advantages import ADVANTAGES
from polyrhythm.config import EngineConfig, load_config
from polyrhythm.devices import DEVICE_VARIABLE
from polyrhythm.engine.embedded.engine import InferenceEngine
from polyrhythm.messages import GenerateRequest
from polyrhythm.training import trainer as trainer_module
from polyrhythm.training.checkpoint import Checkpoints
from polyrhythm.training.packing.attention import IMPLEMENTATION, kernel_for, packed_attention
from polyrhythm.training.packing.transfer import moved_together
from polyrhythm.training.parallel.replica import Replica
from polyrhythm.training.policy.tri_model import load_policy
from polyrhythm.training.trainer import Trainer
from polyrhythm.types import MicroBatch, Sampling
from polyrhythm.weights.export import exported, named_weights
from polyrhythm.weights.pieces import writing
from polyrhythm.weights.store import WeightStore
from tests.conftest import VOCABULARY, make_group
from tests.devices import pretend_torch_npu
from tests.tiny_model import byte_tokenizer

NUM_LAYERS = (2, 6)
DTYPES = ("bfloat16", "float32")
ALGORITHMS = {
    "plain": {},
    "k3": {"kl_coef": 0.1},
    "k1": {"kl_coef": 0.1, "kl_estimator": "k1"},
}


def main(results: Path) -> None:
    pretend_torch_npu.install()
    with tempfile.TemporaryDirectory() as root:
        folders = {num: save_model(Path(root, f"layers-{num}"), num) for num in NUM_LAYERS}
        said: dict[str, Any] = {name: {} for name in ALGORITHMS}
        for name, algorithm in ALGORITHMS.items():
            for num, folder in folders.items():
                said[name][str(num)] = both(lambda on, f=folder, a=algorithm: step_of(f, a, Path(root, on)))
        said["engine"] = both(lambda _: asyncio.run(completions_of(folders[2])))
        said["planted"] = planted(folders)
        said["kernel"] = kernel_for(pretend_device.DEVICE, torch.float32, 16, 2).__name__
        said["without its attention"] = without_its_attention(folders[2], Path(root, "loop"))
        said["rules"] = rules()
        said["optimizer on the host"] = {
            dtype: optimizer_on_the_host(folders[2], dtype, Path(root, dtype)) for dtype in DTYPES
        }
    results.write_text(json.dumps(said))


def save_model(folder: Path, num_layers: int) -> Path:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
        tie_word_embeddings=True, eos_token_id=2, pad_token_id=2, bos_token_id=1, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def both(scene: Callable[[str], Any]) -> dict[str, Any]:
    said = {}
    for on in ("cpu", pretend_device.NAME):
        os.environ[DEVICE_VARIABLE] = on
        said[on] = scene(on)
    return said


def trainer_of(folder: Path, algorithm: dict[str, Any], replica: Replica | None = None, **keys: Any) -> Trainer:
    rollout = {"group_size": 4, "groups_per_step": 4, "max_tokens": 9}
    config = load_config([], {"algorithm": algorithm, "rollout": rollout, **keys})
    return Trainer(config, load_policy(folder), replica=replica)


def micro_batch() -> MicroBatch:
    groups = [make_group(position) for position in range(3)]
    advantage = ADVANTAGES["group_std"]
    return MicroBatch(0, groups, [advantage([r.reward or 0.0 for r in group.rollouts]) for group in groups])


def step_of(folder: Path, algorithm: dict[str, Any], root: Path) -> dict[str, Any]:
    """One update, published, loaded and verified, and a checkpoint of it loaded again."""
    trainer = trainer_of(folder, algorithm)
    trainer.begin_step(0)
    pretend_device.log.clear()
    trainer.forward_backward(micro_batch())
    asked = dict(pretend_device.log.counts)
    places = sorted(f"{kind} at {place}" for kind, place in pretend_device.log.places if kind != "operation")
    trainer.optim_step()
    weights = flat_weights(trainer)
    store = WeightStore(root / "store")
    store.publish(exported(trainer.policy, masters=trainer.models.masters), 1)
    checkpoints = Checkpoints(root / "checkpoints", trainer)
    checkpoints.save(1)
    with torch.no_grad():
        for tensor in named_weights(trainer.policy).values():
            tensor.zero_()
    store.load_into(named_weights(trainer.policy), 1)
    store.verify(exported(trainer.policy), 1)
    loaded = flat_weights(trainer)
    checkpoints.load(1)
    return {
        "device": str(trainer.device), "asked": asked, "places": places, "metrics": trainer.metrics(),
        "weights": weights, "came back": weights == loaded == flat_weights(trainer),
    }  # fmt: skip


def optimizer_on_the_host(folder: Path, dtype: str, root: Path) -> dict[str, Any]:
    """What two updates make of the weights that are trained, beside the policy and on the host."""
    os.environ[DEVICE_VARIABLE] = pretend_device.NAME
    said: dict[str, Any] = {}
    for offload in (False, True):
        trainer = trainer_of(folder, {}, dtype=dtype, training={"offload_optimizer": offload})
        for _ in range(2):
            trainer.begin_step(0)
            trainer.forward_backward(micro_batch())
            trainer.optim_step()
        state = [tensor for name, tensor in trainer.optimizer.state().items() if name.endswith(".exp_avg")]
        said[str(offload)] = {
            "masters": torch.cat([tensor.detach().cpu().flatten() for tensor in trainer.optimizer.names]).tolist(),
            "policy": torch.cat([p.detach().cpu().flatten().float() for p in trainer.policy.parameters()]).tolist(),
            "devices": sorted({tensor.device.type for tensor in state} | {trainer.device.type}),
            **published(trainer, root),
        }
    return said


def published(trainer: Trainer, root: Path) -> dict[str, Any]:
    """What leaves the trainer, in pieces that are smaller than the tensors, and how often the device was waited for."""
    writing.PIECE_BYTES, usual = 4096, writing.PIECE_BYTES
    store = WeightStore(root)
    pretend_device.log.clear()
    folder = store.publish(exported(trainer.policy, masters=trainer.models.masters), 0)
    num_syncs = pretend_device.log.counts["sync"]
    store.verify(exported(trainer.policy), 0)
    writing.PIECE_BYTES = usual
    entries = store.manifest(0).tensors.values()
    return {
        "num_syncs": num_syncs,
        "num_pieces": sum(len(entry.pieces) for entry in entries),
        "published": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "formats": sorted({entry.dtype for entry in entries}),
    }


def flat_weights(trainer: Trainer) -> list[float]:
    return torch.cat([tensor.cpu().flatten().float() for tensor in named_weights(trainer.policy).values()]).tolist()


async def completions_of(folder: Path) -> dict[str, Any]:
    samplings = [
        Sampling(max_tokens=12),
        Sampling(max_tokens=8, temperature=0.7, top_p=0.8),
        Sampling(max_tokens=6, top_k=5),
    ]
    async with InferenceEngine(folder, EngineConfig(threads=1, max_batch=16, kv_tokens=2000)) as engine:
        requests = [
            GenerateRequest(f"r{index}", 0, list(range(3, 10 + 30 * index)), [11, 12, 13], sampling)
            for index, sampling in enumerate(samplings)
        ]
        async with asyncio.timeout(60):
            replies = await asyncio.gather(*(engine.generate(request) for request in requests))
    return {
        "tokens": [[c.token_ids for c in reply.completions] for reply in replies],
        "logprobs": [x for reply in replies for c in reply.completions for x in c.rollout_logprobs],
    }


def planted(folders: dict[int, Path]) -> dict[str, Any]:
    """Mistakes that somebody could make in the product, and what the device says to them."""
    os.environ[DEVICE_VARIABLE] = pretend_device.NAME
    said: dict[str, Any] = {"item in every layer": {}}

    def asks_the_device(module: Any, query: Any, *rest: Any, **more: Any) -> Any:
        query.sum().item()
        return packed_attention(module, query, *rest, **more)

    AttentionInterface.register(IMPLEMENTATION, asks_the_device)
    for num, folder in folders.items():
        trainer = trainer_of(folder, {})
        trainer.begin_step(0)
        pretend_device.log.clear()
        trainer.forward_backward(micro_batch())
        said["item in every layer"][str(num)] = pretend_device.log.counts["sync"]
    AttentionInterface.register(IMPLEMENTATION, packed_attention)

    trainer = trainer_of(folders[2], {})
    trainer.begin_step(0)
    trainer_module.moved_together = lambda tensors, device: [*moved_together(tensors[:2], device), tensors[2]]
    said["a tensor left behind"] = complaint(lambda: trainer.forward_backward(micro_batch()))
    trainer_module.moved_together = moved_together
    return said


def without_its_attention(folder: Path, root: Path) -> dict[str, Any]:
    """A step on a device whose own operator aligns its mask at the wrong corner."""
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger(kernel_for.__module__).addHandler(handler)
    os.environ[DEVICE_VARIABLE] = pretend_device.NAME
    pretend_torch_npu.ALIGNED_AT_LOWER_RIGHT = False
    kernel_for.cache_clear()
    said = step_of(folder, {}, root)
    return {**said, "kernel": kernel_for(pretend_device.DEVICE, torch.float32, 16, 2).__name__, "warnings": warnings}


def rules() -> dict[str, str]:
    there = torch.ones(3, device=pretend_device.NAME)
    return {
        "mixing": complaint(lambda: there + torch.ones(3)),
        "float64": complaint(there.double),
        "float64 moved up": complaint(lambda: torch.ones(3, dtype=torch.float64).to(pretend_device.NAME)),
        "numpy": complaint(there.numpy),
    }


def complaint(action: Callable[[], Any]) -> str:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return "nothing was refused"


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except Exception:
        traceback.print_exc()
        os._exit(1)  # threads of a device that was pretended need not be waited for
