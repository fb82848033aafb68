"""The patch series on disk: read, ordered, with its requirements checked."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from strata.config import load, near
from strata.errors import Finding, StrataError
from strata.model import PatchFile, SeriesFile


@dataclass(frozen=True)
class Patch:
    """One patch: its id, its group, what it says (``spec``), where it lies, and its new files.

    files: (tree, path) -> absolute path of the file below ``files/`` (``files/vllm_ascend/x.py`` belongs to the
    vllm-ascend tree, ``files/vllm/x.py`` to the vllm tree).
    """

    id: str
    group: str
    spec: PatchFile
    directory: Path
    files: dict[tuple[str, str], Path]

    @property
    def yaml_path(self) -> Path:
        return self.directory / "patch.yaml"


@dataclass(frozen=True)
class Series:
    """The patches in order. ``root`` is the repository (or whatever holds ``patches/`` and ``layers/``)."""

    root: Path
    patches: tuple[Patch, ...]

    def __getitem__(self, patch_id: str) -> Patch:
        for patch in self.patches:
            if patch.id == patch_id:
                return patch
        raise unknown_patch(patch_id, [p.id for p in self.patches])

    @property
    def ids(self) -> list[str]:
        return [p.id for p in self.patches]

    def closure(self, ids: Collection[str]) -> list[str]:
        """``ids`` and everything that they require (``requires`` and ``on``), in series order."""
        wanted: set[str] = set()
        todo = list(ids)
        while todo:
            current = self[todo.pop()]
            if current.id not in wanted:
                wanted.add(current.id)
                todo += requirements(current)
        return [i for i in self.ids if i in wanted]

    def without(self, ids: Collection[str]) -> Series:
        """The series less ``ids``; E-ORPHANED where a patch that stays requires one that goes."""
        for i in ids:
            self[i]
        rest = tuple(p for p in self.patches if p.id not in ids)
        broken = [
            Finding(
                "E-ORPHANED",
                f"{p.id} requires {need}, which is left out",
                patch=p.id,
                where=str(p.yaml_path),
                hint=f"leave out {p.id} as well",
            )
            for p in rest
            for need in sorted(requirements(p))
            if need in ids
        ]
        if broken:
            raise StrataError(broken)
        return Series(self.root, rest)

    def digest(self) -> str:
        """The series hash of the labels: sha256 over ids, patch.yaml, .patch and new files of all patches in order."""
        total = hashlib.sha256()
        for patch in self.patches:
            diffs = [(e.diff, patch.directory / e.diff) for e in patch.spec.edits if e.diff]
            parts = [
                ("patch.yaml", patch.yaml_path),
                *((name, path) for name, path in diffs if path.is_file()),
                *((f"{t}:{f}", p) for (t, f), p in sorted(patch.files.items())),
            ]
            for name, path in parts:
                total.update(f"{patch.id}\0{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
        return total.hexdigest()


def requirements(patch: Patch) -> set[str]:
    """The ids that the patch needs: ``requires`` and the ``on`` of its edits."""
    return {*patch.spec.requires, *(e.on for e in patch.spec.edits if e.on)}


def unknown_patch(patch_id: str, known: Collection[str]) -> StrataError:
    guess = near(patch_id, known)
    return StrataError(
        Finding(
            "E-PATCH",
            f"no patch {patch_id!r} in the series",
            expected="one of " + ", ".join(sorted(known)),
            found=patch_id,
            hint=f"did you mean {guess!r}?" if guess else "see layers/source/series.yaml",
        )
    )


TREES = {"vllm_ascend": "vllm-ascend", "csrc": "vllm-ascend", "vllm": "vllm"}


def load_series(root: Path) -> Series:
    """Read ``layers/source/series.yaml`` and every patch it names; all faults in one StrataError."""
    series_path = root / "layers" / "source" / "series.yaml"
    spec = load(series_path, SeriesFile)
    patches: list[Patch] = []
    faults: list[Finding] = []
    for group in spec.groups:
        for patch_id in group.patches:
            directory = root / "patches" / group.name / patch_id
            if not (directory / "patch.yaml").is_file():
                faults.append(
                    Finding(
                        "E-PATCH",
                        f"the series names {group.name}/{patch_id}, which has no patch.yaml",
                        where=str(series_path),
                        expected=str(directory / "patch.yaml"),
                        found="no such file",
                        hint="write it, or take the id out of series.yaml",
                    )
                )
                continue
            try:
                patches.append(read_patch(directory, group.name))
            except StrataError as error:
                faults += error.findings
    listed = {(g.name, p) for g in spec.groups for p in g.patches}
    for path in sorted((root / "patches").glob("*/*/patch.yaml")):
        key = (path.parent.parent.name, path.parent.name)
        if key not in listed and key[0] not in ("locks", "retired"):
            faults.append(
                Finding(
                    "E-PATCH",
                    f"{key[0]}/{key[1]} is in no group of the series",
                    where=str(path),
                    hint=f"name it in {series_path}, or move it to patches/retired/",
                )
            )
    faults += _series_faults(patches)
    if faults:
        raise StrataError(faults)
    return Series(root, tuple(patches))


def read_patch(directory: Path, group: str) -> Patch:
    """Read one patch directory."""
    spec = load(directory / "patch.yaml", PatchFile)
    files: dict[tuple[str, str], Path] = {}
    base = directory / "files"
    for path in sorted(p for p in base.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        relative = path.relative_to(base).as_posix()
        tree = TREES.get(relative.split("/", 1)[0])
        if tree is None:
            raise StrataError(
                Finding(
                    "E-PATCH",
                    "a new file must lie below files/vllm_ascend, files/csrc or files/vllm",
                    where=str(path),
                    patch=directory.name,
                )
            )
        files[tree, relative] = path
    return Patch(directory.name, group, spec, directory, files)


def _series_faults(patches: list[Patch]) -> list[Finding]:
    faults: list[Finding] = []
    position = {p.id: n for n, p in enumerate(patches)}
    if len(position) != len(patches):
        seen: set[str] = set()
        for p in patches:
            if p.id in seen:
                faults.append(Finding("E-PATCH", f"the id {p.id!r} is used twice", where=str(p.yaml_path)))
            seen.add(p.id)
    owner: dict[tuple[str, str], str] = {}
    switches: dict[str, str] = {}
    for n, patch in enumerate(patches):
        for need in sorted(requirements(patch)):
            if need not in position:
                error = unknown_patch(need, position)
                faults.append(
                    Finding(
                        "E-REQUIRES",
                        f"requires {need!r}, which is not in the series",
                        patch=patch.id,
                        where=str(patch.yaml_path),
                        hint=error.findings[0].hint,
                    )
                )
            elif position[need] >= n:
                faults.append(
                    Finding(
                        "E-REQUIRES",
                        f"requires {need!r}, which comes later in the series",
                        patch=patch.id,
                        where=str(patch.yaml_path),
                        hint=f"move {need} before {patch.id}",
                    )
                )
        for other in patch.spec.conflicts:
            if other in position:
                faults.append(
                    Finding(
                        "E-REQUIRES",
                        f"conflicts with {other!r}, which is in the series",
                        patch=patch.id,
                        where=str(patch.yaml_path),
                    )
                )
        for key in patch.files:
            if key in owner:
                faults.append(
                    Finding(
                        "E-OWNER",
                        f"{key[1]} is brought by {owner[key]} too",
                        patch=patch.id,
                        where=str(patch.files[key]),
                        hint="give the file to one patch and require that",
                    )
                )
            owner[key] = patch.id
        if patch.spec.switch:
            name = patch.spec.switch.name
            if name in switches:
                faults.append(
                    Finding(
                        "E-OWNER",
                        f"the switch {name!r} belongs to {switches[name]} too",
                        patch=patch.id,
                        where=str(patch.yaml_path),
                    )
                )
            switches[name] = patch.id
    return faults
