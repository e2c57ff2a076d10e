"""Real runs of models that are no Llama: engine and trainer agree at every step, and the result is a model folder again."""

import pytest
from transformers import AutoModelForCausalLM

from tests.architectures import save_architecture
from tests.integration.conftest import Cli


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gpt2", "gpt_oss", "granite"])
def test_two_steps_of_another_architecture(kind, work_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp(kind)
    before = save_architecture(kind, folder)
    outcome = Cli(work_dir, folder).train(num_steps=2)
    assert outcome.returncode == 0, outcome.output
    assert all(step["onpolicy/violations"] == 0 for step in outcome.metrics())
    assert all(step["mismatch/logprob_abs_max"] < 1e-4 for step in outcome.metrics())
    assert outcome.run_dir is not None
    after = AutoModelForCausalLM.from_pretrained(outcome.run_dir / "model")
    assert type(after) is type(before)
    changed = [name for name, weight in after.named_parameters() if not weight.equal(before.get_parameter(name))]
    assert len(changed) > len(list(before.parameters())) / 2
