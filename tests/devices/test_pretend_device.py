"""Trainer, engine, publication and checkpoints on an accelerator that is pretended: the same results, without waiting."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 300
MAX_SYNCS = MAX_COPIES = 2
"""Of a micro-batch, whatever the number of layers."""


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[str, Any]:
    """What the scenes say: in a process of their own, because a device that is pretended is there for the whole process."""
    results = tmp_path_factory.mktemp("scenes") / "said.json"
    scenes = subprocess.run(
        [sys.executable, "-m", "tests.devices.scenes", str(results)], cwd=ROOT, timeout=DEADLINE_S,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert scenes.returncode == 0, scenes.stderr[-4000:]
    return json.loads(results.read_text())


def test_two_ranks_on_devices_of_their_own_learn_what_one_does(tmp_path):
    command = [sys.executable, "-m", "tests.devices.rank_scene"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], cwd=ROOT, env=environment, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            errors = rank.communicate(timeout=DEADLINE_S)[1]
            assert rank.returncode == 0, errors.decode()[-4000:]
    finally:
        for rank in ranks:
            rank.kill()
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["device"] == second["device"] == "npu:0"
    assert first["weights"] == second["weights"], "the second has verified what the first has published"
    assert first["metrics"]["train/grad_norm"] == pytest.approx(first["metrics alone"]["train/grad_norm"], rel=1e-5)
    assert first["weights"] == pytest.approx(first["weights alone"], abs=2e-6, rel=0)


@pytest.mark.parametrize("num_layers", ["2", "6"])
@pytest.mark.parametrize("algorithm", ["k1", "k3", "plain"])
def test_a_training_step_on_the_device_equals_that_on_the_cpu(said, algorithm, num_layers):
    cpu, device = said[algorithm][num_layers]["cpu"], said[algorithm][num_layers]["npu"]
    assert (cpu["device"], device["device"]) == ("cpu", "npu:0")
    # A first step of AdamW moves a weight by the learning rate of 1e-5, to whichever side its gradient says.
    assert device["weights"] == pytest.approx(cpu["weights"], abs=2e-6, rel=0)
    assert device["metrics"] == pytest.approx(cpu["metrics"], abs=1e-5)
    assert said["kernel"] == "tnd_attention", "the device's own attention has computed this"


@pytest.mark.parametrize("num_layers", ["2", "6"])
@pytest.mark.parametrize("algorithm", ["k1", "k3", "plain"])
def test_a_micro_batch_waits_and_copies_at_most_twice_whatever_the_number_of_layers(said, algorithm, num_layers):
    device = said[algorithm][num_layers]["npu"]
    assert device["asked"]["operation"] > 1000, "the device was used"
    assert device["asked"]["sync"] <= MAX_SYNCS, device["places"]
    assert device["asked"]["copy"] <= MAX_COPIES, device["places"]


def test_published_weights_and_checkpoints_come_back_to_the_device(said):
    assert said["plain"]["2"]["npu"]["came back"]
    assert said["plain"]["2"]["cpu"]["came back"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_optimizer_on_the_host_gives_the_same_bits_as_one_beside_the_policy(said, dtype):
    beside, on_host = said["optimizer on the host"][dtype]["False"], said["optimizer on the host"][dtype]["True"]
    assert (beside["devices"], on_host["devices"]) == (["npu"], ["cpu", "npu"])
    assert on_host["masters"] == beside["masters"] and on_host["policy"] == beside["policy"]
    assert (on_host["masters"] == on_host["policy"]) is (dtype == "float32"), (
        "in bf16 the policy is the masters rounded"
    )


@pytest.mark.parametrize(("dtype", "number_format"), [("bfloat16", "BF16"), ("float32", "F32")])
def test_a_version_leaves_the_device_piece_by_piece_or_is_written_from_the_host_without_it(said, dtype, number_format):
    beside, on_host = said["optimizer on the host"][dtype]["False"], said["optimizer on the host"][dtype]["True"]
    assert beside["formats"] == on_host["formats"] == [number_format]
    assert beside["published"] == on_host["published"], "masters are rounded as the policy is"
    assert beside["num_syncs"] == beside["num_pieces"] > 30
    assert on_host["num_syncs"] == 0


def test_the_engine_draws_the_same_tokens_on_the_device(said):
    cpu, device = said["engine"]["cpu"], said["engine"]["npu"]
    assert device["tokens"] == cpu["tokens"]
    assert len({str(completion) for request in cpu["tokens"] for completion in request}) > 6
    assert device["logprobs"] == pytest.approx(cpu["logprobs"], abs=1e-5)


def test_a_device_whose_attention_is_wrong_trains_with_the_loop_and_says_which_check_failed(said):
    device, cpu = said["without its attention"], said["plain"]["2"]["cpu"]
    assert device["kernel"] == "looped_attention"
    assert any("tnd_attention on npu:0" in line and "the output is off by" in line for line in device["warnings"])
    assert device["weights"] == pytest.approx(cpu["weights"], abs=2e-6, rel=0)
    assert device["asked"]["sync"] <= MAX_SYNCS and device["asked"]["copy"] <= MAX_COPIES, device["places"]


def test_an_item_in_every_layer_is_seen(said):
    syncs = said["planted"]["item in every layer"]
    assert syncs["2"] > MAX_SYNCS
    assert syncs["6"] == syncs["2"] + 4


def test_a_tensor_left_on_the_host_is_refused_with_file_and_line(said):
    assert "tensors on npu:0 and on cpu" in said["planted"]["a tensor left behind"]
    assert said["planted"]["a tensor left behind"].startswith("algorithms/losses/clipped.py:")


def test_the_device_refuses_what_a_real_one_would(said):
    assert "tensors on npu:0 and on cpu" in said["rules"]["mixing"]
    assert "float64" in said["rules"]["float64"]
    assert "float64" in said["rules"]["float64 moved up"]
    assert "numpy" in said["rules"]["numpy"]
