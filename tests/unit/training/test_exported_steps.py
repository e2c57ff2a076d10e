"""A checkpoint becomes a model folder that transformers loads, in the number format of the model it came from."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from polyrhythm.cli.main import main
from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.config import load_config
from polyrhythm.errors import RunError, UserError
from polyrhythm.models import check_model_folder
from polyrhythm.runs import beginning
from polyrhythm.runs.beginning import find_beginning
from polyrhythm.runs.kept_step import KeptStep, find_kept_step
from polyrhythm.training.checkpoint import Checkpoints
from polyrhythm.training.policy import saving
from polyrhythm.training.policy.saving import save_policy
from polyrhythm.training.policy.tri_model import load_policy
from polyrhythm.training.trainer import Trainer
from polyrhythm.types import MicroBatch
from polyrhythm.weights.number_format import number_format
from tests.conftest import make_group
from tests.tiny_model import save_tiny_model

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def bf16_model(tmp_path_factory) -> Path:
    """A model as it comes from the hub: in bfloat16, with a chat template."""
    folder = save_tiny_model(tmp_path_factory.mktemp("given") / "tiny")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def trained_run(bf16_model, tmp_path_factory) -> tuple[RunFolder, Trainer]:
    """A run with checkpoints of steps 1 and 2, as it is while it goes on."""
    keys = {"model": str(bf16_model), "training": {"learning_rate": 1e-3}, **places_in(tmp_path_factory.mktemp("runs"))}
    config = load_config([], keys)
    run = RunFolder.create(config, bf16_model)
    trainer = Trainer(config, load_policy(bf16_model))
    checkpoints = Checkpoints(run.checkpoints, trainer)
    for version in (0, 1):
        trainer.begin_step(version)
        groups = [make_group(0, step=version)]
        trainer.forward_backward(MicroBatch(version=version, groups=groups, advantages=[[1.0, -1.0, 0.5, -0.5]]))
        trainer.optim_step()
        checkpoints.save(version + 1)
    return run, trainer


def places_in(folder: Path) -> dict:
    return {"output_dir": str(folder), "weights": {"root": str(folder / "weights")}}


def test_all_digits_of_a_step_can_be_exported(trained_run, tmp_path, capsys):
    run, trainer = trained_run
    assert main(["export", str(run.path), "--to", str(tmp_path / "taken"), "--dtype", "float32"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "taken")
    for ours, theirs in zip(model.parameters(), trainer.policy.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert f"step 2 of {run.path} is in {tmp_path / 'taken'}\nsaved in float32\n" in capsys.readouterr().out


def test_a_bf16_model_is_exported_in_bf16_with_all_that_belongs_to_it_and_that_is_said(trained_run, bf16_model, capsys):
    run, trainer = trained_run
    assert main(["export", f"{run.path}@2"]) == 0
    said = capsys.readouterr().out
    assert f"saved in bfloat16, the number format of {bf16_model}; --dtype float32 keeps all digits" in said
    folder = check_model_folder(run.path / "export" / "step-2", "export")
    assert number_format(folder) == "bfloat16"
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert (folder / "generation_config.json").exists()
    assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.lm_head.weight is model.model.embed_tokens.weight, "tied as before"
    for ours, theirs in zip(model.parameters(), trainer.policy.parameters(), strict=True):
        assert torch.equal(ours, theirs.bfloat16())
    assert not [path for path in (run.path / "export").iterdir() if path.name.startswith(".")]


def test_nothing_is_overwritten_unless_it_is_a_model_and_that_is_wanted(trained_run, tmp_path, capsys):
    run, _ = trained_run
    kept = tmp_path / "mine" / "thesis.tex"
    kept.parent.mkdir()
    kept.write_text("years")
    export = ["export", f"{run.path}@1", "--to", str(kept.parent)]
    assert main(export) == 2 and "is there already: give another folder, or --force" in capsys.readouterr().err
    assert main([*export, "--force"]) == 2 and "something else than a model" in capsys.readouterr().err
    assert kept.read_text() == "years"
    save_tiny_model(tmp_path / "old")
    assert main([*export[:3], str(tmp_path / "old"), "--force"]) == 0
    assert number_format(tmp_path / "old") == "bfloat16"


def test_a_run_and_the_model_it_began_with_are_never_replaced(trained_run, bf16_model, capsys):
    run, _ = trained_run
    assert main(["export", f"{run.path}@1", "--to", str(run.path), "--force"]) == 2
    assert "something else than a model" in capsys.readouterr().err and run.checkpoints.is_dir()
    assert main(["export", f"{run.path}@1", "--to", str(bf16_model), "--force"]) == 2
    assert "the model that the run began with" in capsys.readouterr().err


def test_hidden_folders_beside_the_target_stay(trained_run, tmp_path):
    run, _ = trained_run
    (tmp_path / ".config").mkdir()
    (tmp_path / ".config" / "settings").write_text("mine")
    assert main(["export", f"{run.path}@1", "--to", str(tmp_path / "config")]) == 0
    assert (tmp_path / ".config" / "settings").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".config", "config"]


def test_the_steps_that_are_there_are_listed(trained_run, capsys):
    run, _ = trained_run
    assert main(["export", str(run.path), "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["step", "1"], ["step", "2"]]
    assert lines[0].endswith("v00000001")


def test_a_step_that_is_not_there_is_named_with_those_that_are(trained_run, tmp_path):
    run, _ = trained_run
    for name, said in {
        f"{run.path}@7": "has no checkpoint of step 7, only of 1, 2: training.checkpoint_every and training.keep_checkpoints",
        f"{run.path}@last": "behind the @ stands the number of a step",
        f"{tmp_path}": "is not a run folder: it has no config.json",
        "nowhere@3": "nowhere is not a run folder",
    }.items():
        with pytest.raises(UserError, match=said):
            find_kept_step(name)
    other = RunFolder.create(load_config([], places_in(tmp_path)), run.model_dir)
    other.trained_model.mkdir()
    with pytest.raises(UserError, match=f"has no checkpoint; its trained model is in {other.trained_model}"):
        find_kept_step(str(other.path))


def test_an_altered_checkpoint_is_not_exported(trained_run, tmp_path, capsys):
    run, _ = trained_run
    with open(run.checkpoints / "v00000001" / "model.safetensors", "r+b") as file:
        file.seek(50_000)
        before = file.read(4)
        file.seek(50_000)
        file.write(b"oops")
        file.flush()
        assert main(["export", f"{run.path}@1", "--to", str(tmp_path / "x")]) == 2
        file.seek(50_000)
        file.write(before)
    assert "digests differ" in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_the_number_format_stays_when_a_run_begins_with_one_that_began_with_another(trained_run, tmp_path, monkeypatch):
    monkeypatch.setattr(beginning, "_export", lambda _, target: save_tiny_model(target))  # in fp32, as it does
    config = load_config([], places_in(tmp_path))
    kept = find_kept_step(str(trained_run[0].path))
    for _ in range(2):
        new = RunFolder.reserve(config.output_dir)
        of_new = beginning.bring_into(new, beginning.Beginning(kept), config)
        new.fill(of_new, new.initial_model)
        assert of_new.training.save_dtype == "bfloat16"
        kept = KeptStep(new, 1)


def test_a_new_run_goes_on_with_the_optimizer_and_counts_its_updates_anew(trained_run, bf16_model):
    run, trainer = trained_run
    new = Trainer(load_config([], {"training": {"weight_decay": 0.1}}), load_policy(bf16_model))
    Checkpoints(run.path / "elsewhere", new).begin(0, run.checkpoints)
    assert new.optimizer.num_updates == 0
    ours, theirs = new.optimizer.state(), trainer.optimizer.state()
    assert ours.keys() == theirs.keys() and len(ours) > 1
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if name != "json")


def test_another_optimizer_cannot_go_on_with_the_state(trained_run):
    run, _ = trained_run
    other = load_config([], {"training": {"optimizer": "torch.optim:SGD"}})
    find_beginning(str(run.path), other)
    with pytest.raises(UserError, match=r"training.optimizer='torch.optim:SGD' cannot go on .* where it was 'adamw'"):
        find_beginning(str(run.path), other, with_optimizer=True)


def test_a_model_that_cannot_be_saved_is_one_line_and_leaves_nothing_half(bf16_model, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving.AutoTokenizer, "from_pretrained", full)
    with pytest.raises(RunError, match=r"the model could not be saved in .*model: .*No space left on device"):
        save_policy(load_policy(bf16_model), bf16_model, tmp_path / "model", "auto")
    assert list(tmp_path.iterdir()) == []
