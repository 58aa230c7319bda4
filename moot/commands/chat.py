"""`moot chat`: talk to a running server. Answers stream; after each the command says where its tokens came from."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moot.client import AnswerOptions, Client, ClientOptions, RequestFailed, StreamedAnswer
from moot.config import load_config
from moot.core.options import Options, option, option_of, part

HELP = "/new starts over, /metrics switches the numbers on or off, /quit (or Ctrl-D) leaves; Ctrl-C stops an answer"


@dataclass(frozen=True, kw_only=True)
class ChatConfig(Options):
    server: ClientOptions = part(ClientOptions)
    model: str | None = option(None, help="served model name (none: the first that the server names)")
    system: str | None = option(None, help="system message")
    temperature: float = option(0.7, help="0 is greedy")
    seed: int | None = option(None, help="the same seed, messages and parameters give the same answers")
    max_tokens: int = option_of(AnswerOptions, "max_tokens", default=512)
    num_speculative_tokens: int | None = option(None, help="K of every round; 0: no drafting; none: the server decides")
    metrics: bool = option(True, help="show after each answer where its tokens came from")


def run(argv: Sequence[str]) -> int:
    config = load_config(
        ChatConfig,
        argv,
        prog="moot chat",
        description=f"Talk to a running server. {HELP}.",
        example="moot chat --temperature 0",
    )
    client = Client(config.server.url, config.server.api_key)
    model = config.model or client.models()[0]
    show_metrics = config.metrics
    messages = _opening(config)
    print(f"{model} at {config.server.url}. {HELP}.", file=sys.stderr)
    interactive, num_failed = sys.stdin.isatty(), 0
    for line in _lines(interactive):
        match line.strip():
            case "":
                continue
            case "/quit":
                break
            case "/new":
                messages = _opening(config)
            case "/metrics":
                show_metrics = not show_metrics
                print(f"numbers {'on' if show_metrics else 'off'}", file=sys.stderr)
            case text:
                messages.append({"role": "user", "content": text})
                answer = _ask(client, _body(config, model, messages))
                if answer is None:
                    messages.pop()
                    num_failed += 1
                    continue
                messages.append({"role": "assistant", "content": answer.text})
                if show_metrics and answer.metrics:
                    print(origin(answer.metrics["speculative_decoding"]), file=sys.stderr)
    # Somebody at a terminal has read of it, and may have asked again; a script has the exit status.
    return 1 if num_failed and not interactive else 0


def origin(speculative: dict[str, Any]) -> str:
    """One sentence on where an answer's tokens came from, from the API's `metrics.speculative_decoding`."""
    rounds, drafted = speculative["num_drafts"], speculative["num_draft_tokens"]
    accepted = speculative["num_accepted_tokens"]
    if not drafted:
        return f"  [{rounds} rounds, nothing drafted]"
    parts = [
        f"{name} won {one['num_votes_won']}, {one['num_accepted_tokens']} of {one['num_proposed_tokens']} right"
        for name, one in speculative["drafters"].items()
    ]
    return (
        f"  [{rounds} rounds, {accepted} of {drafted} drafted tokens accepted ({accepted / drafted:.0%}), "
        f"{1 + accepted / max(rounds, 1):.2f} tokens a round; {'; '.join(parts)}]"
    )


def _opening(config: ChatConfig) -> list[dict[str, str]]:
    return [{"role": "system", "content": config.system}] if config.system else []


def _body(config: ChatConfig, model: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    optional = {"seed": config.seed, "num_speculative_tokens": config.num_speculative_tokens}
    return {
        "model": model,
        "messages": messages,
        "temperature": config.temperature,
        "max_tokens": config.max_tokens,
        "include_metrics": True,
        **{name: value for name, value in optional.items() if value is not None},
    }


def _ask(client: Client, body: dict[str, Any]) -> StreamedAnswer | None:
    """Print the answer while it comes. None: it failed, and that has been said."""
    answer = StreamedAnswer()
    try:
        for piece in client.stream_chat(body, answer):
            print(piece.text, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", file=sys.stderr)
        return answer
    except RequestFailed as error:
        print(f"\nmoot: {error}", file=sys.stderr)
        return None
    print()
    return answer


def _lines(interactive: bool) -> Iterator[str]:
    while True:
        try:
            yield input("> " if interactive else "")
        except EOFError:
            return
