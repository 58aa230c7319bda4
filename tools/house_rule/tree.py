"""A checkout as the house rule sees it: modules, folders, imports and pages, read once and never run."""

from __future__ import annotations

import ast
import importlib
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import grimp

ROOTS = ("moot", "services", "lab", "contrib")
GENERATED = "moot/v1"


@dataclass(frozen=True)
class Module:
    """One file. `name` is dotted, that of its package for an `__init__`; `path` is relative to the checkout."""

    name: str
    path: str
    text: str

    @cached_property
    def syntax(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def base_name(self) -> str:
        return self.path.rpartition("/")[2].removesuffix(".py")

    @property
    def is_package(self) -> bool:
        return self.base_name == "__init__"


@dataclass(frozen=True)
class Tree:
    """`modules` by dotted name and `folders` by path, both without generated code; `imports`: who imports whom,
    TYPE_CHECKING and functions included; `scripts`: modules that a pyproject.toml names; `standing`: small modules and
    why they stand; `pages`: path and text of the documents."""

    root: Path
    modules: Mapping[str, Module]
    folders: tuple[str, ...]
    imports: Mapping[str, frozenset[str]]
    scripts: frozenset[str]
    standing: Mapping[str, str]
    pages: Mapping[str, str]

    def modules_of(self, folder: str) -> list[Module]:
        """The modules that lie in `folder` itself, `__init__` and `__main__` left out."""
        return [one for one in self.modules.values() if one.folder == folder and not one.base_name.startswith("__")]

    def docstring_of(self, folder: str) -> str | None:
        """That of its `__init__`, empty without one; None where there is no `__init__`."""
        init = self.modules.get(folder.replace("/", "."))
        return None if init is None or not init.is_package else ast.get_docstring(init.syntax) or ""


def read(root: Path, standing: Mapping[str, str]) -> Tree:
    """The checkout in the folder `root`, with its exceptions."""
    roots = [name for name in ROOTS if any((root / name).rglob("*.py"))]
    paths = [path for name in roots for path in sorted((root / name).rglob("*.py"))]
    modules = {one.name: one for one in (_module(root, path) for path in paths) if one.folder != GENERATED}
    folders = {
        parent.relative_to(root).as_posix()
        for one in modules.values()
        for parent in (root / one.path).parents
        if parent.is_relative_to(root) and parent != root
    }
    imports = _imports(root, roots, modules)
    return Tree(root, modules, tuple(sorted(folders)), imports, _scripts(root), standing, _pages(root))


def first_sentence(docstring: str) -> str:
    """The first paragraph on one line."""
    return " ".join(docstring.partition("\n\n")[0].split())


def exports(tree: Tree, package: str, above: frozenset[str] = frozenset()) -> dict[str, str]:
    """What a package passes on: the name that it has in `__init__`, and the module that defines it.

    `above`: the packages that pass on what this one does; a circle of them passes on nothing.
    """
    if package in above:
        return {}
    found: dict[str, str] = {}
    for node in ast.walk(tree.modules[package].syntax):
        if isinstance(node, ast.ImportFrom):
            source = _source(tree.modules[package], node)
            for alias in node.names:
                if (origin := _origin(tree, source, alias.name, above | {package})) and origin != package:
                    found[alias.asname or alias.name] = origin
    return found


def importers(tree: Tree) -> dict[str, set[str]]:
    """Who uses each module. A package that only passes a name on does not; those who import it from there do."""
    found: dict[str, set[str]] = {name: set() for name in tree.modules}
    for name, module in tree.modules.items():
        used = {target for target in tree.imports.get(name, ()) if target in found} | _through_packages(tree, module)
        if module.is_package:
            passed_on = exports(tree, name)
            loaded = {node.id for node in ast.walk(module.syntax) if isinstance(node, ast.Name)}
            used -= set(passed_on.values()) - {passed_on[one] for one in loaded & set(passed_on)}
        for target in used - {name}:
            found[target].add(name)
    return found


def loaded_by_name(tree: Tree) -> set[str]:
    """Modules whose dotted name, or its last part after an f-string's `package.`, is a string somewhere in the code."""
    found: set[str] = set()
    for module in tree.modules.values():
        strings, prefixes = {""}, {""}
        for node in ast.walk(module.syntax):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.add(node.value.partition(":")[0])
            elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
                prefixes.add(str(node.values[0].value))
        found |= {f"{prefix}{string}" for prefix in prefixes for string in strings} & set(tree.modules)
    return found


def _module(root: Path, path: Path) -> Module:
    relative = path.relative_to(root)
    parts = relative.parent.parts if path.stem == "__init__" else relative.with_suffix("").parts
    return Module(".".join(parts), relative.as_posix(), path.read_text())


def _imports(root: Path, roots: list[str], modules: Mapping[str, Module]) -> dict[str, frozenset[str]]:
    packages = [name for name in roots if name in modules]
    if not packages:
        return {}
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    try:
        # No cache: it would be written into whatever folder the command was started in.
        graph = grimp.build_graph(*packages, cache_dir=None, exclude_type_checking_imports=False)
    finally:
        sys.path.remove(str(root))
    return {name: frozenset(graph.find_modules_directly_imported_by(name)) for name in graph.modules}


def _scripts(root: Path) -> frozenset[str]:
    paths = [root / "pyproject.toml", *(root / name / "pyproject.toml" for name in ROOTS)]
    projects = [tomllib.loads(path.read_text()).get("project", {}) for path in paths if path.exists()]
    groups = [
        group
        for project in projects
        for group in (project.get("scripts", {}), *project.get("entry-points", {}).values())
    ]
    return frozenset(value.partition(":")[0] for group in groups for value in group.values())


def _pages(root: Path) -> dict[str, str]:
    named = [root / "README.md", root / "CONTRIBUTING.md"]
    paths = [*(path for path in named if path.exists()), *sorted((root / "docs").rglob("*.md"))]
    return {path.relative_to(root).as_posix(): path.read_text() for path in paths}


def _source(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = [*module.folder.split("/"), ""][: -node.level]
    return ".".join([*parts, *filter(None, [node.module])])


def _origin(tree: Tree, source: str, name: str, above: frozenset[str]) -> str | None:
    """The module that `from source import name` is about."""
    if f"{source}.{name}" in tree.modules:
        return f"{source}.{name}"
    if source in tree.modules and tree.modules[source].is_package:
        return exports(tree, source, above).get(name, source)
    return source if source in tree.modules else None


def _through_packages(tree: Tree, module: Module) -> set[str]:
    return {origin for source, name in _names(tree, module) for origin in _origins(tree, source, name)}


def _names(tree: Tree, module: Module) -> Iterator[tuple[str, str]]:
    """Packages that `module` imports from and the name that it takes; `*` where it takes the package itself."""
    for node in ast.walk(module.syntax):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "*") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = _source(module, node)
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield (inner, "*") if inner in tree.modules else (source, alias.name)


def _origins(tree: Tree, source: str, name: str) -> set[str]:
    if source not in tree.modules or not tree.modules[source].is_package:
        return set()
    passed_on = exports(tree, source)
    return {origin for alias, origin in passed_on.items() if name in ("*", alias)}
