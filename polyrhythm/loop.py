"""The loop: the whole method in one page. `polyrhythm trainer --run RUN` is one trainer rank.

Inference and training run at the same time, in processes of their own, and meet on the beat: once per step the new weights
reach every engine, all rollouts of the step come from exactly those weights, and the trainer adds up gradients over
each group as soon as it is finished, while the others are still being generated. One update closes the step.
"""

from polyrhythm.chaos.trainer import trainer_hooks
from polyrhythm.cluster.cores import cores_follow_demand
from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.config import Config
from polyrhythm.devices.memory import snapshot_bytes
from polyrhythm.interrupts import interrupts
from polyrhythm.loader import LoaderSettings, RolloutLoader
from polyrhythm.loader.client import ConductorClient
from polyrhythm.messages import SAVE_DUTY, publish_duty
from polyrhythm.observe.activity import Activity
from polyrhythm.observe.metrics import trainer_times
from polyrhythm.observe.recorder import ActivityRecorder
from polyrhythm.setups import setup_of
from polyrhythm.training.checkpoint import Checkpoints
from polyrhythm.training.parallel.channel import lost_ranks_named
from polyrhythm.training.parallel.elastic.entering import enter_run
from polyrhythm.training.parallel.elastic.replica import ElasticReplica, join_elastic
from polyrhythm.training.parallel.meeting import ConductorLine
from polyrhythm.training.parallel.ranks import join_ranks, leave_ranks, leave_run, replica_kind, stay_in_run
from polyrhythm.training.parallel.replica import Replica
from polyrhythm.training.policy.tri_model import load_policy
from polyrhythm.training.publication import Publication
from polyrhythm.training.threads import ThreadFollower
from polyrhythm.training.trainer import Trainer
from polyrhythm.training.weight_sender import WeightSender
from polyrhythm.weights.store import WeightStore


def train(
    loader: RolloutLoader,
    trainer: Trainer,
    publication: Publication,
    checkpoints: Checkpoints,
    recorder: ActivityRecorder,
) -> None:
    for step in loader.steps():  # engines hold policy v{step.version}, verified
        publication.verify(step.version)  # the replicas have not drifted apart
        trainer.begin_step(step.version)
        for update in step.updates():  # one, unless training.updates_per_step says more
            for micro_batch in update:  # finished groups, as they finish
                trainer.forward_backward(micro_batch)  # engines keep generating meanwhile
            trainer.optim_step()  # divide by the totals, clip, update
        metrics = trainer.metrics()
        trainer.replica.appoint(
            publish_duty(step.version + 1)
        )  # of elastic ranks the next writes if the writer is lost
        publication.publish(step.version + 1)  # whoever holds a part of the policy writes it
        times = trainer_times(recorder.take_seconds())
        if trainer.replica.is_writer:  # it speaks for all
            step.commit(times | metrics)  # the step is closed, engines begin the next one
        checkpoints.save_if_due(step.version + 1)  # meanwhile: weights stay until the next update


def run_trainer(run: RunFolder, config: Config, rank: int = 0, store: WeightStore | None = None) -> None:
    """Start one rank: load the policy, publish it, train, and save what was learnt in the run folder.

    Without a `store` of its own a rank reads weights where the writer publishes them.
    """
    url, credential = run.wait_for_conductor(), run.credentials()["admin"]
    name = config.training.rank_name(rank)
    hooks = trainer_hooks(run.path, name, rank, run.store_root, lambda: run.pid("conductor"), run.first_step)
    recorder = ActivityRecorder(name, ConductorClient(url, credential, rank).report, hooks)  # a thread sends reports
    with recorder.doing(Activity.START):
        replica = _join(run, config, name, recorder)
        client = ConductorClient(url, credential, replica.index)
        trainer = Trainer(config, load_policy(run.model_dir), recorder, replica)
        if cores_follow_demand(config) and trainer.device.type == "cpu":
            ThreadFollower(ConductorClient(url, credential).threads).follow(trainer.policy, trainer.optimizer.inner)
        checkpoints = Checkpoints(run.checkpoints, trainer)
        store = store or WeightStore(run.store_root, keep=config.weights.keep, file_mb=config.weights.file_mb)
        publication = Publication(store, trainer)
        if config.weights.transport == "broadcast":
            line, listener = ConductorLine(url, credential), ConductorClient(url, credential)
            WeightSender(line, listener.next_broadcast, store, lambda: replica.is_writer).follow()
        first_step = _begin(run, client, trainer, checkpoints, publication)
        for hook in hooks:
            hook.begins_at(first_step)
        settings = LoaderSettings.of(
            config, share_prompt=trainer.models.shares_prompts, snapshot_bytes=snapshot_bytes(config, run.model_dir)
        )
        loader = RolloutLoader(client, settings, recorder=recorder, first_step=first_step, shards=replica)
    stay_in_run()
    with interrupts.deferred():
        with checkpoints.kept(), lost_ranks_named():
            train(loader, trainer, publication, checkpoints, recorder)
        replica.appoint(SAVE_DUTY)
        checkpoints.save_last(config.num_steps)
        publication.save_model(config.num_steps, run.model_dir, run.trained_model)
        leave_ranks()
        if replica.is_writer:
            replica.has_done(SAVE_DUTY)
    leave_run()


def _join(run: RunFolder, config: Config, name: str, recorder: ActivityRecorder) -> Replica:
    url, credential, setup = run.wait_for_conductor(), run.credentials()["admin"], setup_of(run.model_dir)
    if config.training.elastic:
        return join_elastic(url, credential, name, config.conductor.lease_s, recorder, setup)
    return join_ranks(url, credential, name, kind=replica_kind(config.training), setup=setup)


def _begin(
    run: RunFolder, client: ConductorClient, trainer: Trainer, checkpoints: Checkpoints, publication: Publication
) -> int:
    """The version with which this rank begins: the first, which the writer publishes, or that of a run that has gone on."""
    first_step, replica = run.first_step, trainer.replica

    def publish(version: int) -> None:
        publication.publish(version)
        if replica.is_writer:
            client.published(version, {})  # engines may load it and begin

    if isinstance(replica, ElasticReplica):
        return enter_run(replica, trainer, checkpoints, publication.store, first_step, run.initial_optimizer, publish)
    checkpoints.begin(first_step, run.initial_optimizer)
    publish(first_step)
    return first_step
