"""Affirming: from what a base shows now to the locks that say a person has seen it. Pure; the command
writes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache

from strata.check import Base, Survey
from strata.errors import EXIT_NEEDS_PERSON, Finding, StrataError
from strata.lock import Affirmation, Lock, LockBase, LockedEdit, LockedUse
from strata.model import At
from strata.verdict import Seen, Verdict

# these concern the code alone, so that one person's look at a symbol is good for every patch on it
_SHARED = frozenset({"NEEDS_REVIEW", "CONTRACT_CHANGED", "MOVED", "SHADOWED", "IDLE"})


@dataclass(frozen=True)
class Change:
    """One verdict that an affirmation settles. before, after: fingerprints, empty where there is none."""

    patch: str
    at: At
    verdict: str
    where: str
    before: str
    after: str
    near: bool | None


def affirm(
    survey: Survey,
    base: Base,
    *,
    ids: Collection[str],
    symbol: At | None,
    reason: str,
    date: str,
    trees: Callable[[], Mapping[str, str]],
) -> tuple[dict[str, Lock], list[Change]]:
    """The new locks by patch id, and what they settle; both empty where everything is in order already.

    ids: patches to affirm whole; symbol: affirm this symbol instead, in every patch that has a lock and edits
    or uses it. Verdicts on a symbol that other locked patches share are settled for these too. trees: makes
    the tree hashes, called only when a lock is to be written. StrataError with exit code 1 where something
    cannot be affirmed.
    """
    chosen = _chosen(survey, ids, symbol)
    _refuse(survey, chosen, symbol)
    settled: dict[str, list[Verdict]] = {}
    for patch_id in chosen:
        settled[patch_id] = [v for v in survey.verdicts[patch_id] if _due(v) and symbol in (None, v.at)]
    shared = {(v.at, v.name, v.condition) for vs in settled.values() for v in vs if v.name in _SHARED}
    for other in survey.series.ids:
        if other in chosen or survey.locks[other] is None:
            continue
        also = [v for v in survey.verdicts[other] if _due(v) and (v.at, v.name, v.condition) in shared]
        if also:
            settled[other] = also
    hashes = cache(lambda: dict(trees()))
    locks: dict[str, Lock] = {}
    changes: list[Change] = []
    for patch_id in survey.series.ids:
        whole = patch_id in chosen and symbol is None
        verdicts = settled.get(patch_id, [])
        if not verdicts and not (whole and _is_stale(survey, patch_id, hashes)):
            continue
        locks[patch_id] = _new_lock(survey, base, patch_id, verdicts, whole, reason, date, hashes())
        changes += [_change(survey, patch_id, v) for v in verdicts if v.at is not None]
    return locks, changes


def _due(verdict: Verdict) -> bool:
    return verdict.affirmable and not verdict.go


def _chosen(survey: Survey, ids: Collection[str], symbol: At | None) -> list[str]:
    if symbol is None:
        return [i for i in survey.series.ids if i in ids]
    concerned = [i for i in survey.series.ids if any(v.at == symbol for v in survey.verdicts[i])]
    if not concerned:
        known = sorted({str(v.at) for vs in survey.verdicts.values() for v in vs if v.at})
        from strata.config import near

        guess = near(str(symbol), known)
        raise StrataError(
            Finding(
                "E-AFFIRM",
                "no patch of the series edits or uses this symbol",
                where=str(symbol),
                hint=f"did you mean {guess}?" if guess else "see: strata why " + str(symbol),
            ),
            EXIT_NEEDS_PERSON,
        )
    return [i for i in concerned if not ids or i in ids]


def _refuse(survey: Survey, chosen: Collection[str], symbol: At | None) -> None:
    """E-AFFIRM for every verdict that a person's word does not mend."""
    refused = []
    for patch_id in chosen:
        for verdict in survey.verdicts[patch_id]:
            if verdict.go or verdict.affirmable or (symbol is not None and verdict.at != symbol):
                continue
            found = verdict.finding
            refused.append(
                Finding(
                    "E-AFFIRM",
                    f"{verdict.name} cannot be affirmed: the patch has to change first",
                    where=str(verdict.at or (found.where if found else "")),
                    patch=patch_id,
                    expected=found.expected if found else "",
                    found=f"{found.code}: {found.message}" if found else verdict.name,
                    details=found.details if found else (),
                    hint=found.hint if found else "",
                )
            )
        if symbol is not None and survey.locks[patch_id] is None:
            refused.append(
                Finding(
                    "E-AFFIRM",
                    "the patch has no lock on this base yet, so one symbol is not enough",
                    patch=patch_id,
                    where=str(symbol),
                    hint=f'strata affirm {patch_id} --reason "…"',
                )
            )
    if refused:
        raise StrataError(refused, EXIT_NEEDS_PERSON)


def _edit_entry(seen: Seen, base: Base) -> LockedEdit:
    return LockedEdit(
        at=seen.at,
        fingerprint=seen.fingerprint,
        body=seen.body,
        neighbours=seen.neighbours,
        on=dict(sorted(seen.on.items())),
        moved_to=seen.place if seen.place != seen.at else None,
        sketch=base.sketch(seen.place),
        file_blob=base.blob(seen.place),
    )


def _use_entry(seen: Seen, base: Base) -> LockedUse:
    return LockedUse(
        at=seen.at,
        fingerprint=seen.fingerprint,
        body=seen.body,
        sketch=base.sketch(seen.at),
        file_blob=base.blob(seen.at),
    )


def _is_stale(survey: Survey, patch_id: str, hashes: Callable[[], dict[str, str]]) -> bool:
    """Whether the lock is right but not up to date: symbols that the patch no longer has, surroundings of an
    anchor that is new, or tree hashes of another copy of the release.
    """
    lock = survey.locks[patch_id]
    if lock is None:
        return True
    edits = {e.at: (e.fingerprint, e.neighbours) for e in lock.edits}
    now = {s.at: (s.fingerprint, s.neighbours) for s in survey.seen[patch_id]}
    used = {s.at for s in survey.used[patch_id]}
    return edits != now or {u.at for u in lock.uses} != used or lock.base.trees != hashes()


def _new_lock(
    survey: Survey,
    base: Base,
    patch_id: str,
    verdicts: list[Verdict],
    whole: bool,
    reason: str,
    date: str,
    hashes: dict[str, str],
) -> Lock:
    old = survey.locks[patch_id]
    edits = {s.at: _edit_entry(s, base) for s in survey.seen[patch_id]}
    uses = {s.at: _use_entry(s, base) for s in survey.used[patch_id]}
    if not whole and old is not None:
        settled = {v.at for v in verdicts}
        edits = {e.at: edits.get(e.at, e) if e.at in settled else e for e in old.edits} | {
            at: e for at, e in edits.items() if at in settled
        }
        uses = {u.at: uses.get(u.at, u) if u.at in settled else u for u in old.uses} | {
            at: u for at, u in uses.items() if at in settled
        }
    known = {str(at) for at in (*edits, *uses)} | {"*"}
    history = [a for a in (old.affirmed if old else ()) if a.symbol in known]
    if old is None:
        history.append(Affirmation(symbol="*", verdict="NO_LOCK", reason=reason, date=date))
    for verdict in verdicts:
        if old is None and verdict.name == "NO_LOCK":
            continue
        entry = Affirmation(
            symbol=str(verdict.at),
            verdict=verdict.name,
            reason=reason,
            date=date,
            condition=verdict.condition or None,
        )
        history = [
            a
            for a in history
            if (a.symbol, a.verdict, a.condition) != (entry.symbol, entry.verdict, entry.condition)
        ]
        history.append(entry)
    return Lock(
        fp=1,
        base=LockBase(version=base.version, trees=hashes),
        edits=tuple(edits[a] for a in sorted(edits, key=str)),
        uses=tuple(uses[a] for a in sorted(uses, key=str)),
        affirmed=tuple(history),
    )


def _change(survey: Survey, patch_id: str, verdict: Verdict) -> Change:
    assert verdict.at is not None
    lock = survey.locks[patch_id]
    locked = (lock.edit(verdict.at) or lock.use(verdict.at)) if lock else None
    seen = next((s for s in (*survey.seen[patch_id], *survey.used[patch_id]) if s.at == verdict.at), None)
    return Change(
        patch_id,
        verdict.at,
        verdict.name,
        seen.where if seen else str(verdict.at),
        (locked.fingerprint or "") if locked else "",
        (seen.fingerprint or "") if seen else "",
        verdict.near,
    )
