"""Packages through pip: what is asked, and what stops before a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from strata import rootfs
from strata.errors import StrataError
from strata.wheels import Target, asked_for, fetch_source, read_report, require_cpu_build

X86 = Target("3.11", "x86_64")


def report(version: str, requires: list[str]) -> dict[str, Any]:
    url = f"https://index.example/torch-{version}-cp311-cp311-manylinux_2_28_x86_64.whl"
    metadata = {"name": "torch", "version": version, "requires_dist": requires}
    return {"version": "1", "install": [{"download_info": {"url": url}, "metadata": metadata}]}


def test_a_cuda_build_stops_before_the_download() -> None:
    torch = read_report(
        report("2.13.0", ["filelock", 'nvidia-cudnn-cu13==9.2; platform_system == "Linux"']), X86
    )
    with pytest.raises(StrataError) as error:
        require_cpu_build(torch)
    (finding,) = error.value.findings
    assert finding.code == "E-TORCH-CUDA"
    assert "PIP_EXTRA_INDEX_URL" in finding.hint and "PIP_FIND_LINKS" in finding.hint


def test_a_cpu_build_goes() -> None:
    require_cpu_build(read_report(report("2.13.0+cpu", ["filelock", "sympy"]), X86))


def test_markers_are_the_targets_not_the_hosts() -> None:
    requires = ['nvidia-nccl-cu12==2.27; platform_system == "Linux" and platform_machine == "x86_64"']
    arm = Target("3.11", "aarch64")
    require_cpu_build(read_report(report("2.10.0", requires), arm))
    with pytest.raises(StrataError):
        require_cpu_build(read_report(report("2.10.0", requires), X86))


def test_target_asks_for_wheels_of_that_python_only() -> None:
    arguments = Target("3.12", "aarch64").arguments()
    assert "--only-binary=:all:" in arguments and "3.12" in arguments
    platforms = [arguments[n + 1] for n, a in enumerate(arguments) if a == "--platform"]
    assert all(p.endswith("_aarch64") for p in platforms) and "manylinux_2_28_aarch64" in platforms


def test_the_stamp_knows_target_files_and_pins(tmp_path: Path) -> None:
    file = tmp_path / "r.txt"
    file.write_text("a==1\n")
    one = asked_for([file], ["torch==2"], X86)
    assert one != asked_for([file], ["torch==3"], X86)
    assert one != asked_for([file], ["torch==2"], Target("3.12", "x86_64"))
    file.write_text("a==2\n")
    assert one != asked_for([file], ["torch==2"], X86)


def test_a_kept_source_archive_is_taken_by_its_hash(tmp_path: Path) -> None:
    import hashlib

    archive = tmp_path / "x-1.tar.gz"
    archive.write_bytes(b"content")
    said: list[str] = []
    assert fetch_source("x==1", hashlib.sha256(b"content").hexdigest(), tmp_path, said.append) == archive
    assert said == []


def test_debian_sources_from_the_mirror_list() -> None:
    mirrors = "bookworm\thttp://m.example/debian\t/k.gpg\nbookworm-security\thttp://s.example/sec\t\n"
    assert rootfs.source_lines(mirrors) == [
        "deb [signed-by=/k.gpg] http://m.example/debian bookworm main",
        "deb http://s.example/sec bookworm-security main",
    ]
