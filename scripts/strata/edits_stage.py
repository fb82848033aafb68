"""The ``edits`` stage of the tuned build: ``python -m strata.edits_stage``. Runs with the base's Python.

Takes the base's two source trees (read only) and the series; leaves below ``--out``:

``source/<tree>/…``  new and changed files of the Python packages, each Python file with its bytecode
``csrc/…``           new and changed build inputs of vllm-ascend, laid out as in its tree
``plan.json``        what the image must hold afterwards: every file with its sha256, and the series
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import py_compile
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from strata.check import Base, no_findings, survey
from strata.errors import EXIT_COULD_NOT_RUN, EXIT_NEEDS_PERSON, Finding, StrataError
from strata.series import Series, load_series
from strata.trees import Trees

WORKSPACE = "/vllm-workspace"
PACKAGES = {"vllm-ascend": "vllm_ascend/", "vllm": "vllm/"}


def is_build_input(tree: str, file: str) -> bool:
    """Whether a change of the file calls for the operators or the extension to be looked at: csrc, build files."""
    return tree == "vllm-ascend" and not file.startswith(PACKAGES[tree])


def place(tree: str, file: str) -> str:
    """Where a file goes below ``--out``."""
    return f"csrc/{file}" if is_build_input(tree, file) else f"source/{tree}/{file}"


def write_files(files: Mapping[tuple[str, str], str], original: Mapping[tuple[str, str], str | None],
                out: Path) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Write changed files and bytecode; by path in the image: sha256, sha256 of the original, path of the bytecode.

    The bytecode is checked against a hash of its source at import, not against times: a layer's times are not
    reliable, the same source gives the same bytes (so the build's cache holds), and an edit in a running container
    still counts. Its code objects carry the path in the image.
    """
    written: dict[str, dict[str, Any]] = {}
    for (tree, file), text in sorted(files.items()):
        target = out / place(tree, file)
        target.parent.mkdir(parents=True, exist_ok=True)
        data = text.encode("utf-8")
        target.write_bytes(data)
        final = f"{WORKSPACE}/{tree}/{file}"
        before = original.get((tree, file))
        entry: dict[str, Any] = {
            "sha256": hashlib.sha256(data).hexdigest(),
            "original": None if before is None else hashlib.sha256(before.encode()).hexdigest(),
            "bytecode": None,
        }
        if file.endswith(".py") and not is_build_input(tree, file):
            py_compile.compile(
                str(target), cfile=importlib.util.cache_from_source(str(target)), dfile=final, doraise=True,
                invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH,
            )  # fmt: skip
            entry["bytecode"] = importlib.util.cache_from_source(final)
        written[final] = entry
    return written


def describe(series: Series) -> dict[str, Any]:
    """The series for image.json: digest and patches in order."""
    return {
        "digest": series.digest(),
        "patches": [
            {
                "id": p.id,
                "group": p.group,
                "kind": p.spec.kind,
                "title": p.spec.title,
                "switch": {"name": p.spec.switch.name, "default": p.spec.switch.default} if p.spec.switch else None,
                "state": "applied",
            }
            for p in series.patches
        ],
    }


def run(root: Path, trees: Path, version: str, without: list[str], out: Path) -> Iterator[str]:
    """Plan, judge and write; yields progress lines. Nothing is written where a verdict stops the series."""
    series = load_series(root).without(without)
    result = survey(series, Base(Trees.at(trees), version), subsets=False)
    if not result.go():
        raise StrataError(no_findings(result, series.ids), EXIT_NEEDS_PERSON)
    for part in ("source", "csrc"):
        (out / part).mkdir(parents=True, exist_ok=True)
    files = write_files(result.plan.files, result.plan.original, out)
    (out / "plan.json").write_text(json.dumps({"version": version, "files": files, "series": describe(series)}, indent=1))
    inputs = sum(is_build_input(*path) for path in result.plan.files)
    yield f"{len(series.ids)} patches: {len(files) - inputs} source files, {inputs} build inputs"


def main(argv: list[str] | None = None) -> int:
    """The command; findings go to stderr."""
    parser = argparse.ArgumentParser(prog="python -m strata.edits_stage", description="Apply the series in the build.")
    parser.add_argument("--root", type=Path, required=True, help="holds patches/ and layers/")
    parser.add_argument("--trees", type=Path, required=True, help="holds vllm-ascend/ and vllm/")
    parser.add_argument("--version", required=True, help="the base's release")
    parser.add_argument("--without", default="", help="patch ids to leave out, by comma")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    without = [i for i in arguments.without.split(",") if i]
    try:
        for line in run(arguments.root, arguments.trees, arguments.version, without, arguments.out):
            print(line, flush=True)
    except StrataError as error:
        print("\n\n".join(f.render() for f in error.findings), file=sys.stderr, flush=True)
        return error.exit_code
    except (OSError, py_compile.PyCompileError) as error:
        print(Finding("E-EDITS", "the edits stage failed", found=str(error)).render(), file=sys.stderr)
        return EXIT_COULD_NOT_RUN
    return 0


if __name__ == "__main__":
    sys.exit(main())
