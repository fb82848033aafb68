"""What ``strata apply --out`` leaves for the image build: new and changed files by the stage that needs
them.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from strata.errors import Finding, StrataError
from strata.series import Series

# what makes operators and bindings: a change here costs a compile, a change elsewhere must not
_BUILD_INPUT = re.compile(
    r"^(csrc/|cmake/|(.*/)?CMakeLists\.txt$|.*\.cmake$|setup\.py$|setup\.cfg$|pyproject\.toml$|MANIFEST\.in$)"
)
PARTS = ("source", "csrc")


def is_build_input(file: str) -> bool:
    """Whether a file of a tree goes to the kernels stage."""
    return bool(_BUILD_INPUT.match(file))


def series_data(series: Series) -> dict[str, Any]:
    """The applied series as plain data: what the labels, ``image.json`` and the in-image checks read."""
    return {
        "digest": series.digest(),
        "patches": [
            {
                "id": p.id,
                "group": p.group,
                "kind": p.spec.kind,
                "title": p.spec.title,
                "switch": p.spec.switch.model_dump() if p.spec.switch else None,
                "state": "applied",
            }
            for p in series.patches
        ],
    }


def write_out(
    directory: Path,
    files: Mapping[tuple[str, str], str],
    series: Series,
    executable: Collection[tuple[str, str]] = (),
) -> dict[str, int]:
    """Write ``source/<tree>/…``, ``csrc/<tree>/…`` and ``series.json`` below ``directory``; returns files per
    part.

    Written aside and moved in, so that a failure leaves what was there; earlier contents of the three are
    replaced. Modification times are those of the write: BuildKit's cache goes by content.
    """
    counts = dict.fromkeys(PARTS, 0)
    stage: Path | None = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=".strata-out-", dir=directory))
        for part in PARTS:
            (stage / part).mkdir()
        for (tree, file), text in sorted(files.items()):
            part = "csrc" if is_build_input(file) else "source"
            path = stage / part / tree / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode("utf-8"))
            if (tree, file) in executable:
                path.chmod(0o755)
            counts[part] += 1
        (stage / "series.json").write_text(json.dumps(series_data(series), indent=1) + "\n", encoding="utf-8")
        for name in (*PARTS, "series.json"):
            target = directory / name
            if target.is_dir():
                target.rename(stage / f"old-{name}")
            (stage / name).rename(target)
    except OSError as error:
        raise StrataError(
            Finding(
                "E-WRITE",
                "the result cannot be written",
                where=str(error.filename or directory),
                found=error.strerror or str(error),
                hint="make room or mend the permissions, then run it again",
            )
        ) from error
    finally:
        if stage is not None:
            with contextlib.suppress(OSError):
                shutil.rmtree(stage)
    return counts
