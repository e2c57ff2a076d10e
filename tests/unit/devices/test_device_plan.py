"""Which process gets which device, without one: what a machine has is given."""

import re

import pytest

from polyrhythm.config import load_config
from polyrhythm.devices import found, plan
from polyrhythm.devices.found import Device, FoundDevices, find_devices
from polyrhythm.devices.plan import describe_plan, plan_devices
from polyrhythm.errors import UserError
from tests.tiny_model import save_tiny_model

SMALL, LARGE = 8 * 10**9, 80 * 10**9


@pytest.fixture
def machine(monkeypatch):
    """A machine with these devices."""

    def make(kind: str = "cuda", num: int = 2, num_bytes: int = LARGE, has_bfloat16: bool = False) -> None:
        there = FoundDevices(kind, [Device("a card", num_bytes)] * num, has_bfloat16=has_bfloat16)
        monkeypatch.setattr(found, "device_files", lambda: ["/dev/nvidia0"])
        monkeypatch.setattr(found, "look_in_another_process", lambda: there)
        for variable in plan.VISIBLE_VARIABLES.values():
            monkeypatch.delenv(variable, raising=False)

    return make


def config_of(num_ranks: int = 1, num_engines: int = 1, **keys):
    return load_config(
        [],
        {
            "training": {"num_ranks": num_ranks} | keys.pop("training", {}),
            "cluster": {"num_engines": num_engines},
            **keys,
        },
    )


def test_ranks_take_the_first_devices_and_engines_the_others(machine):
    machine(num=4)
    devices = plan_devices(config_of(num_ranks=2, num_engines=3))
    assert [devices.rank_environment(rank)["CUDA_VISIBLE_DEVICES"] for rank in range(2)] == ["0", "1"]
    assert devices.engine_names_at(3) == {2: ["engine-0", "engine-2"], 3: ["engine-1"]}
    assert devices.engine_environment(3) == {"POLYRHYTHM_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": "3"}
    assert devices.conductor_environment()["CUDA_VISIBLE_DEVICES"] == "", "the conductor computes nothing"


def test_one_device_is_shared_by_trainer_and_engine(machine):
    machine(kind="npu", num=1)
    devices = plan_devices(config_of())
    assert devices.rank_environment(0) == {"POLYRHYTHM_DEVICE": "npu", "ASCEND_RT_VISIBLE_DEVICES": "0"}
    assert devices.engine_environment(devices.place_for_engine([])) == devices.rank_environment(0)


def test_devices_that_the_user_has_chosen_are_those_that_are_given_out(machine, monkeypatch):
    machine(num=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    devices = plan_devices(config_of())
    assert devices.rank_environment(0)["CUDA_VISIBLE_DEVICES"] == "5"
    assert devices.engine_environment(1)["CUDA_VISIBLE_DEVICES"] == "7"


def test_more_ranks_than_devices_are_refused_with_the_numbers(machine):
    machine(num=2)
    with pytest.raises(UserError, match=r"training.num_ranks=3 needs 3 devices of kind cuda.* has 2: lower"):
        plan_devices(config_of(num_ranks=3))


def test_a_run_on_the_cpu_uses_no_device(machine):
    machine(num=2)
    devices = plan_devices(config_of(device="cpu"))
    assert devices.rank_environment(0) == devices.engine_environment(None) == {"POLYRHYTHM_DEVICE": "cpu"}


def test_a_device_that_is_not_there_is_refused_with_a_way_out(machine, monkeypatch):
    machine(kind="cpu", num=0)
    monkeypatch.setattr(found, "look_in_another_process", lambda: FoundDevices(note="torch 9+cpu finds no device"))
    with pytest.raises(UserError, match=r"device='cuda', but torch 9.cpu finds no device: check that nvidia-smi"):
        find_devices("cuda")
    assert find_devices("auto").kind == "cpu"
    assert "/dev/nvidia0 is there, but torch 9+cpu finds no device: running on the CPU" in find_devices("auto").note


def test_a_machine_without_device_files_is_not_asked(monkeypatch):
    monkeypatch.setattr(found, "device_files", list)
    monkeypatch.setattr(found, "look_in_another_process", lambda: pytest.fail("nobody needs to look"))
    assert find_devices("auto") == FoundDevices()


def test_what_torch_finds_is_told_by_another_process():
    assert found.look_in_another_process().kind == "cpu"
    assert "finds no device" in found.look_in_another_process().note


def test_the_plan_says_what_runs_where_and_what_it_takes(machine, tmp_path):
    machine(num=2)
    config = config_of(algorithm={"kl_coef": 0.1})
    lines = describe_plan(plan_devices(config), config, save_tiny_model(tmp_path))
    assert lines[0] == "cuda 0 (a card, 80.0 GB): trainer"
    assert lines[1].startswith("  trainer takes at most ") and "reference" in lines[1]
    assert lines[2] == "cuda 1 (a card, 80.0 GB): engine-0"
    assert "cache" in lines[3]


@pytest.mark.parametrize(
    ("has_bfloat16", "wanted", "decided"),
    [(False, "auto", "float32"), (True, "auto", "bfloat16"), (True, "float32", "float32")],
)
def test_the_number_format_is_decided_once_by_what_the_devices_have(machine, has_bfloat16, wanted, decided):
    machine(has_bfloat16=has_bfloat16)
    config = config_of(dtype=wanted)
    assert plan_devices(config).decided(config).dtype == decided
    on_cpu = config_of(dtype=wanted, device="cpu")
    assert plan_devices(on_cpu).decided(on_cpu).dtype == "float32"


def test_the_plan_knows_the_number_format_and_what_is_on_the_host(machine, tmp_path):
    machine(num=1, has_bfloat16=True)
    config = config_of(training={"offload_optimizer": True, "num_ranks": 1})
    lines = describe_plan(plan_devices(config), config, save_tiny_model(tmp_path))
    assert "masters" not in lines[1] and "moments" not in lines[1]
    assert re.match(r"host: each trainer rank takes .*masters .*, moments .*, gradients", lines[-1])
    config = config_of()
    lines = describe_plan(plan_devices(config), config, tmp_path)
    assert "masters" in lines[1] and "moments" in lines[1] and not lines[-1].startswith("host")


def test_on_a_cpu_the_plan_is_one_line_about_the_memory_of_the_machine(tmp_path):
    config = config_of(device="cpu")
    (line,) = describe_plan(plan_devices(config), config, save_tiny_model(tmp_path))
    assert re.match(
        r"memory: [\d.]+ GB are free; each trainer rank at most .* each engine at most .*packed weights", line
    )


def test_a_model_that_does_not_fit_is_refused_with_the_numbers(machine, tmp_path):
    machine(num=1, num_bytes=10**9)
    config = config_of()
    with pytest.raises(
        UserError, match=r"device 0 has 1.0 GB, and 1.\d GB are needed there: lower training.tokens_per"
    ):
        describe_plan(plan_devices(config), config, save_tiny_model(tmp_path))
