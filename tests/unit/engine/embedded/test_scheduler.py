from concurrent.futures import Future

import numpy as np
import pytest

from polyrhythm.engine.embedded.scheduler import PREFILL_CHUNK, ROWS_PER_PASS, ActiveRequest, Scheduler
from polyrhythm.engine.refusals import Refused, TooLarge
from polyrhythm.messages import GenerateRequest
from polyrhythm.types import Sampling


def scheduler(**changes) -> Scheduler:
    settings = dict(max_rows=8, num_slots=1000, context_length=900, vocab_size=50)
    return Scheduler(**(settings | changes))


def active(name: str, *, prompt=10, seeds=2, max_tokens=5, **sampling) -> ActiveRequest:
    request = GenerateRequest(name, 0, [1] * prompt, list(range(seeds)), Sampling(max_tokens, **sampling))
    return ActiveRequest(request, Future())


def names(requests) -> list[str]:
    return [request.request.request_id for request in requests]


def prefill_all(schedule: Scheduler) -> None:
    for request, chunk in schedule.prefill_chunks():
        if request.num_prefilled + len(chunk) == len(request.request.prompt_ids):
            schedule.start_decoding(request)


def test_requests_are_admitted_in_arrival_order_and_none_is_overtaken():
    schedule = scheduler(max_rows=8)
    for name, seeds in (("a", 4), ("b", 6), ("c", 1)):
        schedule.add(active(name, seeds=seeds))
    schedule.admit()
    assert names(schedule.prefilling) == ["a"]
    assert names(schedule.waiting) == ["b", "c"]
    schedule.retire(schedule.prefilling[0])
    schedule.admit()
    assert names(schedule.prefilling) == ["b", "c"]


def test_a_request_waits_until_the_cache_has_room():
    schedule = scheduler(num_slots=50)
    schedule.add(active("a", prompt=20, seeds=2, max_tokens=5))
    schedule.add(active("b", prompt=20, seeds=2, max_tokens=5))
    schedule.admit()
    assert names(schedule.prefilling) == ["a"]
    schedule.retire(schedule.prefilling[0])
    schedule.admit()
    assert names(schedule.prefilling) == ["b"]


@pytest.mark.parametrize(
    ("changes", "refusal", "message"),
    [
        (dict(prompt=0), Refused, "prompt ids"),
        (dict(seeds=0), Refused, "seed"),
        (dict(max_tokens=0), Refused, "max_tokens"),
        (dict(temperature=-1.0), Refused, "temperature"),
        (dict(temperature=float("nan")), Refused, "temperature"),
        (dict(top_p=0.0), Refused, "top_p"),
        (dict(top_k=-1), Refused, "top_k"),
        (dict(seeds=9), TooLarge, "engine.max_batch=8"),
        (dict(prompt=896), TooLarge, "engine.context_length=900"),
        (dict(prompt=100, seeds=8, max_tokens=120), TooLarge, "engine.kv_tokens=1000"),
    ],
)
def test_a_request_that_can_never_run_is_refused_at_once(changes, refusal, message):
    with pytest.raises(refusal, match=message):
        scheduler().check(active("a", **changes).request)


def test_prompt_ids_outside_the_vocabulary_are_refused():
    for bad in (-1, 50):
        with pytest.raises(Refused, match="from 0 to 49"):
            scheduler().check(GenerateRequest("a", 0, [1, bad], [0], Sampling(4)))


def test_a_pass_takes_one_chunk_of_a_prompt_and_more_only_while_it_is_not_full():
    schedule = scheduler(num_slots=5000, context_length=2000)
    schedule.add(active("a", prompt=PREFILL_CHUNK * 2 + 10))
    schedule.add(active("b", prompt=30))
    schedule.add(active("c", prompt=30))
    schedule.admit()
    passes = [[len(chunk) for _, chunk in schedule.prefill_chunks()] for _ in range(4)]
    assert passes == [[PREFILL_CHUNK], [PREFILL_CHUNK], [10, 30], [30]]


def test_rows_that_decode_leave_less_room_for_prompts_but_never_none():
    schedule = scheduler(max_rows=100, num_slots=5000, context_length=2000)
    schedule.add(active("a", seeds=ROWS_PER_PASS - 20, prompt=5))
    schedule.admit()
    prefill_all(schedule)
    schedule.add(active("b", prompt=15))
    schedule.add(active("c", prompt=15))
    schedule.admit()
    passes = [[len(chunk) for _, chunk in schedule.prefill_chunks()] for _ in range(2)]
    assert passes == [[15], [15]]


def test_rows_of_finished_completions_are_free_for_others():
    schedule = scheduler(max_rows=4)
    schedule.add(active("a", seeds=4))
    schedule.add(active("b", seeds=2))
    schedule.admit()
    prefill_all(schedule)
    request = schedule.running[0]
    request.append(np.array([5, 6, 7, 8]), np.zeros(4, np.float32))
    schedule.admit()
    assert names(schedule.waiting) == ["b"]
    request.finish_strip(0, "stop")
    request.finish_strip(0, "stop")
    schedule.admit()
    assert names(schedule.prefilling) == ["b"]


def test_completions_come_back_in_the_order_of_the_seeds_whatever_finished_first():
    request = active("a", seeds=3)
    schedule = scheduler()
    schedule.add(request)
    schedule.admit()
    request.append(np.array([10, 20, 30]), np.array([-1, -2, -3], np.float32))
    moved = request.finish_strip(0, "stop")
    assert moved == 2
    assert request.last_tokens().tolist() == [30, 20]
    assert request.active_seeds().tolist() == [2, 1]
    request.append(np.array([31, 21]), np.array([-3.5, -2.5], np.float32))
    request.finish_strip(1, "length")
    request.finish_strip(0, "length")
    assert [completion.token_ids for completion in request.completions()] == [[10], [20, 21], [30, 31]]
    assert [completion.finish_reason for completion in request.completions()] == ["stop", "length", "length"]
    assert request.completions()[2].rollout_logprobs == [-3.0, -3.5]
