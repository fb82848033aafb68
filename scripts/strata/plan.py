"""Planning a series on a pair of trees: every edit placed, composed and checked in memory, every fault
collected."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from packaging.version import InvalidVersion, Version

from strata.composition import Key, Keyed, Piece, compose, locate, text_of
from strata.config import read_text
from strata.errors import Finding, StrataError
from strata.languages import language_of
from strata.model import DEFAULT_TREE, At, Edit
from strata.plan_findings import compiles, finding_of, similar_files, summary, unparsable
from strata.python_imports import bindings, parse_imports
from strata.series import TREES, Patch, Series
from strata.spans import PlaceFault, Placement, Span
from strata.trees import Trees

FilePath = tuple[str, str]  # (tree, file)
MANIFEST_FORMAT = 1


@dataclass(frozen=True)
class Placed:
    """An edit that found its place. edit: its number in the patch, from 0; at: the place after ``moved``.

    on: the patch whose result it was matched on, or None; source: the text that it was matched on.
    """

    patch: str
    edit: int
    at: At
    placement: Placement
    on: str | None = None
    source: str = field(default="", repr=False, compare=False)


@dataclass(frozen=True)
class Fault:
    """An edit, a new file or a patch (edit None) that cannot land, with what to tell."""

    patch: str
    edit: int | None
    at: At | None
    finding: Finding


@dataclass
class Plan:
    """What a series does to a pair of trees.

    files: (tree, file) -> final text of every changed or new file; complete only without faults. original:
    the text before, None for a new file. executable: new files that carry the execute bit. patches: ids
    planned, in order; digest: the series hash of exactly these.
    """

    patches: list[str] = field(default_factory=list)
    digest: str = ""
    placed: list[Placed] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    files: dict[FilePath, str] = field(default_factory=dict)
    original: dict[FilePath, str | None] = field(default_factory=dict)
    executable: set[FilePath] = field(default_factory=set)

    def raise_faults(self) -> None:
        """StrataError (exit 1) with all findings, where there are any."""
        if self.faults:
            raise StrataError([f.finding for f in self.faults], exit_code=1)


def plan_series(
    series: Series,
    trees: Trees,
    version: str,
    *,
    only: Collection[str] | None = None,
    moved: Mapping[At, At] | None = None,
) -> Plan:
    """Place and compose the series, or ``only`` some patches with what they require, on pristine trees.

    version: the base release, chooses the variant of edits with ``for``. moved: places that the edits of a
    place go to instead. Never raises for an edit that cannot be placed: all faults are in the plan.
    """
    ids = series.ids if only is None else series.closure(only)
    return _Planner(series, trees, version, ids, moved or {}).run()


def chosen_edits(patch: Patch, version: str) -> tuple[list[tuple[int, Edit, Edit | None]], list[str]]:
    """The edits of a patch that count on a base: (number, edit, default that it stands in for), and what is
    wrong.

    Variants of one edit stand next to each other: an edit with ``for`` and the same verb as the one before
    it is a variant of that. A base that no variant names takes the one without ``for``.
    """
    groups: list[list[tuple[int, Edit]]] = []
    for n, edit in enumerate(patch.spec.edits):
        if edit.for_ is not None and groups and groups[-1][0][1].verb == edit.verb:
            groups[-1].append((n, edit))
        else:
            groups.append([(n, edit)])
    wanted = _release(version)
    out: list[tuple[int, Edit, Edit | None]] = []
    wrong: list[str] = []
    for group in groups:
        named = [(n, e) for n, e in group if e.for_ and wanted in {_release(v) for v in e.for_}]
        default = next(((n, e) for n, e in group if e.for_ is None), None)
        if len(named) > 1:
            numbers = " and ".join(str(n + 1) for n, _ in named)
            wrong.append(f"edits {numbers} are both for {version}")
        elif named:
            out.append((*named[0], default[1] if default else None))
        elif default:
            out.append((*default, None))
        elif len(group) > 1:
            numbers = " and ".join(str(n + 1) for n, _ in group)
            wrong.append(f"none of edits {numbers}, variants of one another, is for {version}")
    return out, wrong


def _release(name: str) -> Version | str:
    """A release to compare: 0.23 is 0.23.0, and v0.23.0 its tag."""
    try:
        return Version(name)
    except InvalidVersion:
        return name


@dataclass
class _Job:
    """One edit on its way: its spans per file once it is placed."""

    key: Key
    edit: Edit
    default: Edit | None
    depth: int
    spans: dict[FilePath, tuple[Span, ...]] = field(default_factory=dict)


class _Planner:
    def __init__(
        self, series: Series, trees: Trees, version: str, ids: list[str], moved: Mapping[At, At]
    ) -> None:
        self.series, self.trees, self.version, self.ids, self.moved = series, trees, version, ids, moved
        self.patches = [series[i] for i in ids]
        self.plan = Plan(list(ids), Series(series.root, tuple(self.patches)).digest())
        self.jobs: list[_Job] = []
        self.new: dict[FilePath, tuple[str, str]] = {}  # new file -> (patch, text)
        self.base: dict[FilePath, str | None] = {}
        self.states: dict[tuple[FilePath, frozenset[str], int], list[Piece]] = {}
        self.reported: set[tuple[object, ...]] = set()

    def run(self) -> Plan:
        for position, patch in enumerate(self.patches):
            self._new_files(patch)
            edits, wrong = chosen_edits(patch, self.version)
            for message in wrong:
                self._fault(
                    patch, None, None, Finding("E-VARIANT", message, hint="give one variant for each base")
                )
            self.jobs += [
                _Job((position, patch.id, n), edit, default, self._depth(edit)) for n, edit, default in edits
            ]
        for depth in range(max((j.depth for j in self.jobs), default=0) + 1):
            for job in [j for j in self.jobs if j.depth == depth]:
                self._place(job)
        self._import_conflicts()
        everything = frozenset(self.ids)
        touched = dict.fromkeys([*self.new, *(p for j in self.jobs for p in j.spans)])
        top = max((j.depth for j in self.jobs), default=0) + 1
        for path in touched:
            before = self._read(path)
            after = text_of(self._state(path, everything, top))
            if after != before:
                self.plan.files[path] = after
                self.plan.original[path] = before
        if not self.plan.faults:
            self._check_results()
        order = {i: n for n, i in enumerate(self.ids)}
        self.plan.placed.sort(key=lambda p: (order[p.patch], p.edit))
        self.plan.faults.sort(key=lambda f: (order[f.patch], -1 if f.edit is None else f.edit))
        return self.plan

    # --- reading

    def _read(self, path: FilePath) -> str | None:
        if path not in self.base:
            self.base[path] = self.trees.read(*path)
        return self.base[path]

    def _depth(self, edit: Edit) -> int:
        """0 for an edit matched on the base; else one more than the deepest edit of what it is matched on."""
        if edit.on is None:
            return 0
        below = self.series.closure([edit.on])
        return 1 + max(
            (self._depth(e) for i in below for _, e, _ in chosen_edits(self.series[i], self.version)[0]),
            default=0,
        )

    # --- new files

    def _new_files(self, patch: Patch) -> None:
        for path, file in patch.files.items():
            try:
                text = read_text(file)
            except StrataError as error:
                for finding in error.findings:
                    self._fault(patch, None, None, finding)
                continue
            self._add_new(patch, path, text)
            if file.stat().st_mode & 0o100:
                self.plan.executable.add(path)
        if patch.spec.manifest:
            try:
                self._add_new(patch, _manifest_path(patch.spec.manifest), self._manifest())
            except ValueError as error:
                self._fault(patch, None, None, Finding("E-CONFIG", f"bad value for 'manifest': {error}"))

    def _add_new(self, patch: Patch, path: FilePath, text: str) -> None:
        at = At(tree=path[0], file=path[1])
        if self.trees.path(*path).exists():
            self._fault(
                patch, None, at,
                Finding("E-FILE-EXISTS", "the base has this file already", where=str(at),
                        expected="no such file", found="a file of the base",
                        hint="rename the new file, or edit the base's file instead"),
            )  # fmt: skip
            return
        if path in self.new:
            self._fault(
                patch,
                None,
                at,
                Finding("E-OWNER", f"{path[1]} is brought by {self.new[path][0]} too", where=str(at)),
            )
            return
        self.new[path] = (patch.id, text)

    def _manifest(self) -> str:
        entries = [
            {
                "id": p.id,
                "group": p.group,
                "kind": p.spec.kind,
                "title": p.spec.title,
                "switch": {"name": p.spec.switch.name, "default": p.spec.switch.default}
                if p.spec.switch
                else None,
            }
            for p in self.patches
        ]
        head = {"format": MANIFEST_FORMAT, "base": self.version, "digest": self.plan.digest}
        return json.dumps({**head, "patches": entries}, indent=1) + "\n"

    # --- placing

    def _place(self, job: _Job) -> None:
        patch = self.series[job.key[1]]
        edit = job.edit
        try:
            if edit.diff is not None:
                self._place_diff(job, patch)
                return
            assert edit.at is not None
            at = self.moved.get(edit.at, edit.at)
            moved = edit if at is edit.at else edit.model_copy(update={"at": at})
            source = self._source(job, at)
            if source is None:
                self._file_gone(job, patch, at)
                return
            language = language_of(at.file)
            if job.default is not None and self._fits(job.default):
                self._fault(
                    patch, job.key[2], at,
                    Finding("E-VARIANT", f"the variant for {self.version} is not the only one that matches",
                            expected="one variant for each base, never two",
                            found="the edit without 'for' matches as well",
                            hint="give that one its own 'for'"),
                )  # fmt: skip
                return
            placement = language.place(source, moved)
        except PlaceFault as fault:
            self._fault(patch, job.key[2], edit.at, finding_of(fault, patch, edit))
            return
        except StrataError as error:
            for finding in error.findings:
                self._fault(patch, job.key[2], edit.at, finding)
            return
        job.spans[at.path] = placement.spans
        self.plan.placed.append(Placed(patch.id, job.key[2], at, placement, edit.on, source))

    def _fits(self, edit: Edit) -> bool:
        assert edit.at is not None
        source = self._read(edit.at.path)
        if source is None:
            return False
        try:
            language_of(edit.at.file).place(source, edit)
        except PlaceFault:
            return False
        return True

    def _source(self, job: _Job, at: At) -> str | None:
        """The text that an edit is matched on: the base's, or the result of the patch named by ``on``."""
        on = job.edit.on
        if on is None:
            return self._read(at.path)
        if self._read(at.path) is None and at.path not in self.new:
            return None
        ids = frozenset(self.series.closure([on]))
        if self._read(at.path) is None and self.new[at.path][0] not in ids:
            return None
        return text_of(self._state(at.path, ids, job.depth))

    def _place_diff(self, job: _Job, patch: Patch) -> None:
        from strata.diffs import place_diff

        assert job.edit.diff is not None
        text = read_text(patch.directory / job.edit.diff)
        sources: dict[FilePath, str] = {}
        missing: list[At] = []

        def read(file: str) -> str | None:
            path = _diff_path(file)
            at = At(tree=path[0], file=path[1])
            source = self._source(job, at)
            if source is None:
                missing.append(at)
            else:
                sources[path] = source
            return source

        try:
            placements = place_diff(text, read)
        except PlaceFault:
            if missing:
                self._file_gone(job, patch, missing[0])
                return
            raise
        for file, placement in placements:
            path = _diff_path(file)
            # a hunk that spans two symbols gives a placement for each, with the same spans
            job.spans[path] = tuple(dict.fromkeys((*job.spans.get(path, ()), *placement.spans)))
            at = At(tree=path[0], file=path[1], symbol=placement.symbol or None)
            self.plan.placed.append(
                Placed(patch.id, job.key[2], at, placement, job.edit.on, sources.get(path, ""))
            )

    def _file_gone(self, job: _Job, patch: Patch, at: At) -> None:
        owner = self.new.get(at.path)
        if owner:
            hint = f"say 'on: {owner[0]}' to edit what that patch brings"
            found = f"a new file of {owner[0]}"
            near: list[str] = []
        else:
            near = similar_files(self.trees, at)
            found = "no such file" + (" (renamed?)" if near else "")
            hint = "look whether it was renamed: " + ", ".join(near) if near else "look where its code went"
        self._fault(
            patch, job.key[2], at,
            Finding("E-FILE-GONE", "the base has no such file", where=str(at), expected=at.file, found=found,
                    hint=hint, details=tuple(near)),
        )  # fmt: skip

    # --- composing

    def _state(self, path: FilePath, ids: frozenset[str], depth: int) -> list[Piece]:
        """A file after all edits of ``ids`` of less than ``depth``."""
        known = self.states.get((path, ids, depth))
        if known is not None:
            return known
        if depth == 0:
            owner, text = self.new.get(path, ("", ""))
            base = self._read(path)
            pieces = [Piece(base or "", ("base",))] if base is not None else []
            if base is None and owner in ids:
                pieces = [Piece(text, ("file", owner))]
        else:
            pieces = self._state(path, ids, depth - 1)
            jobs = [j for j in self.jobs if j.depth == depth - 1 and j.key[1] in ids and path in j.spans]
            keyed = [Keyed(span, job.key, n) for job in jobs for n, span in self._mapped(job, path, pieces)]
            pieces, overlaps = compose(pieces, keyed)
            for o in overlaps:
                self._overlap(path, o.first, o.second)
        self.states[path, ids, depth] = pieces
        return pieces

    def _mapped(self, job: _Job, path: FilePath, target: list[Piece]) -> list[tuple[int, Span]]:
        """A job's spans, numbered, in the offsets of ``target``; its own are those of the text it was
        matched on."""
        if job.edit.on is None:
            return list(enumerate(job.spans[path]))
        own = self._state(path, frozenset(self.series.closure([job.edit.on])), job.depth)
        if own is target:
            return list(enumerate(job.spans[path]))
        before, after = text_of(own), text_of(target)
        out = []
        for n, span in enumerate(job.spans[path]):
            low, high = _map_span(span, own, target, len(before), len(after))
            if low is None or high is None or after[low:high] != before[span.start : span.end]:
                self._fault(
                    self.series[job.key[1]], job.key[2], job.edit.at,
                    Finding("E-OVERLAP", "another patch changes the text that this edit was matched on",
                            where=str(job.edit.at or path[1]),
                            expected=f"the result of {job.edit.on} untouched at this place",
                            found="changed also by " + ", ".join(self._others(path, job.edit.on)),
                            hint="let the edit stand 'on' the patch that comes last, or merge the two"),
                )  # fmt: skip
                continue
            out.append((n, replace(span, start=low, end=high)))
        return out

    def _others(self, path: FilePath, on: str) -> list[str]:
        below = set(self.series.closure([on]))
        return [
            p for p in dict.fromkeys(j.key[1] for j in self.jobs if path in j.spans) if p not in below
        ] or ["?"]

    def _overlap(self, path: FilePath, first: Key, second: Key) -> None:
        patch = self.series[second[1]]
        edit = patch.spec.edits[second[2]]
        other = self.series[first[1]].spec.edits[first[2]]
        self._fault(
            patch, second[2], edit.at,
            Finding("E-OVERLAP", f"{first[1]} and {second[1]} change the same code",
                    where=str(edit.at or path[1]),
                    expected="edits of places of their own",
                    found=f"edit {first[2] + 1} of {first[1]} ({summary(other)}) and "
                          f"edit {second[2] + 1} of {second[1]} ({summary(edit)})",
                    hint=f"if {second[1]} is to see the other's result, say 'on: {first[1]}' in its edit"
                         if first[1] != second[1] else "make one edit of the two"),
        )  # fmt: skip

    def _import_conflicts(self) -> None:
        """Two patches that bind one name of one file to different things."""
        bound: dict[tuple[FilePath, str], tuple[str, str]] = {}
        for job in self.jobs:
            text, at = job.edit.import_, job.edit.at
            if not text or at is None or job.edit.local or not job.spans or not at.file.endswith(".py"):
                continue
            try:
                nodes = parse_imports(text.strip())
            except PlaceFault:
                continue
            for name, target in [b for node in nodes for b in bindings(node).items()]:
                patch, known = bound.setdefault((at.path, name), (job.key[1], target))
                if known != target:
                    self._fault(
                        self.series[job.key[1]], job.key[2], at,
                        Finding("E-OVERLAP", f"{patch} and {job.key[1]} import {name} differently",
                                where=str(at),
                                expected=known.replace(":", "."), found=target.replace(":", "."),
                                hint="import one of them with 'as'"),
                    )  # fmt: skip

    # --- checking

    def _check_results(self) -> None:
        for path, text in self.plan.files.items():
            if path[1].endswith(".py") and not compiles(text):
                self._blame(path, text)

    def _blame(self, path: FilePath, text: str) -> None:
        """Name the patch, or the patches together, that leave a file in a state that does not parse."""
        at = At(tree=path[0], file=path[1])
        if path in self.new and not any(path in j.spans for j in self.jobs):
            self._fault(self.series[self.new[path][0]], None, at, unparsable(at, text, "the new file"))
            return
        top = max(j.depth for j in self.jobs) + 1
        touching = list(dict.fromkeys(j.key[1] for j in self.jobs if path in j.spans))
        guilty = [
            i for i in touching
            if not compiles(text_of(self._state(path, frozenset(self.series.closure([i])), top)))
        ]  # fmt: skip
        for i in guilty:
            alone = text_of(self._state(path, frozenset(self.series.closure([i])), top))
            self._fault(self.series[i], None, at, unparsable(at, alone, "the file after this patch"))
        if not guilty:
            self._fault(
                self.series[touching[-1]], None, at,
                unparsable(at, text, "the file after " + ", ".join(touching) + " together"),
            )  # fmt: skip

    def _fault(self, patch: Patch, edit: int | None, at: At | None, finding: Finding) -> None:
        where = finding.where or (str(at) if at else str(patch.yaml_path))
        named = Finding(
            finding.code, finding.message, where, finding.patch or patch.id, finding.expected, finding.found,
            finding.hint, finding.details,
        )  # fmt: skip
        mark = (patch.id, edit, named.code, named.where, named.message)
        if mark not in self.reported:
            self.reported.add(mark)
            self.plan.faults.append(Fault(patch.id, edit, at, named))


def _map_span(
    span: Span, own: list[Piece], target: list[Piece], size: int, target_size: int
) -> tuple[int | None, int | None]:
    if span.start < span.end:
        last = locate(own, target, span.end - 1)
        return locate(own, target, span.start), None if last is None else last + 1
    follows = span.rank < 0 or span.op == "close"
    if follows:
        point = 0 if span.start == 0 else locate(own, target, span.start - 1)
        if point is not None and span.start:
            point += 1
    else:
        point = target_size if span.start == size else locate(own, target, span.start)
    return point, point


def _manifest_path(text: str) -> FilePath:
    at = At.parse(text)
    return (TREES.get(at.file.split("/", 1)[0], at.tree), at.file) if at.tree == DEFAULT_TREE else at.path


def _diff_path(file: str) -> FilePath:
    return TREES.get(file.split("/", 1)[0], DEFAULT_TREE), file
