"""`helm test`: the router is ready, refuses strangers where keys are set, and streams a completion to its end."""

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--timeout-s", type=float, default=120.0)
    parser.add_argument("--guarded", action="store_true", help="API keys are set")
    parser.add_argument("--key-file", type=Path, help="holds a key that may call")
    options = parser.parse_args()
    deadline = time.monotonic() + options.timeout_s
    key = options.key_file.read_text().strip() if options.key_file else ""
    wait_until_ready(options.url, deadline)
    if options.guarded:
        status = ask(f"{options.url}/v1/models", "", 10)[0]
        if status != 401:
            return f"a caller without a key got status {status}, not 401"
        if not key:
            print("strangers are refused; set tests.existingSecret to have a completion tested as well")
            return None
    return complete(options.url, options.model, key, deadline)


def wait_until_ready(url, deadline):
    while True:
        status = ask(f"{url}/readyz", "", 5)[0]
        if status == 200:
            return
        if time.monotonic() > deadline:
            sys.exit(f"the router is not ready: /readyz answers {status or 'nothing'}")
        time.sleep(1)


def complete(url, model, key, deadline):
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0, "stream": True}
    status, text = ask(f"{url}/v1/completions", key, max(5, deadline - time.monotonic()), body)
    if status != 200:
        return f"a completion was answered with status {status}: {text[:300]}"
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        return "the stream ended without [DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    if any("error" in chunk for chunk in chunks):
        return f"the stream carried an error: {events[-2][:300]}"
    written = "".join(choice.get("text", "") for chunk in chunks for choice in chunk.get("choices", []))
    if not written:
        return "the completion is empty"
    print(f"ok: {len(chunks)} chunks, {len(written)} characters")
    return None


def ask(url, key, timeout_s, body=None):
    """Status (0: no answer) and text."""
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout_s) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


if __name__ == "__main__":
    sys.exit(main())
