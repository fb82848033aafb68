"""Operator descriptors: what a static-kernel compile is told about one call of an operator.

They are made from what the package records of its own binaries (``supportInfo`` beside each kernel): names,
types, formats, attributes. Recorded shapes are "unknown rank"; a static compile needs fixed ones, so
:data:`SHAPE` stands in.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.kernels_tree import Package

SHAPE = (16, 16)
"""The shape of every tensor. Preprocessing doesn't look at it; a real static compile brings recorded shapes.
"""


@dataclass(frozen=True)
class Descriptor:
    """One call: tensors as ``opc`` hands them to a wrapper (None for an optional input that is absent).

    op_type: the operator's type; op_file: file name of its wrapper; name: unique, used as the kernel's name.
    """

    op_type: str
    op_file: str
    name: str
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    attributes: tuple[Any, ...]
    impl_mode: str

    def as_json(self) -> dict[str, Any]:
        return {
            "op_type": self.op_type,
            "op_file": self.op_file,
            "name": self.name,
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "attributes": list(self.attributes),
            "impl_mode": self.impl_mode,
        }


def from_package(
    package: Package, compute_unit: str, *, every: bool = False, absent: bool = False
) -> list[Descriptor]:
    """The descriptors of all AI-core operators, in order of type.

    every: one for each recorded binary, not only the first of each operator. absent: optional inputs are
    None.
    """
    found: list[Descriptor] = []
    for op_type, keys in sorted(package.descriptions(compute_unit).items()):
        op_file = keys["opFile"]["value"]
        records = package.binaries(compute_unit, op_file)
        found += [_descriptor(op_type, op_file, path, absent) for path in (records if every else records[:1])]
    return found


def without_binary(package: Package, compute_unit: str) -> list[str]:
    """Types that the package describes but has no recorded binary for: nothing can be said about them."""
    return [
        t
        for t, keys in sorted(package.descriptions(compute_unit).items())
        if not package.binaries(compute_unit, keys["opFile"]["value"])
    ]


def _descriptor(op_type: str, op_file: str, path: Path, absent: bool) -> Descriptor:
    info = json.loads(path.read_text(encoding="utf-8"))["supportInfo"]
    inputs = [_tensor(t) for t in info["inputs"]]
    if absent:
        inputs = [
            None if isinstance(r, dict) and r.get("paramType") == "optional" else t
            for r, t in zip(info["inputs"], inputs, strict=True)
        ]
    return Descriptor(
        op_type,
        op_file,
        path.stem,
        tuple(inputs),
        tuple(_tensor(t) for t in info["outputs"]),
        tuple(a.get("value") for a in info.get("attrs") or [] if a),
        info.get("implMode", ""),
    )


def _tensor(record: Any) -> Any:
    if record is None:
        return None
    if isinstance(record, list):
        return [_tensor(r) for r in record]
    shape = list(SHAPE)
    return {
        "shape": shape,
        "ori_shape": shape,
        "range": [[d, d] for d in shape],
        "format": record["format"],
        "ori_format": record["format"],
        "dtype": record["dtype"],
    }
