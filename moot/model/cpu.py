"""What the CPU can do, as Linux lists it."""

from __future__ import annotations

import functools


@functools.cache
def cpu_facts() -> dict[str, str]:
    """The first CPU's entries of /proc/cpuinfo; empty where there is none."""
    facts: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                name, _, value = line.partition(":")
                facts.setdefault(name.strip(), value.strip())
    except OSError:
        return {}
    return facts


def cpu_flags() -> frozenset[str]:
    return frozenset(cpu_facts().get("flags", "").split())
