"""Two Ray nodes on this machine, with a token, and runs of the tiny model on them."""

import pytest

from tests.integration.conftest import cli, tiny_model_dir, work_dir
from tests.ray_cluster import HEAD_ADDRESS, OTHER_ADDRESS, RayCluster

__all__ = ["cli", "tiny_model_dir", "work_dir"]


@pytest.fixture(scope="session")
def cluster():
    """Both nodes have room for engines, the head also for ranks."""
    cluster = RayCluster()
    try:
        cluster.start_head(CPU=2, ranks=2, engines=2)
        cluster.start_node(OTHER_ADDRESS, CPU=2, engines=2)
        assert HEAD_ADDRESS != OTHER_ADDRESS
        yield cluster
    finally:
        cluster.close()
