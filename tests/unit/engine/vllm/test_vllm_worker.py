"""The extension in vLLM's worker, with a stand-in for vLLM's model runner: verified first, then loaded."""

import json
from pathlib import Path

import pytest
import torch

from polyrhythm.engine.vllm.engine import _table
from polyrhythm.engine.vllm.worker.polyrhythm_worker import WeightsOfARun
from polyrhythm.weights.export import named_weights, whole
from polyrhythm.weights.proof import negate_for_canary
from polyrhythm.weights.snapshot import read_manifest
from polyrhythm.weights.store import WeightStore
from tests.conftest import build_tiny_model


class Packed(torch.nn.Embedding):
    """As a head of vLLM's CPU build."""

    cpu_linear = None

    def __init__(self):
        super().__init__(3, 2)
        self.quant_method = self
        self.num_repacks = 0

    def process_weights_after_loading(self, module) -> None:
        self.num_repacks += module is self


class Runner:
    def __init__(self):
        self.loaded: dict[str, torch.Tensor] = {}
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 2), Packed())

    def reload_weights(self, weights_iterator) -> None:
        self.loaded = {name: tensor.clone() for name, tensor in weights_iterator}

    def get_model(self):
        return self.model


class Worker(WeightsOfARun):
    def __init__(self):
        self.model_runner = Runner()


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    store = WeightStore(tmp_path)
    tensors = named_weights(build_tiny_model("qwen3")) | {
        "half": torch.arange(64, dtype=torch.bfloat16).reshape(2, 32),
        "count": torch.tensor([[7]]),
    }
    store.publish([whole(name, tensor) for name, tensor in tensors.items()], 3)
    return store


def load(store: WeightStore, canary_seed: int | None = None) -> tuple[Worker, dict[str, str]]:
    worker, manifest = Worker(), read_manifest(store.root, 3)
    table = json.dumps(_table(manifest, canary_seed))
    return worker, worker.polyrhythm_load(str(store.folder(3)), json.dumps(manifest.files), table)


def test_what_was_published_is_loaded_and_tied_heads_are_packed_again(store):
    worker, answer = load(store)
    loaded = worker.model_runner.loaded
    assert answer == {"repacked": "1"} and worker.model_runner.model[1].num_repacks == 1
    expected = named_weights(build_tiny_model("qwen3"))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    assert loaded["half"].dtype == torch.bfloat16 and loaded["count"].item() == 7


def test_a_canary_is_the_one_that_the_trainer_has_made(store):
    content = (store.folder(3) / "model.safetensors").read_bytes()
    loaded = load(store, canary_seed=5)[0].model_runner.loaded
    expected = named_weights(build_tiny_model("qwen3"))
    negate_for_canary(expected, 5)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    assert loaded["count"].item() == 7
    assert (store.folder(3) / "model.safetensors").read_bytes() == content, "others read that file too"


@pytest.mark.parametrize("damage", ["altered", "missing", "torn"])
def test_a_damaged_snapshot_is_refused_before_the_model_is_touched(store, damage):
    path = store.folder(3) / "model.safetensors"
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-4] if damage == "torn" else content[:-4] + b"\x01\x02\x03\x04")
    worker, answer = load(store)
    said = {"altered": "digests differ", "missing": "No such file", "torn": "the snapshot is torn"}[damage]
    assert said in answer["refused"]
    assert not worker.model_runner.loaded and not worker.model_runner.model[1].num_repacks
