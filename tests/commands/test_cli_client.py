"""The client of the commands, against a real HTTP server: what arrives, and every way in which it can go wrong."""

from __future__ import annotations

import io
import json
import ssl
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moot.client import Client, RequestFailed, StreamedAnswer
from moot.commands import chat
from moot.rpc.tls import Identity
from moot.testing.made_certificates import Authority
from tests.answering import Answer, Request, answering


def chunk(text: str = "", token_ids: list[int] | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "token_ids": token_ids, "finish_reason": more.pop("finish", None)}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
SILENCE = b"the server says nothing for longer than anybody waits"


@dataclass
class Served:
    """A client of a server that gives the answers it was told to. `gone`: set once a caller has hung up."""

    client: Client
    received: list[Request]
    gone: threading.Event


@contextmanager
def serving(
    *answers: tuple[int, list[bytes]], tls: ssl.SSLContext | None = None, timeout_s: float = 10.0
) -> Iterator[Served]:
    left, received, gone = iter(answers), list[Request](), threading.Event()

    def sent(parts: list[bytes]) -> Generator[bytes, None, None]:
        try:
            for part in parts:
                if part is SILENCE:
                    gone.wait(10)
                yield part
        except GeneratorExit:
            gone.set()
            raise

    def answer(request: Request) -> Answer:
        received.append(request)
        status, parts = next(left)
        return Answer(sent(parts), status)

    with answering(answer, tls) as url:
        yield Served(Client(url, "key", timeout_s=timeout_s), received, gone)


def test_a_stream_arrives_piece_by_piece() -> None:
    """Text, ids, end and metrics are all kept; times never run backwards; comments and blank lines are no news."""
    metrics = {"speculative_decoding": {}}
    last = chunk("é", [3, 4], finish="stop", metrics=metrics)
    parts = [chunk(), chunk("a", [1]), b": ping\n\n", chunk("", [2]), last, DONE]
    with serving((200, parts)) as served:
        answer = StreamedAnswer()
        pieces = list(served.client.stream_chat({"messages": []}, answer))
        (request,) = served.received
    assert [(piece.text, piece.token_ids) for piece in pieces] == [("a", [1]), ("", [2]), ("é", [3, 4])]
    assert (answer.text, answer.token_ids) == ("aé", [1, 2, 3, 4])
    assert (answer.finish_reason, answer.metrics) == ("stop", metrics)
    assert sorted(piece.at for piece in pieces) == [piece.at for piece in pieces]
    assert request.headers["authorization"] == "Bearer key"
    assert json.loads(request.body) == {"messages": [], "stream": True}


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ((400, [b'{"error": {"message": "`n` is too large"}}']), "`n` is too large \\(HTTP 400\\)"),
        ((500, [b"<html>"]), "answered with HTTP 500"),
        ((200, [chunk("a", [1])]), "ended before the answer did"),
        ((200, [chunk("a", [1]), b"data: <html>\n\n", DONE]), "not JSON"),
        ((200, [chunk("a", [1]), b'data: {"error": {"message": "no verifier"}}\n\n']), "no verifier"),
    ],
    ids=["refused", "not ours", "cut off", "no JSON", "error event"],
)
def test_failures_are_said_in_one_sentence(answer: tuple[int, list[bytes]], sentence: str) -> None:
    """An answer that is not whole is never taken for one."""
    with serving(answer) as served, pytest.raises(RequestFailed, match=sentence):
        list(served.client.stream_chat({}, StreamedAnswer()))


def test_lines_end_where_the_protocol_says() -> None:
    """Not where a text has a line of its own kind, and also where the connection cuts a line in two."""
    text = "one\u2028two\u0085three\x0bfour\rfive"
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": "stop"}
    event = b"data: " + json.dumps({"choices": [choice]}, ensure_ascii=False).encode() + b"\r\n\r\n"
    with serving((200, [event[:30], event[30:-3], event[-3:], DONE])) as served:
        (piece,) = served.client.stream_chat({}, StreamedAnswer())
    assert piece.text == text


def test_a_silent_server_has_a_deadline() -> None:
    """Before the answer and inside it, and each is said in a sentence."""
    with serving((200, [chunk("a", [1]), SILENCE]), (200, [SILENCE]), timeout_s=0.5) as served:
        with pytest.raises(RequestFailed, match="the stream broke off"):
            list(served.client.stream_chat({}, StreamedAnswer()))
        with pytest.raises(RequestFailed, match="the answer broke off"):
            served.client.get("/metrics")
        served.gone.set()


def test_a_server_that_is_not_there_is_said() -> None:
    """With its address, whatever the system's own words are."""
    with serving() as served:
        pass
    with pytest.raises(RequestFailed, match=f"no answer from {served.client.url}: .*refused"):
        served.client.models()


def test_no_proxy_stands_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router is asked at its own address, whatever the environment says of other traffic."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving((200, [b"good"])) as served:
        assert served.client.get("/") == b"good"


def test_https_trusts_whom_the_environment_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An authority of one's own by SSL_CERT_FILE; a server that nobody vouches for is refused."""
    authority = Authority()
    leaf = authority.issue(Identity("serving", "moot", "router"), uris=(), dns_names=("localhost",))
    (tmp_path / "leaf.pem").write_bytes(leaf.cert + leaf.key)
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "leaf.pem")
    with serving((200, [b"good"]), tls=tls) as served:
        with pytest.raises(RequestFailed, match="certificate"):
            served.client.get("/")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        assert Client(served.client.url).get("/") == b"good"


def test_closing_the_iterator_hangs_up() -> None:
    """A stopped answer frees the server: the connection is closed, not drained."""
    endless = [chunk("x" * 1000, [1])] * 20_000
    with serving((200, endless)) as served:
        stream = served.client.stream_chat({}, StreamedAnswer())
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert served.gone.wait(10)


@pytest.mark.parametrize(("typed", "status"), [("one\ntwo\n", 1), ("two\n", 0)], ids=["one failed", "all answered"])
def test_a_piped_chat_says_by_its_status_whether_all_was_answered(
    typed: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody reads along: what failed is said, the next line is asked, and the exit status tells the script."""
    answers = [(200, [b'{"data": [{"id": "m"}]}']), (200, [chunk("good", [1], finish="stop"), DONE])]
    if status:
        answers.insert(1, (503, [b'{"error": {"message": "no verifier"}}']))
    with serving(*answers) as served:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        assert chat.run(["--url", served.client.url]) == status
    out, err = capsys.readouterr()
    assert out == "good\n"
    assert ("no verifier" in err) == bool(status)


def test_models_are_read() -> None:
    """The served names, in the server's order."""
    with serving((200, [b'{"data": [{"id": "b"}, {"id": "a"}]}'])) as served:
        assert served.client.models() == ["b", "a"]


@pytest.mark.parametrize("body", [b"<html>", b"{}", b'{"data": [{}]}', b"[1]", b'{"data": []}'])
def test_a_server_that_is_no_router_is_said(body: bytes) -> None:
    """Whatever answers at an address, the commands end with a sentence."""
    with serving((200, [body])) as served, pytest.raises(RequestFailed):
        served.client.models()
