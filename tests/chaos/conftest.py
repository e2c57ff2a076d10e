"""One oracle for all cases: the weights of the undisturbed run."""

import pytest

from tests.integration.conftest import Cli, cli, fill_work_dir, tiny_model_dir, work_dir

__all__ = ["cli", "tiny_model_dir", "work_dir"]

FLAGS = {
    "order": "problem", "num_steps": 6, "cluster__num_engines": 2, "training__checkpoint_every": 1,
    "training__schedule": "cosine", "training__warmup_steps": 2,
}  # fmt: skip
"""With a learning rate that no step shares with another: who goes on at a wrong one ends with other weights."""


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, tiny_model_dir) -> bytes:
    """The final weights of a run to which nothing happens."""
    outcome = Cli(fill_work_dir(tmp_path_factory.mktemp("undisturbed")), tiny_model_dir).train(**FLAGS)
    assert outcome.returncode == 0, outcome.output
    assert outcome.weights() != (tiny_model_dir / "model.safetensors").read_bytes()
    return outcome.weights()
