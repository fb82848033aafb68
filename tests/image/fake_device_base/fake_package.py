"""Make a fake operator package: wrappers by the tree's own generator, no binaries, a record of the call.

Usage: ``fake_package.py <csrc> <ops, joined by ;> <compute unit> <output>``. The compile options come as a
real build's would: marks where the tree carries ``cmake/strata_relocatable.cmake``, absolute paths where it
doesn't.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

RECORDED = (
    "SOC_VERSION",
    "MAX_JOBS",
    "ASCEND_HOME_PATH",
    "ASCEND_TOOLKIT_HOME",
    "ATB_HOME_PATH",
    "CPATH",
    "STRATA_FAKE_CANN",
    "STRATA_FAKE_ATB",
    "VLLM_BATCH_INVARIANT",
    "CMAKE_CXX_COMPILER_LAUNCHER",
    "COMPILE_CUSTOM_KERNELS",
)


def device_operators(csrc, names):
    """The operators that have AI-core kernels: those get a wrapper."""
    return [n for n in names if any((g / n / "op_kernel").is_dir() for g in csrc.iterdir() if g.is_dir())]


def camel(name):
    return "".join(part.capitalize() for part in name.split("_"))


def main(csrc, ops, unit, output):
    csrc, output = Path(csrc), Path(output)
    names = ops.split(";")
    vendor = output / "vendors" / "custom_transformer"
    tbe = vendor / "op_impl" / "ai_core" / "tbe"
    dynamic = tbe / "custom_transformer_impl" / "dynamic"
    common = tbe / "custom_transformer_impl" / "ascendc" / "common"
    config = tbe / "config" / unit
    autogen = output.parent / "autogen"
    for directory in (dynamic, common, config, autogen):
        directory.mkdir(parents=True)
    kernels = device_operators(csrc, names)
    described = {
        camel(n): {
            "opFile": {"value": n},
            "opInterface": {"value": n},
            "dynamicShapeSupport": {"flag": "true"},
            "input0": {"name": "x", "paramType": "required", "dtype": "float16", "format": "ND"},
            "output0": {"name": "y", "paramType": "required", "dtype": "float16", "format": "ND"},
        }
        for n in kernels
    }
    (config / f"aic-{unit}-ops-info.json").write_text(json.dumps(described, indent=1))
    lines = []
    for op_type, keys in described.items():
        lines.append(f"[{op_type}]")
        for key, fields in keys.items():
            lines += [f"{key}.{field}={value}" for field, value in fields.items()]
    (autogen / f"aic-{unit}-ops-info.ini").write_text("\n".join(lines) + "\n")
    relocatable = (csrc / "cmake" / "strata_relocatable.cmake").is_file()
    header = "__STRATA_SHIPPED__/cann_compat.h" if relocatable else f"{csrc}/common/include/cann_compat.h"
    (autogen / "custom_compile_options.ini").write_text(f"ALL,,-include{header}\n")
    if relocatable:
        (common / "cann_compat.h").write_text("// fake\n")
    generator = csrc / "cmake" / "scripts" / "util" / "ascendc_impl_build.py"
    impl = output.parent / "impl"
    impl.mkdir()
    subprocess.run(
        [sys.executable, generator, "", "", "", "", impl, autogen, "--opsinfo-dir", autogen], check=True
    )
    for path in sorted((impl / "dynamic").glob("*.py")):
        (dynamic / path.name).write_text(path.read_text())
    record = {
        "arguments": {"ops": names, "soc": unit},
        "cwd": str(Path.cwd()),
        "relocatable": relocatable,
        "environment": {k: os.environ[k] for k in RECORDED if k in os.environ},
    }
    (vendor / "fake-build.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
