"""/docs: the description of the API as one page without scripts, made on the server; it loads nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
"""The content security policy that the page is sent with: a browser loads nothing, whatever stands in it."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #222; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; } h3 { margin-top: 1.5rem; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; vertical-align: top; padding: .3rem .6rem;
  border-bottom: 1px solid #ddd; } code { font: 13px/1.4 ui-monospace, monospace; }
@media (prefers-color-scheme: dark) { body { background: #1b1b1b; color: #ddd; } a { color: #8bf; } }
"""
_KEYS = "Where nothing else is said a path needs a key: `Authorization: Bearer KEY`."
_REFERENCE = "#/components/schemas/"
_BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "maxProperties": "at most {} entries",
}

Json = Mapping[str, Any]


def page(document: Json) -> str:
    """The HTML of an OpenAPI document of ours."""
    info = document["info"]
    title = f"{info['title']} {info['version']}"
    return "\n".join(
        (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1><p>{_prose(info['description'])}</p>",
            '<p><a href="/openapi.json">/openapi.json</a></p>',
            f"<p>{_prose(_KEYS if 'security' in document else 'No API key is asked for.')}</p>",
            *(
                _operation(path, method, operation)
                for path, methods in document["paths"].items()
                for method, operation in methods.items()
            ),
            "<h2>Objects</h2>",
            *(_object(name, schema) for name, schema in document["components"]["schemas"].items()),
            "</body></html>",
        )
    )


def _operation(path: str, method: str, operation: Json) -> str:
    body = operation.get("requestBody")
    asked = f"<p>Body: {_contents(body['content'])}</p>" if body else ""
    answers = (
        (f"<code>{status}</code>", _contents(answer["content"]), _prose(answer["description"]))
        for status, answer in operation["responses"].items()
    )
    head = f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{_prose(operation['summary'])}"
    key = " Needs no key." if operation.get("security") == [] else ""
    return f"{head}{key}</p>{asked}{_table(('status', 'answer', ''), answers)}"


def _contents(contents: Json) -> str:
    return "; ".join(f"{_type(content['schema'])} as <code>{escape(kind)}</code>" for kind, content in contents.items())


def _object(name: str, schema: Json) -> str:
    required = schema.get("required", ())
    rows = (
        (
            f"<code>{escape(field)}</code>{' (required)' if field in required else ''}",
            _type(about),
            f"<code>{escape(json.dumps(about['default']))}</code>" if "default" in about else "",
            _prose(about.get("description", "")),
        )
        for field, about in schema.get("properties", {}).items()
    )
    head = f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{_prose(schema.get("description", ""))}</p>'
    return head + _table(("field", "type", "default", ""), rows)


def _type(schema: Json) -> str:
    """A schema in words, as HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(_REFERENCE))
        return f'<a href="#{name}">{name}</a>'
    if several := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(map(_type, several))
    if "const" in schema or "enum" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values)
    kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    words = [" or ".join(kinds), *(text.format(schema[key]) for key, text in _BOUNDS.items() if key in schema)]
    if "items" in schema:
        words.append(f"each: {_type(schema['items'])}")
    values = (*schema.get("patternProperties", {}).values(), schema.get("additionalProperties"))
    words.extend(f"each value: {_type(inner)}" for inner in values if inner)
    if "contentSchema" in schema:
        words.append(f"each event: {_type(schema['contentSchema'])}")
    return ", ".join(words)


def _prose(text: str) -> str:
    """Words between backquotes are code."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return "<table><tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>" + "\n".join(lines) + "</table>"
