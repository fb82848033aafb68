"""Writing a plan into the trees: all or nothing, whatever happens in the middle.

State lies in ``.strata/`` of the first tree: ``journal.json`` exists only while files are being replaced,
``originals/`` holds what was there before, ``applied.json`` (the stamp) says what was applied. Whoever
finds a journal first puts the originals back; so a tree is fully patched or untouched after the next run at
the latest.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strata.errors import EXIT_NEEDS_PERSON, Finding, StrataError
from strata.model import At
from strata.plan import Plan
from strata.series import Series
from strata.trees import Trees

STATE = ".strata"
STAMP_FORMAT = 1


class Disk:
    """The operations by which anything is changed, one at a time, so that tests can fail each of them."""

    def put(self, path: Path, data: bytes, mode: int, owner: tuple[int, int] | None = None) -> None:
        """Create a file with its content on the disk (fsync) and its mode and owner set."""
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            if owner is not None and owner != (os.geteuid(), os.getegid()):
                os.fchown(file.fileno(), *owner)
            os.fsync(file.fileno())

    def move(self, source: Path, target: Path) -> None:
        """Rename in one step and make the rename last."""
        source.replace(target)
        self._sync(target.parent)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._sync(path.parent)

    def make_directory(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def remove_directory(self, path: Path) -> None:
        path.rmdir()

    def _sync(self, directory: Path) -> None:
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


DISK = Disk()


@dataclass(frozen=True)
class Target:
    """One file of a transaction; number: its name below ``originals/``. before, after: sha256; None: no
    such file."""

    tree: str
    file: str
    number: int
    before: str | None
    after: str


@dataclass(frozen=True)
class Stamp:
    """What was applied: digest of the series, its patches in order, every file with its hashes."""

    digest: str
    patches: tuple[str, ...]
    targets: tuple[Target, ...]
    directories: tuple[tuple[str, str], ...]


def compile_check(plan: Plan) -> None:
    """Byte-compile every touched Python file in memory. StrataError E-COMPILE (exit 1) naming file and
    patches."""
    faults = []
    for (tree, file), text in plan.files.items():
        if not file.endswith(".py"):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(text.removeprefix("\ufeff"), file, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None) or 0
            patches = dict.fromkeys(p.patch for p in plan.placed if p.at.path == (tree, file))
            faults.append(
                Finding(
                    "E-COMPILE",
                    f"the file does not compile after patching: {getattr(error, 'msg', None) or error}",
                    where=f"{At(tree=tree, file=file)} (line {line} of the result)",
                    patch=", ".join(patches),
                    expected="Python that compiles",
                    found=text.splitlines()[line - 1].strip()[:120]
                    if 0 < line <= len(text.splitlines())
                    else "",
                    hint="mend the edits of the patches named",
                )
            )
    if faults:
        raise StrataError(faults, EXIT_NEEDS_PERSON)


def already_applied(series: Series, trees: Trees) -> bool:
    """Whether exactly this series is in the trees. First undoes what a killed run left half done.

    StrataError E-DIRTY (exit 1): another series is applied, or patched files were changed since.
    """
    with _locked(trees):
        _recover(trees)
        return _is_applied(trees, series.digest())


def write(plan: Plan, trees: Trees, series_digest: str | None = None) -> list[Path]:
    """Write a plan without faults; the files written, or nothing where it is applied already.

    series_digest: identity of what is applied, the plan's own by default. StrataError: the plan's faults,
    E-COMPILE, E-DIRTY (a file differs from what was planned on), E-WRITE (the disk refused; the trees are
    as before), E-BUSY.
    """
    plan.raise_faults()
    compile_check(plan)
    digest = series_digest or plan.digest
    with _locked(trees):
        _recover(trees)
        if _is_applied(trees, digest):
            return []
        _check_clean(plan, trees)
        return _transaction(plan, trees, digest)


def revert(trees: Trees) -> list[Path]:
    """Put back what was there before the series was applied; the files concerned, none where nothing is
    applied."""
    with _locked(trees):
        _recover(trees)
        stamp = _read_stamp(trees)
        if stamp is None:
            return []
        changed = [t for t in stamp.targets if _hash(trees.path(t.tree, t.file)) != t.after]
        if changed:
            raise StrataError(_dirty("patched files were changed since", changed), EXIT_NEEDS_PERSON)
        try:
            _write_json(_state(trees) / "journal.json", asdict(stamp))
            _roll_back(trees, stamp)
        except OSError as error:
            raise StrataError(_disk_finding(error, trees, "run it again: it goes on from there")) from error
        return [trees.path(t.tree, t.file) for t in stamp.targets]


def unfinished(trees: Trees) -> bool:
    """Whether a killed run left the trees half patched (``already_applied``, ``write`` and ``revert`` undo
    that)."""
    return (_state(trees) / "journal.json").exists()


# --- state


def _state(trees: Trees) -> Path:
    return next(iter(trees.roots.values())) / STATE


def _staging(trees: Trees, tree: str) -> Path:
    return trees.roots[tree] / STATE / "staging"


def _originals(trees: Trees, tree: str) -> Path:
    return trees.roots[tree] / STATE / "originals"


@contextlib.contextmanager
def _locked(trees: Trees) -> Iterator[None]:
    """One writer per pair of trees; the lock dies with its process."""
    root = next(iter(trees.roots.values()))
    handle = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StrataError(
                Finding("E-BUSY", "another strata is at work on these trees", where=str(root),
                        hint="wait until it has finished")
            ) from error  # fmt: skip
        yield
    finally:
        os.close(handle)


def _is_applied(trees: Trees, digest: str) -> bool:
    stamp = _read_stamp(trees)
    if stamp is None:
        return False
    now = {t: _hash(trees.path(t.tree, t.file)) for t in stamp.targets}
    if all(found == t.before for t, found in now.items()) and (stamp.targets or stamp.digest != digest):
        _forget(trees)  # somebody put the sources back: the stamp is about what no longer is
        return False
    changed = [t for t, found in now.items() if found != t.after]
    if changed:
        raise StrataError(_dirty("patched files were changed since", changed), EXIT_NEEDS_PERSON)
    if stamp.digest != digest:
        raise StrataError(
            Finding(
                "E-DIRTY",
                "another series, or an older state of this one, is applied to these trees",
                where=str(_state(trees) / "applied.json"),
                expected=f"series {digest[:12]} or pristine sources",
                found=f"series {stamp.digest[:12]}: {', '.join(stamp.patches)}",
                hint="take it out first: strata apply --revert",
            ),
            EXIT_NEEDS_PERSON,
        )
    return True


def _dirty(message: str, targets: list[Target]) -> Finding:
    return Finding(
        "E-DIRTY",
        message,
        where=str(At(tree=targets[0].tree, file=targets[0].file)),
        expected="the files as strata wrote them",
        found=f"{len(targets)} changed",
        hint="put these files back, or start from fresh sources (make sources)",
        details=tuple(str(At(tree=t.tree, file=t.file)) for t in targets),
    )


def _read_stamp(trees: Trees, name: str = "applied.json") -> Stamp | None:
    path = _state(trees) / name
    try:
        data = json.loads(path.read_bytes())
        targets = tuple(Target(**t) for t in data["targets"])
        directories = tuple((d[0], d[1]) for d in data["directories"])
        return Stamp(data["digest"], tuple(data["patches"]), targets, directories)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StrataError(
            Finding("E-STATE", "the record of what was applied cannot be read", where=str(path),
                    expected="JSON as strata writes it", found=str(error),
                    hint="start from fresh sources (make sources)")
        ) from error  # fmt: skip


def _hash(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StrataError(
            Finding("E-READ", "the file cannot be read", where=str(path), found=error.strerror or str(error))
        ) from error


def _home(path: Path) -> Path:
    """The directory that a file of a tree really lies in."""
    return path.parent.resolve()


def _check_clean(plan: Plan, trees: Trees) -> None:
    """Every file must be what the plan was made on, and a file of its own: a rename would cut a link off."""
    dirty = []
    links = [path for path in plan.original if trees.path(*path).is_symlink()]
    if links:
        raise StrataError(
            Finding(
                "E-WRITE",
                "a file to be patched is a symbolic link",
                where=str(At(tree=links[0][0], file=links[0][1])),
                expected="a regular file of the tree",
                found=f"a link to {trees.path(*links[0]).readlink()}",
                hint="put the file itself there",
            )
        )
    outside = [
        path for path in plan.original if not _home(trees.path(*path)).is_relative_to(trees.roots[path[0]])
    ]
    if outside:
        raise StrataError(
            Finding(
                "E-WRITE",
                "a directory of the tree leads out of it",
                where=str(At(tree=outside[0][0], file=outside[0][1])),
                expected=f"a directory below {trees.roots[outside[0][0]]}",
                found=str(_home(trees.path(*outside[0]))),
                hint="put a real directory in the place of the link",
            )
        )
    for (tree, file), before in plan.original.items():
        found = _hash(trees.path(tree, file))
        expected = None if before is None else hashlib.sha256(before.encode()).hexdigest()
        if found != expected:
            dirty.append(Target(tree, file, 0, expected, ""))
    if dirty:
        raise StrataError(_dirty("files changed while the plan was made", dirty), EXIT_NEEDS_PERSON)


# --- transaction


def _transaction(plan: Plan, trees: Trees, digest: str) -> list[Path]:
    targets = tuple(
        Target(tree, file, n, None if before is None else _sha(before), _sha(plan.files[tree, file]))
        for n, ((tree, file), before) in enumerate(sorted(plan.original.items()))
    )
    stamp = Stamp(digest, tuple(plan.patches), targets, tuple(_new_directories(trees, targets)))
    journal = _state(trees) / "journal.json"
    try:
        _stage(plan, trees, targets)
        _write_json(journal, asdict(stamp))
        for tree, directory in stamp.directories:
            DISK.make_directory(trees.path(tree, directory))
        for t in targets:
            DISK.move(_staging(trees, t.tree) / str(t.number), trees.path(t.tree, t.file))
        _write_json(_state(trees) / "applied.json", {"format": STAMP_FORMAT, **asdict(stamp)})
        DISK.remove(journal)
    except BaseException as error:
        if not journal.exists():
            with contextlib.suppress(OSError):  # leftovers of staging; the next run clears them
                _forget(trees)
        else:
            _undo_after(error, trees, stamp)
        if not isinstance(error, OSError):
            raise
        raise StrataError(
            _disk_finding(error, trees, "make room or mend the permissions, then run it again")
        ) from error
    with contextlib.suppress(OSError):  # applied and recorded; empty staging directories may stay
        for tree in trees.roots:
            if _staging(trees, tree).is_dir():
                shutil.rmtree(_staging(trees, tree))
    return [trees.path(t.tree, t.file) for t in targets]


def _undo_after(error: BaseException, trees: Trees, stamp: Stamp) -> None:
    try:
        _roll_back(trees, stamp)
    except OSError as second:
        finding = _disk_finding(
            second, trees, "mend the disk, then run strata apply: it puts the originals back first"
        )
        raise StrataError(
            Finding(finding.code, "writing failed, and so did putting the originals back", finding.where,
                    found=f"{error}; then {second}", hint=finding.hint)
        ) from error  # fmt: skip


def _stage(plan: Plan, trees: Trees, targets: tuple[Target, ...]) -> None:
    """New contents and copies of the originals, beside the trees' own files and on their file systems."""
    DISK.make_directory(_state(trees))
    for tree in {t.tree for t in targets}:
        for directory in (_staging(trees, tree).parent, _staging(trees, tree), _originals(trees, tree)):
            DISK.make_directory(directory)
    for t in targets:
        path = trees.path(t.tree, t.file)
        mode = 0o755 if (t.tree, t.file) in plan.executable else 0o644
        owner = None
        if t.before is not None:
            info = path.stat()
            mode, owner = info.st_mode & 0o7777, (info.st_uid, info.st_gid)
            DISK.put(_originals(trees, t.tree) / str(t.number), path.read_bytes(), mode, owner)
        DISK.put(_staging(trees, t.tree) / str(t.number), plan.files[t.tree, t.file].encode(), mode, owner)


def _new_directories(trees: Trees, targets: tuple[Target, ...]) -> Iterator[tuple[str, str]]:
    """Directories that new files need, outermost first."""
    seen = set()
    for t in targets:
        parents = [p.as_posix() for p in Path(t.file).parents if p.as_posix() != "."]
        for parent in reversed(parents):
            if (t.tree, parent) not in seen and not trees.path(t.tree, parent).exists():
                seen.add((t.tree, parent))
                yield t.tree, parent


def _recover(trees: Trees) -> None:
    """Undo a run that was killed: with a journal put the originals back, without one clear what it had
    staged."""
    try:
        stamp = _read_stamp(trees, "journal.json")
        if stamp is not None:
            _roll_back(trees, stamp)
        elif not (_state(trees) / "applied.json").exists():
            _forget(trees)
    except OSError as error:
        raise StrataError(
            _disk_finding(error, trees, "an earlier run was killed; mend the disk, then run it again")
        ) from error


def _roll_back(trees: Trees, stamp: Stamp) -> None:
    """Put the originals back. Renames only, so that a full disk cannot stop it; may be repeated from any
    point."""
    for t in stamp.targets:
        path = trees.path(t.tree, t.file)
        if t.before is None:
            if path.exists():
                DISK.remove(path)
        elif (kept := _originals(trees, t.tree) / str(t.number)).exists():
            DISK.move(kept, path)
    for tree, directory in reversed(stamp.directories):
        path = trees.path(tree, directory)
        shutil.rmtree(path / "__pycache__", ignore_errors=True)  # bytecode of new files that are gone
        if path.is_dir() and not any(path.iterdir()):
            DISK.remove_directory(path)
    DISK.remove(_state(trees) / "applied.json")
    DISK.remove(_state(trees) / "journal.json")
    _forget(trees)


def _forget(trees: Trees) -> None:
    """Remove all state. The stamp goes first: without it the rest means nothing."""
    stamp = _state(trees) / "applied.json"
    if stamp.exists():
        DISK.remove(stamp)
    for root in trees.roots.values():
        if (root / STATE).is_dir():
            for name in ("staging", "originals"):
                if (root / STATE / name).is_dir():
                    shutil.rmtree(root / STATE / name)
            for name in ("journal.json.new", "applied.json.new"):
                (root / STATE / name).unlink(missing_ok=True)
            if not any((root / STATE).iterdir()):
                DISK.remove_directory(root / STATE)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    fresh = path.with_name(path.name + ".new")
    DISK.put(fresh, (json.dumps(data, indent=1) + "\n").encode(), 0o644)
    DISK.move(fresh, path)


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _disk_finding(error: OSError, trees: Trees, hint: str) -> Finding:
    return Finding(
        "E-WRITE",
        "the trees cannot be written",
        where=str(error.filename2 or error.filename or next(iter(trees.roots.values()))),
        found=error.strerror or str(error),
        hint=hint,
    )
