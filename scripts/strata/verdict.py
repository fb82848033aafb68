"""What to say of one symbol of one patch on one base. Pure: everything it needs is handed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from strata.errors import Finding
from strata.lock import Lock, LockedEdit, LockedUse
from strata.model import At
from strata.shadow import Shadow

# best first; what absorbs or orphans a patch ranks above all of these
ORDER = (
    "UNTOUCHED",
    "MOVED",
    "NEEDS_REVIEW",
    "CONTRACT_CHANGED",
    "NO_LOCK",
    "SHADOWED",
    "IDLE",
    "AMBIGUOUS",
    "CONFLICT",
    "SYMBOL_GONE",
    "FILE_GONE",
)
# verdicts that a person can take upon them; for the others the patch has to change first
AFFIRMABLE = frozenset({"MOVED", "NEEDS_REVIEW", "CONTRACT_CHANGED", "NO_LOCK"})
FAULT_VERDICTS = {
    "E-SYMBOL-GONE": "SYMBOL_GONE",
    "E-FILE-GONE": "FILE_GONE",
    "E-AMBIGUOUS": "AMBIGUOUS",
}  # every other fault of placing or composing is a CONFLICT


@dataclass(frozen=True)
class Verdict:
    """One statement about one symbol. go: the build may go on; at is None where it is about the patch as a
    whole.

    near: for NEEDS_REVIEW, whether the anchor's own surroundings changed. condition: for SHADOWED and IDLE,
    when it holds; affirmable: a person may affirm it as it is. finding: None exactly for what goes without
    saying (UNTOUCHED).
    """

    patch: str
    at: At | None
    name: str
    go: bool
    finding: Finding | None = None
    near: bool | None = None
    condition: str = ""
    affirmable: bool = False


@dataclass(frozen=True)
class Found:
    """Another place that looks like a symbol: what it is and how alike (1.0: same body)."""

    at: At
    line: int
    likeness: float


@dataclass(frozen=True)
class Seen:
    """What a base shows of one symbol of a patch now.

    at: as the patch names it; place: where it was found (differs after a move); fingerprint: on the pristine
    base, None where the base has no such symbol; neighbours: of all its anchors, sorted; on: fingerprints on
    other patches' results; line: 1-based line of the first anchor, or of the symbol; twins: other symbols
    with the same body; shadows: from ``ShadowInfo.explain_all``.
    """

    at: At
    place: At
    fingerprint: str | None
    body: str | None = None
    neighbours: tuple[str, ...] = ()
    on: dict[str, str] = field(default_factory=dict)
    line: int = 0
    twins: tuple[Found, ...] = ()
    shadows: tuple[Shadow, ...] = ()

    @property
    def where(self) -> str:
        """``file::symbol:line`` for a finding."""
        return f"{self.place}" + (f" (line {self.line})" if self.line else "")


def edit_verdicts(patch: str, lock: Lock | None, seen: Seen) -> list[Verdict]:
    """The verdicts for an edited symbol that was placed: what the lock says, and what overwrites it."""
    return [*_shadows(patch, lock, seen, used=False), _edited(patch, lock, seen)]


def use_verdicts(patch: str, lock: Lock | None, seen: Seen) -> list[Verdict]:
    """The verdicts for a symbol that the patch relies on and the base still has."""
    return [*_shadows(patch, lock, seen, used=True), _used(patch, lock, seen)]


def _edited(patch: str, lock: Lock | None, seen: Seen) -> Verdict:
    locked = lock.edit(seen.at) if lock else None
    if lock is None or locked is None:
        return _no_lock(patch, seen, lock)
    moved = seen.place != seen.at
    unclear = seen.place.path != seen.at.path or bool(seen.twins)
    if moved and unclear and locked.moved_to != seen.place:
        twins = [f"same body: {t.at} (line {t.line})" for t in seen.twins]
        return Verdict(
            patch,
            seen.at,
            "MOVED",
            False,
            Finding(
                "MOVED",
                "the edited symbol has gone to another file"
                if seen.place.path != seen.at.path
                else "several symbols have the body of the edited one",
                where=seen.where,
                patch=patch,
                expected=str(seen.at),
                found=str(seen.place),
                details=tuple(twins),
                hint=f"look at it there, then: {affirm_command(patch)}",
            ),
            affirmable=True,
        )
    changed_on = sorted(k for k, v in locked.on.items() if seen.on.get(k) != v) + sorted(
        set(seen.on) - set(locked.on)
    )
    if seen.fingerprint == locked.fingerprint and not changed_on:
        if not moved:
            return Verdict(patch, seen.at, "UNTOUCHED", True)
        return _moved(patch, seen)
    if moved and seen.body == locked.body and not changed_on:
        return _moved(patch, seen)
    near = bool(set(locked.neighbours) - set(seen.neighbours))
    details = [
        "near: the statements around the anchor changed"
        if near
        else "far: the anchor's surroundings are as they were",
        *(f"the result of {k}, on which the edit is placed, changed" for k in changed_on),
    ]
    return Verdict(
        patch,
        seen.at,
        "NEEDS_REVIEW",
        False,
        Finding(
            "NEEDS_REVIEW",
            f"{_name(seen.at)} changed upstream since the patch was affirmed",
            where=seen.where,
            patch=patch,
            expected=_text(locked),
            found=seen.fingerprint or "no such symbol on the pristine base",
            details=tuple(details),
            hint=f"read the function and `strata diff {patch}`, then: {affirm_command(patch)}",
        ),
        near=near,
        affirmable=True,
    )


def _moved(patch: str, seen: Seen) -> Verdict:
    return Verdict(
        patch,
        seen.at,
        "MOVED",
        True,
        Finding(
            "MOVED",
            "the same body is at another place now; the patch goes there",
            where=seen.where,
            patch=patch,
            expected=str(seen.at),
            found=str(seen.place),
            hint=f"write at: {seen.place} in patch.yaml, then affirm",
        ),
    )


def _used(patch: str, lock: Lock | None, seen: Seen) -> Verdict:
    locked = lock.use(seen.at) if lock else None
    if lock is None or locked is None:
        return _no_lock(patch, seen, lock)
    if seen.fingerprint == locked.fingerprint:
        return Verdict(patch, seen.at, "UNTOUCHED", True)
    return Verdict(
        patch,
        seen.at,
        "CONTRACT_CHANGED",
        False,
        Finding(
            "CONTRACT_CHANGED",
            f"{_name(seen.at)}, which the patch relies on, changed upstream",
            where=seen.where,
            patch=patch,
            expected=_text(locked),
            found=seen.fingerprint or "no such symbol",
            hint=f"check that what the patch expects of it still holds, then: {affirm_command(patch)}",
        ),
        affirmable=True,
    )


def _no_lock(patch: str, seen: Seen, lock: Lock | None) -> Verdict:
    message = (
        "the patch has never been affirmed on this base"
        if lock is None
        else "the lock knows nothing of this symbol yet"
    )
    return Verdict(
        patch,
        seen.at,
        "NO_LOCK",
        False,
        Finding(
            "NO_LOCK",
            message,
            where=seen.where,
            patch=patch,
            expected="a lock for this base",
            found="none",
            hint=f"read the code, then: {affirm_command(patch)}",
        ),
        affirmable=True,
    )


def no_lock_verdict(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict for a patch without any lock, in place of one for each of its symbols."""
    patch = verdicts[0].patch
    places = tuple(v.finding.where for v in verdicts if v.finding)
    return Verdict(
        patch,
        None,
        "NO_LOCK",
        False,
        Finding(
            "NO_LOCK",
            "the patch has never been affirmed on this base",
            patch=patch,
            expected="a lock for this base",
            found=f"none; {len(places)} symbols to look at:",
            details=places,
            hint=f"read the code, then: {affirm_command(patch)}",
        ),
        affirmable=True,
    )


def _shadows(patch: str, lock: Lock | None, seen: Seen, *, used: bool) -> list[Verdict]:
    if not seen.shadows:
        return []
    worst = seen.shadows[0]
    details = tuple(
        f"{s.verdict} by {s.by}: {s.message}" + (f" [{s.condition}]" if s.condition else "")
        for s in seen.shadows
    )
    about = "what the patch relies on" if used else "the edited code"
    condition = shadow_condition(seen.shadows)
    if not worst.condition:
        return [
            Verdict(
                patch,
                seen.at,
                worst.verdict,
                False,
                Finding(
                    worst.verdict,
                    f"{about} is not what runs on this base",
                    where=seen.where,
                    patch=patch,
                    expected="code that this base runs",
                    found=worst.message,
                    details=details,
                    hint=f"edit what runs instead (see {worst.by}), or take the patch out for this base",
                ),
            )
        ]
    affirmed = lock.affirmation(seen.at, worst.verdict, condition) if lock else None
    finding = Finding(
        worst.verdict,
        f"{about} is not what runs under a condition"
        + (f"; affirmed: {affirmed.reason}" if affirmed else ""),
        where=seen.where,
        patch=patch,
        expected="code that this base runs",
        found=f"conditional: {condition}",
        details=details,
        hint="" if affirmed else f"if the patch is meant for the other case: {affirm_command(patch)}",
    )
    return [
        Verdict(
            patch, seen.at, worst.verdict, affirmed is not None, finding, condition=condition, affirmable=True
        )
    ]


def shadow_condition(shadows: Sequence[Shadow]) -> str:
    """The conditions of several conditional shadows in one line, in a stable order: what an affirmation is
    about.
    """
    return "; or ".join(
        dict.fromkeys(f"{s.verdict.lower()} by {_without_line(s.by)}: {s.condition}" for s in shadows)
    )


def _without_line(by: str) -> str:
    head, _, tail = by.rpartition(":")
    return head if tail.isdigit() else by


def fault_verdict(patch: str, at: At | None, finding: Finding, likely: Sequence[Found] = ()) -> Verdict:
    """The verdict for an edit that could not be placed or composed."""
    name = FAULT_VERDICTS.get(finding.code, "CONFLICT")
    details = (
        *finding.details,
        *(f"candidate: {f.at} (line {f.line}), {f.likeness:.0%} alike" for f in likely),
    )
    hint = finding.hint or f"mend the anchor; see: strata why {at or patch}"
    return Verdict(
        patch,
        at,
        name,
        False,
        Finding(
            finding.code,
            finding.message,
            finding.where or str(at or ""),
            patch,
            finding.expected,
            finding.found,
            hint,
            details,
        ),
    )


def gone_verdict(
    patch: str,
    at: At,
    *,
    file_gone: bool,
    likely: Sequence[Found] = (),
    files: Sequence[str] = (),
    used: bool = False,
) -> Verdict:
    """The verdict for a symbol, edited or used, that the base no longer has.

    likely: symbols, and files: paths that may be its successors, best first.
    """
    name = "FILE_GONE" if file_gone else "SYMBOL_GONE"
    role = "the patch relies on" if used else "the patch edits"
    details = tuple(f"candidate: {f.at} (line {f.line}), {f.likeness:.0%} alike" for f in likely)
    details += tuple(f"candidate: {file}" for file in files)
    successor = str(likely[0].at) if likely else files[0] if files else ""
    return Verdict(
        patch,
        at,
        name,
        False,
        Finding(
            name,
            f"the {'file' if file_gone else 'symbol'} that {role} is not in this base",
            where=str(at),
            patch=patch,
            expected=str(at),
            found="no such file" if file_gone else "no such symbol",
            details=details,
            hint="name its successor in patch.yaml"
            + (f", perhaps {successor}" if successor else "")
            + ", or retire the patch",
        ),
    )


def worst(verdicts: Sequence[Verdict]) -> Verdict | None:
    """What the patch as a whole gets: the worst that stops it, else the worst of what lets it go."""
    stopping = [v for v in verdicts if not v.go]
    return max(stopping or verdicts, key=lambda v: ORDER.index(v.name), default=None)


def affirm_command(patch: str) -> str:
    """What to type after reading the code."""
    return f'strata affirm {patch} --reason "…"'


def _name(at: At) -> str:
    return at.symbol or at.file


def _text(locked: LockedEdit | LockedUse) -> str:
    return locked.fingerprint or "no such symbol on the pristine base"
