"""The series that this tree was patched with, as the patch engine wrote it into ``series.json``."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

MANIFEST = Path(__file__).with_name("series.json")
RUNTIME_PATCH = "runtime-switches"


class SeriesError(RuntimeError):
    """``series.json`` is missing or is not what the patch engine writes."""


@dataclass(frozen=True)
class Series:
    """What is in the tree.

    patches: patch ids in series order; defaults: switch name -> value without any setting; owners: switch
    name -> patch id; digest: first 12 hex digits of the sha256 of the manifest's content, independent of
    its layout.
    """

    patches: tuple[str, ...]
    defaults: Mapping[str, bool]
    owners: Mapping[str, str]
    digest: str


def parse(entries: Iterable[Mapping[str, Any]], where: str = "series.json") -> Series:
    """Read the manifest's entries ``{id, group, kind, title, switch: {name, default} | null}``.

    Raises SeriesError for an entry of another shape and for a switch that two patches claim.
    """
    patches: list[str] = []
    defaults: dict[str, bool] = {}
    owners: dict[str, str] = {}
    content = list(entries)
    for number, entry in enumerate(content):
        try:
            patch_id = entry["id"]
            switch = entry.get("switch")
            name, default = (switch["name"], switch["default"]) if switch is not None else (None, None)
        except (AttributeError, KeyError, TypeError) as error:
            raise SeriesError(
                f"{where}: entry {number} is not {{id, switch: {{name, default}} or null}}: {entry!r}"
            ) from error
        patches.append(patch_id)
        if name is None:
            continue
        if not isinstance(default, bool):
            raise SeriesError(
                f"{where}: the default of switch {name!r} ({patch_id}) is {default!r}, expected true or false"
            )
        if name in owners:
            raise SeriesError(f"{where}: the switch {name!r} belongs to {owners[name]} and to {patch_id}")
        defaults[name] = default
        owners[name] = patch_id
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(canonical.encode()).hexdigest()[:12]
    return Series(tuple(patches), MappingProxyType(defaults), MappingProxyType(owners), digest)


@functools.cache
def load() -> Series:
    """The series of this tree, read once per process. Raises SeriesError naming the file."""
    try:
        content = json.loads(MANIFEST.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SeriesError(
            f"{MANIFEST}: {error}; the patch engine writes this file with patch {RUNTIME_PATCH!r}: "
            "rebuild the image"
        ) from error
    if isinstance(content, dict):
        content = content.get("patches")
    if not isinstance(content, list):
        raise SeriesError(f"{MANIFEST}: expected a list of patches, found {type(content).__name__}")
    return parse(content, str(MANIFEST))


def owner_of(module: str) -> str:
    """The id of the patch that brings ``vllm_ascend/strata/<module>.py``: a patch's module is named like
    the patch.
    """
    patch_id = module.partition(".")[0].replace("_", "-")
    return patch_id if patch_id in load().patches else RUNTIME_PATCH
