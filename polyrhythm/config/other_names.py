"""Names that people know from elsewhere: earlier versions, TRL, verl, OpenRLHF. What a key is called here, or why it is not.

A name of two words with a dot, such as `rollout.n`, is the end of a longer one: `actor_rollout_ref.rollout.n`.
"""

RENAMED = {
    "engine.num": "cluster.num_engines",
    "engine.min": "cluster.min_engines",
    "engine.max": "cluster.max_engines",
    "engine.max_restarts": "cluster.max_restarts",
    "task.options.reward": "reward.functions",
}
RENAMED_VALUES = {("conductor.dispatch", "problem"): "in_order", ("task.name", "jsonl"): "dataset"}

CLIP_BOTH = "algorithm.clip_low and algorithm.clip_high"
LOSS_MODES = 'algorithm.aggregation ("token_mean" is DAPO, "sequence_mean" GRPO, "constant" Dr. GRPO)'
DIVIDED = 'algorithm.advantage ("group_std" divides by the standard deviation of a group, "group_mean" does not)'
UPDATES = "training.updates_per_step (into how many updates the groups of a step are divided)"
KL_LOSS = 'algorithm.kl_coef above 0, with algorithm.kl_estimator "k2" or "k3"'
GO_ON = "polyrhythm train --resume RUN goes on with a run, --from RUN begins a new one with its weights"
FUNCTION_OF_UPDATES = (
    "the learning rate must be a function of the number of updates, so that a resumed run goes on with the same; "
    "use cosine, linear or another that does not watch a loss"
)
VALUES_NOT_HERE = {
    ("training.schedule", "reduce_lr_on_plateau"): FUNCTION_OF_UPDATES,
    ("training.schedule", "greedy"): FUNCTION_OF_UPDATES,
    **dict.fromkeys(
        (("schedule", name) for name in ("constant", "cosine", "linear", "polynomial")),
        "schedule says when groups are trained on; that of the learning rate is training.schedule",
    ),
}
MINIMUM = 'training.schedule_options, such as training.schedule = "cosine_with_min_lr" with {min_lr_rate = 0.1}'
PROBLEMS = 'task.options, such as task.name = "dataset" with task.options = {path = "problems.jsonl"}'
EPOCHS = "num_steps (task.epochs is how often a run may go through its problems)"
PROMPT_COLUMN = 'task.options, such as {prompt_key = "question"}'
TOO_LONG = 'prompt.too_long ("error", "drop" or "truncate"; a prompt has what engine.context_length leaves beside rollout.max_tokens)'

CALLED_HERE = {
    # The objective.
    "beta": "algorithm.kl_coef",
    "kl_loss_coef": "algorithm.kl_coef",
    "init_kl_coef": "algorithm.kl_coef",
    "use_kl_loss": KL_LOSS,
    "use_kl_in_reward": 'algorithm.kl_coef above 0, with algorithm.kl_estimator = "k1"',
    "kl_loss_type": "algorithm.kl_estimator (low_var_kl is k3)",
    "kl_penalty": "algorithm.kl_estimator (kl is k1, low_var_kl is k3)",
    "epsilon": CLIP_BOTH,
    "clip_ratio": CLIP_BOTH,
    "cliprange": CLIP_BOTH,
    "eps_clip": CLIP_BOTH,
    "eps_clip_low_high": CLIP_BOTH,
    "epsilon_low": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "clip_ratio_low": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "loss_type": LOSS_MODES,
    "loss_agg_mode": LOSS_MODES,
    "policy_loss_type": "algorithm.loss",
    "scale_rewards": DIVIDED,
    "norm_adv_by_std_in_grpo": DIVIDED,
    "no_advantage_std_norm": DIVIDED,
    "adv_estimator": DIVIDED,
    "advantage_estimator": DIVIDED,
    # Rollouts.
    "num_generations": "rollout.group_size",
    "n_samples_per_prompt": "rollout.group_size",
    "rollout.n": "rollout.group_size",
    "max_completion_length": "rollout.max_tokens",
    "max_response_length": "rollout.max_tokens",
    "response_length": "rollout.max_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "generate_max_len": "rollout.max_tokens",
    "train_batch_size": "rollout.groups_per_step (problems, not completions)",
    "rollout_batch_size": "rollout.groups_per_step",
    "ppo_mini_batch_size": UPDATES,
    "steps_per_generation": UPDATES,
    "num_mini_batches": UPDATES,
    # Engines.
    "max_model_len": "engine.context_length",
    "max_num_seqs": "engine.max_batch",
    "vllm_max_model_length": "engine.context_length",
    "vllm_num_engines": "cluster.num_engines",
    "rollout.name": "engine.kind",
    # Training.
    "bf16": 'dtype, as dtype = "bfloat16"',
    "torch_dtype": "dtype",
    "lr": "training.learning_rate",
    "actor_learning_rate": "training.learning_rate",
    "lr_warmup_steps": "training.warmup_steps",
    "lr_scheduler_type": "training.schedule",
    "lr_scheduler": "training.schedule",
    "warmup_style": "training.schedule",
    "lr_scheduler_kwargs": "training.schedule_options",
    "min_lr_ratio": MINIMUM,
    "min_lr": MINIMUM,
    "optim": "training.optimizer",
    "optim_args": "training.optimizer_options",
    "optimizer_name": "training.optimizer",
    "no_decay_name_list": "training.weight_decay_exclude",
    "l2": "training.weight_decay",
    "adam_betas": "training.adam_beta1 and training.adam_beta2",
    "betas": "training.adam_beta1 and training.adam_beta2",
    "grad_clip": "training.max_grad_norm",
    "max_norm": "training.max_grad_norm",
    "clip_grad": "training.max_grad_norm",
    "max_steps": "num_steps",
    "total_training_steps": "num_steps",
    "enable_gradient_checkpointing": "training.gradient_checkpointing",
    "ppo_max_token_len_per_gpu": "training.tokens_per_micro_batch",
    "train_max_tokens_per_gpu": "training.tokens_per_micro_batch",
    "save_steps": "training.checkpoint_every",
    "save_freq": "training.checkpoint_every",
    "save_total_limit": "training.keep_checkpoints",
    "max_ckpt_num": "training.keep_checkpoints",
    "max_actor_ckpt_to_keep": "training.keep_checkpoints",
    "n_gpus_per_node": "training.num_ranks (training processes of this machine)",
    "nproc_per_node": "training.num_ranks",
    # The model, problems and rewards.
    "model_name_or_path": "model",
    "model_name": "model",
    "pretrain": "model",
    "model.path": "model",
    "dataset_name": PROBLEMS,
    "train_dataset": PROBLEMS,
    "train_files": PROBLEMS,
    "prompt_data": PROBLEMS,
    "dataset_config": 'task.options, such as {subset = "main"}',
    "dataset_train_split": 'task.options, such as {split = "train"}',
    "prompt_key": PROMPT_COLUMN,
    "input_key": PROMPT_COLUMN,
    "label_key": 'task.options, such as {answer_key = "label"}',
    "system_prompt": "prompt.system",
    "prompt_template": "prompt.template",
    "input_template": "prompt.template",
    "apply_chat_template": 'prompt.form ("chat" makes a text the message of a user)',
    "apply_chat_template_kwargs": "prompt.chat_template_kwargs",
    "max_prompt_length": TOO_LONG,
    "prompt_max_len": TOO_LONG,
    "truncation": TOO_LONG,
    "filter_overlong_prompts": TOO_LONG,
    "shuffle_dataset": "task.shuffle",
    "data.shuffle": "task.shuffle",
    "num_train_epochs": EPOCHS,
    "total_epochs": EPOCHS,
    "num_episodes": EPOCHS,
    "reward_funcs": "reward.functions",
    "reward_fn": "reward.functions",
    "custom_reward_function": "reward.functions",
    "custom_reward_function.path": "reward.functions",
    "custom_reward_function.name": "reward.functions",
    "remote_rm_url": "reward.functions (a function of yours may ask a server)",
    "reward_weights": "reward.weights",
    "reward_kwargs": "reward.options (a function that has some is a factory)",
    # Loggers.
    "report_to": "observe.loggers",
    "trainer.logger": "observe.loggers",
    "use_wandb": 'observe.loggers = ["wandb"]',
    "use_tensorboard": 'observe.loggers = ["tensorboard"]',
    "experiment_name": "observe.run_name",
    "wandb_run_name": "observe.run_name",
    "project_name": "observe.project",
    "wandb_project": "observe.project",
    # Folders.
    "save_path": "output_dir",
    "ckpt_path": "output_dir",
    "default_local_dir": "output_dir",
}

FILTERED = (
    "completions drawn from a filtered distribution are not the policy's, and training on them is off-policy: remove it"
)
PACKED = (
    "a step has rollout.groups_per_step groups of rollout.group_size, which are packed into passes of "
    "training.tokens_per_micro_batch tokens: the result does not depend on how"
)
LOGGED = "every step is logged: to metrics.jsonl in the run folder, and to observe.loggers"
ONCE = "a step's rollouts are trained on once; training.updates_per_step divides them among several updates"
ON_POLICY = "engines generate with the policy that is trained, so there is nothing to correct"
SHARDED = 'training.parallel = "shard_state" or "shard", with training.num_ranks (docs/ranks.md)'
CRITIC = "rewards are compared within a group, so there is no critic"
NO_VALIDATION = "there is no evaluation during a run yet"

NOT_HERE = {
    "top_p": FILTERED,
    "top_k": FILTERED,
    "min_p": FILTERED,
    "repetition_penalty": FILTERED,
    "per_device_train_batch_size": PACKED,
    "gradient_accumulation_steps": PACKED,
    "generation_batch_size": PACKED,
    "micro_train_batch_size": PACKED,
    "micro_rollout_batch_size": PACKED,
    "ppo_micro_batch_size": PACKED,
    "ppo_micro_batch_size_per_gpu": PACKED,
    "use_dynamic_bsz": PACKED,
    "packing_samples": PACKED,
    "use_remove_padding": PACKED,
    "num_iterations": ONCE,
    "ppo_epochs": ONCE,
    "max_epochs": ONCE,
    "logging_steps": LOGGED,
    "trackio_space_id": "trackio reads the environment variable TRACKIO_SPACE_ID",
    "log_completions": "observe.samples_per_step completions of each step are written to samples.jsonl",
    "eval_steps": NO_VALIDATION,
    "eval_strategy": NO_VALIDATION,
    "test_freq": NO_VALIDATION,
    "val_files": NO_VALIDATION,
    "eval_dataset": NO_VALIDATION,
    "use_vllm": 'engine.kind = "vllm" (docs/vllm.md)',
    "gpu_memory_utilization": "engine.kv_tokens is the size of the key/value cache; that of vLLM goes into engine.options",
    "tensor_model_parallel_size": "cluster.num_engines starts more engines; that of vLLM goes into engine.options",
    "warmup_ratio": "training.warmup_steps counts steps",
    "lr_warmup_ratio": "training.warmup_steps counts steps",
    "lr_warmup_steps_ratio": "training.warmup_steps counts steps",
    "fp16": "training is in float32 or bfloat16: see dtype",
    "use_peft": "all weights are trained",
    "peft_config": "all weights are trained",
    "deepspeed": SHARDED,
    "zero_stage": SHARDED,
    "entropy_coeff": "the objective has no entropy term",
    "entropy_coef": "the objective has no entropy term",
    "entropy_loss_coef": "the objective has no entropy term",
    "gamma": CRITIC,
    "lam": CRITIC,
    "lambd": CRITIC,
    "importance_sampling_level": "the ratio is that of a token; see algorithm.loss",
    "delta": "the ratio is clipped by algorithm.clip_low and algorithm.clip_high only",
    "clip_ratio_c": "the ratio is clipped by algorithm.clip_low and algorithm.clip_high only",
    "dual_clip": "the ratio is clipped by algorithm.clip_low and algorithm.clip_high only",
    "mask_truncated_completions": "completions that were cut off count with the reward they are given",
    "sync_ref_model": "the reference is the model that the run began with",
    "enable_vllm_is_correction": ON_POLICY,
    "nnodes": "engines of other machines join a run (docs/elastic.md); the trainer is on one",
    "resume_from_checkpoint": GO_ON,
    "resume_mode": GO_ON,
    "load_checkpoint": GO_ON,
}
NOT_HERE_BY_BEGINNING = {
    "vllm_importance_sampling": ON_POLICY,
    "vllm": 'options of vLLM itself go into the table engine.options, with engine.kind = "vllm" (docs/vllm.md)',
    "critic": CRITIC,
    "lora": "all weights are trained",
    "fsdp": SHARDED,
}


def explain_name(key: str) -> str | None:
    """What a dotted key, `-` or `_` in it, is called here or why it is not there, in one line; None if it is unknown."""
    if new := RENAMED.get(key):
        return f"{key} was renamed to {new}"
    words = key.replace("-", "_").split(".")
    for beginning, why in NOT_HERE_BY_BEGINNING.items():
        if any(word.startswith(beginning) for word in words[:-1]):
            return f"unknown key {key}: {why}"
    for name in (".".join(words[start:]) for start in range(len(words))):
        if here := CALLED_HERE.get(name):
            return f"unknown key {key}: here it is {here}"
        if why := NOT_HERE.get(name):
            return f"unknown key {key}: {why}"
    for beginning, why in NOT_HERE_BY_BEGINNING.items():
        if words[-1].startswith(beginning):
            return f"unknown key {key}: {why}"
    return None


def explain_value(key: str, value: object) -> str | None:
    """What became of this value of a key; None if it never was one."""
    if isinstance(value, str) and (why := VALUES_NOT_HERE.get((key, value))):
        return f"{key}={value!r} is not possible here: {why}"
    new = RENAMED_VALUES.get((key, value)) if isinstance(value, str) else None
    return f'{key} = "{value}" was renamed to {key} = "{new}"' if new else None
