"""Answers about shadows kept between runs: they depend on the trees' content and on this code, and on nothing
else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from strata import branches, modules, shadow, shadow_assigned, shadow_imports, shadow_platform
from strata.shadow import Shadow
from strata.trees import PACKAGES, Trees

_CODE = (branches, modules, shadow, shadow_assigned, shadow_imports, shadow_platform)
_KEPT = 6


class ShadowStore:
    """One JSON file of answers per state of the trees below ``directory``; a damaged or stale one counts as
    empty.
    """

    def __init__(self, directory: Path, trees: Trees, version: str) -> None:
        self._directory = directory
        self._path = directory / f"shadow-{_key(trees, version)}.json"
        self._answers: dict[str, list[Shadow]] = self._read()
        self._fresh = False

    def get(self, question: str) -> list[Shadow] | None:
        """What was answered before; None where nothing was."""
        return self._answers.get(question)

    def put(self, question: str, answer: list[Shadow]) -> None:
        """Keep an answer until :meth:`save`."""
        self._answers[question] = answer
        self._fresh = True

    def save(self) -> None:
        """Write what is new in one step. A cache that cannot be written is left alone: it is only ever a
        short cut.
        """
        if not self._fresh:
            return
        data = {q: [asdict(s) for s in answer] for q, answer in sorted(self._answers.items())}
        temporary: str | None = None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._directory, suffix=".tmp")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(data, file)
            Path(temporary).replace(self._path)
            self._prune()
        except OSError:
            if temporary:
                with contextlib.suppress(OSError):
                    Path(temporary).unlink()
        self._fresh = False

    def _read(self) -> dict[str, list[Shadow]]:
        try:
            data = json.loads(self._path.read_bytes())
            return {q: [Shadow(**s) for s in answer] for q, answer in data.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def _prune(self) -> None:
        old = sorted(self._directory.glob("shadow-*.json"), key=lambda p: p.stat().st_mtime)
        for path in old[:-_KEPT]:
            path.unlink(missing_ok=True)


def _key(trees: Trees, version: str) -> str:
    """A hash over version, this code, and path, size and time of every Python file of both packages."""
    total = hashlib.blake2b(version.encode(), digest_size=16)
    for module in _CODE:
        total.update(Path(str(module.__file__)).read_bytes())
    for tree, root in sorted(trees.roots.items()):
        for file in trees.files(tree):
            if file.startswith(PACKAGES[tree] + "/"):
                try:
                    info = (root / file).stat()
                    state = f"{info.st_size}\0{info.st_mtime_ns}\0{info.st_ctime_ns}"
                except OSError as error:  # a link that leads nowhere
                    state = str(error.errno)
                total.update(f"{root}\0{file}\0{state}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()
