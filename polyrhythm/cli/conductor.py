"""`polyrhythm conductor`: the conductor of a run, which `polyrhythm train` starts."""

import argparse

from polyrhythm.runs.joining import add_run_argument, join_run, serve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)


def run(parsed: argparse.Namespace) -> int:
    from polyrhythm.chaos.rewards import reward_pool
    from polyrhythm.cluster.cores import cores_follow_demand, num_cores, plan_threads
    from polyrhythm.conductor import service

    folder, config = join_run(parsed)
    return serve(
        service.run_conductor(
            config, folder.path, folder.model_dir, folder.store_root, folder.credentials(), port=config.conductor.port,
            ready=lambda url: folder.announce("conductor", url),
            first_step=folder.first_step,
            has_optimizer=folder.first_step > 0 or folder.initial_optimizer.exists(),
            cores=plan_threads(config, num_cores()) if cores_follow_demand(config) else None,
            make_rewards=reward_pool(folder.path),
        )
    )  # fmt: skip
