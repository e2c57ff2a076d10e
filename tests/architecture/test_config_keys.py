"""Every configuration key, listed, so that growth is seen."""

from pydantic import BaseModel

from polyrhythm.config import Config


def keys_of(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += keys_of(field.annotation, f"{prefix}{name}.")
        else:
            assert field.description, f"{prefix}{name} has no docstring"
            keys.append(f"{prefix}{name}")
    return keys


def test_the_keys_are_those_listed_here():
    assert keys_of(Config) == LISTED


LISTED = """
model
seed
num_steps
output_dir
device
dtype
schedule
order
task.name
task.options
task.shuffle
task.epochs
task.holdout
prompt.form
prompt.system
prompt.template
prompt.chat_template_kwargs
prompt.too_long
rollout.group_size
rollout.groups_per_step
rollout.max_tokens
rollout.temperature
rollout.stop
reward.functions
reward.weights
reward.options
reward.environment
reward.num_workers
reward.deadline_s
reward.memory_mb
algorithm.loss
algorithm.advantage
algorithm.aggregation
algorithm.clip_low
algorithm.clip_high
algorithm.kl_coef
algorithm.kl_estimator
engine.kind
engine.python
engine.options
engine.url
engine.threads
engine.max_batch
engine.context_length
engine.kv_tokens
engine.resources
engine.start_deadline_s
training.learning_rate
training.schedule
training.schedule_options
training.warmup_steps
training.optimizer
training.optimizer_options
training.offload_optimizer
training.weight_decay
training.weight_decay_exclude
training.adam_beta1
training.adam_beta2
training.max_grad_norm
training.tokens_per_micro_batch
training.updates_per_step
training.share_prompt
training.gradient_checkpointing
training.checkpoint_every
training.keep_checkpoints
training.save_dtype
training.num_ranks
training.parallel
training.ranks_per_replica
training.ranks_elsewhere
training.elastic
training.min_ranks
training.max_ranks
training.threads
training.resources
weights.root
weights.keep
weights.file_mb
weights.transport
weights.load_deadline_s
conductor.host
conductor.port
conductor.dispatch
conductor.request_deadline_s
conductor.max_attempts
conductor.hedge_groups
conductor.lease_s
conductor.stall_deadline_s
cluster.kind
cluster.address
cluster.token_file
cluster.placement
cluster.num_engines
cluster.min_engines
cluster.max_engines
cluster.max_restarts
cluster.cores
observe.view
observe.samples_per_step
observe.loggers
observe.project
observe.run_name
""".split()
