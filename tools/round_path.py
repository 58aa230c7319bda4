"""How many files one round goes through, and how often it moves from one to another: a profile hook on a running demo.

    python tools/round_path.py [--root CHECKOUT] [--tokens 300]

Starts `moot serve --demo` of the checkout, lets one streamed request run, and records in router and verifier, from the
middle of the answer on, which files of moot/ and services/ functions are called in. Prints files and moves a round.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

# Runs at the start of every process of the demo. The second signal writes what was seen between both.
HOOK = """
import json, os, signal, sys, threading
folder, root = os.environ["ROUND_PATH"], os.environ["ROUND_ROOT"]
parts = tuple(os.path.join(root, name) + os.sep for name in ("moot", "services"))
on, last, moves = False, {}, {}

def seen(frame, event, argument):
    if on and event == "call":
        path = frame.f_code.co_filename
        if path.startswith(parts):
            thread = threading.get_ident()
            if last.get(thread) != path:
                last[thread] = path
                moves[path] = moves.get(path, 0) + 1

def toggle(number, frame):
    global on
    if on:
        with open(os.path.join(folder, f"{os.getpid()}.json"), "w") as file:
            json.dump({os.path.relpath(path, root): count for path, count in moves.items()}, file)
        os.rename(file.name, file.name.replace(".json", ".done"))
    on = not on

if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGUSR1, toggle)
    sys.setprofile(seen)
    threading.setprofile(seen)
"""
PROMPT = "Write a long story about a lighthouse."
WAIT_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--tokens", type=int, default=300)
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(HOOK)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        environ = os.environ | {
            "PYTHONPATH": f"{folder}{os.pathsep}{root}",
            "ROUND_PATH": name,
            "ROUND_ROOT": str(root),
        }
        command = [sys.executable, "-m", "moot", "serve", "--demo", "--port", str(port)]
        system = subprocess.Popen(command, cwd=root, env=environ, stdout=subprocess.DEVNULL)
        try:
            rounds = watched_answer(f"http://127.0.0.1:{port}", arguments.tokens, system.pid)
            seen = gathered(folder)
        finally:
            system.send_signal(signal.SIGTERM)
            system.wait(60)
    moves = sum(count for counts in seen for count in counts.values())
    # What is touched less than every tenth round is not a round's own: a scrape, a heartbeat, a look at the panel.
    files = {path for counts in seen for path, count in counts.items() if count >= rounds / 10}
    print(f"{len(files)} files, {moves / rounds:.0f} moves a round ({rounds} rounds)")
    return 0


def watched_answer(url: str, num_tokens: int, system: int) -> int:
    """Streams one answer and switches the recording on in its middle; returns the chunks since then, one a round."""
    end = time.monotonic() + WAIT_S
    while not is_ready(url):
        if time.monotonic() > end:
            raise TimeoutError(f"{url} is not ready after {WAIT_S} s")
        time.sleep(0.5)
    body = {"model": "smollm2-135m-instruct", "stream": True, "max_tokens": num_tokens, "ignore_eos": True}
    body["messages"] = [{"role": "user", "content": PROMPT}]
    head = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), head)
    num_chunks, started_at = 0, 0
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        for line in answer:
            num_chunks += line.startswith(b"data: {")
            if not started_at and num_chunks == num_tokens // 4:
                started_at = num_chunks
                toggle(system)
            if started_at and num_chunks == started_at + num_tokens // 4:
                toggle(system)
                return num_chunks - started_at
    raise RuntimeError("the answer ended before enough was seen: give more --tokens")


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def toggle(system: int) -> None:
    """Tells router and verifier, children of the process `system`."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines()[1:]:
        pid, parent, args = line.split(None, 2)
        if int(parent) == system and ("services.router" in args or "services.verifier" in args):
            os.kill(int(pid), signal.SIGUSR1)


def gathered(folder: Path) -> list[dict[str, int]]:
    """What router and verifier have written."""
    end = time.monotonic() + WAIT_S
    while len(found := list(folder.glob("*.done"))) < 2:
        if time.monotonic() > end:
            raise TimeoutError("router and verifier have not written what they saw")
        time.sleep(0.1)
    return [json.loads(path.read_text()) for path in found]


if __name__ == "__main__":
    sys.exit(main())
