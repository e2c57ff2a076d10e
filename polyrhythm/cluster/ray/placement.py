"""Which process fits on which node of a Ray cluster, by resources, and what is missing if not. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from polyrhythm.config import Config
from polyrhythm.errors import UserError

Resources = Mapping[str, float]
WITHOUT_WISHES = {"CPU": 1.0}
"""What a process asks for if the configuration says nothing."""
UNTOLD = ("object_store_memory", "node:")
"""Resources of Ray's own, by the beginning of their names, which say nothing to a user."""


@dataclass(frozen=True)
class Node:
    """A node of the cluster: its address, what it has, and what of it nobody has taken."""

    address: str
    total: Resources
    free: Resources


@dataclass(frozen=True)
class Wish:
    """A process to be placed, and the key of the configuration that says what it needs."""

    name: str
    key: str
    needs: Resources


@dataclass
class _Room:
    address: str
    left: dict[str, float]
    names: list[str] = field(default_factory=list)


def wishes_of(config: Config) -> list[Wish]:
    """What Ray will be asked to place when the run begins."""
    engines = [f"engine-{index}" for index in range(config.cluster.num_engines)]
    ranks = config.training.rank_names[: config.training.num_ranks_here]
    return [
        *(Wish(name, "engine.resources", needs_of("engine", config)) for name in engines),
        *(Wish(name, "training.resources", needs_of("trainer", config)) for name in ranks),
    ]


def needs_of(role: str, config: Config) -> Resources:
    """What each process of a role needs."""
    resources = config.engine.resources if role == "engine" else config.training.resources
    return resources or WITHOUT_WISHES


def plan_placement(wishes: Sequence[Wish], nodes: Sequence[Node], cluster: str, is_spread: bool) -> dict[str, str]:
    """A node for each process, by its address. UserError if there is no room: which resource, how many, what there is.

    Ray decides by itself in the end; that all of them fit is what this shows.
    """
    rooms = [_Room(node.address, dict(node.free)) for node in nodes]
    placed: dict[str, str] = {}
    for wish in wishes:
        fitting = [room for room in rooms if _fits(wish.needs, room.left)]
        if not fitting:
            raise UserError(_missing(wish, wishes, placed, nodes, cluster))
        room = min(fitting, key=lambda room: len(room.names)) if is_spread else fitting[0]
        room.names.append(wish.name)
        for resource, amount in wish.needs.items():
            room.left[resource] = room.left.get(resource, 0.0) - amount
        placed[wish.name] = room.address
    return placed


def in_words(resources: Resources) -> str:
    """`CPU 2, GPU 1`; memory in GB."""
    told = {name: amount for name, amount in sorted(resources.items()) if not name.startswith(UNTOLD)}
    return ", ".join(f"{name} {_amount(name, amount)}" for name, amount in told.items()) or "nothing"


def _fits(needs: Resources, left: Resources) -> bool:
    return all(left.get(resource, 0.0) >= amount for resource, amount in needs.items())


def _missing(wish: Wish, wishes: Sequence[Wish], placed: Mapping[str, str], nodes: Sequence[Node], cluster: str) -> str:
    """One line. What can be freed is told apart from what the cluster never had."""
    alike = [other for other in wishes if other.key == wish.key]
    num_placed = sum(other.name in placed for other in alike)
    what = "engine" if wish.key == "engine.resources" else "rank"
    whom = f"the {what}" if len(alike) == 1 else f"each of {len(alike)} {what}s"
    could_ever = any(_fits(wish.needs, node.total) for node in nodes)
    has = "; ".join(f"{node.address} has {_free_of_total(node, wish.needs)}" for node in nodes) or "it has no nodes"
    fix = (
        f"free some, lower {wish.key} or have fewer of them" if could_ever else f"add such a node, or change {wish.key}"
    )
    return (
        f"{wish.key} asks for {in_words(wish.needs)} for {whom}, and {cluster} has room for {num_placed}: {has}; {fix}"
    )


def _free_of_total(node: Node, needs: Resources) -> str:
    parts = []
    for resource in sorted(needs):
        total, free = node.total.get(resource, 0.0), node.free.get(resource, 0.0)
        taken = "" if free == total else f" ({_amount(resource, free)} free)"
        parts.append(f"{resource} {_amount(resource, total)}{taken}")
    others = {name: amount for name, amount in node.total.items() if name not in needs and name != "memory"}
    told = in_words(others)
    return ", ".join(parts) + (f" beside {told}" if told != "nothing" else "")


def _amount(resource: str, amount: float) -> str:
    return f"{amount / 1e9:.1f} GB" if resource == "memory" else f"{amount:g}"
