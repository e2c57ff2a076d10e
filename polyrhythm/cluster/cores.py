"""How the cores of one machine are divided, and the environment that the processes are started with."""

import os

from polyrhythm.conductor.engines.cores import CorePlan
from polyrhythm.config import Config


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def plan_threads(config: Config, cores: int) -> CorePlan:
    """Half of the cores among the ranks, the rest among the engines, at least one each, unless the configuration says."""
    num_ranks = config.training.num_ranks_here
    trainer = config.training.threads or max(1, cores // 2 // max(1, num_ranks))
    engine = config.engine.threads or max(
        1, (cores - min(trainer * num_ranks, cores - 1)) // max(1, config.cluster.num_engines)
    )
    return CorePlan(num_cores=cores, trainer=trainer, engine=engine, num_ranks=max(1, num_ranks))


def cores_follow_demand(config: Config) -> bool:
    """Of one machine only: who trains elsewhere has cores of its own."""
    if config.training.ranks_elsewhere:
        return False
    if config.cluster.cores == "auto":
        is_adjustable = config.engine.kind == "embedded" and config.cluster.kind == "local"
        return (
            is_adjustable and config.order == "completion" and not config.engine.threads and not config.training.threads
        )
    return config.cluster.cores == "follow"


def process_environment(num_threads: int) -> dict[str, str]:
    """What must be set before torch is imported."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        # A waiting thread must not take the core another process could use, but waking a sleeping one for every small
        # operation costs a fifth of the time on virtual machines: it looks for work for about 0.1 ms before it sleeps,
        # unless the machine is crowded (kernels/spinning.py).
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "10000",
        "MKL_CBWR": "AUTO,STRICT",  # matrix products give the same bits for any batch size and number of threads
        # Freed memory is kept for the next micro-batch: on many machines fresh pages cost more than the arithmetic.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
        "MALLOC_TOP_PAD_": str(64 * 2**20),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
