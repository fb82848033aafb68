"""Make two packages usable on a CPU that were built for other hardware. Run once in the venv, while the image is built.

torchvision: the package index has builds that are linked against CUDA. Beside a CPU torch its extension does not load, and
the import then fails at two operators that it registers fake kernels for. Declaring their schemas lets the Python transforms
work; the operators themselves stay unavailable.

triton-ascend 3.2.0, in the interpreter: its ``store`` asks ``if not mask``, and there a mask of one element is a value, so
that a False mask is taken for no mask and the store happens; asking for None is what is meant. And its general reduction,
which argmax takes, slices shapes with the axis as given, so that ``axis=-1`` gives a wrong shape.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

_SCHEMAS = """

if not _has_ops():  # a CUDA-linked extension beside a CPU torch: the schemas alone, for the registrations that follow
    _strata_schemas = torch.library.Library("torchvision", "FRAGMENT")
    for _strata_schema in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    ):
        _strata_schemas.define(_strata_schema)
"""


def package(name: str) -> Path:
    """Directory of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"{name} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def torchvision() -> None:
    """Append the schemas to the module that loads the extension."""
    path = package("torchvision") / "extension.py"
    text = path.read_text()
    if "def _has_ops" not in text:
        sys.exit(f"{path}: not the torchvision that this step was written for")
    path.write_text(text + _SCHEMAS)


def triton_masks() -> None:
    """Turn the truth test of a mask into a test for None, in both copies of the module."""
    root = package("triton")
    for path in (root / "language" / "semantic.py", root / "triton_patch" / "language" / "semantic.py"):
        text, count = re.subn(r"^( +)if not mask:$", r"\1if mask is None:", path.read_text(), flags=re.MULTILINE)
        if not count:
            sys.exit(f"{path}: no mask test found: not the triton-ascend that this step was written for")
        path.write_text(text)


def triton_reductions() -> None:
    """Count a negative axis from the end before the general reduction slices with it."""
    path = package("triton") / "runtime" / "interpreter.py"
    text, count = re.subn(
        r"^( +)(input_shape = input\[0\]\.handle\.data\.shape)$",
        r"\1\2\n\1axis %= len(input_shape)",
        path.read_text(),
        flags=re.MULTILINE,
    )
    if count != 1:
        sys.exit(f"{path}: not the triton-ascend that this step was written for ({count} places)")
    path.write_text(text)


if __name__ == "__main__":
    torchvision()
    triton_masks()
    triton_reductions()
