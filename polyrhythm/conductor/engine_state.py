"""The state of one engine as the conductor sees it: a pure state machine, time comes in as an argument.

    joining ─► loading ─► ready ⇄ suspect ─► quarantined ─► loading …      any ─► draining ─► gone

The only way to `ready` at a version is a load of that version that the engine has verified.
"""

from dataclasses import dataclass
from enum import StrEnum


class EngineState(StrEnum):
    JOINING = "joining"
    LOADING = "loading"
    READY = "ready"
    SUSPECT = "suspect"
    QUARANTINED = "quarantined"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(frozen=True)
class Limits:
    """After how many failures in a row, and for how long, an engine is believed."""

    probe_failures: int = 3
    request_failures: int = 3
    suspect_pause_s: float = 2.0
    """A suspect engine is given one request again after this long."""


@dataclass
class EngineHealth:
    """Failures of probes and of real requests are counted apart: a wedged engine still answers probes."""

    since_s: float
    limits: Limits = Limits()
    state: EngineState = EngineState.JOINING
    policy_version: int = -1
    probe_failures: int = 0
    request_failures: int = 0
    cause: str = ""

    def can_serve(self, version: int, now_s: float, num_in_flight: int) -> bool:
        """Whether a request at `version` may go to this engine; a suspect one gets a single request to prove itself."""
        if self.policy_version != version:
            return False
        if self.state is EngineState.SUSPECT:
            return num_in_flight == 0 and now_s - self.since_s >= self.limits.suspect_pause_s
        return self.state is EngineState.READY

    @property
    def is_leaving(self) -> bool:
        return self.state in (EngineState.DRAINING, EngineState.GONE)

    def load_started(self, now_s: float) -> None:
        if not self.is_leaving:
            self._enter(EngineState.LOADING, now_s)

    def load_succeeded(self, version: int, now_s: float) -> None:
        """The engine has verified `version` and holds it."""
        self.policy_version = version
        self.probe_failures = self.request_failures = 0
        if self.state is EngineState.LOADING:
            self._enter(EngineState.READY, now_s)

    def load_failed(self, cause: str, now_s: float) -> None:
        """What the engine holds now is unknown: it serves nothing until a load succeeds."""
        self.policy_version = -1
        if not self.is_leaving:
            self._enter(EngineState.QUARANTINED, now_s, cause)

    def probe_succeeded(self, policy_version: int, now_s: float) -> None:
        self.probe_failures = 0
        if self.state in (EngineState.READY, EngineState.SUSPECT) and policy_version != self.policy_version:
            cause = f"holds version {policy_version} where {self.policy_version} was loaded: it was restarted"
            self.load_failed(cause, now_s)
        elif self.state is EngineState.SUSPECT and self.request_failures == 0:
            self._enter(EngineState.READY, now_s)

    def probe_failed(self, cause: str, now_s: float) -> None:
        self.probe_failures += 1
        self._failed(self.probe_failures >= self.limits.probe_failures, cause, now_s)

    def request_succeeded(self, now_s: float) -> None:
        self.request_failures = 0
        if self.state is EngineState.SUSPECT and self.probe_failures == 0:
            self._enter(EngineState.READY, now_s)

    def request_failed(self, cause: str, now_s: float) -> None:
        self.request_failures += 1
        self._failed(self.request_failures >= self.limits.request_failures, cause, now_s)

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
