import pytest

from polyrhythm.conductor.engines.health import EngineHealth, EngineState, Limits

LIMITS = Limits(probe_failures=3, request_failures=2, suspect_pause_s=5, load_pause_s=1, max_load_pause_s=4, lease_s=30)


def ready_engine(version: int = 0) -> EngineHealth:
    health = EngineHealth(since_s=0, limits=LIMITS)
    health.load_started(0)
    health.load_succeeded(version, 0)
    return health


def test_only_a_verified_load_makes_an_engine_serve():
    health = EngineHealth(since_s=0, limits=LIMITS)
    assert not health.can_serve(-1, 0, 0)
    health.probe_succeeded(0, 0)
    health.request_succeeded(0)
    assert not health.can_serve(0, 0, 0)
    health.load_started(0)
    assert not health.can_serve(0, 0, 0)
    health.load_succeeded(0, 0)
    assert health.can_serve(0, 0, 0)
    assert not health.can_serve(1, 0, 0)


def test_a_failed_load_quarantines_until_a_good_load_whatever_the_probes_say():
    health = ready_engine()
    health.load_started(1)
    health.load_failed("torn snapshot", 1)
    for _ in range(5):
        health.probe_succeeded(0, 2)
    assert (health.state, health.policy_version, health.cause) == (EngineState.QUARANTINED, -1, "torn snapshot")
    health.load_started(3)
    health.load_succeeded(0, 4)
    assert health.can_serve(0, 4, 0)


def test_an_engine_that_answers_probes_and_fails_on_work_is_found():
    health = ready_engine()
    health.request_failed("timeout", 1)
    health.probe_succeeded(0, 2)
    assert health.state is EngineState.SUSPECT
    health.request_failed("timeout", 3)
    assert health.state is EngineState.QUARANTINED


def test_an_engine_that_works_and_misses_a_probe_now_and_then_stays():
    health = ready_engine()
    for now_s in range(10):
        health.probe_failed("slow", now_s)
        health.probe_succeeded(0, now_s + 0.5)
    assert health.state is EngineState.READY


def test_an_engine_that_answers_no_probe_is_quarantined_even_between_good_requests():
    health = ready_engine()
    for now_s in range(3):
        health.request_succeeded(now_s)
        health.probe_failed("refused", now_s)
    assert health.state is EngineState.QUARANTINED


def test_a_suspect_engine_gets_one_request_after_a_pause():
    health = ready_engine()
    health.request_failed("reset", 10)
    assert not health.can_serve(0, 14, num_in_flight=0)
    assert health.can_serve(0, 15, num_in_flight=0)
    assert not health.can_serve(0, 15, num_in_flight=1)
    health.request_succeeded(16)
    assert health.can_serve(0, 16, num_in_flight=5)


def test_an_engine_quarantined_for_its_work_returns_on_probation():
    health = ready_engine()
    health.hangs("generates nothing", 1)
    health.load_started(2)
    health.load_succeeded(0, 3)
    assert health.state is EngineState.SUSPECT
    health.probe_succeeded(0, 4)
    assert health.state is EngineState.SUSPECT
    health.request_succeeded(5)
    assert health.state is EngineState.READY


def test_an_engine_that_holds_another_version_than_it_loaded_is_quarantined():
    health = ready_engine(version=4)
    health.probe_succeeded(-1, 1)
    assert health.state is EngineState.QUARANTINED
    assert "holds version -1 where 4 was loaded" in health.cause


def test_loads_are_tried_again_after_longer_and_longer_pauses():
    health = ready_engine()
    pauses = []
    for _ in range(4):
        health.load_failed("no", 0)
        pauses.append(next(s for s in range(100) if health.wants_load(0, s)))
    assert pauses == [1, 2, 4, 4]
    health.load_started(10)
    health.load_succeeded(0, 10)
    health.request_succeeded(11)
    health.load_failed("no", 0)
    assert health.wants_load(0, 1)


@pytest.mark.parametrize(("version", "wanted"), [(0, False), (1, True)])
def test_a_ready_engine_wants_a_load_only_for_a_new_version(version, wanted):
    assert ready_engine(version=0).wants_load(version, 1) is wanted


def test_a_draining_engine_takes_nothing_and_comes_back_by_no_event():
    health = ready_engine()
    health.drain(1)
    for event in (
        lambda: health.probe_succeeded(0, 2),
        lambda: health.request_succeeded(2),
        lambda: health.request_failed("x", 2),
        lambda: health.load_started(2),
        lambda: health.load_succeeded(0, 2),
        lambda: health.load_failed("x", 2),
    ):
        event()
        assert health.state is EngineState.DRAINING
        assert not health.can_serve(0, 100, 0)
        assert not health.wants_load(1, 100)


@pytest.mark.parametrize("sign", ["is_alive", "request_succeeded"])
def test_any_sign_of_life_renews_the_lease(sign):
    health = ready_engine()
    assert not health.lease_has_expired(30)
    assert health.lease_has_expired(31)
    getattr(health, sign)(31)
    assert not health.lease_has_expired(61)
    assert health.lease_has_expired(62)
