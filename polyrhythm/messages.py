"""Messages between the processes: msgspec structs in msgpack, never pickle.

Every server checks `Authorization: Bearer <token>`; `tokens.json` in the run folder holds one credential per scope.
"""

from typing import Annotated, Any, Literal, TypeVar

import msgspec

from polyrhythm.types import Completion, Group, Sampling

CONTENT_TYPE = "application/msgpack"
MAX_BODY_BYTES = 64 * 2**20

T = TypeVar("T")


class GenerateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prompt and as many completions as there are seeds, all by `policy_version`."""

    request_id: str
    policy_version: int
    prompt_ids: list[int]
    seeds: list[int]
    sampling: Sampling


class GenerateReply(msgspec.Struct, frozen=True):
    """Completions in the order of the seeds, and the version whose weights drew every token of them."""

    request_id: str
    policy_version: int
    completions: list[Completion]


class Meeting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The place of one member in a broadcast of weights: member 0 sends them, the others receive."""

    version: int
    number: int
    """Of the broadcast: its members find each other by the keys of this number."""
    member: int
    """For an engine, that of its first process."""
    num_members: int
    deadline_s: float
    """Whoever has not received everything by then reads the weight store instead."""


class LoadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Load this version from the weight store. A version number, never a path. With a meeting, it is also sent."""

    version: int
    meeting: Meeting | None = None


class ThreadsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Compute with this many CPU threads from now on."""

    num_threads: int


class EngineStatus(msgspec.Struct, frozen=True):
    """What an engine says of itself; `policy_version` is -1 until a snapshot was loaded and verified."""

    policy_version: int
    num_running: int
    num_waiting: int
    num_tokens_generated: int
    busy_s: float
    num_threads: int
    num_kv_tokens: int = 0
    """How many tokens its key/value cache has room for, and how many of them running requests hold or reserve."""
    num_kv_tokens_used: int = 0
    has_received: bool = False
    """What it holds came by a broadcast, not from the weight store."""


class Capabilities(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an engine can do, whatever its kind. The conductor learns it when the engine joins."""

    max_completions: Annotated[int, msgspec.Meta(ge=1)]
    """So many completions decode together; further ones wait."""
    adjustable_threads: bool
    """Its number of CPU threads can be changed while it runs."""
    reads_store: bool
    """It loads a version by itself, from the weight store; otherwise it must be sent the weights."""
    openai_routes: bool
    """It also serves the OpenAI API."""
    num_receivers: Annotated[int, msgspec.Meta(ge=0)] = 0
    """So many of its processes take part in a broadcast of weights; 0: it reads the weight store alone."""


class Setup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a process of a run is made of; see `setups`."""

    package: str
    torch: str
    model: dict[str, str]
    """Digests of files of the model's folder, by name."""


class JoinRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine asks to be used or, as a heartbeat, says that it still is."""

    name: str
    url: str
    capabilities: Capabilities
    setup: Setup


class RunInfo(msgspec.Struct, frozen=True):
    """What an engine or a rank must know to join a run. Paths are those of the conductor's machine."""

    run_dir: str
    model_dir: str
    store_root: str
    setup: Setup
    config: dict[str, Any]
    first_step: int
    has_optimizer: bool
    """Ranks begin with what an optimizer remembers, which is in the run folder."""


class EngineName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The wish to drain or remove the engine of this name."""

    name: str


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Weights `version` are in the store: the step before it is done, the step of its number may begin.

    `metrics` is what the trainer measured in the step before; the first version of a run has none.
    """

    version: int
    metrics: dict[str, float]


class RankJoin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank of the trainer takes its place in the run. To say it again is harmless."""

    name: str
    """Empty: that of a rank which nobody has taken."""
    member: str
    """The process that joins, by a name that no other has."""
    wait_s: Annotated[float, msgspec.Meta(ge=0)]
    """It waits so long for the others, and then asks again."""
    has_run_folder: bool = True
    """It can write into the run's folder and weight store, as the first rank must."""
    setup: Setup | None = None


class RankBeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank says that it is alive or, when it has nothing more to do, that it leaves."""

    name: str
    member: str
    wait_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """So long it waits for bad news, then it says so again."""
    is_leaving: bool = False


class Membership(msgspec.Struct, frozen=True):
    """Who trains together: the names of the ranks in their order, and the version they begin with.

    Epoch 0: these are there, others are missing. What ranks tell each other belongs to an epoch; the next one begins when they change.
    """

    epoch: int
    members: list[str]
    version: int
    name: str
    """That of the rank which has asked."""
    lease_s: float = 60.0
    """Who gives no sign of life for so long is lost."""


class RankEnter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An elastic rank wants to take part in updates. It holds the weights of this version, -1: of none."""

    member: str
    holds: int
    has_state: bool
    """It holds what the optimizer remembers, too."""
    wait_s: Annotated[float, msgspec.Meta(ge=0)]


class RankEntry(msgspec.Struct, frozen=True):
    """What it does: ask again, publish the first version of the run, load this version, or train: it takes part from now on."""

    what: Literal["wait", "found", "load", "train"]
    version: int = -1


class RankStay(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An elastic rank says that it is alive, and waits for news."""

    member: str
    ended_epoch: int
    """The last epoch of which it knows that it has ended without an update."""
    wait_s: Annotated[float, msgspec.Meta(ge=0)]


class RankNews(msgspec.Struct, frozen=True):
    """The last epoch that has ended without an update, and whether this rank is the one that speaks for all."""

    ended_epoch: int
    is_first: bool


class RankReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An elastic rank holds the sum over the groups at these positions, and there is nothing more for it."""

    member: str
    positions: list[int]
    said: bytes
    """For the other members."""
    wait_s: Annotated[float, msgspec.Meta(ge=0)]


class RankDecision(msgspec.Struct, frozen=True):
    """What it does: ask again, look for more groups, or add up with the members of this epoch."""

    what: Literal["wait", "more", "go"]
    epoch: int = 0
    members: list[str] = []
    without_state: list[str] = []
    said: list[bytes] = []


class RankReduced(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An elastic rank holds the sum of all members of the epoch, with this digest."""

    member: str
    epoch: int
    digest: str
    wait_s: Annotated[float, msgspec.Meta(ge=0)]


class RankVerdict(msgspec.Struct, frozen=True):
    """Whether that sum is the update, or the members add up again."""

    what: Literal["wait", "commit", "again"]


class RankFailed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An elastic rank could not add up with the members of the epoch."""

    member: str
    epoch: int
    cause: str


SAVE_DUTY = "save"
"""To write the trained model when the run is over."""


def publish_duty(version: int) -> str:
    return f"publish {version}"


class RankDuty(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that one rank does for all: whose it is, or that it is done."""

    member: str
    duty: str
    is_done: bool = False
    wait_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class RankDutyReply(msgspec.Struct, frozen=True):
    """Whether this rank does it now, another has done it, or it has to ask again."""

    what: Literal["wait", "yours", "done"]


class RankName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The wish to drain or remove the elastic rank of this name, or the news that its process has ended."""

    name: str


class RendezvousRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One operation on the keys by which the ranks of an epoch find each other."""

    epoch: int
    operation: Literal["set", "get", "add", "has", "delete", "compare_set", "num_keys"]
    keys: list[str] = []
    value: bytes = b""
    expected: bytes = b""
    amount: int = 0
    wait_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """With "get": so long it waits for keys that are not there."""


class RendezvousReply(msgspec.Struct, frozen=True):
    """`values` of the keys, None if they did not come in time; `number` is what was counted, or 1 for yes."""

    values: list[bytes] | None = None
    number: int = 0


class GroupsReply(msgspec.Struct, frozen=True):
    """The next groups of a rank, in hand-out order. `is_last`: nothing of what it asked about is still to come."""

    groups: list[Group]
    is_last: bool


def encode(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(body: bytes, kind: type[T]) -> T:
    """Decode and check a message; `msgspec.DecodeError` says what is wrong with it."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (UnicodeDecodeError, RecursionError) as error:  # msgspec lets these two through
        raise msgspec.DecodeError(str(error)) from error
