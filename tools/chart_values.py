"""What the Helm chart takes from elsewhere: options with their defaults, their schema, the README's table, rules and
dashboards (helm reads files inside the chart only).

python tools/chart_values.py            write them
python tools/chart_values.py --check    exit status 1 if they are not what the services and values.yaml say
"""

from __future__ import annotations

import json
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from generated import filled

from moot.core.options import FlatOption, flat_options
from moot.rpc.link import LinkConfig
from moot.rpc.tls import TlsOptions
from services.drafter.config import DrafterConfig
from services.router.config import RouterConfig
from services.verifier.config import VerifierConfig

CHART = Path(__file__).parents[1] / "deploy" / "helm" / "moot"
DEPLOY = CHART.parents[1]
RULES = [DEPLOY / "prometheus" / name for name in ("recording.yaml", "alerts.yaml")]
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))

TLS = frozenset(leaf.name for leaf in flat_options(TlsOptions))
LINK = frozenset(leaf.name for leaf in flat_options(LinkConfig))
"""Both ends must agree: they stand in `link`, once."""
PORTS = frozenset(("host", "port", "metrics_port", "ready_file"))
ROLES: dict[str, tuple[type, frozenset[str]]] = {
    "router": (
        RouterConfig,
        LINK
        | TLS
        | PORTS
        | {"model", "revision", "served_model_name", "grpc_port", "reuse_port", "verifiers", "drafters", "redis_url"}
        | {"store_prefix", "api_key", "api_keys_file", "drafter_priors", "redis_sentinels", "redis_sentinel_master"}
        | {"redis_sentinel_username", "redis_sentinel_password"},
    ),
    "verifier": (VerifierConfig, LINK | TLS | PORTS | {"model", "revision", "device"}),
    "drafterDefaults": (
        DrafterConfig,
        LINK | TLS | PORTS | {"kind", "drafter_id", "model", "tokenizer", "option"},
    ),
}
"""Each role's options, and those of them that the chart sets itself."""


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def options(role: str) -> list[FlatOption]:
    """Those that an operator may set under `config`."""
    config, owned = ROLES[role]
    return [leaf for leaf in flat_options(config) if leaf.name not in owned]


def defaults(role: str) -> dict[str, Any]:
    """As values.yaml has them."""
    return {camel(leaf.name): plain(leaf.default) for leaf in options(role)}


def plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def schema_of(hint: Any, leaf: FlatOption) -> dict[str, Any]:
    """JSON schema of one option."""
    described = {"description": leaf.option.help}
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        (inner,) = [arg for arg in args if arg is not type(None)]
        found = schema_of(inner, leaf)
        return {**found, "type": [found["type"], "null"]}
    if origin is tuple:
        return {"type": "array", "items": {"type": "string", "minLength": 1}, **described}
    names = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string"}
    found = {"type": names[hint], **described}
    if leaf.option.choices:
        found["enum"] = list(leaf.option.choices)
    if hint in (int, float):
        found["minimum"] = 0
    return found


def values_block(role: str) -> str:
    lines = ["  config:"]
    for leaf in options(role):
        help_text = " ".join(leaf.option.help.split())
        lines.append(f"    # -- {help_text[:1].upper()}{help_text[1:]}")
        written = json.dumps(plain(leaf.default))
        lines.append(f"    {camel(leaf.name)}: {written}")
    return "\n".join(lines) + "\n"


def values_text(text: str) -> str:
    for role in ROLES:
        begin, end = f"  # BEGIN config {role} (tools/chart_values.py)\n", f"  # END config {role}\n"
        head, rest = text.split(begin)
        text = head + begin + values_block(role) + end + rest.split(end)[1]
    return text


def schema_text() -> str:
    """values.schema.json: what schema.yaml says by hand, and the options."""
    schema = yaml.safe_load((CHART / "schema.yaml").read_text())
    for role in ROLES:
        schema["definitions"][f"{role}Config"] = {
            "type": "object",
            "additionalProperties": False,
            "properties": {camel(leaf.name): schema_of(leaf.hint, leaf) for leaf in options(role)},
        }
    return json.dumps(merged(schema, schema["definitions"]), indent=1, ensure_ascii=False) + "\n"


def merged(node: Any, definitions: dict[str, Any]) -> Any:
    """Draft 7 cannot close an object that is put together from others: its properties are written out."""
    if isinstance(node, list):
        return [merged(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    node = dict(node)
    for name in node.pop("x-merge", ()):
        node["properties"] = {**definitions[name]["properties"], **node.get("properties", {})}
    return {key: merged(value, definitions) for key, value in node.items()}


def options_text() -> str:
    """files/options.json: every option that a role's program has, for templates to ask."""
    names = {"drafterDefaults": "drafter"}
    listed = {names.get(role, role): sorted(leaf.name for leaf in flat_options(ROLES[role][0])) for role in ROLES}
    return json.dumps(listed, indent=1) + "\n"


KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z][\w-]*):(?: (?P<value>.*))?$")


def documented(text: str) -> Iterator[tuple[str, str]]:
    """Path and comment of every value that has a `# --` comment of its own, in order."""
    path: list[tuple[int, str]] = []
    comment = ""
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("# -- "):
            comment = stripped.removeprefix("# -- ")
        elif match := KEY.match(line):
            depth = len(match["indent"])
            path = [(other, key) for other, key in path if other < depth] + [(depth, match["key"])]
            if comment:
                yield ".".join(key for _, key in path), comment
            comment = ""
        elif stripped.startswith("#") and comment:
            comment += " " + stripped.removeprefix("#").strip()


def undocumented(values: Any, known: set[str], path: str = "") -> Iterator[str]:
    """Leaves that neither they themselves nor what they stand in has a comment for."""
    if path in known:
        return
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from undocumented(value, known, f"{path}.{key}" if path else key)
    else:
        yield path


def at(values: Any, path: str) -> Any:
    for key in path.split("."):
        values = values[key]
    return values


def table(text: str) -> str:
    values = yaml.safe_load(text)
    rows = list(documented(text))
    if missing := list(undocumented(values, {path for path, _ in rows})):
        raise SystemExit(f"values.yaml: no `# --` comment: {', '.join(missing)}")
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for path, comment in rows:
        default = json.dumps(at(values, path), ensure_ascii=False).replace("|", "\\|")
        lines.append(f"| `{path}` | `{default}` | {comment.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def made() -> dict[Path, str]:
    """Every file that this program writes, as it should be."""
    text = values_text((CHART / "values.yaml").read_text())
    return {
        CHART / "values.yaml": text,
        CHART / "values.schema.json": schema_text(),
        CHART / "files" / "options.json": options_text(),
        CHART / "README.md": filled((CHART / "README.md").read_text(), "values", table(text)),
        **{CHART / "files" / "rules" / path.name: path.read_text() for path in RULES},
        **{CHART / "files" / "dashboards" / path.name: path.read_text() for path in DASHBOARDS},
    }


def main(argv: list[str]) -> int:
    stale = [path for path, text in made().items() if not path.exists() or path.read_text() != text]
    if "--check" in argv:
        for path in stale:
            print(f"{path.name} is not what the services and values.yaml say: python tools/chart_values.py")
        return int(bool(stale))
    for path in stale:
        path.write_text(made()[path])
        print(f"wrote {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
