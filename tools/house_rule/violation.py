"""One place that does not keep a rule of the house."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """`place` is a path, a module or an entry of a table; `says` is what is wrong there and what mends it."""

    rule: int
    place: str
    says: str

    def __str__(self) -> str:
        return f"rule {self.rule}: {self.place}: {self.says}"
