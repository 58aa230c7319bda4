"""An API server as far as helm needs one to install: it says which kinds there are, and keeps what it is given.

Nothing runs, no default is filled in and nothing is checked: what the objects say is looked at by other tests.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet

from tests.answering import Answer, Request, answering

Object = dict[str, Any]
VERSION = {"major": "1", "minor": "33", "gitVersion": "v1.33.0", "platform": "linux/amd64"}
KINDS = {
    "v1": "ConfigMap Secret Service ServiceAccount Pod PersistentVolumeClaim",
    "apps/v1": "Deployment StatefulSet",
    "rbac.authorization.k8s.io/v1": "Role RoleBinding",
    "networking.k8s.io/v1": "NetworkPolicy Ingress",
    "policy/v1": "PodDisruptionBudget",
    "autoscaling/v2": "HorizontalPodAutoscaler",
    "keda.sh/v1alpha1": "ScaledObject",
    "monitoring.coreos.com/v1": "PodMonitor ServiceMonitor PrometheusRule",
    "gateway.networking.k8s.io/v1": "HTTPRoute",
    "cert-manager.io/v1": "Certificate",
}
"""What a cluster with everything that the chart can use knows of; all of it lives in namespaces."""


RECORD = "sh.helm.release"


def plural(kind: str) -> str:
    name = kind.lower()
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}es" if name.endswith("ss") else f"{name}s"


def resources(version: str) -> Object:
    """What one API version has, as discovery says it."""
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    listed = [
        {"name": plural(kind), "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
        for kind in KINDS[version].split()
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": listed}


def groups() -> Object:
    found = []
    for version in KINDS:
        group, _, number = version.rpartition("/")
        if group:
            named = {"groupVersion": version, "version": number}
            found.append({"name": group, "versions": [named], "preferredVersion": named})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": found}


def merged(old: Object, patch: Object) -> Object:
    """Maps merge, null removes. Lists of a strategic patch merge by key, which nothing here needs: an error."""
    found = dict(old)
    for key, value in patch.items():
        if key.startswith("$") or (isinstance(value, list) and value):
            raise ValueError(f"a patch of lists: {key}")
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key) or {}, value) if isinstance(value, dict) else value
    return found


def failure(code: int, reason: str, message: str) -> tuple[int, Object]:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
    return code, {**status, "reason": reason, "code": code, "message": message}


class ObjectServer:
    """`objects`: by path; `written`: method and path of each change, in order."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.written: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._fixed: dict[str, Object] = {
            "/version": VERSION,
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/api/v1": resources("v1"),
            "/apis": groups(),
            **{f"/apis/{version}": resources(version) for version in KINDS if "/" in version},
        }

    def of_release(self) -> dict[tuple[str, str], Object]:
        """By kind and name, without helm's own records."""
        found = {(one["kind"], one["metadata"]["name"]): one for one in self.objects.values()}
        return {key: one for key, one in found.items() if not key[1].startswith(RECORD)}

    def records(self) -> list[bytes]:
        """Helm's own: what its Secrets hold."""
        secrets = [one["data"] for one in self.objects.values() if one["metadata"]["name"].startswith(RECORD)]
        return [base64.b64decode(data["release"]) for data in secrets]

    def respond(self, request: Request) -> Answer:
        merges = "merge-patch" in request.headers.get("content-type", "")
        with self._lock:
            status, found = self._answer(request.method, request.path, read_object(request.body), merges)
        return Answer(json.dumps(found).encode(), status, {"Content-Type": "application/json"})

    def _answer(self, method: str, url: str, body: Object | None, merges: bool) -> tuple[int, Object]:
        """Status and body. `merges`: a patch is what differs, not the whole object."""
        parts = urlsplit(url)
        path = parts.path.rstrip("/")
        if method == "GET" and path in self._fixed:
            return 200, self._fixed[path]
        if method != "GET":
            self.written.append((method, path))
        match method:
            case "GET" if path in self.objects:
                return 200, self.objects[path]
            case "GET" if path.rpartition("/")[2] in self._plurals:
                return 200, self._list(path, parse_qs(parts.query).get("labelSelector", [""])[0])
            case "POST":
                assert body is not None
                return self._put(f"{path}/{body['metadata']['name']}", body, fresh=True)
            case "PUT" | "PATCH":
                assert body is not None
                return self._put(path, merged(self.objects[path], body) if merges else body)
            case "DELETE" if path in self.objects:
                return 200, self.objects.pop(path)
        return failure(404, "NotFound", f"{path} not found")

    @property
    def _plurals(self) -> set[str]:
        return {plural(kind) for kinds in KINDS.values() for kind in kinds.split()}

    def _put(self, path: str, body: Object, fresh: bool = False) -> tuple[int, Object]:
        """A whole object: one that is created, replaced, or applied by its only owner."""
        if fresh and path in self.objects:
            return failure(409, "AlreadyExists", f"{path} exists")
        status = 200 if path in self.objects else 201
        self.objects[path] = body
        return status, body

    def _list(self, path: str, selector: str) -> Object:
        wanted = [part.partition("=")[::2] for part in selector.split(",") if part]
        items = [
            one
            for key, one in self.objects.items()
            if key.rpartition("/")[0] == path
            and all(one["metadata"].get("labels", {}).get(name) == value for name, value in wanted)
        ]
        kind = items[0]["kind"] if items else "Secret"
        return {"kind": f"{kind}List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items}


PROTOBUF = b"k8s\0"


def read_object(sent: bytes) -> Object | None:
    """YAML, JSON, or what helm's own records come in: a Secret (or the options of a deletion) as protobuf."""
    if not sent.startswith(PROTOBUF):
        found: Object | None = yaml.safe_load(sent)
        return found
    envelope = dict(_fields(sent[len(PROTOBUF) :]))
    (version, kind), secret = dict(_fields(envelope[1])).values(), list(_fields(envelope.get(2, b"")))
    if kind != b"Secret":
        return None
    metadata = list(_fields(dict(secret)[1]))
    labels = {key.decode(): value.decode() for key, value in _entries(metadata, 11)}
    data = {key.decode(): base64.b64encode(value).decode() for key, value in _entries(secret, 2)}
    named = {"name": dict(metadata)[1].decode(), "labels": labels}
    return {"apiVersion": version.decode(), "kind": "Secret", "metadata": named, "data": data}


def _entries(message: list[tuple[int, bytes]], number: int) -> Iterator[tuple[bytes, bytes]]:
    for field, entry in message:
        if field == number:
            pair = dict(_fields(entry))
            yield pair[1], pair.get(2, b"")


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each field that has bytes; numbers are passed over."""
    for field in UnknownFieldSet(Empty.FromString(message)):
        if field.wire_type == 2:
            yield field.field_number, field.data


@contextmanager
def object_server(folder: Path) -> Iterator[tuple[ObjectServer, Path]]:
    """The server on a free loopback port, and a kubeconfig in `folder` that names it."""
    objects = ObjectServer()
    with answering(objects.respond) as url:
        named = {"name": "test", "cluster": {"server": url}}
        context = {"name": "test", "context": {"cluster": "test", "user": "test"}}
        config = {"clusters": [named], "contexts": [context], "users": [{"name": "test", "user": {}}]}
        path = folder / "kubeconfig"
        path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **config, "current-context": "test"}))
        yield objects, path
