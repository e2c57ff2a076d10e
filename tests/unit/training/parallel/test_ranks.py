"""Ranks that train together give the gradient of one: real processes, compared after the division and the clipping."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from socket import AF_INET

import psutil
import pytest
import torch
from safetensors.torch import load_file

from polyrhythm.errors import RunError
from polyrhythm.training.parallel.ranks import join_ranks
from polyrhythm.training.parallel.replicate import WholeReplica
from tests.conftest import build_tiny_model
from tests.meeting_place import CREDENTIAL, meeting_place
from tests.unit.training.parallel.rank_worker import COMPARED, SCENARIOS, all_groups
from tests.unit.training.test_equivalence import config_for, gradients_of, relative_error

ROOT = Path(__file__).parents[4]
NUM_RANKS = 3
DEADLINE_S = 120


def widest_interface() -> str:
    """One that others can reach, if this machine has any: ranks must not listen there even if the environment says so."""
    addresses = {name: rows[0].address for name, rows in psutil.net_if_addrs().items() if rows[0].family == AF_INET}
    return max(addresses, key=lambda name: addresses[name] != "127.0.0.1")


@pytest.fixture(scope="module")
def together(tmp_path_factory) -> Path:
    """The folder in which three ranks have left what they saw."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.unit.training.parallel.rank_worker"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": widest_interface()}
    with meeting_place(*(f"trainer-{rank}" for rank in range(NUM_RANKS))) as place:
        workers = [
            subprocess.Popen(
                [*command, str(rank), str(NUM_RANKS), str(folder), place.url], cwd=ROOT, env=environment,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(NUM_RANKS)
        ]  # fmt: skip
        try:
            outputs = [worker.communicate(timeout=DEADLINE_S)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    assert [worker.returncode for worker in workers] == [0] * NUM_RANKS, "\n".join(outputs)
    return folder


@pytest.fixture(scope="module")
def said(together) -> list[dict]:
    return [json.loads((together / f"said-{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def gradients_in(folder: Path, rank: int, scenario: str) -> list[torch.Tensor]:
    tensors = load_file(folder / f"gradients-{rank}.safetensors")
    return [tensors[name] for name in sorted(tensors) if name.rpartition("/")[0] == scenario]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_ranks_have_the_gradient_of_one_rank_and_the_same_bits_everywhere(together, said, scenario):
    alone, trainer = gradients_of(build_tiny_model("llama"), config_for(**SCENARIOS[scenario]), [all_groups()])
    by_rank = [gradients_in(together, rank, scenario) for rank in range(NUM_RANKS)]
    assert relative_error(by_rank[0], alone) < (1e-4 if scenario == "two updates" else 1e-6)
    for other in by_rank[1:]:
        assert all(torch.equal(a, b) for a, b in zip(by_rank[0], other, strict=True))
    shown = [rank["metrics"][scenario] for rank in said]
    assert shown[0] == shown[1] == shown[2]
    expected = trainer.metrics()
    expected = pytest.approx({key: expected[key] for key in COMPARED}, rel=1e-4, abs=1e-5)  # losses add up to zero
    assert {key: shown[0][key] for key in COMPARED} == expected
    assert shown[0]["ranks/num"] == NUM_RANKS
    assert (shown[0]["ranks/largest_share"] == 1.0) == (scenario == "all to one rank")


def test_ranks_hear_each_other_in_order_and_numbers_arrive_as_they_are(said):
    assert said[0]["gathered"] == [f"[inf, -1.5, {float(rank)}]" for rank in range(NUM_RANKS)]
    assert all(rank["gathered"] == said[0]["gathered"] for rank in said)


def test_ranks_listen_on_loopback_alone(said):
    assert all(rank["listening"] and set(rank["listening"]) == {"127.0.0.1"} for rank in said)


def test_a_rank_does_not_wait_for_ever_for_the_others():
    with meeting_place("trainer-0", "trainer-1") as place:
        with pytest.raises(RunError, match="trainer-0 did not meet the other ranks of the run within 0:00:01"):
            join_ranks(place.url, CREDENTIAL, "trainer-0", timedelta(seconds=1))


def test_one_rank_needs_nobody():
    with meeting_place("trainer") as place:
        replica = join_ranks(place.url, CREDENTIAL, "trainer")
    gradient = torch.ones(3)
    assert replica.add_up([gradient], 2.5) == 2.5 and torch.equal(gradient, torch.ones(3))
    assert replica.is_writer and replica.is_alone and replica.gather({"a": 1}) == [{"a": 1}]
    assert not WholeReplica(1, 2).is_writer and not WholeReplica(0, 2).is_alone
