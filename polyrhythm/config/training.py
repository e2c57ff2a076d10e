"""The keys of `[training]`."""

from typing import Any, Literal

from pydantic import Field, model_validator

from polyrhythm.config.section import Section

ScheduleName = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr",
    "cosine_warmup_with_min_lr", "polynomial", "inverse_sqrt", "warmup_stable_decay",
]  # fmt: skip
ADAM_BETAS = (0.9, 0.95)
KEYS_INSTEAD_OF_OPTIONS = {"lr": "training.learning_rate", "weight_decay": "training.weight_decay"}
KEYS_INSTEAD_OF_SCHEDULE_OPTIONS = {"num_warmup_steps": "training.warmup_steps", "num_training_steps": "num_steps"}


class TrainingConfig(Section):
    """The trainer."""

    learning_rate: float = Field(default=1e-5, ge=0)
    """Peak learning rate."""
    schedule: ScheduleName = "constant"
    """How the learning rate moves over the num_steps of the run: a schedule of transformers, by its name."""
    schedule_options: dict[str, Any] = {}
    """The schedule's own options, such as {min_lr_rate = 0.1} or {num_decay_steps = 20}; see docs/training.md."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises to its peak; the first update has a part of it, never zero."""
    optimizer: str = "adamw"
    """adamw (fused), or `module:Class` of any torch optimizer, such as torch.optim:SGD."""
    optimizer_options: dict[str, Any] = {}
    """The optimizer's own options, such as {momentum = 0.9}; rate and weight decay have keys of their own."""
    offload_optimizer: bool = False
    """Keep the optimizer's state and the fp32 weights that it updates on the host, if the policy is on an accelerator."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of the optimizer."""
    weight_decay_exclude: list[str] = []
    """Parameters whose name contains one of these, such as ["bias", "norm"], have no weight decay."""
    adam_beta1: float = Field(default=ADAM_BETAS[0], ge=0, lt=1)
    """First-moment decay of adamw."""
    adam_beta2: float = Field(default=ADAM_BETAS[1], ge=0, lt=1)
    """Second-moment decay of adamw."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this norm after they were divided by the step's totals."""
    tokens_per_micro_batch: int = Field(default=4096, ge=1)
    """Token budget of one forward and backward pass."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer updates per step; above 1 the old policy is kept for the probability ratio, and groups are divided among
    updates in the order in which they reach the trainer (see `order`)."""
    share_prompt: Literal["auto", "always", "never"] = "auto"
    """Compute a prompt once for all its completions."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    checkpoint_every: int = Field(default=20, ge=0)
    """Steps between checkpoints, from which `train --resume` goes on; 0 writes none."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """How many checkpoints are kept; older ones are removed."""
    save_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the trained model that is saved; auto: that of the model the run began with. Checkpoints have all digits."""
    num_ranks: int = Field(default=1, ge=1)
    """Training processes. Each takes groups when it has nothing to do; gradients are added up before an update."""
    parallel: Literal["replicate", "shard_state", "shard"] = "replicate"
    """What a rank holds. replicate: everything; shard_state: whole weights and gradients, and its part of the rest;
    shard: its part of everything (FSDP2), in rounds that all ranks of a replica make together. See docs/ranks.md."""
    ranks_per_replica: int = Field(default=0, ge=0)
    """Ranks that hold one copy of the policy together, with parallel = "shard"; 0: all of them."""
    ranks_elsewhere: int = Field(default=0, ge=0)
    """So many of training.num_ranks, the last ones, are not started with the run: they join it by `polyrhythm trainer --join`,
    from any machine."""
    elastic: bool = False
    """Ranks may come and go while the run goes on: a lost one's groups are trained by the others. See docs/elastic.md."""
    min_ranks: int = Field(default=0, ge=0)
    """Fewest ranks of this machine when they follow demand, with `elastic`; 0 is training.num_ranks."""
    max_ranks: int = Field(default=0, ge=0)
    """Most ranks of this machine when they follow demand, with `elastic`; 0 is training.num_ranks."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of each rank; 0 divides the machine between the processes."""
    resources: dict[str, float] = {}
    """cluster.kind ray: what each rank needs on its node, such as {GPU = 1, CPU = 4}; empty: CPU 1."""

    @model_validator(mode="after")
    def _checks(self) -> "TrainingConfig":
        for option, key in KEYS_INSTEAD_OF_OPTIONS.items():
            if option in self.optimizer_options:
                raise ValueError(f"training.optimizer_options has {option!r}: it is given by {key}")
        for option, key in KEYS_INSTEAD_OF_SCHEDULE_OPTIONS.items():
            if option in self.schedule_options:
                raise ValueError(f"training.schedule_options has {option!r}: it is given by {key}")
        self._check_replicas()
        if self.ranks_elsewhere > self.num_ranks:
            raise ValueError(
                f"training.ranks_elsewhere={self.ranks_elsewhere} is more than training.num_ranks={self.num_ranks}: "
                "it says how many of them join from elsewhere"
            )
        self._check_elastic()
        betas = (self.adam_beta1, self.adam_beta2)
        if self.optimizer != "adamw" and betas != ADAM_BETAS:
            raise ValueError(
                f"training.adam_beta1 and training.adam_beta2 ({betas[0]}, {betas[1]}) are of adamw, not of "
                f"training.optimizer={self.optimizer!r}: use training.optimizer_options"
            )
        if self.optimizer == "adamw" and "betas" in self.optimizer_options:
            raise ValueError("training.optimizer_options has 'betas': use training.adam_beta1 and training.adam_beta2")
        return self

    def _check_replicas(self) -> None:
        size = self.ranks_per_replica
        if size and self.parallel != "shard":
            raise ValueError(
                f'training.ranks_per_replica={size} is of training.parallel="shard", not of {self.parallel!r}: leave it at 0'
            )
        if size == 1:
            raise ValueError(
                'training.ranks_per_replica=1 shards nothing: use training.parallel="replicate", or at least 2'
            )
        if size and self.num_ranks % size:
            raise ValueError(
                f"training.num_ranks={self.num_ranks} cannot be divided into replicas of "
                f"training.ranks_per_replica={size}: make it a multiple"
            )

    @property
    def is_sharded(self) -> bool:
        """No rank holds all that an update changes."""
        return self.parallel != "replicate" and self.num_ranks > 1

    @property
    def num_replicas(self) -> int:
        """Copies of the policy that take groups, each at its own pace."""
        return (
            self.num_ranks // (self.ranks_per_replica or self.num_ranks) if self.parallel == "shard" else self.num_ranks
        )

    def _check_elastic(self) -> None:
        if self.elastic and self.parallel != "replicate":
            raise ValueError(
                f"training.elastic=true does not go with training.parallel={self.parallel!r}: a lost rank takes its part of the "
                'policy with it; use training.parallel="replicate"'
            )
        if not self.elastic and (self.min_ranks or self.max_ranks):
            raise ValueError(
                f"training.min_ranks={self.min_ranks} and training.max_ranks={self.max_ranks} are of ranks that come and go: "
                "set training.elastic=true, or leave them out"
            )
        if not (self.min_ranks or self.num_ranks) <= self.num_ranks <= (self.max_ranks or self.num_ranks):
            raise ValueError(
                f"training.num_ranks={self.num_ranks} is not between training.min_ranks={self.min_ranks} and "
                f"training.max_ranks={self.max_ranks}: a run starts with the first, then follows demand between the others"
            )

    @property
    def num_ranks_here(self) -> int:
        """Of the ranks, those that the run itself starts."""
        return self.num_ranks - self.ranks_elsewhere

    @property
    def rank_names(self) -> list[str]:
        """The names of the ranks that a run begins with, as processes, in the timeline and as targets of faults."""
        return [self.rank_name(rank) for rank in range(self.num_ranks)]

    def rank_name(self, rank: int) -> str:
        """Elastic ranks may be more than there were in the beginning."""
        return "trainer" if self.num_ranks == 1 and not self.elastic else f"trainer-{rank}"

    def rank_of(self, name: str) -> int:
        """The number in the name of a rank."""
        return int(name.rpartition("-")[2]) if "-" in name else 0
