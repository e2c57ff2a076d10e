"""Ranks that hold a policy together, with real processes, engines and a rank that dies."""

import json

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from polyrhythm.chaos.plan import read_fault_log

FLAGS = {"order": "problem", "num_steps": 4, "algorithm__kl_coef": 0.05, "training__checkpoint_every": 1}
KILL_THE_SECOND_SHARD = """
[[fault]]
what = "kill"
where = "trainer-1"
step = 3
at = "reduce"
"""


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return float(torch.stack([(ours[name] - theirs[name]).norm() for name in ours]).norm())


def test_sharded_ranks_train_what_one_rank_trains_also_when_a_shard_dies_and_others_go_on(cli):
    alone = cli.train(**FLAGS)
    assert alone.returncode == 0, alone.output
    (cli.work_dir / "plan.toml").write_text(KILL_THE_SECOND_SHARD)
    sharded = cli.arguments(**FLAGS, training__num_ranks=2, training__parallel="shard")
    broken = cli.run(*sharded, "--chaos", "plan.toml")
    assert broken.run_dir != alone.run_dir
    assert [line["where"] for line in read_fault_log(broken.run_dir)] == ["trainer-1"]
    assert broken.returncode == 1 and "trainer-1 was killed by SIGKILL" in broken.output
    assert "trainer-0" not in broken.output, "the other shard fell because of it"
    manifest = json.loads((broken.run_dir / "checkpoints" / "v00000002" / "manifest.json").read_text())
    pieces = {name: len(entry["pieces"]) for name, entry in manifest["tensors"].items() if len(entry["shape"]) == 2}
    assert set(pieces.values()) == {2}, "each shard has written its rows of weights and of moments"
    assert any(name.startswith("optimizer.") for name in pieces)

    resumed = cli.run(
        "train", "--resume", str(broken.run_dir), "--training.parallel", "shard_state", "--observe.view", "plain"
    )
    assert resumed.returncode == 0, resumed.output
    rows = resumed.metrics()
    assert len(rows) == 4
    for row in rows:
        assert row["ranks/num"] == 2 and row["ranks/largest_share"] < 1 and row["onpolicy/violations"] == 0
        assert row["mismatch/logprob_abs_mean"] < 1e-4 and row["kl/k3"] >= 0
    begun, expected, ours = (
        load_file(folder / "model.safetensors")
        for folder in (cli.model_dir, alone.run_dir / "model", resumed.run_dir / "model")
    )
    assert distance(ours, expected) < 1e-3 * distance(begun, expected)
    model = AutoModelForCausalLM.from_pretrained(resumed.run_dir / "model")
    assert {name for name, _ in model.named_parameters()} == ours.keys(), "an ordinary folder"
    assert sorted(path.name for path in (resumed.run_dir / "model").iterdir()) == sorted(
        path.name for path in (alone.run_dir / "model").iterdir()
    )


def test_shards_train_in_bfloat16_and_keep_all_digits(cli):
    run = cli.train(**FLAGS | {"num_steps": 2}, dtype="bfloat16", training__num_ranks=2, training__parallel="shard")
    assert run.returncode == 0, run.output
    rows = run.metrics()
    assert len(rows) == 2 and all(row["ranks/num"] == 2 and row["onpolicy/violations"] == 0 for row in rows)
    kept = json.loads((run.run_dir / "checkpoints" / "v00000002" / "manifest.json").read_text())["tensors"]
    assert {entry["dtype"] for name, entry in kept.items() if name.startswith("policy.")} == {"F32"}
    saved = load_file(run.run_dir / "model" / "model.safetensors")
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in saved.values()), "all digits"
    assert not list(run.run_dir.glob(".model*"))
