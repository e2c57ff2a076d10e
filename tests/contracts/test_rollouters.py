"""Every kind of rollout: what the engine sampled is in the trace, once, in order, and nothing else counts as sampled."""

import pytest

from polyrhythm.conductor.engines.client import EngineError
from polyrhythm.messages import GenerateReply, GenerateRequest
from polyrhythm.rollout import ROLLOUTERS, Generate
from polyrhythm.types import Completion, Problem, Sampling, Trace, rollout_seed

SEEDS = [rollout_seed(0, 3, 7, index) for index in range(4)]
SAMPLING = Sampling(max_tokens=8, stop=("\n",))


class Letters:
    """One token per character."""

    def encode(self, problem: Problem) -> list[int]:
        return [ord(character) for character in str(problem.prompt)]

    def decode(self, token_ids) -> str:
        return "".join(map(chr, token_ids))


class ScriptedEngine:
    """Samples letters that are a function of the seed, and remembers what it sampled."""

    def __init__(self):
        self.requests: list[GenerateRequest] = []
        self.sampled: dict[int, list[Completion]] = {}

    async def __call__(self, request: GenerateRequest) -> GenerateReply:
        self.requests.append(request)
        completions = [self.complete(seed) for seed in request.seeds]
        for seed, completion in zip(request.seeds, completions, strict=True):
            self.sampled.setdefault(seed, []).append(completion)
        return GenerateReply(request.request_id, request.policy_version, completions)

    def complete(self, seed: int) -> Completion:
        length = 1 + seed % 4
        ids = [97 + (seed >> place) % 26 for place in range(length)]
        return Completion(ids, [-1.0 - place for place in range(length)], "stop")


async def roll_out(kind: str, send) -> list[Trace]:
    rollouter = ROLLOUTERS[kind](Letters(), SAMPLING)
    problem = Problem(7, "ab")
    generate = Generate(send, "3/0/0/7/0", 3, rollouter.prompt_ids(problem))
    return await rollouter.run(problem, generate, SEEDS)


@pytest.mark.parametrize("kind", ROLLOUTERS)
async def test_every_seed_gives_one_trace_of_exactly_what_was_sampled_for_it(kind):
    engine = ScriptedEngine()
    traces = await roll_out(kind, engine)
    assert len(traces) == len(SEEDS)
    for seed, trace in zip(SEEDS, traces, strict=True):
        expected = engine.sampled[seed]
        assert [turn.token_ids for turn in trace.turns] == [completion.token_ids for completion in expected]
        assert trace.rollout_logprobs == [logprob for completion in expected for logprob in completion.rollout_logprobs]
        assert trace.finish_reason == expected[-1].finish_reason


@pytest.mark.parametrize("kind", ROLLOUTERS)
async def test_the_mask_marks_the_sampled_tokens_and_no_others(kind):
    for trace in await roll_out(kind, ScriptedEngine()):
        sampled = [i for i, is_sampled in zip(trace.token_ids, trace.sampled_mask, strict=True) if is_sampled]
        assert sampled == [token_id for turn in trace.turns for token_id in turn.token_ids]
        assert trace.num_sampled == len(sampled) == len(trace.rollout_logprobs)
        assert trace.num_tokens == len(trace.token_ids)


@pytest.mark.parametrize("kind", ROLLOUTERS)
async def test_every_request_names_the_version_and_has_an_id_of_its_own(kind):
    engine = ScriptedEngine()
    await roll_out(kind, engine)
    assert {request.policy_version for request in engine.requests} == {3}
    assert engine.requests[0].request_id == "3/0/0/7/0"
    assert len({request.request_id for request in engine.requests}) == len(engine.requests)
    assert {tuple(request.prompt_ids) for request in engine.requests} == {(97, 98)}


@pytest.mark.parametrize("kind", ROLLOUTERS)
async def test_the_same_seeds_give_the_same_traces_in_another_attempt(kind):
    assert await roll_out(kind, ScriptedEngine()) == await roll_out(kind, ScriptedEngine())


@pytest.mark.parametrize("kind", ROLLOUTERS)
async def test_what_the_engine_fails_at_reaches_the_dispatcher(kind):
    async def fail(request: GenerateRequest) -> GenerateReply:
        raise EngineError("it holds another version", wrong_version=True)

    with pytest.raises(EngineError, match="another version"):
        await roll_out(kind, fail)


async def test_later_requests_of_an_attempt_are_numbered():
    engine = ScriptedEngine()
    generate = Generate(engine, "3/0/0/7/0", 3, [1])
    for _ in range(3):
        await generate([5], SAMPLING)
    assert [request.request_id for request in engine.requests] == ["3/0/0/7/0", "3/0/0/7/0/1", "3/0/0/7/0/2"]
