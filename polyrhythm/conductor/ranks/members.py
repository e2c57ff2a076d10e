"""Elastic ranks: who is there, who takes part in updates, and who gave no sign of life for too long. Pure."""

import re
from dataclasses import dataclass


@dataclass
class Member:
    """A process of the trainer. `id` is its own; its name may have been that of another process, which is lost."""

    id: str
    name: str
    seen_s: float
    can_write: bool = True
    """It has the run's folder, and can speak for all."""
    has_entered: bool = False
    """It holds the weights of the open step: no update is made without it."""
    has_state: bool = False
    """It holds what the optimizer remembers, and not only the weights."""
    is_leaving: bool = False
    """It leaves after the update that is being made."""

    @property
    def state(self) -> str:
        """As users see it."""
        return "leaving" if self.is_leaving else "training" if self.has_entered else "joining"


class Members:
    """The members by id. Their order is that of their names, so that a sum depends on who they are and not on who came first."""

    def __init__(self, lease_s: float):
        self.lease_s = lease_s
        self._present: dict[str, Member] = {}

    @property
    def present(self) -> list[Member]:
        return sorted(self._present.values(), key=lambda member: (by_number(member.name), member.id))

    @property
    def entered(self) -> list[Member]:
        return [member for member in self.present if member.has_entered]

    def get(self, id: str) -> Member | None:
        return self._present.get(id)

    def named(self, name: str) -> Member | None:
        return next((member for member in self._present.values() if member.name == name), None)

    def add(self, id: str, name: str, now_s: float, can_write: bool = True) -> Member:
        assert id not in self._present and self.named(name) is None
        self._present[id] = Member(id, name, now_s, can_write)
        return self._present[id]

    def remove(self, id: str) -> None:
        del self._present[id]

    def silent(self, now_s: float) -> list[Member]:
        """Those whose lease has expired."""
        return [member for member in self.present if now_s - member.seen_s > self.lease_s]


def by_number(name: str) -> tuple[str, int]:
    """trainer-10 comes after trainer-9."""
    match = re.fullmatch(r"(.*?)-?(\d{1,9})", name)
    return (match[1], int(match[2])) if match else (name, -1)
