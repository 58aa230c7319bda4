"""The record of every request, in Redis or in memory.

`await open_store(...)` gives a RequestStore; its user closes it.
"""

from __future__ import annotations

from collections.abc import Callable

from services.router.store.config import StoreConfig
from services.router.store.degrade import DurableStore
from services.router.store.memory import MemoryStore

__all__ = ["DurableStore", "MemoryStore", "StoreConfig", "open_store"]


async def open_store(
    config: StoreConfig, on_change: Callable[[bool], None] = lambda up: None
) -> DurableStore | MemoryStore:
    """Open the store of records. Without a server they are in memory only. `on_change(up)` is told at start and at
    every change since."""
    if not config.keeps_records:
        return MemoryStore()
    store = DurableStore(config, on_change)
    await store.start()
    return store
