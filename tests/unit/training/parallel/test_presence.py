"""A rank that waits for another hears from the conductor that the run has failed, and ends."""

import subprocess
import sys
from pathlib import Path

from polyrhythm.errors import AnotherFailed
from tests.meeting_place import meeting_place

ROOT = Path(__file__).parents[4]
WAITS_IN_A_SUM = """
import sys, time
import torch
from polyrhythm.errors import AnotherFailed
from polyrhythm.training.parallel.ranks import join_ranks, stay_in_run
from tests.meeting_place import CREDENTIAL

url, name, is_deaf = sys.argv[1], sys.argv[2], sys.argv[3] == "deaf"
replica = join_ranks(url, CREDENTIAL, name)
if not is_deaf:
    stay_in_run()
print("met", flush=True)
if is_deaf:
    time.sleep(600)  # it hears nothing of the failure, and so closes no connection
try:
    replica.add_up([torch.ones(3)], 1.0)
except AnotherFailed as error:
    raise SystemExit(AnotherFailed.exit_code)
"""


def test_a_rank_that_waits_for_one_that_never_comes_is_freed_when_the_run_fails():
    """Both live and stay connected, so gloo by itself would wait for a day."""
    with meeting_place("trainer-0", "trainer-1", lease_s=2.0) as place:
        command = [sys.executable, "-c", WAITS_IN_A_SUM, place.url]
        ranks = [
            subprocess.Popen(
                [*command, f"trainer-{rank}", how], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            for rank, how in enumerate(("waits", "deaf"))
        ]
        try:
            for rank in ranks:
                assert rank.stdout.readline() == b"met\n"
            place.fails_with("an engine burnt down")
            _, said = ranks[0].communicate(timeout=60)
        finally:
            for rank in ranks:
                rank.kill()
    assert ranks[0].returncode == AnotherFailed.exit_code
    assert "trainer-0 is not in the run any more: the conductor answered 503: an engine burnt down" in said.decode()
