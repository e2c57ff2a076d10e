"""The state of one engine as the conductor sees it: a pure state machine, time comes in as an argument.

    joining ─► loading ─► ready ⇄ suspect ─► quarantined ─► loading …      any ─► draining ─► gone

The only way to serve a version is a load of that version that the engine has verified.
"""

from dataclasses import dataclass

from polyrhythm.observe.status import EngineState


@dataclass(frozen=True)
class Limits:
    """How many failures in a row, and how long a silence, an engine is forgiven."""

    probe_failures: int = 3
    request_failures: int = 3
    suspect_pause_s: float = 2.0
    """A suspect engine is given one request again after this long."""
    load_pause_s: float = 0.5
    """A failed load is tried again after this long, then after twice as long, and so on."""
    max_load_pause_s: float = 15.0
    lease_s: float = 60.0
    """An engine that gave no sign of life for this long is gone."""


@dataclass
class EngineHealth:
    """Failures of probes and of real requests are counted apart: a wedged engine still answers probes."""

    since_s: float
    limits: Limits = Limits()
    state: EngineState = EngineState.JOINING
    policy_version: int = -1
    num_probe_failures: int = 0
    num_request_failures: int = 0
    num_quarantines: int = 0
    """Quarantines since the last request that was answered well."""
    last_alive_s: float = 0.0
    cause: str = ""

    def __post_init__(self) -> None:
        self.last_alive_s = self.since_s

    def can_serve(self, version: int, now_s: float, num_in_flight: int) -> bool:
        """Whether a request at `version` may go to this engine; a suspect one gets a single request to prove itself."""
        if self.policy_version != version:
            return False
        if self.state is EngineState.SUSPECT:
            return num_in_flight == 0 and now_s - self.since_s >= self.limits.suspect_pause_s
        return self.state is EngineState.READY

    def wants_load(self, version: int, now_s: float) -> bool:
        """Whether it is time to make this engine load `version`."""
        if self.state is EngineState.QUARANTINED:
            pause_s = self.limits.load_pause_s * 2 ** min(self.num_quarantines - 1, 10)
            return now_s - self.since_s >= min(pause_s, self.limits.max_load_pause_s)
        if self.state in (EngineState.READY, EngineState.SUSPECT):
            return self.policy_version != version
        return self.state is EngineState.JOINING

    def lease_has_expired(self, now_s: float) -> bool:
        return self.state is not EngineState.GONE and now_s - self.last_alive_s > self.limits.lease_s

    @property
    def is_leaving(self) -> bool:
        return self.state in (EngineState.DRAINING, EngineState.GONE)

    def is_alive(self, now_s: float) -> None:
        """A sign of life: a heartbeat, or any answer."""
        self.last_alive_s = now_s

    def load_started(self, now_s: float) -> None:
        if not self.is_leaving:
            self._enter(EngineState.LOADING, now_s, self.cause)

    def load_succeeded(self, version: int, now_s: float) -> None:
        """The engine has verified `version` and holds it. After failed requests it still has to prove itself."""
        self.is_alive(now_s)
        self.policy_version = version
        self.num_probe_failures = 0
        if self.state is EngineState.LOADING:
            if self.num_request_failures:
                self._enter(EngineState.SUSPECT, now_s, self.cause)
            else:
                self._enter(EngineState.READY, now_s)

    def load_failed(self, cause: str, now_s: float) -> None:
        """What the engine holds now is unknown, or known to be wrong: it serves nothing until a load succeeds."""
        self.policy_version = -1
        if not self.is_leaving:
            self.num_quarantines += 1
            self._enter(EngineState.QUARANTINED, now_s, cause)

    def probe_succeeded(self, policy_version: int, now_s: float) -> None:
        self.is_alive(now_s)
        self.num_probe_failures = 0
        if self.state not in (EngineState.READY, EngineState.SUSPECT):
            return
        if policy_version != self.policy_version:
            self.load_failed(f"it holds version {policy_version} where {self.policy_version} was loaded", now_s)
        elif self.state is EngineState.SUSPECT and self.num_request_failures == 0:
            self._enter(EngineState.READY, now_s)

    def probe_failed(self, cause: str, now_s: float) -> None:
        self.num_probe_failures += 1
        self._failed(self.num_probe_failures >= self.limits.probe_failures, cause, now_s)

    def request_succeeded(self, now_s: float) -> None:
        self.is_alive(now_s)
        self.num_request_failures = self.num_quarantines = 0
        if self.state is EngineState.SUSPECT and self.num_probe_failures == 0:
            self._enter(EngineState.READY, now_s)

    def request_failed(self, cause: str, now_s: float) -> None:
        self.num_request_failures += 1
        self._failed(self.num_request_failures >= self.limits.request_failures, cause, now_s)

    def hangs(self, cause: str, now_s: float) -> None:
        """It answers probes and does nothing with its requests."""
        self.num_request_failures += 1
        self._failed(True, cause, now_s)

    def drain(self, now_s: float) -> None:
        """No further requests; those in flight are finished."""
        if self.state is not EngineState.GONE:
            self._enter(EngineState.DRAINING, now_s)

    def leave(self, cause: str, now_s: float) -> None:
        self._enter(EngineState.GONE, now_s, cause)

    def _failed(self, for_good: bool, cause: str, now_s: float) -> None:
        if self.state not in (EngineState.READY, EngineState.SUSPECT):
            return
        if for_good:
            self.load_failed(cause, now_s)
        else:
            self._enter(EngineState.SUSPECT, now_s, cause)

    def _enter(self, state: EngineState, now_s: float, cause: str = "") -> None:
        self.state, self.since_s, self.cause = state, now_s, cause
