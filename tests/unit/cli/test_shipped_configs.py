"""The files in configs/ for more than one device, by `train --dry-run` on machines that are made up."""

from pathlib import Path

import pytest

from polyrhythm.cli.main import main
from polyrhythm.cluster.ray import checks
from polyrhythm.cluster.ray.placement import Node
from polyrhythm.devices import found
from polyrhythm.devices.found import Device, FoundDevices
from tests.tiny_model import save_tiny_model

CONFIGS = Path(__file__).parents[3] / "configs"
GSM8K = 'path = "openai/gsm8k", subset = "main", split = "train"'


@pytest.fixture
def dry_run(tmp_path, monkeypatch, capsys):
    """What `--dry-run` prints for a file on a machine with this many GPUs."""
    save_tiny_model(tmp_path / "model")
    (tmp_path / "problems.jsonl").write_text('{"question": "What is 2 + 3?", "answer": "2 and 3 are 5. #### 5"}\n')

    def run(name: str, num_gpus: int) -> tuple[int, str]:
        there = FoundDevices("cuda", [Device("a card", 80 * 10**9)] * num_gpus)
        monkeypatch.setattr(found, "device_files", lambda: ["/dev/nvidia0"])
        monkeypatch.setattr(found, "look_in_another_process", lambda: there)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        text = (CONFIGS / name).read_text()
        assert GSM8K in text, "what would be downloaded"
        (tmp_path / name).write_text(text.replace(GSM8K, f'path = "{tmp_path / "problems.jsonl"}"'))
        here = [
            "--model",
            str(tmp_path / "model"),
            "--engine.kind",
            "embedded",
            "--rollout.max_tokens",
            "8",
            "--prompt.form",
            "text",
        ]
        code = main(["train", str(tmp_path / name), "--dry-run", *here])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def test_of_two_gpus_one_trains_and_one_generates(dry_run):
    code, said = dry_run("two_gpus.toml", 2)
    assert code == 0, said
    assert "cuda 0 (a card, 80.0 GB): trainer\n" in said
    assert "cuda 1 (a card, 80.0 GB): engine-0\n" in said


def test_of_eight_gpus_four_hold_the_policy_together_and_four_generate(dry_run):
    code, said = dry_run("eight_gpus.toml", 8)
    assert code == 0, said
    for place in range(4):
        assert f"cuda {place} (a card, 80.0 GB): trainer-{place}\n" in said
        assert f"cuda {place + 4} (a card, 80.0 GB): engine-{place}\n" in said


def test_a_file_for_eight_gpus_is_refused_on_two(dry_run):
    code, said = dry_run("eight_gpus.toml", 2)
    assert code == 2
    assert "training.num_ranks=4 needs 4 devices" in said


def test_on_sixty_four_devices_ray_has_room_for_every_rank_and_engine(dry_run, monkeypatch):
    nodes = [Node(f"10.0.0.{number}", {"CPU": 64.0, "GPU": 8.0}, {"CPU": 64.0, "GPU": 8.0}) for number in range(1, 9)]
    monkeypatch.setattr(checks, "existing_cluster", lambda config: checks.Cluster(config.cluster.address, {}, nodes))
    code, said = dry_run("sixty_four_devices.toml", 8)
    assert code == 0, said
    assert said.count(" fits on 10.0.0.") == 64
    monkeypatch.setattr(
        checks, "existing_cluster", lambda config: checks.Cluster(config.cluster.address, {}, nodes[:-1])
    )
    code, said = dry_run("sixty_four_devices.toml", 8)
    assert code == 2
    assert "engine.resources asks for CPU 4, GPU 1" in said or "training.resources asks for CPU 4, GPU 1" in said
