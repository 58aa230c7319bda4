"""An API server as far as discovery asks one: list and watch of EndpointSlices, with all that may go wrong."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.waiting import GIVE_UP_S

SERVICE_LABEL = "kubernetes.io/service-name"


def endpoint(address: str, **conditions: bool) -> dict[str, Any]:
    return {"addresses": [address], "conditions": conditions or {"ready": True, "serving": True, "terminating": False}}


def slice_of(service: str, name: str, *endpoints: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": name, "labels": {SERVICE_LABEL: service}}
    return {"metadata": metadata, "addressType": "IPv4", "endpoints": list(endpoints)}


def service_of(item: dict[str, Any]) -> str:
    return str(item["metadata"]["labels"][SERVICE_LABEL])


def concerns(event: Any, service: str) -> bool:
    """Whether a watch of `service` is told of `event`: one of no service in particular goes to all."""
    try:
        return service_of(event["object"]) == service
    except (KeyError, TypeError):
        return True


def kubeconfig(port: int) -> dict[str, Any]:
    """What kubectl would be given to reach a server on this port."""
    named = {"name": "test", "cluster": {"server": f"http://127.0.0.1:{port}"}}
    context = {"name": "test", "context": {"cluster": "test", "user": "test"}}
    users = [{"name": "test", "user": {"token": "abc"}}]
    config = {"clusters": [named], "contexts": [context], "users": users, "current-context": "test"}
    return {"apiVersion": "v1", "kind": "Config", **config}


class ApiServer:
    """List and watch of the EndpointSlices of one namespace, on a free loopback port; misbehaves when told to."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.slices: dict[str, dict[str, Any]] = {}
        self.events: list[tuple[int, dict[str, Any]]] = []
        self.version = 100
        self.cut = 0
        """Watches begun before this count are cut."""
        self.watches = 0
        self.lists = 0
        self.answers: list[Any] = []
        """What the next lists are answered with instead: a status, or a body."""
        self.refuse_watches = 0
        self.answers_watches = threading.Event()
        """While it is not set, watches are asked for and not answered."""
        self.answers_watches.set()
        self.server: ThreadingHTTPServer | None = None
        self.port = 0
        self.start()

    def start(self) -> None:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                outer.answer(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        """Nobody listens any more, and every connection is cut."""
        assert self.server is not None
        self.server.shutdown()
        self.server.server_close()
        self.cut_watches()

    def cut_watches(self) -> None:
        with self.condition:
            self.cut = self.watches
            self.condition.notify_all()

    def put(self, item: dict[str, Any], told: bool = True) -> None:
        """A slice is made or changed. `told`: whether watches hear of it."""
        with self.condition:
            name = item["metadata"]["name"]
            kind = "MODIFIED" if name in self.slices else "ADDED"
            self.slices[name] = item
            self._note(kind, item, told)

    def delete(self, name: str, told: bool = True) -> None:
        with self.condition:
            self._note("DELETED", self.slices.pop(name), told)

    def say(self, event: dict[str, Any]) -> None:
        """Any event to all watches."""
        with self.condition:
            self.version += 1
            self.events.append((self.version, event))
            self.condition.notify_all()

    def _note(self, kind: str, item: dict[str, Any], told: bool) -> None:
        self.version += 1
        if told:
            self.events.append((self.version, {"type": kind, "object": item}))
            self.condition.notify_all()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        url = urlsplit(request.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        assert url.path == "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices"
        label, _, service = query["labelSelector"].partition("=")
        assert label == SERVICE_LABEL
        if query.get("watch", "").lower() == "true":
            self._answer_watch(request, query, service)
        else:
            self._answer_list(request, service)

    def _answer_list(self, request: BaseHTTPRequestHandler, service: str) -> None:
        with self.condition:
            self.lists += 1
            self.condition.notify_all()
            special = self.answers.pop(0) if self.answers else None
            version = str(self.version)
            found = [item for item in self.slices.values() if service_of(item) == service]
            body: Any = {"metadata": {"resourceVersion": version}, "items": found}
        status = 200
        if isinstance(special, int):
            status, body = special, {"kind": "Status", "code": special}
        elif special is not None:
            body = special
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def _answer_watch(self, request: BaseHTTPRequestHandler, query: dict[str, str], service: str) -> None:
        assert query["allowWatchBookmarks"].lower() == "true"
        seen = int(query["resourceVersion"])
        with self.condition:
            self.watches += 1
            number = self.watches
            refused, self.refuse_watches = self.refuse_watches > 0, max(0, self.refuse_watches - 1)
            self.condition.notify_all()
        self.answers_watches.wait(GIVE_UP_S)
        if refused:
            request.send_response(410)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        ends = threading.Event()
        timer = threading.Timer(int(query["timeoutSeconds"]), lambda: (ends.set(), self._wake()))
        timer.daemon = True
        timer.start()
        try:
            while True:
                with self.condition:
                    fresh = [one for one in self.events if one[0] > seen and concerns(one[1], service)]
                    if not fresh and number > self.cut and not ends.is_set():
                        self.condition.wait()
                        continue
                    if number <= self.cut:
                        # In the middle of an event, as a connection that breaks does.
                        half = b'{"type": "ADDED", "obj'
                        request.wfile.write(b"%x\r\n%s\r\n" % (len(half), half))
                        request.close_connection = True
                        request.connection.close()
                        return
                for version, event in fresh:
                    line = json.dumps(event).encode() + b"\n"
                    request.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                    seen = version
                request.wfile.flush()
                if ends.is_set() and not fresh:
                    request.wfile.write(b"0\r\n\r\n")
                    return
        except OSError:
            request.close_connection = True
        finally:
            timer.cancel()

    def _wake(self) -> None:
        with self.condition:
            self.condition.notify_all()

    async def until(self, true: Callable[[ApiServer], bool]) -> None:
        def wait() -> bool:
            with self.condition:
                return self.condition.wait_for(lambda: true(self), GIVE_UP_S)

        assert await asyncio.to_thread(wait), "the API server was not asked in time"
