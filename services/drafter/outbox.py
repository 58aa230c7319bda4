"""Answers on their way to their streams: gathered while a piece of work is done, delivered together."""

from __future__ import annotations

from services.drafter.commands import Answer, Stream


class Outbox:
    """Not thread-safe: the engine's thread only."""

    def __init__(self) -> None:
        self._answers: dict[int, list[Answer]] = {}
        self._streams: dict[int, Stream] = {}

    def put(self, stream: Stream, answer: Answer) -> None:
        self._streams[id(stream)] = stream
        self._answers.setdefault(id(stream), []).append(answer)

    def deliver(self) -> None:
        """Each stream gets its answers in one piece."""
        for key, answers in self._answers.items():
            self._streams[key].deliver(answers)
        self._answers.clear()
        self._streams.clear()
