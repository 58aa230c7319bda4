"""Rule 6: the default, the bound and the help text of an option stand once, in the dataclass of what uses them."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from house_rule.tables import MEASUREMENTS
from house_rule.tree import Module, Tree
from house_rule.violation import Violation

_NOTHING = {"None", "()", "''"}
"""Defaults that say only that nothing was given."""
_PLAIN = {*_NOTHING, "0", "1", "0.0", "1.0", "False", "True"}
"""Defaults that a dataclass without options may share with an option by chance."""

_CHECKS = ("__post_init__", "check_together")


@dataclass(frozen=True)
class Field:
    """One field of a dataclass. `default` and `help` are source text, empty without; only an option has a `help`."""

    name: str
    default: str
    help: str
    attributes: tuple[str, ...]
    """What the default takes from other objects: the fields that it may restate."""


@dataclass(frozen=True)
class Record:
    """A dataclass: `kin` are the classes that it inherits or nests, `bounds` what its checks ask of several fields."""

    name: str
    path: str
    fields: tuple[Field, ...]
    kin: frozenset[str]
    bounds: tuple[str, ...]

    @property
    def has_options(self) -> bool:
        return any(field.help for field in self.fields)


@dataclass(frozen=True)
class Statement:
    """A help text, a default or a bound, and the dataclass that it stands in."""

    sort: str
    text: str
    record: Record


def options_stand_once(tree: Tree) -> Iterator[Violation]:
    """Rule 6, of all dataclasses with options; defaults also of those without, which a config must not restate."""
    modules = [module for module in tree.modules.values() if not module.path.startswith(MEASUREMENTS)]
    records = [record for module in modules for record in _records(module)]
    yield from _copied(records)
    stated: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        for one in _statements(record):
            stated[one.sort, one.text].append(one.record)
    kin = {record.name: record.kin for record in records}
    for (sort, text), owners in stated.items():
        first, *others = sorted(owners, key=lambda record: not record.has_options)
        # A help text that a subclass says again stands twice; a default that it changes does not.
        apart = [one for one in others if sort == "help text" or not _related(kin, first.name, one.name)]
        if apart and first.has_options:
            places = ", ".join(f"{one.name} ({one.path})" for one in apart)
            says = f"the {sort} {text} also stands in {places}: state it once, and inherit or nest it"
            yield Violation(6, f"{first.path} {first.name}", says)


def _copied(records: list[Record]) -> Iterator[Violation]:
    known = {field.name for record in records for field in record.fields}
    for record in records:
        for field in record.fields:
            if field.help and (copied := [name for name in field.attributes if name in known]):
                says = f"its default restates {copied[0]} of another dataclass: nest that dataclass"
                yield Violation(6, f"{record.path} {record.name}.{field.name}", says)


def _statements(record: Record) -> Iterator[Statement]:
    for field in record.fields:
        if field.help:
            yield Statement("help text", field.help, record)
        # A constant is the one place of its value, however many defaults name it.
        is_constant = field.default.isidentifier() and field.default not in ("True", "False")
        if field.default and not is_constant and field.default not in (_NOTHING if field.help else _PLAIN):
            yield Statement("default", f"{field.name} = {field.default}", record)
    for bound in record.bounds if record.has_options else ():
        yield Statement("bound", bound, record)


def _related(kin: dict[str, frozenset[str]], one: str, other: str) -> bool:
    return other in _family(kin, one) or one in _family(kin, other)


def _family(kin: dict[str, frozenset[str]], name: str) -> set[str]:
    found: set[str] = set()
    todo = [name]
    while todo:
        new = kin.get(todo.pop(), frozenset()) - found
        found |= new
        todo += new
    return found


def _records(module: Module) -> Iterator[Record]:
    callers = _callers(module.syntax)
    for node in ast.walk(module.syntax):
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(one) for one in node.decorator_list):
            fields = [one for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
            named = [*node.bases, *(one.annotation for one in fields)]
            kin = frozenset(part.id for one in named for part in ast.walk(one) if isinstance(part, ast.Name))
            bounds = tuple(dict.fromkeys(_bounds(node)))
            yield Record(
                node.name, module.path, tuple(_field(one, callers) for one in fields), kin - {node.name}, bounds
            )


def _callers(syntax: ast.Module) -> frozenset[str]:
    """By which names a module calls what declares an option."""
    imported = [one for node in ast.walk(syntax) if isinstance(node, ast.ImportFrom) for one in node.names]
    return frozenset(one.asname or one.name for one in imported if one.name in ("option", "option_of"))


def _field(node: ast.AnnAssign, callers: frozenset[str]) -> Field:
    call, default, text = node.value, node.value, ""
    if isinstance(call, ast.Call):
        # field(...) and other calls make a value for each object: no default that could be stated twice.
        default = None
        if isinstance(call.func, ast.Name) and call.func.id in callers:
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            # option_of(POLICY, "quorum") states nothing but what it is given beside.
            is_taken = len(call.args) == 2
            default = call.args[0] if call.args and not is_taken else given.get("default")
            text = ast.unparse(given["help"]) if "help" in given else "" if is_taken else "''"
    attributes = [part.attr for part in ast.walk(default) if isinstance(part, ast.Attribute)] if default else []
    return Field(ast.unparse(node.target), ast.unparse(default) if default else "", text, tuple(attributes))


def _bounds(node: ast.ClassDef) -> Iterator[str]:
    """Comparisons with fields, and fields named to a function that refuses: `self.require_positive("port")`."""
    checks = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name in _CHECKS]
    for part in (part for check in checks for part in ast.walk(check)):
        if isinstance(part, ast.Compare) and "self." in (text := ast.unparse(part)):
            yield text
        elif isinstance(part, ast.Call) and ast.unparse(part.func).startswith("self."):
            for constant in (inner for argument in part.args for inner in ast.walk(argument)):
                if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                    yield f"{ast.unparse(part.func)}({constant.value!r})"
