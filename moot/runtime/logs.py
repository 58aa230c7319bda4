"""Structured logs: one JSON object a line on standard error, with the request id of the task that wrote it.

No prompt, output text, token id or key is ever logged: values are names, numbers and ids of requests.
"""

from __future__ import annotations

import contextvars
import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any

request_id_var: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")
"""Set where a request is taken in; every log line of the task and its children carries it."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Fields: time (UTC), level, logger, service, thread, message, request_id, and whatever `extra` names."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "service": self._service,
            "thread": record.threadName,
            "message": record.getMessage(),
        }
        if request_id := request_id_var.get():
            entry["request_id"] = request_id
        entry |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info and record.exc_info[0]:
            # Frames only: the text of an exception may quote what a user wrote.
            entry["error"] = record.exc_info[0].__name__
            entry["traceback"] = [
                f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{line} {frame.f_code.co_name}"
                for frame, line in traceback.walk_tb(record.exc_info[2])
            ]
        return json.dumps(entry, default=str)


def setup_logging(service: str, level: str = "info") -> None:
    """Replace the root logger's handlers by one that writes JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("grpc", "httpx"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
