"""Which process of a run is given which device, told to it by its environment, and whether it fits.

Each rank of the trainer has a device of its own, the first ones. Engines have the others; if there are none, they share those of
the ranks. A process sees no device but its own.
"""

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from polyrhythm.config import Config, TrainingConfig
from polyrhythm.devices import DEVICE_VARIABLE
from polyrhythm.devices.found import FoundDevices, find_devices
from polyrhythm.devices.memory import (
    CONTEXT,
    ModelShape,
    Parts,
    engine_memory,
    gigabytes,
    in_words,
    offloaded_memory,
    trainer_memory,
)
from polyrhythm.errors import UserError

VISIBLE_VARIABLES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}


@dataclass(frozen=True)
class DevicePlan:
    """By the devices' places among those that this process may use."""

    found: FoundDevices
    num_ranks: int
    rank_names: list[str]

    @property
    def kind(self) -> str:
        return self.found.kind

    def decided(self, config: Config) -> Config:
        """With the number format that "auto" means here, for all processes of a run."""
        if config.dtype != "auto":
            return config
        return config.model_copy(update={"dtype": "bfloat16" if self.found.has_bfloat16 else "float32"})

    @property
    def engine_places(self) -> list[int]:
        """Where engines may be; empty on a CPU."""
        places = list(range(len(self.found.devices)))
        return places[self.num_ranks :] or places

    def conductor_environment(self) -> dict[str, str]:
        return self._environment(None)

    def rank_environment(self, rank: int) -> dict[str, str]:
        return self._environment(rank)

    def engine_environment(self, place: int | None) -> dict[str, str]:
        return self._environment(place)

    def place_for_engine(self, taken: Iterable[int | None]) -> int | None:
        """The device with the fewest engines, given those that the others have."""
        counts = Counter(taken)
        return min(self.engine_places, key=lambda place: counts[place], default=None)

    def engine_names_at(self, num_engines: int) -> dict[int, list[str]]:
        """Which of the first engines are where."""
        taken: list[int | None] = []
        for _ in range(num_engines if self.engine_places else 0):
            taken.append(self.place_for_engine(taken))
        return {place: [f"engine-{n}" for n, at in enumerate(taken) if at == place] for place in self.engine_places}

    def _environment(self, place: int | None) -> dict[str, str]:
        if self.kind == "cpu":
            return {DEVICE_VARIABLE: "cpu"}
        variable = VISIBLE_VARIABLES[self.kind]
        names = visible_names(variable, len(self.found.devices))
        return {DEVICE_VARIABLE: self.kind, variable: "" if place is None else names[place]}


ON_CPU = DevicePlan(FoundDevices(), num_ranks=1, rank_names=["trainer"])


def plan_devices(config: Config) -> DevicePlan:
    """For this machine; a device that is not there, or is there too few times, is a UserError."""
    found = FoundDevices() if config.cluster.kind == "ray" else find_devices(config.device)  # Ray gives devices
    num_ranks, num_devices = config.training.num_ranks_here, len(found.devices)
    if found.kind != "cpu" and num_ranks > num_devices:
        raise UserError(
            f"training.num_ranks={config.training.num_ranks} needs {num_ranks} devices of kind {found.kind}, one for each rank, and "
            f'this machine has {num_devices}: lower training.num_ranks, or use device="cpu"'
        )
    return DevicePlan(found, num_ranks, config.training.rank_names)


def visible_names(variable: str, num_devices: int) -> list[str]:
    """What the driver calls the devices: the user may have chosen some of them for the whole run."""
    chosen = [name for name in os.environ.get(variable, "").split(",") if name]
    return chosen or [str(index) for index in range(num_devices)]


def describe_plan(plan: DevicePlan, config: Config, model_dir: Path | None) -> list[str]:
    """What runs where and what it takes, line by line; a plan that does not fit is a UserError."""
    lines = [plan.found.note] if plan.found.note else []
    lines += [describe_ranks(config.training)] if config.training.num_ranks > 1 else []
    if model_dir is None or config.cluster.kind == "ray":
        return lines
    shape, config = ModelShape.of_folder(model_dir), plan.decided(config)
    return lines + (_on_the_host(config, shape) if plan.kind == "cpu" else _on_devices(plan, config, shape))


def describe_ranks(training: TrainingConfig) -> str:
    """What each rank of the trainer holds."""
    num, parallel = training.num_ranks, training.parallel
    if not training.is_sharded:
        held = "each holds the whole policy, its gradient and its moments"
    elif parallel == "shard_state":
        held = f"each holds whole weights and gradients, and 1/{num} of what an update changes"
    else:
        held = f"{training.num_replicas} x {num // training.num_replicas} that hold one copy of everything together"
    return f"training.parallel = {parallel}: {num} ranks, {held}"


def _on_the_host(config: Config, shape: ModelShape) -> list[str]:
    available = psutil.virtual_memory().available
    trainer, engine = trainer_memory(config, shape), _engine_parts(config, shape, available)
    if engine:
        engine = {**engine, "packed weights": engine["weights"]}  # for the CPU's matrix products
    total = config.training.num_ranks_here * sum(trainer.values()) + config.cluster.num_engines * sum(engine.values())
    enough = "" if total < available else f"; all of them may need {gigabytes(total)} GB, which is more than there is"
    needs = [f"each trainer rank at most {in_words(trainer)}"] + [f"each engine at most {in_words(engine)}"] * bool(
        engine
    )
    return [f"memory: {gigabytes(available)} GB are free; {'; '.join(needs)}{enough}"]


def _on_devices(plan: DevicePlan, config: Config, shape: ModelShape) -> list[str]:
    lines: list[str] = []
    engines = plan.engine_names_at(max(config.cluster.num_engines, config.cluster.max_engines))
    for place, device in enumerate(plan.found.devices):
        needs: dict[str, Parts] = {}
        if place < plan.num_ranks:
            needs[plan.rank_names[place]] = {**trainer_memory(config, shape, on_device=True), "context": CONTEXT}
        for name in engines.get(place, []):
            needs[name] = _engine_parts(config, shape, device.num_bytes)
        total = sum(sum(parts.values()) for parts in needs.values())
        lines.append(
            f"{plan.kind} {place} ({device.name}, {gigabytes(device.num_bytes)} GB): {', '.join(needs) or 'not used'}"
        )
        lines += [f"  {name} takes at most {in_words(parts)}" for name, parts in needs.items() if parts]
        if total > device.num_bytes:
            raise UserError(_too_much(lines, place, total, device.num_bytes))
    if on_host := offloaded_memory(config, shape):
        lines.append(f"host: each trainer rank takes {in_words(on_host)}")
    return lines


def _engine_parts(config: Config, shape: ModelShape, available: int) -> Parts:
    """Another kind of engine knows itself what it takes."""
    if config.engine.kind != "embedded":
        return {}
    return engine_memory(config, shape, available)


def _too_much(lines: list[str], place: int, total: int, num_bytes: int) -> str:
    return "\n".join(
        [
            f"device {place} has {gigabytes(num_bytes)} GB, and {gigabytes(total)} GB are needed there: lower "
            "training.tokens_per_micro_batch or engine.kv_tokens, set training.gradient_checkpointing=true or "
            "training.offload_optimizer=true, give engines a device of their own, or use a smaller model",
            *lines,
        ]
    )
