"""The state of a series on a base: one plan of everything, what the locks say of it, and what smaller series
would do.

Read-only and deterministic: the same trees, series and locks give the same survey.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from strata.errors import EXIT_GOOD, EXIT_NEEDS_PERSON, Finding, StrataError
from strata.languages import language_of
from strata.lock import Lock, LockedSymbol, blob_hash, likeness, read_lock, sketch
from strata.model import DEFAULT_TREE, At
from strata.plan import Fault, Placed, Plan, plan_series
from strata.series import Series, requirements
from strata.shadow import Shadow, ShadowInfo, plain_name, shadow_map
from strata.shadow_store import ShadowStore
from strata.spans import PlaceFault, Symbol
from strata.trees import Trees
from strata.verdict import (
    Found,
    Seen,
    Verdict,
    edit_verdicts,
    fault_verdict,
    gone_verdict,
    no_lock_verdict,
    use_verdicts,
    worst,
)

_CANDIDATES = 3
_MIN_SCORE = 0.45


@dataclass(frozen=True)
class Interaction:
    """``patch`` relies on ``uses``, which ``edited_by`` edits at ``at``: both have to be tested together."""

    patch: str
    uses: At
    edited_by: str
    at: At


@dataclass
class Survey:
    """Everything that is known of a series on a base.

    verdicts: by patch id in series order, edits before uses; seen, used: what the base shows of each symbol,
    for locks; plan: of the full series, moved symbols followed; files are complete only where it has no
    faults.
    """

    base: str
    series: Series
    plan: Plan
    locks: dict[str, Lock | None]
    verdicts: dict[str, list[Verdict]] = field(default_factory=dict)
    seen: dict[str, list[Seen]] = field(default_factory=dict)
    used: dict[str, list[Seen]] = field(default_factory=dict)
    interactions: list[Interaction] = field(default_factory=list)

    def worst(self, patch_id: str) -> Verdict | None:
        """What a patch gets as a whole; None for one without edits and uses."""
        return worst(self.verdicts[patch_id])

    def go(self, ids: Collection[str] | None = None) -> bool:
        """Whether nothing stops these patches (default: the series)."""
        return all(v.go for i in (ids or self.series.ids) for v in self.verdicts[i])

    def exit_code(self, ids: Collection[str] | None = None) -> int:
        """0 where all may go, 1 where a person is needed."""
        return EXIT_GOOD if self.go(ids) else EXIT_NEEDS_PERSON


class Base:
    """The pristine trees of a base with what is computed of them kept: texts, fingerprints, symbols."""

    def __init__(self, trees: Trees, version: str, cache: Path | None = None) -> None:
        """cache: a directory to keep answers about shadows in, so that a second run need not search again."""
        self.trees = trees
        self.version = version
        self._shadow: ShadowInfo = shadow_map(trees, version)
        self._store = ShadowStore(cache, trees, version) if cache else None
        self._texts: dict[tuple[str, str], str | None] = {}
        self._prints: dict[tuple[str, str, str | None, bool], str | None] = {}
        self._symbols: dict[tuple[str, str], dict[str, Symbol]] = {}

    def text(self, path: tuple[str, str]) -> str | None:
        """The text of a file, None where there is none."""
        if path not in self._texts:
            self._texts[path] = self.trees.read(*path)
        return self._texts[path]

    def fingerprint(self, at: At, *, body: bool = False) -> str | None:
        """The fingerprint of a symbol or file, None where there is none; body: without the symbol's own
        name.
        """
        key = (*at.path, at.symbol, body)
        if key not in self._prints:
            text = self.text(at.path)
            self._prints[key] = None if text is None else fingerprint_in(text, at, body=body)
        return self._prints[key]

    def fault(self, at: At) -> Finding | None:
        """Why a file that is there gives no fingerprint, other than that it has no such symbol."""
        text = self.text(at.path)
        try:
            if text is not None:
                language_of(at.file).fingerprint(text, at.symbol)
        except PlaceFault as fault:
            if fault.code != "E-SYMBOL-GONE":
                return Finding(
                    fault.code,
                    fault.message,
                    where=f"{at}" + (f" (line {fault.line})" if fault.line else ""),
                    expected=fault.expected,
                    found=fault.found,
                    hint="take the file from the release again"
                    if fault.code == "E-PARSE"
                    else "name one of them in 'uses'",
                    details=tuple(fault.candidates),
                )
        return None

    def symbols(self, path: tuple[str, str]) -> dict[str, Symbol]:
        """The symbols of a file by qualified name; empty for a file that is missing or does not parse."""
        if path not in self._symbols:
            text = self.text(path)
            try:
                found = language_of(path[1]).symbols(text) if text is not None else []
            except PlaceFault:
                found = []
            self._symbols[path] = {s.qualname: s for s in found}
        return self._symbols[path]

    def line(self, at: At) -> int:
        """The 1-based line of a symbol, 0 where it is unknown."""
        found = self.symbols(at.path).get(at.symbol or "")
        return found.line if found else 0

    def sketch(self, at: At) -> str | None:
        """The similarity hash of a definition, None where ``at`` names something else."""
        text = self.text(at.path)
        if text is None:
            return None
        found = self.symbols(at.path).get(at.symbol or "")
        return sketch(text[found.start : found.end]) if found and found.kind != "module" else None

    def blob(self, at: At) -> str | None:
        """git's blob hash of the file."""
        text = self.text(at.path)
        return None if text is None else blob_hash(text)

    def shadows(self, at: At, line: int | None = None) -> list[Shadow]:
        """Why a place is not what runs, see :class:`strata.shadow.ShadowInfo`."""
        question = f"{at}@{line or ''}"
        known = self._store.get(question) if self._store else None
        if known is None:
            known = self._shadow.explain_all(at, line)
            if self._store:
                self._store.put(question, known)
        return known

    def keep(self) -> None:
        """Write what was found for the next run."""
        if self._store:
            self._store.save()

    # --- looking for what has gone

    def same_body(self, at: At, body: str | None) -> list[At]:
        """Symbols with this body: in the file of ``at``, or where it has none, in files of its tree that have
        the name.
        """
        if body is None:
            return []
        here = list(self._with_body(at.path, body))
        if here:
            return here
        return [found for path in self._files_naming(at) for found in self._with_body(path, body)]

    def _with_body(self, path: tuple[str, str], body: str) -> Iterator[At]:
        for name, symbol in self.symbols(path).items():
            if symbol.kind in ("function", "class"):
                at = At(tree=path[0], file=path[1], symbol=name)
                if self.fingerprint(at, body=True) == body:
                    yield at

    def candidates(self, at: At, locked: LockedSymbol | None) -> list[Found]:
        """Likely successors of a symbol that has gone, best first, by the likeness of name and body."""
        wanted = plain_name(at.symbol or "")
        paths = [at.path] if self.text(at.path) is not None else []
        found = self._rank(paths, wanted, locked)
        return found or self._rank(self._files_naming(at), wanted, locked)

    def _rank(
        self, paths: Sequence[tuple[str, str]], wanted: str, locked: LockedSymbol | None
    ) -> list[Found]:
        ranked = []
        for path in paths:
            for name, symbol in self.symbols(path).items():
                if symbol.kind not in ("function", "class"):
                    continue
                alike = _alike(wanted, name)
                at = At(tree=path[0], file=path[1], symbol=name)
                own = self.sketch(at) if locked and locked.sketch else None
                if own and locked and locked.sketch:
                    alike = (alike + max(0.0, 2 * likeness(own, locked.sketch) - 1)) / 2
                if alike >= _MIN_SCORE:
                    ranked.append(Found(at, symbol.line, round(alike, 2)))
        return sorted(ranked, key=lambda f: (-f.likeness, str(f.at)))[:_CANDIDATES]

    def _files_naming(self, at: At) -> list[tuple[str, str]]:
        """Other files of the tree that define the symbol's last name, or have the file's name."""
        suffix = "." + at.file.rsplit(".", 1)[-1]
        last = re.escape(plain_name(at.symbol or "").rsplit(".", 1)[-1])
        defines = re.compile(
            rf"^[ \t]*(?:async +def|def|class) +{last}\b" if suffix == ".py" else rf"\b{last}\b", re.MULTILINE
        )
        found = []
        for file in self.trees.files(at.tree, (suffix,)):
            path = (at.tree, file)
            if path == at.path:
                continue
            text = self._readable(path) if last else None
            if text is not None and defines.search(text):
                found.append(path)
        return found

    def _readable(self, path: tuple[str, str]) -> str | None:
        try:
            return self.text(path)
        except StrataError:
            return None  # a damaged file that no patch names is no candidate


def fingerprint_in(text: str, at: At, *, body: bool = False) -> str | None:
    """The fingerprint of a symbol in a given text of its file; None where the text has no such symbol."""
    language = language_of(at.file)
    try:
        if body and at.symbol:
            return language.body_fingerprint(text, at.symbol)
        return language.fingerprint(text, at.symbol)
    except PlaceFault:
        return None


def _alike(one: str, other: str) -> float:
    last = difflib.SequenceMatcher(None, one.rsplit(".", 1)[-1], other.rsplit(".", 1)[-1]).ratio()
    return (2 * last + difflib.SequenceMatcher(None, one, other).ratio()) / 3


# --- the survey


def survey(series: Series, base: Base, *, subsets: bool = True) -> Survey:
    """Plan the series on a base and give every symbol of every patch its verdicts.

    subsets: also plan each patch with only its requirements, and the series less each patch.
    """
    locks = {i: read_lock(series.root, base.version, i) for i in series.ids}
    plan, moved = _followed(series, base, locks)
    result = Survey(base.version, series, plan, locks)
    for patch_id in series.ids:
        result.seen[patch_id] = _seen_edits(patch_id, plan, moved, base)
        result.used[patch_id] = []
        result.verdicts[patch_id] = _of_patch(patch_id, result, base)
    if subsets and not plan.faults:
        _subsets(result, base, moved)
    result.interactions = _interactions(result)
    base.keep()
    return result


def plan_on(series: Series, base: Base, only: Collection[str] | None = None) -> Plan:
    """The plan of a series, or of ``only`` some patches with what they require, moved symbols followed as
    :func:`survey` does it.
    """
    ids = series.ids if only is None else series.closure(only)
    locks = {i: read_lock(series.root, base.version, i) for i in ids}
    return _followed(series, base, locks, only)[0]


def _followed(
    series: Series, base: Base, locks: dict[str, Lock | None], only: Collection[str] | None = None
) -> tuple[Plan, dict[At, At]]:
    plan = plan_series(series, base.trees, base.version, only=only)
    moved = _moved(plan, locks, base)
    if moved:
        plan = plan_series(series, base.trees, base.version, only=only, moved=moved)
    return plan, moved


def _moved(plan: Plan, locks: dict[str, Lock | None], base: Base) -> dict[At, At]:
    """Symbols that are gone from their place and found with the same body elsewhere."""
    found: dict[At, At] = {}
    for fault in plan.faults:
        lock = locks.get(fault.patch)
        at = fault.at
        if (
            at is None
            or not at.symbol
            or lock is None
            or fault.finding.code not in ("E-SYMBOL-GONE", "E-FILE-GONE")
        ):
            continue
        locked = lock.edit(at)
        if locked is None:
            continue
        places = base.same_body(at, locked.body)
        if places and at not in found:
            found[at] = locked.moved_to if locked.moved_to in places and locked.moved_to else places[0]
    return found


def _seen_edits(patch_id: str, plan: Plan, moved: dict[At, At], base: Base) -> list[Seen]:
    """What the base shows of every symbol that a patch edits and that was placed."""
    origin = {new: old for old, new in moved.items()}
    groups: dict[tuple[At, At], list[Placed]] = {}
    for placed in plan.placed:
        if placed.patch == patch_id:
            place = At(tree=placed.at.tree, file=placed.at.file, symbol=placed.placement.symbol or None)
            groups.setdefault((origin.get(placed.at, place), place), []).append(placed)
    found = []
    for (at, place), items in groups.items():
        fingerprint = base.fingerprint(place)
        body = base.fingerprint(place, body=True) if place.symbol else None
        results = {i.on: fingerprint_in(i.source, place) for i in items if i.on}
        lines = sorted(i.placement.line for i in items)
        shadows = {s: None for i in items for s in base.shadows(place, None if i.on else i.placement.line)}
        twins = [t for t in base.same_body(at, body) if t != place] if place != at else []
        found.append(
            Seen(
                at=at,
                place=place,
                fingerprint=fingerprint,
                body=body,
                neighbours=tuple(sorted({i.placement.neighbours for i in items if i.placement.neighbours})),
                on={k: v for k, v in sorted(results.items()) if v},
                line=lines[0],
                twins=tuple(Found(t, base.line(t), 1.0) for t in twins),
                shadows=tuple(sorted(shadows, key=lambda s: (bool(s.condition), s.verdict != "IDLE", s.by))),
            )
        )
    return found


def _of_patch(patch_id: str, result: Survey, base: Base) -> list[Verdict]:
    lock = result.locks[patch_id]
    ours = {key for p in result.series.patches for key in p.files}
    verdicts: list[Verdict] = []
    for fault in result.plan.faults:
        if fault.patch == patch_id:
            verdicts.append(_of_fault(fault, lock, base, ours))
    for seen in result.seen[patch_id]:
        verdicts += edit_verdicts(patch_id, lock, seen)
    for at in result.series[patch_id].spec.uses:
        if at.path in ours:
            continue  # a new file of the series: its content is the series' own
        fingerprint = base.fingerprint(at)
        if fingerprint is None:
            unclear = base.fault(at)
            if unclear is not None:
                verdicts.append(fault_verdict(patch_id, at, unclear))
                continue
            locked = lock.use(at) if lock else None
            verdicts.append(
                gone_verdict(
                    patch_id,
                    at,
                    file_gone=base.text(at.path) is None,
                    likely=base.candidates(at, locked) if at.symbol else (),
                    used=True,
                )
            )
            continue
        seen = Seen(
            at=at,
            place=at,
            fingerprint=fingerprint,
            body=base.fingerprint(at, body=True) if at.symbol else None,
            line=base.line(at),
            shadows=tuple(base.shadows(at)),
        )
        result.used[patch_id].append(seen)
        verdicts += use_verdicts(patch_id, lock, seen)
    return _only_the_decisive(verdicts) if lock is None else list(dict.fromkeys(verdicts))


def _of_fault(fault: Fault, lock: Lock | None, base: Base, ours: Collection[tuple[str, str]]) -> Verdict:
    at = fault.at
    if at is not None and at.path in ours:
        return fault_verdict(fault.patch, at, fault.finding)  # about a new file of the series, not upstream's
    if at is not None and at.symbol and fault.finding.code in ("E-SYMBOL-GONE", "E-FILE-GONE"):
        likely = base.candidates(at, lock.edit(at) if lock else None)
        file_gone = base.text(at.path) is None
        files = fault.finding.details if file_gone and not likely else ()
        return gone_verdict(fault.patch, at, file_gone=file_gone, likely=likely, files=files)
    if at is not None and base.text(at.path) is None:
        return gone_verdict(fault.patch, at, file_gone=True, files=fault.finding.details)
    return fault_verdict(fault.patch, at, fault.finding)


def _only_the_decisive(verdicts: list[Verdict]) -> list[Verdict]:
    """Each statement once, and one word about a missing lock instead of one per symbol."""
    kept = list(dict.fromkeys(verdicts))
    unlocked = [v for v in kept if v.name == "NO_LOCK"]
    if len(unlocked) < 2:
        return kept
    first = kept.index(unlocked[0])
    kept = [v for v in kept if v.name != "NO_LOCK"]
    return [*kept[:first], no_lock_verdict(unlocked), *kept[first:]]


def _subsets(result: Survey, base: Base, moved: dict[At, At]) -> None:
    """Each patch with only its requirements, and the series less each patch: faults that only show there.

    A smaller series differs from the full one only in files that it shares with patches outside of it, so
    only the patches that touch such files are planned again.
    """
    series = result.series
    touched: dict[str, set[tuple[str, str]]] = {p.id: set(p.files) for p in series.patches}
    for placed in result.plan.placed:
        touched[placed.patch].add(placed.at.path)
    closures = {i: series.closure([i]) for i in series.ids}
    planned: dict[tuple[str, ...], Plan] = {}
    told: set[tuple[str, int | None, str, str]] = set()
    for patch_id in series.ids:
        rest = [i for i in series.ids if patch_id not in closures[i]]
        for ids, words in ((closures[patch_id], "with only what it requires"), (rest, f"without {patch_id}")):
            outside = {path for i in series.ids if i not in ids for path in touched[i]}
            sharing = tuple(series.closure([i for i in ids if touched[i] & outside]))
            if not sharing:
                continue
            if sharing not in planned:
                planned[sharing] = plan_series(series, base.trees, base.version, only=sharing, moved=moved)
            for fault in planned[sharing].faults:
                mark = (fault.patch, fault.edit, fault.finding.code, fault.finding.where)
                if mark in told:
                    continue
                told.add(mark)
                finding = replace(fault.finding, message=f"{words}: {fault.finding.message}")
                result.verdicts[fault.patch].append(fault_verdict(fault.patch, fault.at, finding))
    for patch_id in series.ids:
        result.verdicts[patch_id] = list(dict.fromkeys(result.verdicts[patch_id]))


def _interactions(result: Survey) -> list[Interaction]:
    found = []
    for patch in result.series.patches:
        for use in patch.spec.uses:
            for other in result.series.patches:
                if other.id == patch.id:
                    continue
                found += [
                    Interaction(patch.id, use, other.id, seen.at)
                    for seen in result.seen[other.id]
                    if _touches(use, seen.place)
                ]
    return found


def _touches(one: At, other: At) -> bool:
    """Whether two places overlap: the same symbol, one inside the other, or the whole file."""
    if one.path != other.path:
        return False
    if one.symbol is None or other.symbol is None:
        return True
    first, second = plain_name(one.symbol), plain_name(other.symbol)
    return first == second or first.startswith(second + ".") or second.startswith(first + ".")


def touching(result: Survey, at: At) -> list[tuple[str, str, At]]:
    """(patch id, ``edits`` or ``uses``, place) of everything in the series that concerns a place."""
    found = []
    for patch_id in result.series.ids:
        found += [(patch_id, "edits", s.at) for s in result.seen[patch_id] if _touches(at, s.at)]
        found += [(patch_id, "uses", u) for u in result.series[patch_id].spec.uses if _touches(at, u)]
    return found


def no_findings(result: Survey, ids: Collection[str]) -> list[Finding]:
    """The findings that stop these patches, in series order."""
    return [
        v.finding for i in result.series.ids if i in ids for v in result.verdicts[i] if not v.go and v.finding
    ]


__all__ = [
    "DEFAULT_TREE",
    "Base",
    "Interaction",
    "Survey",
    "no_findings",
    "requirements",
    "survey",
    "touching",
]
