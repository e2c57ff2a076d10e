"""One rank of a trainer as a process of its own: `python -m tests.unit.training.parallel.rank_worker RANK NUM FOLDER URL`.

Trains one step per scenario and leaves gradients and metrics in the folder.
"""

import json
import sys
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file

from polyrhythm.messages import GroupsReply
from polyrhythm.training.parallel.ranks import join_ranks, leave_ranks
from polyrhythm.types import Group
from tests.conftest import ScriptedSource, build_tiny_model, make_group
from tests.meeting_place import CREDENTIAL
from tests.unit.training.test_equivalence import NUM_GROUPS, config_for, gradients_of

AGGREGATIONS = ("token_mean", "sequence_mean", "constant", "group_token_mean")
SCENARIOS = {
    **{
        f"{aggregation}/{clip}": {"algorithm": {"aggregation": aggregation}, "training": {"max_grad_norm": clip}}
        for aggregation in AGGREGATIONS
        for clip in (1e9, 0.05)
    },
    "two updates": {"algorithm": {"kl_coef": 0.1}, "training": {"updates_per_step": 2, "max_grad_norm": 0.05}},
    "all to one rank": {"training": {"max_grad_norm": 0.05}},
}
COMPARED = ("train/loss", "train/tokens", "train/entropy", "train/grad_norm", "groups/skipped", "mismatch/k3")


class ShareSource(ScriptedSource):
    """The share of one rank, there from the start: group i of a step is that of rank i modulo `num`; of 1, all are the first's."""

    def __init__(self, rank: int, num: int):
        super().__init__([])
        self.rank, self.num = rank, num

    def groups(self, version, offset, until, wait_s):
        mine = [group for group in all_groups()[:until] if group.position % self.num == self.rank]
        return GroupsReply(groups=mine[offset:], is_last=True)


def all_groups() -> list[Group]:
    return [make_group(position) for position in range(NUM_GROUPS)]


def main(rank: int, num: int, folder: Path, url: str) -> None:
    torch.set_num_threads(1)
    replica = join_ranks(url, CREDENTIAL, f"trainer-{rank}")
    listening = [
        connection.laddr.ip
        for connection in psutil.Process().net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    said: dict = {"listening": listening, "metrics": {}}
    said["gathered"] = [str(value) for value in replica.gather([float("inf"), -1.5, float(rank)])]
    gradients = {}
    for name, flags in SCENARIOS.items():
        source = ShareSource(rank, 1 if name == "all to one rank" else num)
        seen, trainer = gradients_of(build_tiny_model("llama"), config_for(**flags), source, replica=replica)
        gradients |= {f"{name}/{index}": gradient for index, gradient in enumerate(seen)}
        said["metrics"][name] = trainer.metrics()
    save_file(gradients, folder / f"gradients-{rank}.safetensors")
    (folder / f"said-{rank}.json").write_text(json.dumps(said))
    leave_ranks()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
