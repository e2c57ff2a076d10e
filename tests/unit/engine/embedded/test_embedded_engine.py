import asyncio
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from polyrhythm.config import EngineConfig
from polyrhythm.engine.embedded.engine import InferenceEngine
from polyrhythm.engine.refusals import EngineFailed, Refused, Reloading, TooLarge, WrongVersion
from polyrhythm.messages import GenerateRequest
from polyrhythm.types import Completion, Sampling
from polyrhythm.weights.snapshot import Manifest
from polyrhythm.weights.store import SnapshotError, WeightStore
from tests.publishing import publish

KINDS = ["llama-gqa", "llama-mha", "qwen2", "qwen3"]
VOCAB_SIZE, EOS = 300, 299


def engine_of(model_dir: Path, *, store=None, stop_at_eos=True, **config) -> InferenceEngine:
    settings = dict(threads=1, max_batch=32, kv_tokens=8000)
    return InferenceEngine(model_dir, EngineConfig(**(settings | config)), store=store, stop_at_eos=stop_at_eos)


def request_of(rng: random.Random, *, prompt: int, seeds: int, version=0, **sampling) -> GenerateRequest:
    prompt_ids = [rng.randrange(VOCAB_SIZE) for _ in range(prompt)]
    settings = Sampling(**(dict(max_tokens=12) | sampling))
    return GenerateRequest(
        f"r{rng.random()}", version, prompt_ids, [rng.getrandbits(63) for _ in range(seeds)], settings
    )


def bits(completions: list[Completion]) -> list:
    return [(c.token_ids, [logprob.hex() for logprob in c.rollout_logprobs], c.finish_reason) for c in completions]


@torch.no_grad()
def reference_logprobs(model, prompt_ids: list[int], token_ids: list[int], temperature: float) -> torch.Tensor:
    logits = model(torch.tensor([prompt_ids + token_ids])).logits[0, len(prompt_ids) - 1 : -1]
    logprobs = (logits.double() / temperature).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(token_ids)[:, None])[:, 0]


@pytest.fixture(params=["on", "off"])
def decoding(request, monkeypatch) -> None:
    """Kernels, and the torch operators of machines without a compiler."""
    monkeypatch.setenv("POLYRHYTHM_KERNELS", request.param)


@pytest.mark.usefixtures("decoding")
@pytest.mark.parametrize("kind", KINDS)
async def test_log_probabilities_equal_those_of_the_transformers_model(model_dirs, kind):
    reference = AutoModelForCausalLM.from_pretrained(model_dirs[kind], dtype=torch.float32)
    rng = random.Random(kind)
    requests = [
        request_of(rng, prompt=prompt, seeds=seeds, temperature=temperature, top_k=top_k)
        for prompt, seeds, temperature, top_k in [(1, 3, 1.0, 0), (37, 1, 0.7, 20), (600, 2, 1.0, 0)]
    ]
    async with engine_of(model_dirs[kind], stop_at_eos=False) as engine:
        replies = await asyncio.gather(*map(engine.generate, requests))
    for request, reply in zip(requests, replies, strict=True):
        assert reply.request_id == request.request_id
        for completion in reply.completions:
            assert len(completion.token_ids) == 12 and completion.finish_reason == "length"
            expected = reference_logprobs(
                reference, request.prompt_ids, completion.token_ids, request.sampling.temperature
            )
            difference = (torch.tensor(completion.rollout_logprobs).double() - expected).abs().max()
            assert difference < 5e-5


@pytest.mark.usefixtures("decoding")
@pytest.mark.parametrize("kind", KINDS)
async def test_a_completion_is_the_same_bits_alone_and_among_others_that_join_at_random_times(model_dirs, kind):
    rng = random.Random(kind)
    watched = [
        request_of(rng, prompt=prompt, seeds=seeds, max_tokens=24)
        for prompt, seeds in [(5, 1), (40, 5), (300, 8), (2, 2)]
    ]
    single = [
        GenerateRequest("s", 0, request.prompt_ids, [seed], request.sampling)
        for request in watched
        for seed in request.seeds
    ]

    async def later(engine: InferenceEngine, request: GenerateRequest):
        await asyncio.sleep(rng.random() * 0.15)
        return await engine.generate(request)

    async with engine_of(model_dirs[kind]) as engine:
        alone = [(await engine.generate(request)).completions for request in watched]
        one_by_one = [(await engine.generate(request)).completions[0] for request in single]
        others = [
            request_of(rng, prompt=rng.randrange(1, 300), seeds=rng.randrange(1, 9), max_tokens=rng.randrange(1, 40))
            for _ in range(12)
        ]
        everyone = [*watched, *others]
        rng.shuffle(everyone)
        replies = await asyncio.gather(*(later(engine, request) for request in everyone))
    among = {request.request_id: reply.completions for request, reply in zip(everyone, replies, strict=True)}
    assert [bits(among[request.request_id]) for request in watched] == [bits(completions) for completions in alone]
    assert bits(one_by_one) == bits([completion for completions in alone for completion in completions])


@pytest.mark.usefixtures("decoding")
async def test_a_completion_is_the_same_bits_with_one_and_two_threads(model_dir):
    requests = [request_of(random.Random(seed), prompt=30 + seed, seeds=4, max_tokens=16) for seed in range(3)]
    results = []
    for threads in (1, 2):
        async with engine_of(model_dir, threads=threads) as engine:
            replies = await asyncio.gather(*map(engine.generate, requests))
            assert engine.status().num_threads == threads
        results.append([bits(reply.completions) for reply in replies])
    assert results[0] == results[1]


async def test_completions_end_at_end_of_text_and_at_stop_tokens_and_keep_them(model_dir):
    rng = random.Random(1)
    request = request_of(rng, prompt=6, seeds=32, max_tokens=200, stop_token_ids=(17,))
    async with engine_of(model_dir) as engine:
        completions = (await engine.generate(request)).completions
    stopped = [completion for completion in completions if completion.finish_reason == "stop"]
    assert {completion.token_ids[-1] for completion in stopped} == {EOS, 17}
    for completion in completions:
        assert not {EOS, 17} & set(completion.token_ids[:-1])
        assert len(completion.rollout_logprobs) == len(completion.token_ids)
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 200


async def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(model_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    free = request_of(random.Random(2), prompt=6, seeds=16, max_tokens=40)
    async with engine_of(model_dir, stop_at_eos=False) as engine:
        completions = (await engine.generate(free)).completions
        texts = [tokenizer.decode(completion.token_ids) for completion in completions]
        stop = next(text[i : i + 2] for text in texts for i in range(10, 30) if text[i : i + 2].isascii())
        stopping = GenerateRequest("s", 0, free.prompt_ids, free.seeds, Sampling(max_tokens=40, stop=(stop,)))
        stopped = (await engine.generate(stopping)).completions
    assert any(completion.finish_reason == "stop" for completion in stopped)
    for whole, cut in zip(completions, stopped, strict=True):
        ends = [n for n in range(1, 41) if stop in tokenizer.decode(whole.token_ids[:n])]
        length = ends[0] if ends else 40
        assert cut.token_ids == whole.token_ids[:length]
        assert cut.finish_reason == ("stop" if ends else "length")


async def test_temperature_zero_takes_the_most_likely_token(model_dir):
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    request = request_of(random.Random(3), prompt=9, seeds=2, temperature=0.0)
    async with engine_of(model_dir, stop_at_eos=False) as engine:
        first, second = (await engine.generate(request)).completions
    assert first == second
    with torch.no_grad():
        logits = reference(torch.tensor([request.prompt_ids + first.token_ids])).logits[0, 8:-1]
    assert logits.argmax(-1).tolist() == first.token_ids


async def test_a_request_for_another_version_is_refused(model_dir):
    async with engine_of(model_dir) as engine:
        with pytest.raises(WrongVersion, match="asked for policy version 3, this engine holds 0"):
            await engine.generate(request_of(random.Random(0), prompt=3, seeds=1, version=3))


async def test_loaded_weights_are_used_and_a_failed_load_leaves_no_version(model_dirs, tmp_path):
    from tests.unit.engine.conftest import build_model

    store = WeightStore(tmp_path)
    other = build_model("qwen2", seed=5)
    publish(store, other, 7)
    request = request_of(random.Random(4), prompt=20, seeds=2, version=7)
    async with engine_of(model_dirs["qwen2"], store=store, stop_at_eos=False) as engine:
        assert engine.status().policy_version == -1
        await engine.load(7)
        assert engine.status().policy_version == 7
        reply = await engine.generate(request)
        assert reply.policy_version == 7
        for completion in reply.completions:
            expected = reference_logprobs(other, request.prompt_ids, completion.token_ids, 1.0)
            assert (torch.tensor(completion.rollout_logprobs).double() - expected).abs().max() < 5e-5
        with pytest.raises(SnapshotError):
            await engine.load(8)
        assert engine.status().policy_version == -1
        for version in (7, -1):
            with pytest.raises(WrongVersion):
                await engine.generate(request_of(random.Random(4), prompt=20, seeds=2, version=version))
        await engine.load(7)
        assert bits((await engine.generate(request)).completions) == bits(reply.completions)


async def test_a_load_ends_the_requests_that_still_run(model_dir, tmp_path):
    store = WeightStore(tmp_path)
    publish(store, AutoModelForCausalLM.from_pretrained(model_dir), 0)
    publish(store, AutoModelForCausalLM.from_pretrained(model_dir), 1)
    async with engine_of(model_dir, store=store, stop_at_eos=False) as engine:
        await engine.load(0)
        running = asyncio.create_task(engine.generate(request_of(random.Random(0), prompt=3, seeds=2, max_tokens=200)))
        await asyncio.sleep(0.02)
        await engine.load(1)
        with pytest.raises(Reloading, match="ask again"):
            await running
        status = engine.status()
        assert (status.policy_version, status.num_running, status.num_waiting) == (1, 0, 0)
        assert (await engine.generate(request_of(random.Random(0), prompt=3, seeds=2, version=1))).policy_version == 1


async def test_of_two_loads_at_once_each_is_announced_when_it_is_done(model_dir, tmp_path):
    store = WeightStore(tmp_path)
    for version in (0, 1):
        publish(store, AutoModelForCausalLM.from_pretrained(model_dir), version)
    seen: list[tuple[int, int]] = []
    async with engine_of(model_dir, store=store) as engine:
        load_into = store.load_into

        def observed(targets, version: int) -> Manifest:
            seen.append((version, engine.status().policy_version))
            manifest = load_into(targets, version)
            seen.append((version, engine.status().policy_version))
            return manifest

        await engine.load(0)  # with its canary, once
        store.load_into = observed
        await asyncio.gather(engine.load(0), engine.load(1))
        assert seen == [(0, -1), (0, -1), (1, -1), (1, -1)], "nothing is announced while weights are written"
        assert engine.status().policy_version == 1


@pytest.mark.parametrize(
    "sampling", [{"top_k": 2**63}, {"top_p": 1e-300}, {"top_p": float("nan")}, {"stop_token_ids": (2**70,)}]
)
async def test_numbers_that_cannot_be_used_are_refused_and_harm_nobody(model_dir, sampling):
    async with engine_of(model_dir) as engine:
        with pytest.raises(Refused):
            await engine.generate(request_of(random.Random(0), prompt=3, seeds=1, **sampling))
        for num_threads in (0, 2**40):
            with pytest.raises(Refused, match="threads"):
                engine.set_threads(num_threads)
        assert len((await engine.generate(request_of(random.Random(0), prompt=3, seeds=1))).completions) == 1


async def test_a_cancelled_request_frees_its_rows_and_its_cache(model_dir):
    hog = request_of(random.Random(0), prompt=20, seeds=8, max_tokens=900)
    async with engine_of(model_dir, max_batch=8, kv_tokens=7300, stop_at_eos=False) as engine:
        running = asyncio.create_task(engine.generate(hog))
        await asyncio.sleep(0.1)
        assert engine.status().num_running == 8
        waiting = asyncio.create_task(engine.generate(request_of(random.Random(1), prompt=20, seeds=8, max_tokens=4)))
        await asyncio.sleep(0.1)
        assert engine.status().num_waiting == 8 and not waiting.done()
        running.cancel()
        reply = await asyncio.wait_for(waiting, 5)
        assert len(reply.completions) == 8
        assert (engine.status().num_running, engine.status().num_waiting) == (0, 0)
        again = GenerateRequest("again", 0, hog.prompt_ids, hog.seeds, Sampling(max_tokens=890))
        assert len((await asyncio.wait_for(engine.generate(again), 60)).completions) == 8


async def test_a_cancelled_request_leaves_its_neighbours_as_they_would_be_alone(model_dir):
    leaving = request_of(random.Random(0), prompt=20, seeds=3, max_tokens=900)
    staying = request_of(random.Random(1), prompt=12, seeds=4, max_tokens=300)
    async with engine_of(model_dir, stop_at_eos=False) as engine:
        alone = await engine.generate(staying)
        decoded: list[int] = []
        under_way = asyncio.Event()

        def count(tokens) -> None:
            decoded.append(len(tokens))
            if len(decoded) == 20:
                under_way.set()

        cancelled = asyncio.create_task(engine.generate(leaving))
        kept = asyncio.create_task(engine.generate(staying, count))
        await asyncio.wait_for(under_way.wait(), 10)
        assert engine.status().num_running == 7
        cancelled.cancel()
        assert (await asyncio.wait_for(kept, 30)).completions == alone.completions


async def test_status_counts_tokens_and_busy_time(model_dir):
    async with engine_of(model_dir, stop_at_eos=False) as engine:
        await engine.generate(request_of(random.Random(0), prompt=3, seeds=3, max_tokens=5))
        await engine.generate(request_of(random.Random(0), prompt=3, seeds=2, max_tokens=1))
        status = engine.status()
    assert status.num_tokens_generated == 17
    assert 0 < status.busy_s < 10


async def test_a_failing_compute_thread_fails_its_requests_and_refuses_new_ones(model_dir, monkeypatch):
    async with engine_of(model_dir) as engine:

        def broken(*_):
            raise MemoryError("planted")

        monkeypatch.setattr(engine._runner, "decode", broken)
        request = request_of(random.Random(0), prompt=3, seeds=1)
        with pytest.raises(EngineFailed, match="planted"):
            await asyncio.wait_for(engine.generate(request), 5)
        assert not engine.is_alive and engine.status().policy_version == -1
        assert "planted" in await asyncio.wait_for(engine.failure(), 5)
        with pytest.raises(EngineFailed):
            await asyncio.wait_for(engine.generate(request), 5)


async def test_closing_fails_what_is_still_running(model_dir):
    engine = engine_of(model_dir, stop_at_eos=False)
    running = asyncio.create_task(engine.generate(request_of(random.Random(0), prompt=3, seeds=2, max_tokens=900)))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(engine.close(), 10)
    with pytest.raises(EngineFailed, match="closed"):
        await asyncio.wait_for(running, 5)


async def test_requests_that_cannot_run_are_refused_before_they_wait(model_dir):
    async with engine_of(model_dir) as engine:
        with pytest.raises(TooLarge):
            await engine.generate(request_of(random.Random(0), prompt=1020, seeds=1))
        with pytest.raises(Refused, match="empty"):
            await engine.generate(request_of(random.Random(0), prompt=3, seeds=1, stop=("",)))
