"""`polyrhythm.rollouts`: conductor and engines for a training loop of one's own, in the process of the caller."""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from polyrhythm.cluster.cores import num_cores, plan_threads
from polyrhythm.cluster.launcher import make_launcher
from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.cluster.supervisor import POLL_S, Supervisor
from polyrhythm.config import Config, merged_config
from polyrhythm.devices.plan import plan_devices
from polyrhythm.errors import RunError, UserError
from polyrhythm.loader import LoaderSettings, RolloutLoader
from polyrhythm.loader.client import ConductorClient
from polyrhythm.loader.loader import Step
from polyrhythm.messages import GroupsReply
from polyrhythm.observe.terminal.view import make_view
from polyrhythm.rewards.sandbox.hosting import host_functions
from polyrhythm.runs.arguments import ConfigKeys, Dataset, Reward, request_of, rewards_of
from polyrhythm.runs.script import refuse_while_imported, script_modules_found
from polyrhythm.runs.starting import new_run

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CAUSE_DEADLINE_S = 10.0
"""Whoever notices that the conductor is gone waits this long to hear why."""


class Rollouts:
    """What a training loop sees: steps with their micro-batches, and where it hands its weights on.

    A process that fails is a RunError or UserError, wherever the loop is waiting.
    """

    def __init__(self, folder: RunFolder, config: Config, watch: "_Watch"):
        from polyrhythm.weights.store import WeightStore  # imports torch

        self.config = config
        self.folder = folder.path
        self.model_dir = folder.model_dir
        """The model that the engines have: what the loop begins with."""
        self._store = WeightStore(folder.store_root, keep=config.weights.keep, file_mb=config.weights.file_mb)
        self._source = _WatchedSource(
            ConductorClient(folder.wait_for_conductor(), folder.credentials()["admin"]), watch
        )
        if config.weights.transport == "broadcast":
            self._send_to_engines(folder)
        # A plain loop computes the prompt with each of its completions: that is what fills a micro-batch.
        shares_prompts = config.training.share_prompt == "always"
        self._loader = RolloutLoader(self._source, LoaderSettings.of(config, share_prompt=shares_prompts))
        self._version = 0

    def _send_to_engines(self, folder: RunFolder) -> None:
        from polyrhythm.training.parallel.meeting import ConductorLine
        from polyrhythm.training.weight_sender import WeightSender

        url, credential = folder.wait_for_conductor(), folder.credentials()["admin"]
        listener = ConductorClient(url, credential)
        WeightSender(ConductorLine(url, credential), listener.next_broadcast, self._store).follow()

    def publish(self, model: "PreTrainedModel", metrics: Mapping[str, float] | None = None) -> None:
        """Hand the weights of `model` to the engines. The first time they begin; later it closes the step.

        `metrics` go into metrics.jsonl beside what conductor and engines have measured.
        """
        from polyrhythm.weights.export import exported
        from polyrhythm.weights.proof import probe_of

        self._store.publish(exported(model), self._version, probe_of(model, self._version))
        self._source.published(self._version, dict(metrics or {}))
        self._version += 1

    def steps(self) -> Iterator[Step]:
        """One Step for each of the configuration's num_steps; `publish` must have been called before each."""
        for step in self._loader.steps():
            if self._version != step.version + 1:
                raise UserError(f"step {step.version + 1} has no weights: call publish(model) before each step")
            yield step


@contextlib.contextmanager
def rollouts(
    *,
    model: str | Path | None = None,
    dataset: Dataset | None = None,
    rewards: Reward | Sequence[Reward] | None = None,
    reward_weights: Sequence[float] | None = None,
    config: Config | None = None,
    **keys: Unpack[ConfigKeys],
) -> Iterator[Rollouts]:
    """Conductor and engines of a run without a trainer, until the block is left; arguments as in `polyrhythm.train`.

    with polyrhythm.rollouts(model=folder, dataset=rows, rewards=[correct]) as loader:
        loader.publish(policy)                      # version 0
        for step in loader.steps():
            for update in step.updates():
                for micro_batch in update: ...      # groups as they finish, with advantages
            loader.publish(policy)                  # closes the step; engines begin the next one
    """
    refuse_while_imported("rollouts")
    with contextlib.ExitStack() as stack:
        stack.enter_context(script_modules_found())
        names = stack.enter_context(host_functions(rewards_of(rewards)))
        request = request_of(model, dataset, names, reward_weights, config, keys)
        folder = stack.enter_context(new_run(_without_trainer(request.config), request.rows))
        config = folder.config()
        launcher = stack.enter_context(contextlib.closing(make_launcher(config.cluster.kind, folder)))
        threads = plan_threads(config, num_cores())
        run = stack.enter_context(
            Supervisor(folder, config, threads, launcher, plan_devices(config), has_trainer=False)
        )
        if config.observe.view != "auto":  # a loop of one's own says itself how it goes, unless it was asked for
            run.view = make_view(config.observe.view, folder.path)
        stack.enter_context(_threads(threads.trainer))
        watch = stack.enter_context(_Watch(run))
        yield Rollouts(folder, config, watch)


@contextlib.contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    """The caller's torch leaves the engines their cores: with more threads than cores all of them crawl."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _without_trainer(config: Config) -> Config:
    if config.training.num_ranks > 1:
        raise UserError(f"training.num_ranks={config.training.num_ranks}: a loop of your own is one process, use 1")
    # Nobody tells the caller's torch when others are idle, so each process keeps the threads it has.
    cores = {"cores": "split"} if config.cluster.cores == "auto" else {}
    return merged_config(config.model_dump(), {"cluster": cores})


class _Watch:
    """Looks at the processes from a thread. What ends the run is kept for whoever waits, and ends the conductor."""

    def __init__(self, run: Supervisor):
        self._run = run
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._failure: Exception | None = None

    def __enter__(self) -> "_Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(timeout=CAUSE_DEADLINE_S)

    def failure(self, deadline_s: float) -> Exception | None:
        """What has ended the run, as soon as it is known."""
        self._thread.join(timeout=deadline_s)
        return self._failure

    def _watch(self) -> None:
        try:
            while not self._is_over.wait(POLL_S):
                self._run.look()
        except Exception as error:  # also a defect of ours: the loop must hear it, there is nobody else
            self._failure = error
            if self._run.conductor is not None:
                self._run.conductor.ask_to_end()  # whoever waits for it waits no longer


class _WatchedSource:
    """The conductor's client; if the conductor cannot be reached, the error says who failed."""

    def __init__(self, client: ConductorClient, watch: _Watch):
        self._client = client
        self._watch = watch

    def published(self, version: int, metrics: dict[str, float]) -> None:
        with self._explained():
            self._client.published(version, metrics)

    def wait_for_engines(self, version: int, deadline_s: float) -> None:
        with self._explained():
            self._client.wait_for_engines(version, deadline_s)

    def groups(self, version: int, offset: int, until: int, wait_s: float) -> GroupsReply:
        with self._explained():
            return self._client.groups(version, offset, until, wait_s)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RunError as error:
            raise self._watch.failure(CAUSE_DEADLINE_S) or error from None
