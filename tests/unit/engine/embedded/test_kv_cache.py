import torch
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.engine.embedded.kv_cache import KvCache, KvRange, SlotAllocator


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_allocated_ranges_never_overlap_and_everything_can_be_freed(actions):
    allocator = SlotAllocator(100)
    held: list[tuple[int, int]] = []
    for allocate, size in actions:
        if allocate:
            start = allocator.allocate(size)
            if start is not None:
                assert start >= 0 and start + size <= 100
                assert all(start + size <= other or other + length <= start for other, length in held)
                held.append((start, size))
        elif held:
            allocator.free(*held.pop(size % len(held)))
    for start, size in held:
        allocator.free(start, size)
    assert allocator.allocate(100) == 0


def test_a_range_that_is_too_long_waits_for_a_free_neighbour():
    allocator = SlotAllocator(10)
    first, second = allocator.allocate(6), allocator.allocate(4)
    assert (first, second, allocator.allocate(1)) == (0, 6, None)
    allocator.free(0, 6)
    assert allocator.allocate(7) is None
    allocator.free(6, 4)
    assert allocator.allocate(10) == 0


def test_prompt_and_strips_are_read_back_as_written_and_strips_move():
    cache = KvCache(num_layers=2, num_slots=30, num_heads=3, head_dim=4, device=torch.device("cpu"))
    where = KvRange(start=5, prompt_length=4, num_strips=3, strip_length=5)
    keys, values = torch.randn(19, 3, 4), torch.randn(19, 3, 4)
    cache.write(1, torch.arange(5, 24), keys, values)
    prompt_keys, prompt_values = cache.prompt(where, 4)
    assert torch.equal(prompt_keys[1][0].transpose(0, 1), keys[:4])
    assert torch.equal(prompt_values[1][0].transpose(0, 1), values[:4])
    strip_keys, strip_values = cache.strips(where, num_strips=2, length=3)
    assert torch.equal(strip_keys[1][1].transpose(0, 1), keys[9:12])
    assert torch.equal(strip_values[1][0].transpose(0, 1), values[4:7])
    cache.move_strip(where, source=2, target=0, length=5)
    assert torch.equal(cache.strips(where, 1, 5)[0][1][0].transpose(0, 1), keys[14:19])
