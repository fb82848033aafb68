"""Locks: what a patch's author saw of a base, per edited and per used symbol, in
``patches/locks/<version>/<id>.yaml``.

A lock holds fingerprints and names, never upstream's code. Fingerprints decide; blob and tree hashes are
evidence for a person who compares two copies of a release.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, Field

from strata.config import Strict, load
from strata.errors import Finding, StrataError
from strata.fingerprint import FP_VERSION
from strata.model import At, AtField, Text

_SKETCH_BITS = 64
_WORD = re.compile(r"\w+|[^\w\s]")
_FINGERPRINT = r"^(py|tok)\d+:[0-9a-f]{16,}$"
Fingerprint = Annotated[str, Field(pattern=_FINGERPRINT)]


def _is_date(value: str) -> str:
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", value):
        raise ValueError("a date is written 2026-12-31")
    return value


class LockedSymbol(Strict):
    """One symbol as its author saw it.

    fingerprint: of the whole symbol on the pristine base (absent where only another patch's result has the
    symbol); body: the same without its own name, to find it again after a move; sketch: 64-bit similarity
    hash of its tokens as 16 hex digits, to rank rename candidates; file_blob: git's blob hash of the file, as
    evidence.
    """

    at: AtField
    fingerprint: Fingerprint | None = None
    body: Fingerprint | None = None
    sketch: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")] | None = None
    file_blob: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = None


class LockedEdit(LockedSymbol):
    """An edited symbol. neighbours: fingerprints of the anchors' surroundings, one per distinct anchor,
    sorted.

    on: for edits that are placed on another patch's result, that result's fingerprint of the symbol by patch
    id; moved_to: the place in another file that a person affirmed as the symbol's new home.
    """

    neighbours: tuple[Fingerprint, ...] = ()
    on: dict[str, Fingerprint] = Field(default_factory=dict)
    moved_to: AtField | None = None


class LockedUse(LockedSymbol):
    """A symbol that the patch relies on without editing it."""


class Affirmation(Strict):
    """A person's word that a verdict is in order. symbol: ``*`` for all symbols of the patch (its first
    lock).
    """

    symbol: str
    verdict: str
    reason: Text
    date: Annotated[str, AfterValidator(_is_date)]
    condition: str | None = None


class LockBase(Strict):
    """The base that was seen: release and, as evidence, the hashes of its trees."""

    version: str
    trees: dict[str, str] = Field(default_factory=dict)


class Lock(Strict):
    """The content of one lock file."""

    fp: Literal[1]
    base: LockBase
    edits: tuple[LockedEdit, ...] = ()
    uses: tuple[LockedUse, ...] = ()
    affirmed: tuple[Affirmation, ...] = ()

    def edit(self, at: At) -> LockedEdit | None:
        """What the lock says of an edited symbol."""
        return next((e for e in self.edits if e.at == at), None)

    def use(self, at: At) -> LockedUse | None:
        """What the lock says of a used symbol."""
        return next((u for u in self.uses if u.at == at), None)

    def affirmation(self, at: At, verdict: str, condition: str | None = None) -> Affirmation | None:
        """The latest affirmation of a verdict for a symbol, under exactly this condition."""
        found = [
            a
            for a in self.affirmed
            if a.symbol == str(at) and a.verdict == verdict and a.condition == condition
        ]
        return found[-1] if found else None


def lock_path(root: Path, version: str, patch_id: str) -> Path:
    """Where a patch's lock for a base lies."""
    return root / "patches" / "locks" / version / f"{patch_id}.yaml"


def read_lock(root: Path, version: str, patch_id: str) -> Lock | None:
    """The lock of a patch on a base, None where there is none; E-LOCK where it belongs to another base."""
    path = lock_path(root, version, patch_id)
    if not path.is_file():
        return None
    lock = load(path, Lock)
    if lock.base.version != version:
        raise StrataError(
            Finding(
                "E-LOCK",
                "the lock belongs to another base than its directory",
                where=str(path),
                patch=patch_id,
                expected=version,
                found=lock.base.version,
                hint="move it to the directory of its base, or affirm again",
            )
        )
    return lock


def locked_versions(root: Path) -> list[str]:
    """The base releases that any patch has a lock for, oldest first."""
    directory = root / "patches" / "locks"
    names = [p.name for p in directory.iterdir() if p.is_dir()] if directory.is_dir() else []
    return sorted(names, key=_release_key)


def _release_key(name: str) -> tuple[int, Version, str]:
    try:
        return 1, Version(name), name
    except InvalidVersion:
        return 0, Version("0"), name


def render_lock(lock: Lock) -> str:
    """The lock as YAML: stable order, one symbol per block, so that a change touches few lines."""
    data: dict[str, Any] = {"fp": lock.fp, "base": {"version": lock.base.version}}
    if lock.base.trees:
        data["base"]["trees"] = dict(sorted(lock.base.trees.items()))
    for name in ("edits", "uses"):
        entries = sorted(getattr(lock, name), key=lambda e: str(e.at))
        if entries:
            data[name] = [_plain(e) for e in entries]
    if lock.affirmed:
        data["affirmed"] = [_plain(a) for a in lock.affirmed]
    head = "# Written by `strata affirm`: what was seen of the base when the patch was last affirmed.\n"
    return head + yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=118)


def _plain(entry: Strict) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name in type(entry).model_fields if not isinstance(entry, LockedSymbol) else _ORDER:
        value = getattr(entry, name, None)
        if value is None or value == () or value == {}:
            continue
        if isinstance(value, At):
            value = str(value)
        elif isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, dict):
            value = dict(sorted(value.items()))
        plain[name] = value
    return plain


_ORDER = ("at", "fingerprint", "body", "neighbours", "on", "moved_to", "sketch", "file_blob")


def write_lock(root: Path, patch_id: str, lock: Lock) -> Path:
    """Write a lock in one step: readers see the old content or the new, never a part. E-WRITE where it cannot
    be.
    """
    path = lock_path(root, lock.base.version, patch_id)
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{patch_id}.", suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(render_lock(lock))
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
        raise StrataError(
            Finding(
                "E-WRITE",
                "the lock cannot be written",
                where=str(path),
                patch=patch_id,
                found=error.strerror or str(error),
                hint="nothing was changed; make room or mend the permissions",
            )
        ) from error
    return path


def blob_hash(text: str) -> str:
    """git's blob hash (sha1, 40 hex digits) of a file's content, UTF-8."""
    data = text.encode("utf-8")
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def sketch(text: str) -> str:
    """A 64-bit similarity hash of a piece of code as 16 hex digits: similar token runs give a small Hamming
    distance.

    Charikar's simhash over runs of three tokens; no token can be read back from it.
    """
    tokens = _WORD.findall(text)
    weights = [0] * _SKETCH_BITS
    for start in range(max(len(tokens) - 2, 1)):
        run = "\0".join(tokens[start : start + 3])
        bits = int.from_bytes(
            hashlib.blake2b(run.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
        )
        for n in range(_SKETCH_BITS):
            weights[n] += 1 if bits >> n & 1 else -1
    value = sum(1 << n for n in range(_SKETCH_BITS) if weights[n] > 0)
    return f"{value:016x}"


def likeness(one: str, other: str) -> float:
    """Share of equal bits of two sketches, 0.0 to 1.0; unrelated code lies near 0.5."""
    return 1 - (int(one, 16) ^ int(other, 16)).bit_count() / _SKETCH_BITS


__all__ = [
    "FP_VERSION",
    "Affirmation",
    "Lock",
    "LockBase",
    "LockedEdit",
    "LockedSymbol",
    "LockedUse",
    "blob_hash",
    "likeness",
    "lock_path",
    "locked_versions",
    "read_lock",
    "render_lock",
    "sketch",
    "write_lock",
]
