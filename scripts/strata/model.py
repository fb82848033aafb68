"""What a patch says of itself: typed models of ``patch.yaml`` and ``series.yaml``."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from strata.config import Strict

DEFAULT_TREE = "vllm-ascend"
Kind = Literal["perf", "fix", "build", "runtime"]
VERBS = (
    "replace", "delete", "before", "after", "wrap", "add_item", "add_param", "decorate", "prepend", "append", "import",
)  # fmt: skip
_AT = re.compile(r"^(?:(?P<tree>[a-z][a-z0-9-]*)::)?(?P<file>[^:\s][^:]*)(?:::(?P<symbol>\S+))?$")
_PATCH_ID = re.compile(r"^[a-z0-9]+(-[a-z0-9]+)*$")


class At(Strict):
    """A place: ``[tree::]file[::qualified name]``.

    tree: ``vllm-ascend`` (the default) or ``vllm``; file: path relative to that tree's root, with ``/``;
    symbol: qualified name with ``#n``, ``.setter`` or ``<module>`` where needed; None for the whole file.
    """

    tree: str = DEFAULT_TREE
    file: str
    symbol: str | None = None

    @classmethod
    def parse(cls, text: str) -> At:
        """Read the written form. ValueError where it has another shape or leaves its tree."""
        head, _, rest = text.partition("::")
        match = _AT.match(text)
        # "a/b.py::X" has a path before its first "::"; "vllm::a/b.py" has a bare tree name
        if not match or (rest and "/" not in head and "." not in head and head not in ("vllm", "vllm-ascend")):
            raise ValueError(f"{text!r} is not [tree::]file[::qualified name] (trees: vllm-ascend, vllm)")
        file = match["file"]
        # one file has one name: two edits of a file under two names would not see each other
        if any(part in ("", ".", "..") for part in file.split("/")) or "\\" in file or not file.isprintable():
            raise ValueError(f"{file!r} must be a path inside the tree, without '..', '.' or '//'")
        return cls(tree=match["tree"] or DEFAULT_TREE, file=file, symbol=match["symbol"])

    def __str__(self) -> str:
        tree = "" if self.tree == DEFAULT_TREE else f"{self.tree}::"
        return f"{tree}{self.file}" + (f"::{self.symbol}" if self.symbol else "")

    @property
    def path(self) -> tuple[str, str]:
        """(tree, file): the key under which plans keep a file."""
        return self.tree, self.file


def _parse_at(value: Any) -> Any:
    return At.parse(value) if isinstance(value, str) else value


AtField = Annotated[At, BeforeValidator(_parse_at)]


def _some_text(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return value


Text = Annotated[str, AfterValidator(_some_text)]


def _is_release(value: str) -> str:
    try:
        Version(value)
    except InvalidVersion:
        raise ValueError(f"{value!r} is no release: an edit for it would never be made") from None
    return value


Release = Annotated[str, AfterValidator(_is_release)]


class Switch(Strict):
    """The run-time switch of a patch; ``default: off`` where it is not always correct or not always a gain."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    default: bool


class Evidence(Strict):
    """A figure and where it comes from. ``verified_here`` is true only for figures measured by this project."""

    source: Text
    model: str | None = None
    metric: Text
    before: float | str | None = None
    after: float | str | None = None
    note: str | None = None
    verified_here: bool


class AddItem(Strict):
    """An item for an argument list, tuple, list, set, dict or token list; place: first, last, before/after another."""

    value: Text
    place: str = "last"


class AddParam(Strict):
    """A parameter for the function named by ``at``; place: ``first``, ``last``, ``keyword`` or ``after <name>``."""

    name: Text
    annotation: str | None = None
    default: str | None = None
    place: str = "last"


class Decorate(Strict):
    """A decorator for the function or class named by ``at``; place: ``outer`` or ``inner``."""

    with_: Text = Field(alias="with")
    place: Literal["outer", "inner"] = "outer"


class Edit(Strict):
    """One change of one place. Exactly one verb (or ``diff``); see docs/patches.md for the grammar."""

    at: AtField | None = None
    for_: Annotated[tuple[Release, ...], Field(min_length=1)] | None = Field(default=None, alias="for")
    on: str | None = None
    find: Text | None = None
    in_: Text | None = Field(default=None, alias="in")
    next_to: Text | None = None
    nth: Annotated[int, Field(ge=1)] | None = None
    count: Annotated[int, Field(ge=1)] = 1
    between: tuple[Text, Text] | None = None
    local: bool = False

    replace: Text | None = None
    delete: Literal[True] | None = None
    before: Text | None = None
    after: Text | None = None
    wrap: Text | None = None
    add_item: AddItem | None = None
    add_param: AddParam | None = None
    decorate: Decorate | None = None
    prepend: Text | None = None
    append: Text | None = None
    import_: Text | None = Field(default=None, alias="import")
    diff: Text | None = None

    @property
    def verb(self) -> str:
        """The one verb that is set, or ``diff``."""
        return next(v for v in (*VERBS, "diff") if getattr(self, "import_" if v == "import" else v) is not None)

    @model_validator(mode="after")
    def _one_verb(self) -> Edit:
        given = [v for v in (*VERBS, "diff") if getattr(self, "import_" if v == "import" else v) is not None]
        if len(given) != 1:
            raise ValueError(f"an edit has exactly one verb of {', '.join((*VERBS, 'diff'))}; found {given or 'none'}")
        verb = given[0]
        if verb == "diff":
            if self.at is not None or self.find is not None:
                raise ValueError("a diff edit has no 'at' or 'find': the places are in the .patch file")
            return self
        if self.at is None:
            raise ValueError(f"'{verb}' needs 'at'")
        needs_find = verb in ("replace", "delete", "before", "after", "wrap", "add_item")
        if needs_find and self.find is None and not (verb == "add_item" and (self.between or self.at.symbol)):
            raise ValueError(f"'{verb}' needs 'find'")
        if not needs_find and self.find is not None:
            raise ValueError(f"'{verb}' takes no 'find'")
        if verb == "wrap" and "$BODY" not in (self.wrap or ""):
            raise ValueError("the template of 'wrap' must contain $BODY")
        if self.local and verb != "import":
            raise ValueError("'local' belongs to 'import'")
        return self


class PatchFile(Strict):
    """The content of ``patch.yaml``."""

    title: Text
    why: Text
    kind: Kind
    switch: Switch | None = None
    evidence: tuple[Evidence, ...] = ()
    differs: str | None = None
    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    uses: tuple[AtField, ...] = ()
    edits: tuple[Edit, ...] = ()
    manifest: str | None = None
    """Where the engine writes the applied series as JSON (patch ids, kinds, switches); for the runtime patch."""

    @model_validator(mode="after")
    def _switch_by_kind(self) -> PatchFile:
        if self.kind in ("perf", "fix") and self.switch is None:
            raise ValueError(f"a patch of kind {self.kind!r} needs a switch that restores upstream's behaviour")
        if self.kind in ("build", "runtime") and self.switch is not None:
            raise ValueError(f"a patch of kind {self.kind!r} has no run-time switch (build: use WITHOUT=<id>)")
        return self


class SeriesGroup(Strict):
    """A directory below ``patches/`` and the ids of its patches, in order."""

    name: Annotated[str, Field(pattern=_PATCH_ID.pattern)]
    patches: tuple[Annotated[str, Field(pattern=_PATCH_ID.pattern)], ...]


class SeriesFile(Strict):
    """The content of ``layers/source/series.yaml``: groups in order."""

    groups: tuple[SeriesGroup, ...]
