"""POLYRHYTHM_KERNELS switches kernels off, and the work is done all the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from polyrhythm.errors import UserError
from polyrhythm.kernels.switch import is_on, kernel_names, kernels_off

ROOT = Path(__file__).parents[3]


def test_kernels_are_on_unless_the_environment_says_otherwise(monkeypatch):
    monkeypatch.delenv("POLYRHYTHM_KERNELS", raising=False)
    assert all(is_on(name) for name in kernel_names())


@pytest.mark.parametrize(
    ("value", "off"),
    [
        ("on", set()),
        ("", set()),
        ("off", {"decode", "elementwise", "packed", "product"}),
        ("off:packed", {"packed"}),
        ("off:packed,decode", {"packed", "decode"}),
    ],
)
def test_all_or_some_are_switched_off(monkeypatch, value, off):
    monkeypatch.setenv("POLYRHYTHM_KERNELS", value)
    assert kernels_off() == off


@pytest.mark.parametrize("value", ["no", "off:", "off:attention", "on:packed", "packed"])
def test_a_value_that_means_nothing_is_refused_with_what_would_do(monkeypatch, value):
    monkeypatch.setenv("POLYRHYTHM_KERNELS", value)
    with pytest.raises(UserError, match="use on, off, or off: and some of decode,elementwise,packed,product"):
        kernels_off()


def work_with(switch: str, folder: Path) -> dict[str, torch.Tensor]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "POLYRHYTHM_KERNELS": switch, "MKL_CBWR": "AUTO,STRICT"}
    result = folder / f"{switch}.safetensors"
    command = [sys.executable, "-m", "tests.unit.kernels.some_work", str(result)]
    subprocess.run(command, env=environment, cwd=folder, timeout=200, check=True)
    return load_file(result)


def test_training_and_generation_without_kernels_give_the_same_within_rounding(tmp_path):
    on, off = work_with("on", tmp_path), work_with("off", tmp_path)
    assert on.pop("num_kernels").item() == 4 and off.pop("num_kernels").item() == 0
    assert torch.equal(on.pop("generated_ids"), off.pop("generated_ids"))
    assert on.keys() == off.keys() and any(name.startswith("gradient/") for name in on)
    for name, expected in off.items():
        assert expected.abs().max() > 0, name
        assert (on[name] - expected).abs().max() < 2e-5 * max(1.0, expected.abs().max().item()), name
