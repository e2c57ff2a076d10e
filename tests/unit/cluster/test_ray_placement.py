"""Which process fits on which node, and what is said if one does not. Without Ray."""

import pytest

from polyrhythm.cluster.ray.placement import Node, Wish, in_words, plan_placement, wishes_of
from polyrhythm.config import Config
from polyrhythm.errors import UserError


def node(address: str, free: dict[str, float] | None = None, **total: float) -> Node:
    return Node(address, total, total if free is None else free)


def engines(count: int, **needs: float) -> list[Wish]:
    return [Wish(f"engine-{index}", "engine.resources", needs) for index in range(count)]


def test_processes_are_spread_over_nodes_or_packed_on_the_first_with_room():
    nodes = [node("a", GPU=2), node("b", GPU=2)]
    assert plan_placement(engines(3, GPU=1), nodes, "it", is_spread=True) == {
        "engine-0": "a",
        "engine-1": "b",
        "engine-2": "a",
    }
    assert list(plan_placement(engines(3, GPU=1), nodes, "it", is_spread=False).values()) == ["a", "a", "b"]


def test_a_process_must_fit_on_one_node():
    with pytest.raises(
        UserError, match=r"asks for GPU 4 for the engine, and it has room for 0: a has GPU 2; b has GPU 2"
    ):
        plan_placement(engines(1, GPU=4), [node("a", GPU=2), node("b", GPU=2)], "it", is_spread=True)


def test_what_others_have_taken_is_told_apart_from_what_was_never_there():
    busy = [node("a", free={"GPU": 1, "CPU": 8}, GPU=4, CPU=8)]
    with pytest.raises(UserError, match=r"has room for 1: a has GPU 4 \(1 free\) beside CPU 8; free some"):
        plan_placement(engines(2, GPU=1), busy, "it", is_spread=True)
    with pytest.raises(UserError, match=r"a has gpu 0 beside CPU 8, GPU 4; add such a node"):
        plan_placement(engines(2, gpu=1), busy, "it", is_spread=True)


def test_a_cluster_without_nodes_has_room_for_nobody():
    with pytest.raises(UserError, match="it has no nodes"):
        plan_placement(engines(1, CPU=1), [], "it", is_spread=True)


def test_a_process_without_wishes_asks_for_a_core():
    assert wishes_of(Config()) == [
        Wish("engine-0", "engine.resources", {"CPU": 1.0}),
        Wish("trainer", "training.resources", {"CPU": 1.0}),
    ]


def test_resources_are_told_in_words_without_those_of_ray_itself():
    told = in_words({"memory": 25e9, "GPU": 0.5, "node:10.0.0.1": 1, "object_store_memory": 1e9, "big": 2})
    assert told == "GPU 0.5, big 2, memory 25.0 GB"
