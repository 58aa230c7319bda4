"""Writing a message, and learning the moment in which gRPC has it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any


class Handed(Generator[Any, Any, None]):
    """`await Handed(call.write(message), note)`: as `await call.write(message)`, and `note()` is called on the way.

    gRPC puts a message on the connection within the call that takes it, unless the peer's window is full; that it has
    done so it tells through its own thread and the event loop, after everything else that the loop has to do. `note`
    is called when the first part is done. Not when it fails.
    """

    __slots__ = ("_note", "_steps")

    def __init__(self, write: Coroutine[Any, Any, None], note: Callable[[], None]) -> None:
        self._steps: Generator[Any, Any, None] = write.__await__()
        self._note: Callable[[], None] | None = note

    def __await__(self) -> Generator[Any, Any, None]:
        return self

    def send(self, value: Any) -> Any:
        try:
            waits_for = self._steps.send(value)
        except StopIteration:
            self._tell()
            raise
        self._tell()
        return waits_for

    def throw(self, error: Any, value: Any = None, trace: Any = None) -> Any:
        return self._steps.throw(error if value is None else value)

    def _tell(self) -> None:
        note, self._note = self._note, None
        if note is not None:
            note()
