"""The sections of a configuration: one class per room, one docstring per key, cross-checks at the end."""

import re
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from polyrhythm.config.section import Explained, Section
from polyrhythm.config.training import TrainingConfig


class TaskConfig(Section):
    """What to learn."""

    name: str = "addition"
    """A built-in task (addition, dataset, reasoning_gym) or `module:Class`."""
    options: dict[str, Any] = {}
    """The task's own options, such as {digits = 2} or {path = "problems.jsonl"} in a file; as a flag in JSON, {"digits": 2}."""
    shuffle: bool = True
    """Problems come in an order drawn from the seed, another one in each epoch; else in the task's own order."""
    epochs: int = Field(default=0, ge=0)
    """How often a run may go through all problems: one that needs more is refused; 0 is as often as num_steps takes."""
    holdout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the problems that is never trained on, the same ones whatever the seed."""


class PromptConfig(Section):
    """How a problem of any task becomes the prompt that the model sees."""

    form: Literal["auto", "text", "chat"] = "auto"
    """What a prompt of plain text becomes: text stays text, chat makes it the message of a user, auto is chat if system
    or template is set. A prompt that is a list of messages is a chat anyway."""
    system: str = ""
    """System message of every chat that has none of its own."""
    template: str = ""
    """Text around the question, such as "{question} Think step by step."; {name} stands for any column of the problem."""
    chat_template_kwargs: dict[str, Any] = {}
    """Handed to the model's chat template, such as {enable_thinking = false} in a file; as a flag in JSON."""
    too_long: Literal["error", "drop", "truncate"] = "error"
    """What becomes of a prompt that leaves no room for rollout.max_tokens: error refuses the run, drop leaves its problem
    out, truncate cuts tokens off its beginning."""


class RolloutConfig(Section):
    """How much is generated in a step, and how it is sampled."""

    group_size: int = Field(default=8, ge=1)
    """Completions per problem; their rewards are compared with one another."""
    groups_per_step: int = Field(default=8, ge=1)
    """Problems per step."""
    max_tokens: int = Field(default=64, ge=1)
    """Most tokens of a completion."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the trainer scores the same tempered distribution."""
    stop: list[str] = []
    """Strings that end a completion, in addition to the task's own and the end-of-text token."""


class RewardConfig(Section):
    """What rollouts are worth, and the worker processes that find out."""

    functions: list[str] = []
    """Built-in rewards by name, your functions as `module:function` or `file.py:function`, such as ["math", "my_rewards.py:score"];
    empty: the task's own."""
    weights: list[float] = []
    """The reward is the sum of what the functions return, each times its weight; empty: all 1."""
    options: dict[str, dict[str, Any]] = {}
    """Options of built-in rewards, such as {length = {budget = 200}}. A function of yours that is named here is a factory: called
    with these, it returns the function."""
    environment: list[str] = []
    """Environment variables that rewards may see, such as ["OPENAI_API_KEY"]; others with secrets are hidden from them."""
    num_workers: int = Field(default=1, ge=1)
    """Reward worker processes."""
    deadline_s: float = Field(default=30.0, gt=0)
    """A call for a group that takes longer is stopped; after the second its completions are tried one at a time."""
    memory_mb: int = Field(default=4096, ge=0)
    """Address space of a reward worker; 0 is no limit."""

    @model_validator(mode="after")
    def _checks(self) -> "RewardConfig":
        for index, function in enumerate(self.functions):
            if not re.fullmatch(r"\w+|\w+(\.\w+)*:\w+|.+\.(py|sock):\w+", function):
                raise ValueError(
                    f"reward.functions[{index}]={function!r} is not of the form module:function or file.py:function"
                )
            if function in self.functions[:index]:
                raise ValueError(f"reward.functions has {function!r} twice: give it once, with the sum of the weights")
        if self.weights and len(self.weights) != len(self.functions):
            raise ValueError(
                f"reward.weights={self.weights} are {len(self.weights)} weights for the {len(self.functions)} functions "
                f"of reward.functions={self.functions}: give one for each, or none"
            )
        return self


class AlgorithmConfig(Section):
    """The objective."""

    loss: str = "clipped"
    """The loss: clipped (PPO's probability ratio, clipped), or `module:name` of a function; see docs/losses.md."""
    advantage: Literal["group_std", "group_mean"] = "group_std"
    """Reward minus the group's mean, divided by the group's standard deviation or not (Dr. GRPO)."""
    aggregation: Literal["token_mean", "sequence_mean", "constant", "group_token_mean"] = "token_mean"
    """How token losses become one number; see docs/losses.md."""
    clip_low: float = Field(default=0.2, ge=0)
    """The probability ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """The probability ratio is clipped above at 1 + clip_high."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the reference model; 0 means there is no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 is subtracted from the reward; k2 and k3 are added to the loss."""


START_DEADLINES_S = {"embedded": 120.0, "vllm": 900.0}


class EngineConfig(Section):
    """What generates completions."""

    kind: Literal["embedded", "vllm"] = "embedded"
    """embedded: the inference engine of this package. vllm: a vLLM server of its own behind each engine; see docs/vllm.md."""
    python: str = ""
    """vllm: the interpreter that has vLLM; empty: that of the environment which `polyrhythm setup vllm` makes."""
    options: dict[str, Any] = {}
    """vllm: options of `vllm serve`, passed on as they are, such as {enforce-eager = true}; as a flag in JSON."""
    url: str = ""
    """vllm: a server that you run on this machine, such as http://127.0.0.1:8000, instead of one that is started."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of each engine; 0 divides the machine between the processes."""
    max_batch: int = Field(default=64, ge=1)
    """Most completions that decode together in one engine."""
    context_length: int = Field(default=0, ge=0)
    """Longest prompt plus completion; 0 takes the model's own limit."""
    kv_tokens: int = Field(default=0, ge=0)
    """Size of the key/value cache in tokens; 0 makes room for max_batch completions and their prompts."""
    resources: dict[str, float] = {}
    """cluster.kind ray: what each engine needs on its node, such as {GPU = 1, CPU = 4}, or a resource of yours; empty: CPU 1."""
    start_deadline_s: float = Field(default=0.0, ge=0)
    """An engine must have joined within this time; 0 depends on its kind: 120 embedded, 900 vllm."""

    @property
    def joins_within_s(self) -> float:
        return self.start_deadline_s or START_DEADLINES_S[self.kind]

    @model_validator(mode="after")
    def _checks(self) -> "EngineConfig":
        for key, value in {"python": self.python, "options": self.options, "url": self.url}.items():
            if value and self.kind != "vllm":
                raise ValueError(f'engine.{key}={value!r} goes with engine.kind="vllm", not with {self.kind!r}')
        return self


class WeightsConfig(Section):
    """The weight store."""

    root: str = ""
    """Folder of the snapshots; empty: shared memory if they fit there, else the run folder."""
    keep: int = Field(default=2, ge=2)
    """Snapshots kept; older ones are removed."""
    file_mb: int = Field(default=4096, ge=1)
    """A snapshot of more than so many MiB is written in several files of at most this size."""
    transport: Literal["snapshot", "broadcast"] = "snapshot"
    """How new weights reach engines of kind vllm: each reads the snapshot (or downloads it), or the first rank also sends it to all
    of them at once; who misses that reads the snapshot. See docs/vllm.md."""
    load_deadline_s: float = Field(default=60.0, gt=0)
    """An engine must have loaded and verified a new version within this time, and one second more for every 50 MB of it."""


class ConductorConfig(Section):
    """The process between engines and trainer."""

    host: str = "127.0.0.1"
    """Address the conductor binds; another than loopback lets engines of other machines join, with the run's token."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port the conductor binds; 0 takes a free one."""
    dispatch: Literal["longest_first", "in_order"] = "longest_first"
    """Which group goes out next: the one with the longest completions at its last visit, or by problem order."""
    request_deadline_s: float = Field(default=300.0, gt=0)
    """A generation request must be answered within this time."""
    max_attempts: int = Field(default=8, ge=1)
    """A group is asked for this often, of one engine after another, before its problem is replaced."""
    hedge_groups: int = Field(default=0, ge=0)
    """The last so many groups of a step are also asked of idle engines; the first answer counts. 0 is off."""
    lease_s: float = Field(default=60.0, gt=0)
    """An engine that gave no sign of life for this long is gone; it may join again."""
    stall_deadline_s: float = Field(default=600.0, gt=0)
    """The run ends, with the cause, when nothing has happened for this long."""


class ClusterConfig(Section):
    """The processes of a run: where, how many, and what if one dies."""

    kind: Literal["local", "ray"] = "local"
    """local: processes of this machine, which those of other machines may join. ray: Ray places engines and ranks on the nodes
    of a cluster by their `resources`; see docs/scale_out.md."""
    address: str = ""
    """ray: HOST:PORT of the cluster's head, such as 10.0.0.1:6379; empty starts a cluster on this machine for this run."""
    token_file: str = ""
    """ray: file with the token of the cluster at cluster.address; empty: where Ray itself looks for one."""
    placement: Literal["spread", "pack"] = "spread"
    """ray: processes apart, on as many nodes as there are, or close together. Custom resources name nodes."""
    num_engines: int = Field(default=1, ge=0)
    """Engines to start; 0: all join by `polyrhythm engine --join`."""
    min_engines: int = Field(default=0, ge=0)
    """Fewest engines of this machine when they follow demand; 0 is cluster.num_engines."""
    max_engines: int = Field(default=0, ge=0)
    """Most engines of this machine when they follow demand; 0 is cluster.num_engines."""
    max_restarts: int = Field(default=3, ge=0)
    """How often each engine and each elastic rank of this machine is started again after it died; with 0 a dead engine ends the
    run, and a dead elastic rank stays away."""
    cores: Literal["auto", "follow", "split"] = "auto"
    """follow: cores go to whoever has work, at run time. split: each process keeps its threads. auto: follow, unless
    order is "problem" (a change of threads can change the last bit) or threads are set."""

    @model_validator(mode="after")
    def _checks(self) -> "ClusterConfig":
        for key, value in {"address": self.address, "token_file": self.token_file}.items():
            if value and self.kind != "ray":
                raise ValueError(f'cluster.{key}={value!r} goes with cluster.kind="ray", not with {self.kind!r}')
        if self.token_file and not self.address:
            raise ValueError(f"cluster.token_file={self.token_file!r} is of no use without cluster.address")
        if self.kind == "ray" and self.cores == "follow":
            raise ValueError('cluster.cores="follow" divides one machine: with cluster.kind="ray" use "split"')
        if not (self.min_engines or self.num_engines) <= self.num_engines <= (self.max_engines or self.num_engines):
            raise ValueError(
                f"cluster.num_engines={self.num_engines} is not between cluster.min_engines={self.min_engines} and "
                f"cluster.max_engines={self.max_engines}: a run starts with the first, then follows demand between the others"
            )
        return self


class ObserveConfig(Section):
    """What is shown and written."""

    view: Literal["auto", "live", "plain", "none"] = "auto"
    """Live terminal view, plain lines, or nothing; auto chooses by the terminal."""
    samples_per_step: int = Field(default=4, ge=0)
    """Completions written to samples.jsonl at each step."""
    loggers: list[str] = []
    """Where metrics and samples also go, beside metrics.jsonl and samples.jsonl: tensorboard, wandb, trackio, mlflow, or
    `module:Class`; see docs/loggers.md."""
    project: str = ""
    """The project (in mlflow the experiment) that loggers put the run into; empty: polyrhythm."""
    run_name: str = ""
    """What loggers call the run; empty: the name of its folder."""


class Config(BaseSettings, metaclass=Explained):
    """A run."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    model: str = "smollm2-135m"
    """A local folder, a hub id, or the built-in name smollm2-135m."""
    seed: int = Field(default=0, ge=0)
    """Seed of the problem order and of every completion."""
    num_steps: int = Field(default=20, ge=1)
    """Steps to train."""
    output_dir: str = "runs"
    """Run folders are made in here, named by time."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """Where models live: auto takes the accelerators of this machine, else the CPU. See docs/accelerators.md."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format in which the policy computes while it is trained, and in which engines get it; auto is float32 on the CPU and
    bfloat16 on an accelerator that has it. With bfloat16, fp32 weights beside it are what is updated, and gradients are
    summed in fp32."""
    schedule: Literal["periodic", "sync"] = "periodic"
    """periodic: train on groups as they finish. sync: wait for all of them first, the reference it must equal."""
    order: Literal["completion", "problem"] = "completion"
    """Groups reach the trainer as they finish, or in problem order, which makes a run repeatable bit for bit."""
    task: TaskConfig = TaskConfig()
    prompt: PromptConfig = PromptConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    engine: EngineConfig = EngineConfig()
    training: TrainingConfig = TrainingConfig()
    weights: WeightsConfig = WeightsConfig()
    conductor: ConductorConfig = ConductorConfig()
    cluster: ClusterConfig = ClusterConfig()
    observe: ObserveConfig = ObserveConfig()

    @model_validator(mode="after")
    def _cross_checks(self) -> "Config":
        if self.rollout.group_size < 2:
            raise ValueError(
                f"rollout.group_size={self.rollout.group_size} leaves no group to compare with: use at least 2"
            )
        context_length = self.engine.context_length
        if context_length and self.rollout.max_tokens >= context_length:
            raise ValueError(
                f"rollout.max_tokens={self.rollout.max_tokens} leaves no room for a prompt in "
                f"engine.context_length={context_length}: lower the first or raise the second"
            )
        if self.rollout.group_size > self.engine.max_batch:
            raise ValueError(
                f"rollout.group_size={self.rollout.group_size} does not fit engine.max_batch={self.engine.max_batch}: "
                "a group decodes together; raise engine.max_batch"
            )
        if self.rollout.groups_per_step % self.training.updates_per_step:
            raise ValueError(
                f"rollout.groups_per_step={self.rollout.groups_per_step} cannot be divided into "
                f"training.updates_per_step={self.training.updates_per_step} equal updates: make it a multiple"
            )
        if self.engine.kind == "vllm" and self.cluster.cores == "follow":
            raise ValueError(
                'cluster.cores="follow" does not go with engine.kind="vllm", whose threads cannot change: use "split"'
            )
        if self.weights.transport == "broadcast" and self.engine.kind != "vllm":
            raise ValueError(
                f'weights.transport="broadcast" reaches engines of kind vllm alone, and engine.kind={self.engine.kind!r}: '
                'use weights.transport="snapshot"'
            )
        if self.engine.url and max(self.cluster.num_engines, self.cluster.max_engines) > 1:
            raise ValueError(
                f"engine.url={self.engine.url!r} is one server, and cluster.num_engines={self.cluster.num_engines}, "
                f"cluster.max_engines={self.cluster.max_engines} would all use it: let others join with `polyrhythm engine --join`"
            )
        if self.engine.url and self.cluster.kind == "ray":
            raise ValueError(
                f"engine.url={self.engine.url!r} is a server of one machine, and cluster.kind='ray' may place engines on others: "
                "leave it out"
            )
        if self.training.ranks_elsewhere and self.conductor.host in ("", "0.0.0.0", "::"):
            raise ValueError(
                f"conductor.host={self.conductor.host!r} does not say by which address ranks reach each other, and "
                f"training.ranks_elsewhere={self.training.ranks_elsewhere}: give one address of this machine"
            )
        for key, resources in {"engine": self.engine.resources, "training": self.training.resources}.items():
            for name, amount in resources.items():
                if amount < 0 or (amount > 1 and amount % 1):
                    raise ValueError(f"{key}.resources asks for {name} {amount:g}: use a whole number, or a part of 1")
        groups_per_update = self.rollout.groups_per_step // self.training.updates_per_step
        if self.training.num_ranks > groups_per_update:
            raise ValueError(
                f"training.num_ranks={self.training.num_ranks} is more than the {groups_per_update} groups of an update: "
                "a rank would have nothing to do; lower it or raise rollout.groups_per_step"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, **_: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # The environment says nothing about a run: what counts is in the files and flags that are saved with it.
        return (init_settings,)
