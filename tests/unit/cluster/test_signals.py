import signal

import pytest

from polyrhythm.cluster.signals import signals_handled


@pytest.fixture(autouse=True)
def heeded_by_default():
    """The suite itself may have been started so that it ignores SIGHUP."""
    earlier = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, earlier)


def test_signals_are_handled_for_a_while_and_as_before_afterwards():
    before = signal.getsignal(signal.SIGHUP)
    with signals_handled(signal.default_int_handler, signal.SIGHUP), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGHUP)
    with signals_handled(signal.SIG_IGN, signal.SIGHUP, signal.SIGINT):
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGHUP) is before


def test_a_signal_that_is_ignored_stays_so():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals_handled(signal.default_int_handler, signal.SIGHUP):
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
