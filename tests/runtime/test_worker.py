"""One thread computes: calls run in order, on it, and their errors reach who asked."""

from __future__ import annotations

import threading

import pytest

from moot.runtime.worker import WorkerThread


def test_calls_run_in_order_on_one_thread_that_ends_after_finish() -> None:
    """Whoever loads the model is who computes with it; after `finish` the thread is gone."""
    worker = WorkerThread("compute")
    assert not worker.is_alive
    seen: list[tuple[int, int]] = []
    futures = [worker.submit(lambda n=n: seen.append((n, threading.get_ident()))) for n in range(5)]
    for future in futures:
        future.result(timeout=10)
    assert [n for n, _ in seen] == [0, 1, 2, 3, 4]
    assert len({thread for _, thread in seen}) == 1
    assert threading.get_ident() not in {thread for _, thread in seen}
    worker.finish()
    worker.join(10)
    assert not worker.is_alive


def test_an_error_goes_to_whoever_asked_and_the_thread_goes_on() -> None:
    """A model that cannot be loaded is an error of the start, not a dead thread that nobody notices."""
    worker = WorkerThread("compute")

    def fail() -> None:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        worker.submit(fail).result(timeout=10)
    assert worker.submit(lambda: 7).result(timeout=10) == 7
    worker.finish()
    worker.join(10)


def test_a_worker_without_calls_can_be_joined() -> None:
    """Stopping what never started is no error."""
    worker = WorkerThread("compute")
    worker.finish()
    worker.join(0.1)
    assert not worker.is_alive
