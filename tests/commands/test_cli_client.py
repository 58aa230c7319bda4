"""The client of the commands, against a real HTTP server: what arrives, and every way in which it can go wrong."""

from __future__ import annotations

import io
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from moot.client import Client, RequestFailed, StreamedAnswer
from moot.commands import chat
from moot.rpc.tls import Identity
from moot.testing.made_certificates import Authority


def chunk(text: str = "", token_ids: list[int] | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "token_ids": token_ids, "finish_reason": more.pop("finish", None)}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
SILENCE = b"the server says nothing for longer than anybody waits"


class Handler(BaseHTTPRequestHandler):
    answers: ClassVar[list[tuple[int, list[bytes]]]]
    received: ClassVar[list[tuple[dict[str, str], Any]]]
    gone: ClassVar[threading.Event]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append(({key.lower(): value for key, value in self.headers.items()}, json.loads(body)))
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        status, parts = self.answers.pop(0)
        self.send_response(status)
        self.end_headers()
        try:
            for part in parts:
                if part is SILENCE:
                    self.gone.wait(10)
                self.wfile.write(part)
                self.wfile.flush()
        except OSError:
            self.gone.set()

    def log_message(self, format: str, *args: object) -> None:
        """Tests are quiet."""


class Server(ThreadingHTTPServer):
    tls: ssl.SSLContext | None = None

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        return (self.tls.wrap_socket(connection, server_side=True) if self.tls else connection), address

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is no news."""


@contextmanager
def serving(
    *answers: tuple[int, list[bytes]], tls: ssl.SSLContext | None = None, timeout_s: float = 10.0
) -> Iterator[tuple[Client, type[Handler]]]:
    handler = type("Answers", (Handler,), {"answers": list(answers), "received": [], "gone": threading.Event()})
    server = Server(("127.0.0.1", 0), handler)
    server.tls = tls
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"https://localhost:{server.server_port}" if tls else f"http://127.0.0.1:{server.server_port}"
    try:
        yield Client(url, "key", timeout_s=timeout_s), handler
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_stream_arrives_piece_by_piece() -> None:
    """Text, ids, end and metrics are all kept; times never run backwards; comments and blank lines are no news."""
    metrics = {"speculative_decoding": {}}
    parts = [
        chunk(),
        chunk("a", [1]),
        b": ping\n\n",
        chunk("", [2]),
        chunk("é", [3, 4], finish="stop", metrics=metrics),
        DONE,
    ]
    with serving((200, parts)) as (client, handler):
        answer = StreamedAnswer()
        pieces = list(client.stream_chat({"messages": []}, answer))
        headers, body = handler.received[0]
    assert [(piece.text, piece.token_ids) for piece in pieces] == [("a", [1]), ("", [2]), ("é", [3, 4])]
    assert (answer.text, answer.token_ids, answer.finish_reason, answer.metrics) == (
        "aé",
        [1, 2, 3, 4],
        "stop",
        metrics,
    )
    assert sorted(piece.at for piece in pieces) == [piece.at for piece in pieces]
    assert headers["authorization"] == "Bearer key"
    assert body == {"messages": [], "stream": True}


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
    with serving(answer) as (client, _), pytest.raises(RequestFailed, match=sentence):
        list(client.stream_chat({}, StreamedAnswer()))


def test_lines_end_where_the_protocol_says() -> None:
    """Not where a text has a line of its own kind, and also where the connection cuts a line in two."""
    text = "one\u2028two\u0085three\x0bfour\rfive"
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": "stop"}
    event = b"data: " + json.dumps({"choices": [choice]}, ensure_ascii=False).encode() + b"\r\n\r\n"
    with serving((200, [event[:30], event[30:-3], event[-3:], DONE])) as (client, _):
        (piece,) = client.stream_chat({}, StreamedAnswer())
    assert piece.text == text


def test_a_silent_server_has_a_deadline() -> None:
    """Before the answer and inside it, and each is said in a sentence."""
    with serving((200, [chunk("a", [1]), SILENCE]), timeout_s=0.5) as (client, handler):
        with pytest.raises(RequestFailed, match="the stream broke off"):
            list(client.stream_chat({}, StreamedAnswer()))
        handler.gone.set()
    with serving((200, [SILENCE]), timeout_s=0.5) as (client, handler):
        with pytest.raises(RequestFailed, match="the answer broke off"):
            client.get("/metrics")
        handler.gone.set()


def test_a_server_that_is_not_there_is_said() -> None:
    """With its address, whatever the system's own words are."""
    with serving() as (client, _):
        pass
    with pytest.raises(RequestFailed, match=f"no answer from {client.url}: .*refused"):
        client.models()


def test_no_proxy_stands_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router is asked at its own address, whatever the environment says of other traffic."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving((200, [b"good"])) as (client, _):
        assert client.get("/") == b"good"


def test_https_trusts_whom_the_environment_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An authority of one's own by SSL_CERT_FILE; a server that nobody vouches for is refused."""
    authority = Authority()
    leaf = authority.issue(Identity("serving", "moot", "router"), uris=(), dns_names=("localhost",))
    (tmp_path / "leaf.pem").write_bytes(leaf.cert + leaf.key)
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "leaf.pem")
    with serving((200, [b"good"]), tls=tls) as (client, _):
        with pytest.raises(RequestFailed, match="certificate"):
            client.get("/")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        assert Client(client.url).get("/") == b"good"


def test_closing_the_iterator_hangs_up() -> None:
    """A stopped answer frees the server: the connection is closed, not drained."""
    endless = [chunk("x" * 1000, [1])] * 20_000
    with serving((200, endless)) as (client, handler):
        stream = client.stream_chat({}, StreamedAnswer())
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert handler.gone.wait(10)


@pytest.mark.parametrize(("typed", "status"), [("one\ntwo\n", 1), ("two\n", 0)], ids=["one failed", "all answered"])
def test_a_piped_chat_says_by_its_status_whether_all_was_answered(
    typed: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody reads along: what failed is said, the next line is asked, and the exit status tells the script."""
    answers = [(200, [b'{"data": [{"id": "m"}]}']), (200, [chunk("good", [1], finish="stop"), DONE])]
    if status:
        answers.insert(1, (503, [b'{"error": {"message": "no verifier"}}']))
    with serving(*answers) as (client, _):
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        assert chat.run(["--url", client.url]) == status
    out, err = capsys.readouterr()
    assert out == "good\n"
    assert ("no verifier" in err) == bool(status)


def test_models_are_read() -> None:
    """The served names, in the server's order."""
    with serving((200, [b'{"data": [{"id": "b"}, {"id": "a"}]}'])) as (client, _):
        assert client.models() == ["b", "a"]


@pytest.mark.parametrize("body", [b"<html>", b"{}", b'{"data": [{}]}', b"[1]", b'{"data": []}'])
def test_a_server_that_is_no_router_is_said(body: bytes) -> None:
    """Whatever answers at an address, the commands end with a sentence."""
    with serving((200, [body])) as (client, _), pytest.raises(RequestFailed):
        client.models()
