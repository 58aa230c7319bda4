"""`moot serve`: everything on this machine, or one role of a distributed system."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

from moot.cli import COMMANDS
from moot.commands.common import say
from moot.commands.system import System, SystemConfig, running
from moot.config import load_config

ROLES = ("router", "verifier", "drafter")
WATCH_INTERVAL_S = 0.5


def run(argv: Sequence[str]) -> int:
    if argv and argv[0] in ROLES:
        # This process becomes the service: one process fewer, and signals go where they belong.
        os.execv(sys.executable, [sys.executable, "-m", f"services.{argv[0]}", *argv[1:]])
    config = load_config(
        SystemConfig,
        argv,
        prog="moot serve",
        description=f"{COMMANDS['serve']}. A role's own flags: moot serve ROLE --help",
        example="moot serve --demo\n  moot serve verifier --model ./my-model --port 7100",
    )
    stop = threading.Event()
    with running(config, "serve", say) as system:
        # Not before: until here an interrupt ends the start at once.
        _on_signal(stop)
        _introduce(system)
        while not stop.wait(WATCH_INTERVAL_S):
            system.supervisor.check()
        say("stopping")
    return 0


def _on_signal(stop: threading.Event) -> None:
    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():  # asked twice: do not wait for the drain
            raise KeyboardInterrupt
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)


def _introduce(system: System) -> None:
    model = system.client.models()[0]
    keyed = '\' -H "Authorization: Bearer $MOOT_API_KEY"' if system.client.has_key else "'"
    drafters = ", ".join(system.drafter_ids) or "none"
    print(
        f"""
Serving {model} at {system.url}  (drafters: {drafters})

  API        {system.url}/v1/chat/completions  (OpenAI's)
  metrics    {system.url}/metrics
  logs       {system.logs}

  curl {system.url}/v1/chat/completions -H 'Content-Type: application/json{keyed} \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
  moot chat --url {system.url}

Ctrl-C stops it.""",
        flush=True,
    )
