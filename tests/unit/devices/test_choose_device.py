"""The build of torch for CUDA on a machine without a GPU: every process must find the CPU."""

from pathlib import Path

import pytest
import torch

from polyrhythm.devices import DEVICE_VARIABLE, choose_device
from polyrhythm.engine.embedded.model_runner import load_runner
from polyrhythm.errors import UserError
from polyrhythm.training.policy.tri_model import load_policy
from tests.tiny_model import save_tiny_model

PACKAGE = Path(__file__).parents[3] / "polyrhythm"


@pytest.fixture
def cuda_build_without_gpu(monkeypatch):
    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.mark.usefixtures("cuda_build_without_gpu")
def test_an_accelerator_that_is_not_there_is_not_chosen():
    assert choose_device() == torch.device("cpu")


def test_an_accelerator_that_is_there_is_chosen(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    assert choose_device() == torch.device("cuda")


@pytest.mark.usefixtures("cuda_build_without_gpu")
def test_engine_and_trainer_load_their_model_on_the_cpu(tmp_path):
    save_tiny_model(tmp_path)
    assert load_runner(tmp_path).device == torch.device("cpu")
    assert load_policy(tmp_path).device == torch.device("cpu")


def test_only_one_function_asks_for_the_accelerator():
    asking = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if "current_accelerator" in path.read_text()
    ]
    assert asking == ["devices/__init__.py"]


def test_a_process_is_told_which_kind_of_device_it_has(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")
    assert choose_device() == torch.device("cpu")
    monkeypatch.setenv(DEVICE_VARIABLE, "npu")
    with pytest.raises(UserError, match=r"POLYRHYTHM_DEVICE=npu, but torch .* finds cuda"):
        choose_device()


def test_an_accelerator_without_attention_is_not_chosen(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps"))
    assert choose_device() == torch.device("cpu")
