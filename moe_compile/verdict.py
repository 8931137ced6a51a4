"""Answers to "can this be done this way?": `OK`, or a `Reject` that says why not.

Both are values, so they can be collected, journalled and printed. A `Reject` is falsy, hence
`if verdict := provider.supports(...)` reads as it should; there is no bare False or None.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ok:
    """A truthy verdict."""

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return "ok"


@dataclass(frozen=True)
class Reject:
    """A falsy verdict.

    reason: a short, stable phrase that tests and users can match on ("ids differ between the linears").
    detail: the particulars (shapes, names, versions); may be empty.
    """

    reason: str
    detail: str = ""

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


OK = Ok()
Verdict = Ok | Reject


class Unproved(Exception):
    """Carries a Reject out of nested readers of one proof; caught where the proof was begun."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.verdict = Reject(reason, detail)
