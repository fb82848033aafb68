"""The modules of a base's two trees by name: parsed when asked for, names resolved without importing
anything.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from strata.branches import Branches, Facts, Site, branches_of

PACKAGE_TREES = {"vllm_ascend": "vllm-ascend", "vllm": "vllm"}
_MAX_HOPS = 8
_BY_NAME = ("sys.modules.get", "import_module", "importlib.import_module")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class TreeSource(Protocol):
    """What is needed of the trees (``strata.trees.Trees`` has it)."""

    def read(self, tree: str, file: str) -> str | None:
        """The text of a file, None where there is none."""

    def files(self, tree: str, suffixes: tuple[str, ...] = (".py",)) -> list[str]:
        """The relative paths of a tree's files."""


@dataclass(frozen=True)
class Place:
    """A name inside a file of a tree; ``qualname`` is empty for the module itself."""

    tree: str
    file: str
    qualname: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.tree, self.file, self.qualname


class Module:
    """One parsed module: its definitions, what its imports and aliases bind, its branches on this base."""

    def __init__(self, tree: str, file: str, name: str, text: str, node: ast.Module, facts: Facts) -> None:
        self.tree, self.file, self.name, self.text, self.node, self._facts = (
            tree,
            file,
            name,
            text,
            node,
            facts,
        )
        self._scoped: dict[tuple[str, ...], dict[str, str]] = {}

    @cached_property
    def branches(self) -> Branches:
        """Dead ranges and live statements on this base."""
        return branches_of(self.node, self._facts)

    @cached_property
    def definitions(self) -> dict[str, Definition]:
        """Live functions and classes by qualified name; of a name defined twice, the last live one."""
        found: dict[str, Definition] = {}
        for site in self.branches.live:
            if isinstance(site.node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found[".".join((*site.scope, site.node.name))] = site.node
        return found

    @cached_property
    def all_definitions(self) -> dict[str, list[Definition]]:
        """Functions and classes by qualified name in order of appearance, those in dead branches included."""
        found: dict[str, list[Definition]] = {}
        _collect(self.node.body, (), found)
        return found

    @cached_property
    def assigned(self) -> set[str]:
        """Names that live top-level or class-level statements assign, qualified."""
        found: set[str] = set()
        for site in self.branches.live:
            if any(".".join(site.scope[: n + 1]) not in self.classes for n in range(len(site.scope))):
                continue
            targets = (
                site.node.targets
                if isinstance(site.node, ast.Assign)
                else [site.node.target]
                if isinstance(site.node, ast.AnnAssign)
                else []
            )
            found |= {".".join((*site.scope, t.id)) for t in targets if isinstance(t, ast.Name)}
        return found

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """Live classes by qualified name."""
        return {n: d for n, d in self.definitions.items() if isinstance(d, ast.ClassDef)}

    @cached_property
    def bindings(self) -> dict[str, str]:
        """Top-level names bound by live imports or by plain aliases of such names, as dotted names."""
        return dict(self._bindings(()))

    def bindings_in(self, scope: tuple[str, ...]) -> dict[str, str]:
        """The same as seen from inside ``scope``: what the functions around it import or alias comes on
        top.
        """
        if not scope:
            return self.bindings
        if scope not in self._scoped:
            outer = self.bindings_in(scope[:-1])
            definition = self.definitions.get(".".join(scope))
            if isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = (*definition.args.posonlyargs, *definition.args.args, *definition.args.kwonlyargs)
                hidden = {a.arg for a in arguments}
                outer = {n: d for n, d in outer.items() if n not in hidden}
                outer |= dict(self._bindings(scope, outer))
            self._scoped[scope] = outer
        return self._scoped[scope]

    @cached_property
    def sites_by_scope(self) -> dict[tuple[str, ...], list[Site]]:
        """The live statements by the definitions around them."""
        found: dict[tuple[str, ...], list[Site]] = {}
        for site in self.branches.live:
            found.setdefault(site.scope, []).append(site)
        return found

    def _bindings(
        self, scope: tuple[str, ...], known: dict[str, str] | None = None
    ) -> Iterator[tuple[str, str]]:
        bound = dict(known or {})
        for site in self.sites_by_scope.get(scope, ()):
            node = site.node
            for name, dotted in self._imported(node):
                bound[name] = dotted
                yield name, dotted
            if (
                isinstance(node, ast.Assign)
                and len(node.targets) == 1
                and isinstance(node.targets[0], ast.Name)
            ):
                dotted = self.dotted(node.value, bound)
                if dotted and dotted != f"{self.name}.{node.targets[0].id}":
                    bound[node.targets[0].id] = dotted
                    yield node.targets[0].id, dotted

    def _imported(self, node: ast.stmt) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom):
            base = self.absolute(node)
            for alias in node.names:
                if alias.name != "*":
                    yield alias.asname or alias.name, f"{base}.{alias.name}"

    def absolute(self, node: ast.ImportFrom) -> str:
        """The dotted name of the module that a ``from`` import names, relative ones made absolute."""
        if not node.level:
            return node.module or ""
        package = self.name.split(".")
        if not self.file.endswith("/__init__.py"):
            package = package[:-1]
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, *([node.module] if node.module else [])])

    def dotted(self, expression: ast.expr, bound: dict[str, str]) -> str:
        """The dotted name that an expression stands for (``a.b.C``, ``sys.modules["a.b"]``), or an empty
        string.
        """
        if isinstance(expression, ast.Name):
            if expression.id in bound:
                return bound[expression.id]
            return f"{self.name}.{expression.id}" if expression.id in self.definitions else ""
        if isinstance(expression, ast.Attribute):
            head = self.dotted(expression.value, bound)
            return f"{head}.{expression.attr}" if head else ""
        module = None
        if isinstance(expression, ast.Call) and expression.args:
            if ast.unparse(expression.func) in _BY_NAME:
                module = expression.args[0]
        elif isinstance(expression, ast.Subscript) and ast.unparse(expression.value) == "sys.modules":
            module = expression.slice
        if isinstance(module, ast.Constant) and isinstance(module.value, str):
            return module.value
        return ""


def _collect(body: list[ast.stmt], scope: tuple[str, ...], found: dict[str, list[Definition]]) -> None:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.setdefault(".".join((*scope, node.name)), []).append(node)
            _collect(node.body, (*scope, node.name), found)
            continue
        for name in ("body", "orelse", "finalbody"):
            _collect(getattr(node, name, []), scope, found)
        for part in (*getattr(node, "handlers", []), *getattr(node, "cases", [])):
            _collect(part.body, scope, found)


class Modules:
    """All modules of the trees; every file is read and parsed at most once, and only when something asks for
    it.
    """

    def __init__(self, trees: TreeSource, version: str) -> None:
        self._trees = trees
        self.facts = Facts(version)
        self._texts: dict[tuple[str, str], str | None] = {}
        self._parsed: dict[tuple[str, str], Module | None] = {}
        self._files: dict[str, list[str]] = {}

    def text(self, tree: str, file: str) -> str | None:
        """The text of a file, None where there is none."""
        if (tree, file) not in self._texts:
            self._texts[tree, file] = self._trees.read(tree, file)
        return self._texts[tree, file]

    def files(self, tree: str) -> list[str]:
        """The Python files of the tree's package."""
        if tree not in self._files:
            package = next(p for p, t in PACKAGE_TREES.items() if t == tree) + "/"
            self._files[tree] = [f for f in self._trees.files(tree) if f.startswith(package)]
        return self._files[tree]

    def module(self, tree: str, file: str) -> Module | None:
        """The parsed module; None where the file is missing or is not Python that this interpreter reads."""
        key = (tree, file)
        if key not in self._parsed:
            text = self.text(tree, file)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # upstream's escapes are upstream's business
                    node = ast.parse(text.removeprefix("\ufeff")) if text is not None else None
            except (SyntaxError, ValueError):
                node = None
            self._parsed[key] = (
                Module(tree, file, module_name(file), text, node, self.facts)
                if text is not None and node
                else None
            )
        return self._parsed[key]

    def mentioning(self, tree: str, word: str) -> list[Module]:
        """The parsed modules of a tree whose text has ``word`` as a whole word."""
        pattern = re.compile(rf"\b{re.escape(word)}\b")
        found = []
        for file in self.files(tree):
            text = self.text(tree, file)
            if text is not None and word in text and pattern.search(text):
                module = self.module(tree, file)
                if module is not None:
                    found.append(module)
        return found

    def file_of(self, dotted: str) -> tuple[str, str] | None:
        """(tree, file) of a module by its dotted name."""
        tree = PACKAGE_TREES.get(dotted.split(".")[0])
        if tree is None:
            return None
        path = dotted.replace(".", "/")
        for file in (f"{path}.py", f"{path}/__init__.py"):
            if self.text(tree, file) is not None:
                return tree, file
        return None

    def locate(self, dotted: str) -> Place | None:
        """The longest prefix of a dotted name that is a module, and the rest inside it; None outside the
        trees.
        """
        parts = dotted.split(".")
        for cut in range(len(parts), 0, -1):
            found = self.file_of(".".join(parts[:cut]))
            if found:
                return Place(*found, ".".join(parts[cut:]))
        return None

    def origin(self, dotted: str) -> Place | None:
        """Where the thing that a dotted name leads to is defined: re-exports and aliases are followed.

        None outside the trees or where the trail is lost; a name that its module does not define keeps that
        module.
        """
        for _ in range(_MAX_HOPS):
            place = self.locate(dotted)
            if place is None or not place.qualname:
                return place
            module = self.module(place.tree, place.file)
            if module is None:
                return place
            head, _, rest = place.qualname.partition(".")
            if head in module.definitions or head not in module.bindings:
                return place
            dotted = module.bindings[head] + (f".{rest}" if rest else "")
        return None


def module_name(file: str) -> str:
    """``vllm_ascend/ops/__init__.py`` → ``vllm_ascend.ops``."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
