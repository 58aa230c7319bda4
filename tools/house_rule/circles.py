"""Circles of imports: which modules reach each other, and by what way."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping


def circles(imports: Mapping[str, frozenset[str]]) -> list[list[str]]:
    """The sets of modules that reach each other by imports, each sorted."""
    reached = {name: _reached(imports, name) for name in imports}
    components = {
        tuple(sorted(other for other in there if name in reached[other]))
        for name, there in reached.items()
        if name in there
    }
    return [list(component) for component in sorted(components)]


def _reached(imports: Mapping[str, frozenset[str]], start: str) -> set[str]:
    found: set[str] = set()
    todo = list(imports[start])
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += imports.get(name, ())
    return found


def shortest_circle(imports: Mapping[str, frozenset[str]], component: list[str]) -> list[str]:
    """From the component's first module back to it."""
    start = component[0]
    paths = deque([[start]])
    seen: set[str] = set()
    while paths:
        path = paths.popleft()
        for name in sorted(imports[path[-1]] & set(component)):
            if name == start:
                return [*path, start]
            if name not in seen:
                seen.add(name)
                paths.append([*path, name])
    raise ValueError(f"{start} is in no circle")
