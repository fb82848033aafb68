"""The series that this tree was patched with, as the patch engine wrote it into ``series.json``."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

MANIFEST = Path(__file__).with_name("series.json")
FORMAT = 1
RUNTIME_PATCH = "runtime-switches"


class SeriesError(RuntimeError):
    """``series.json`` is missing or is not what the patch engine writes."""


@dataclass(frozen=True)
class Series:
    """What is in the tree.

    patches: patch ids in series order; defaults: switch name -> value without any setting; owners: switch
    name -> patch id; digest: the first 12 hex digits of the series hash, which the image's labels carry too
    and which changes with every byte of a patch.
    """

    patches: tuple[str, ...]
    defaults: Mapping[str, bool]
    owners: Mapping[str, str]
    digest: str


def parse(manifest: Any, where: str = "series.json") -> Series:
    """Read ``{format: 1, digest, patches: [{id, switch: {name, default} | null, …}, …], …}``.

    Raises SeriesError for another shape and for a switch that two patches claim.
    """
    if not isinstance(manifest, Mapping) or manifest.get("format") != FORMAT:
        raise SeriesError(f"{where}: not a series manifest of format {FORMAT}")
    digest, entries = manifest.get("digest"), manifest.get("patches")
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{12,}", digest):
        raise SeriesError(f"{where}: 'digest' is {digest!r}, expected the series hash in hex")
    if not isinstance(entries, list):
        raise SeriesError(f"{where}: 'patches' is {type(entries).__name__}, expected a list")
    patches: list[str] = []
    defaults: dict[str, bool] = {}
    owners: dict[str, str] = {}
    for number, entry in enumerate(entries):
        try:
            patch_id = entry["id"]
            switch = entry["switch"]
            name, default = (switch["name"], switch["default"]) if switch is not None else (None, None)
        except (KeyError, TypeError) as error:
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
    return Series(tuple(patches), MappingProxyType(defaults), MappingProxyType(owners), digest[:12])


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
    return parse(content, str(MANIFEST))


def owner_of(module: str) -> str:
    """The id of the patch that brings ``vllm_ascend/strata/<module>.py``: a patch's module is named like
    the patch.
    """
    patch_id = module.partition(".")[0].replace("_", "-")
    return patch_id if patch_id in load().patches else RUNTIME_PATCH
