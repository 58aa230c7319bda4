"""The rules of the house, one function each: from a tree to its violations, the one of options being a module."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from house_rule.circles import circles, shortest_circle
from house_rule.options import options_stand_once
from house_rule.tables import (
    CONTRACTS,
    CROWDED,
    KEEPS_OUT,
    PLUG_IN,
    PROPERTY_TEST,
    PUBLIC,
    ROOMS,
    ROUTER_ROOMS,
    Contract,
)
from house_rule.tree import Module, Tree, first_sentence, importers, loaded_by_name
from house_rule.violation import Violation

MAX_MODULES, MAX_LINES, SMALL_LINES, MAX_PAGE_BYTES = 12, 500, 80, 12_000

_SENTENCE_ENDS = re.compile(r"[.!?][)\"'`\]]*(?=\s|$)")
_CODE = re.compile(r"`[^`]*`")
_ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|etc|vs)\.(?=\s)")
_MADE_PARTS = re.compile(
    r"<!-- (?P<mark>[\w-]+): begin.*?<!-- (?P=mark): end -->|<!-- result [\w-]+ -->.*?<!-- end -->", re.DOTALL
)
SERVING = ("moot", "services")
_TWICE_ALLOWED = {"__init__", "__main__", "config", "servicer"}


def folders_hold_one_floor(tree: Tree) -> Iterator[Violation]:
    """Rule 1: at most 12 modules in a folder, and one sentence that says what the folder is."""
    for folder in tree.folders:
        number, docstring = len(tree.modules_of(folder)), tree.docstring_of(folder)
        if number > MAX_MODULES and folder not in CROWDED:
            yield Violation(1, folder, f"holds {number} modules, {MAX_MODULES} at most: divide it by subjects")
        if docstring is None:
            yield Violation(1, folder, "has no __init__.py: add one whose docstring says in one sentence what it is")
        elif (sentences := _sentences(docstring)) != 1:
            says = f"starts with {sentences} sentences" if docstring else "has no docstring"
            yield Violation(1, f"{folder}/__init__.py", f"{says}: one sentence, then an empty line, says what it is")


def modules_are_one_thought(tree: Tree) -> Iterator[Violation]:
    """Rule 2: neither longer than a thought, nor a part of one, nor without use."""
    users, started = importers(tree), _started(tree)
    standing = tree.standing
    for module in tree.modules.values():
        if module.lines > MAX_LINES:
            yield Violation(2, module.path, f"{module.lines} lines, {MAX_LINES} at most: divide it by thoughts")
        if module.base_name.startswith("__") or module.name in started:
            continue
        if not (used_by := users[module.name]):
            yield Violation(2, module.path, "nobody imports it: delete it, or let what needs it import it")
        elif len(used_by) == 1 and module.lines < SMALL_LINES and module.name not in standing:
            (user,) = used_by
            says = f"{module.lines} lines for {user} alone: fold it in, or say in SMALL_BUT_STANDING why it stands"
            yield Violation(2, module.path, says)
    for name, reason in standing.items():
        if says := _no_reason(tree, users, name, reason):
            yield Violation(2, f"SMALL_BUT_STANDING[{name!r}]", says)


def imports_are_no_circle(tree: Tree) -> Iterator[Violation]:
    """Rule 3: also none under TYPE_CHECKING or in functions."""
    for component in circles(tree.imports):
        path = " -> ".join(shortest_circle(tree.imports, component))
        among = f" (one of several among {len(component)} modules)" if path.count("->") < len(component) else ""
        yield Violation(3, component[0], f"{path}{among}: they are one thought, or one of the arrows is wrong")


def names_stand_once(tree: Tree) -> Iterator[Violation]:
    """Rule 4: base names of modules and names of public classes, in what serves."""
    modules, classes = defaultdict(list), defaultdict(list)
    for module in tree.modules.values():
        if not _within(module.name, SERVING):
            continue
        if module.base_name not in _TWICE_ALLOWED and module.folder != "moot/commands":
            modules[module.base_name].append(module.path)
        for node in module.syntax.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(module.path)
    for sort, places in (("module", modules), ("class", classes)):
        for name, paths in sorted(places.items()):
            if len(paths) > 1:
                says = f"a {sort} {name} is also in {', '.join(paths[1:])}: name all but one by what they are"
                yield Violation(4, paths[0], says)


def contracts_hold(tree: Tree, contracts: Iterable[Contract] = CONTRACTS) -> Iterator[Violation]:
    """Rule 5. A room that is not built yet keeps its contracts; a misspelled one, or half a router, does not."""
    first, *others = ROUTER_ROOMS
    for name in others if first in tree.modules else ():
        if name not in tree.modules:
            yield Violation(5, name, f"is missing while {first} is there: build it, or name the contracts' rooms anew")
    for contract in contracts:
        for name in contract.names:
            if name not in ROOMS:
                yield Violation(5, name, "a contract names it, and it is no room of the house: correct one of them")
        for importer, imported in sorted((a, b) for a, targets in tree.imports.items() for b in targets):
            if _within(imported, contract.targets) and _is_bound(importer, contract):
                yield Violation(5, importer, f"imports {imported}: {_only(contract)}")


def pages_are_short(tree: Tree) -> Iterator[Violation]:
    """Rule 7: what is written by hand; made pages and made parts do not count."""
    for path, text in tree.pages.items():
        if path.startswith("docs/results/") or text.startswith("<!-- made by "):
            continue
        if (size := len(_MADE_PARTS.sub("", text).encode())) > MAX_PAGE_BYTES:
            says = f"{size / 1000:.1f} kB by hand, {MAX_PAGE_BYTES // 1000} at most: divide it, or shorten it"
            yield Violation(7, path, says)


RULES: Mapping[int, Callable[[Tree], Iterator[Violation]]] = {
    1: folders_hold_one_floor,
    2: modules_are_one_thought,
    3: imports_are_no_circle,
    4: names_stand_once,
    5: contracts_hold,
    6: options_stand_once,
    7: pages_are_short,
}


def _sentences(docstring: str) -> int:
    paragraph = _ABBREVIATIONS.sub(r"\1", _CODE.sub("code", first_sentence(docstring)))
    # What follows the last end, if anything does, is a sentence without one.
    return len([part for part in _SENTENCE_ENDS.split(paragraph) if part.strip()])


def _started(tree: Tree) -> set[str]:
    """Modules that are begun with: run, named by pyproject.toml or in a string, or offered to code outside."""
    begun = {name for name, module in tree.modules.items() if _within(name, PUBLIC) or _is_run(module)}
    return begun | loaded_by_name(tree) | tree.scripts


def _is_run(module: Module) -> bool:
    guards = [ast.unparse(node.test) for node in module.syntax.body if isinstance(node, ast.If)]
    return any(guard.startswith("__name__ ==") for guard in guards)


def _no_reason(tree: Tree, users: Mapping[str, set[str]], name: str, reason: str) -> str:
    if name not in tree.modules:
        return "there is no such module: delete the entry"
    if tree.modules[name].lines >= SMALL_LINES or len(users[name]) != 1:
        return "it is no longer small and for one importer: delete the entry"
    if reason.startswith(PROPERTY_TEST):
        path = reason.removeprefix(PROPERTY_TEST)
        return "" if (tree.root / path).is_file() else f"there is no {path}: name the test, or fold the module in"
    if reason == PLUG_IN or (reason.startswith(KEEPS_OUT) and reason.removeprefix(KEEPS_OUT).strip()):
        return ""
    return f"{reason!r} is no reason: {PLUG_IN!r}, '{KEEPS_OUT}LIBRARY' or '{PROPERTY_TEST}PATH' is"


def _within(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _is_bound(importer: str, contract: Contract) -> bool:
    if contract.sources:
        return _within(importer, contract.sources)
    return not _within(importer, (*contract.allowed, *contract.targets))


def _only(contract: Contract) -> str:
    if contract.sources:
        return f"{', '.join(contract.sources)} knows none of {', '.join(contract.targets)}; hand over what it needs"
    return f"only {', '.join(contract.allowed)} may; move what is needed to where both may look"
