"""What can be said about a model from its folder, without torch, before anything starts."""

import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from polyrhythm.errors import UserError
from polyrhythm.models import REFUSED, TESTED, check_model_folder, why_not_generated
from polyrhythm.weights.pretrained import find_model, resolve_model
from tests.architectures import ARCHITECTURES
from tests.tiny_model import save_tiny_model

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def model_folder(folder: Path, config: object, files: dict[str, str] | None = None) -> Path:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name, content in ({"model.safetensors": "weights", "tokenizer.json": "{}"} if files is None else files).items():
        (folder / name).write_text(content)
    return folder


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        {"model_type": "qwen3"},
        LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "auto_map": {"AutoConfig": "a.B"}},
        QWEN2 | {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 21, "num_hidden_layers": 24},
        QWEN2 | {"use_sliding_window": True, "max_window_layers": 24, "num_hidden_layers": 24},
        LLAMA | {"layer_types": ["full_attention"] * 2, "rope_parameters": {"rope_type": "default"}},
        {
            "model_type": "gemma2",
            "layer_types": ["full_attention", "sliding_attention"],
            "final_logit_softcapping": 30.0,
        },
    ],
)
def test_a_model_that_can_be_trained_passes(tmp_path, config):
    assert check_model_folder(model_folder(tmp_path, config), "mine") == tmp_path


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "carries a state from token to token"),
        ({"model_type": "bloom", "architectures": ["BloomForCausalLM"]}, "computes attention by itself"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "is a BertForMaskedLM, not a causal language model"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "is a t5, not a causal language model"),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, "not a causal language model"),
        ({"model_type": "grok", "auto_map": {"AutoConfig": "a.B"}}, "brings code of its own (auto_map, type grok)"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "is quantised (gptq)"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        (LLAMA | {"rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope'"),
        (QWEN2 | {"layer_types": ["full_attention", "linear_attention"]}, "has layers of type linear_attention"),
        ({}, "config.json has no model_type"),
        ([], "config.json has no model_type"),
        ("{", "config.json is not JSON"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_trained_is_refused_in_one_line_with_the_cause_and_a_way_out(tmp_path, config, said):
    with pytest.raises(UserError) as error:
        check_model_folder(model_folder(tmp_path, config), "mine")
    assert str(error.value).startswith("model='mine'") and said in str(error.value)
    assert "\n" not in str(error.value) and ": " in str(error.value)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tokenizer.json": ""}, "has no model.safetensors: save the model with save_pretrained"),
        ({"tokenizer.json": "", "pytorch_model.bin": ""}, "has no model.safetensors, only pytorch_model.bin"),
        ({"tokenizer.json": "", "adapter_model.safetensors": ""}, "has no model.safetensors, only adapter_model"),
        ({"tokenizer.json": "", "model.safetensors": LFS}, "model.safetensors is a Git LFS pointer"),
        ({"model.safetensors.index.json": '{"weight_map": {"a": "one", "b": "two"}}', "one": ""}, "lacks two, one of 1"),
        ({"model.safetensors.index.json": "[]"}, "model.safetensors.index.json cannot be read"),
        ({"model.safetensors": ""}, "has no tokenizer.json"),
    ],
)  # fmt: skip
def test_weights_that_are_not_there_are_named(tmp_path, files, said):
    with pytest.raises(UserError) as error:
        check_model_folder(model_folder(tmp_path, LLAMA, files), "mine")
    assert said in str(error.value)


def test_an_adapter_is_called_one(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="is a LoRA adapter: merge it"):
        check_model_folder(tmp_path, "mine")


def test_the_files_rules_are_those_of_transformers_own_configuration(tmp_path):
    """The same answers from the file and from the configuration class that the engine loads."""
    from transformers import AutoConfig

    for change in (
        {}, {"use_sliding_window": True, "num_hidden_layers": 29}, {"use_sliding_window": True, "sliding_window": None},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {"sliding_window": 64},
    ):  # fmt: skip
        for model_type in ("qwen2", "qwen3", "llama"):
            config = {"model_type": model_type} | change
            loaded = AutoConfig.from_pretrained(model_folder(tmp_path, config)).to_dict()
            assert why_not_generated(config) == why_not_generated(loaded), config


def test_tested_means_that_there_is_a_test():
    assert sorted(TESTED) == sorted(ARCHITECTURES)
    assert not set(TESTED) & set(REFUSED)


class FakeHub:
    """Has the config.json of one model; `asked` says which files were asked for."""

    def __init__(self, folder: Path, config: dict):
        self.folder, self.config, self.asked = folder, config, []

    def snapshot_download(self, name: str, allow_patterns: list[str], **_: object) -> str:
        self.asked.append(allow_patterns)
        model_folder(self.folder, self.config, {} if allow_patterns == ["config.json"] else None)
        return str(self.folder)


@pytest.mark.parametrize("find", [resolve_model, find_model])
def test_a_model_of_the_hub_is_refused_before_its_weights_are_downloaded(find, tmp_path, monkeypatch):
    hub = FakeHub(tmp_path, {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    with pytest.raises(UserError, match="model='owner/name' carries a state"):
        find("owner/name")
    assert hub.asked == [["config.json"]]


def test_a_model_of_the_hub_is_downloaded_when_its_configuration_is_good(tmp_path, monkeypatch):
    hub = FakeHub(tmp_path, LLAMA)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    assert find_model("owner/name") is None
    assert resolve_model("owner/name") == tmp_path == find_model("owner/name")
    assert len(hub.asked) == 4 and "*.safetensors" in hub.asked[2]


def test_the_check_imports_neither_torch_nor_transformers(tmp_path):
    program = (
        "import sys; from pathlib import Path; from polyrhythm.models import check_model_folder;"
        "check_model_folder(Path(sys.argv[1]), 'mine'); assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    folder = str(save_tiny_model(tmp_path / "tiny"))
    done = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
