"""Credentials: one secret per scope, sent as `Authorization: Bearer <secret>`, compared in constant time."""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

ADMIN = "admin"
"""Whoever may administrate may do everything."""


@dataclass(frozen=True)
class Credentials:
    """The secrets of a run or a server by scope. They never appear in a representation, hence in no log."""

    by_scope: Mapping[str, str] = field(repr=False)

    def __post_init__(self) -> None:
        if not all(self.by_scope.values()):
            raise ValueError("an empty credential would admit anybody")

    def __getitem__(self, scope: str) -> str:
        return self.by_scope[scope]

    def scopes_of(self, authorization: str) -> set[str]:
        """The scopes whose credential this header shows, in time that does not depend on what it holds."""
        given = authorization.encode(errors="surrogateescape")
        return {scope for scope, secret in self.by_scope.items() if hmac.compare_digest(given, bearer(secret).encode())}


def bearer(credential: str) -> str:
    """The value of the `Authorization` header."""
    return f"Bearer {credential}"
