"""Who watches a run is told what its processes do, in order and at once, and can neither delay nor end it."""

import http.server
import itertools
import threading
import time
from collections.abc import Callable

import pytest

from polyrhythm.loader.client import ConductorClient
from polyrhythm.observe.activity import Activity, ActivityReport
from polyrhythm.observe.recorder import ActivityRecorder

DEADLINE_S = 20.0


def until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until_s, "it never came"
        time.sleep(0.005)


def test_seconds_are_added_up_per_activity_until_they_are_taken():
    recorder = ActivityRecorder("trainer")
    for _ in range(2):
        with recorder.doing(Activity.WAIT):
            time.sleep(0.01)
    assert recorder.seconds(Activity.WAIT) >= 0.02
    assert set(recorder.take_seconds()) == {Activity.WAIT}
    assert recorder.take_seconds() == {}


def test_a_new_activity_is_reported_while_it_lasts_and_spans_keep_their_order():
    reports: list[ActivityReport] = []
    recorder = ActivityRecorder("trainer-1", reports.append)
    activities = [Activity.LOAD, Activity.WAIT, Activity.FORWARD_BACKWARD, Activity.UPDATE, Activity.PUBLISH]
    for activity in activities:
        with recorder.doing(activity):
            until(lambda activity=activity: bool(reports) and reports[-1].doing is activity)
    until(lambda: sum(len(report.spans) for report in reports) == len(activities))
    spans = [span for report in reports for span in report.spans]
    assert [span.activity for span in spans] == activities
    assert {span.process for span in spans} == {"trainer-1"}
    assert all(a.end_s <= b.start_s + 1e-3 for a, b in itertools.pairwise(spans))


def test_a_conductor_that_never_answers_does_not_delay_the_trainer():
    is_asked, may_answer = threading.Event(), threading.Event()

    def never(_: ActivityReport) -> None:
        is_asked.set()
        may_answer.wait(timeout=60)

    recorder = ActivityRecorder("trainer", never)
    with recorder.doing(Activity.START):
        assert is_asked.wait(timeout=DEADLINE_S)
    for _ in range(10_000):  # the watcher has not returned from the first report
        with recorder.doing(Activity.FORWARD_BACKWARD):
            pass
    assert not may_answer.is_set()
    may_answer.set()


def test_a_conductor_that_is_gone_raises_nothing(caplog):
    client = ConductorClient("http://127.0.0.1:1", "token")  # nobody listens there
    recorder = ActivityRecorder("trainer", client.report)
    with recorder.doing(Activity.START):
        until(lambda: "nobody hears what trainer does" in caplog.text)
    with recorder.doing(Activity.LOAD):
        pass
    assert recorder.take_seconds().keys() == {Activity.START, Activity.LOAD}  # it goes on recording


def test_a_conductor_that_refuses_reports_raises_nothing(caplog):
    class Refuse(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(409)

    with http.server.HTTPServer(("127.0.0.1", 0), Refuse) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = ConductorClient(f"http://127.0.0.1:{server.server_port}", "token")
        recorder = ActivityRecorder("trainer", client.report)
        with recorder.doing(Activity.START):
            until(lambda: "answered 409" in caplog.text)
        server.shutdown()
    assert recorder.take_seconds().keys() == {Activity.START}


def test_a_watcher_that_comes_back_hears_the_newest_state():
    reports: list[ActivityReport] = []
    is_gone = True

    def send(report: ActivityReport) -> None:
        if is_gone:
            raise OSError("gone")
        reports.append(report)

    recorder = ActivityRecorder("trainer", send)
    with recorder.doing(Activity.LOAD):
        pass
    with recorder.doing(Activity.WAIT):
        is_gone = False
        until(lambda: bool(reports))
        assert reports[0].doing is Activity.WAIT


def test_hooks_act_before_an_activity_and_after_one_that_ended_well():
    events: list[str] = []

    class Hook:
        def before(self, activity: Activity) -> None:
            events.append(f"before {activity}")

        def after(self, activity: Activity) -> None:
            events.append(f"after {activity}")

    recorder = ActivityRecorder("trainer", hooks=[Hook()])
    with recorder.doing(Activity.PUBLISH):
        events.append("body")
    with pytest.raises(ValueError), recorder.doing(Activity.COMMIT):
        raise ValueError
    assert events == ["before publish", "body", "after publish", "before commit"]
    assert recorder.seconds(Activity.COMMIT) > 0, "an activity that failed took its time too"
