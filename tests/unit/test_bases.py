"""Bases: the file, names and references, identities, pins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from strata import base as base_module
from strata.bases import (
    BasesFile,
    find_base,
    guess_from_reference,
    kind_of_request,
    load_bases,
)
from strata.choice import choose, identify
from strata.config import validate
from strata.errors import StrataError

ROOT = Path(__file__).resolve().parents[2]
BASES = load_bases(ROOT)
VERSION = "0.23.0"


def codes(error: pytest.ExceptionInfo[StrataError]) -> list[str]:
    return [f.code for f in error.value.findings]


def test_every_release_has_its_three_bases() -> None:
    for release in BASES.releases.values():
        assert {"cpu", "a2", "a3"} <= set(release.bases)
        assert [b.kind for b in release.bases.values()].count("embedded") == 1


def test_names_of_a_base() -> None:
    known = find_base(BASES, "v0.23.0", "a3")
    assert (known.full_name, known.tuned_tag) == ("0.23.0-a3", "strata:0.23.0-a3")
    assert known.image.endswith("vllm-ascend:v0.23.0-a3")
    assert known.base.soc == "ascend910_9391"
    assert find_base(BASES, VERSION, "cpu").image == "strata-base:0.23.0-cpu"


def test_unknown_version_lists_those_known() -> None:
    with pytest.raises(StrataError) as error:
        find_base(BASES, "0.99.0", "cpu")
    assert codes(error) == ["E-VERSION"]
    assert VERSION in error.value.findings[0].expected


def test_unknown_base_lists_those_known() -> None:
    with pytest.raises(StrataError) as error:
        find_base(BASES, VERSION, "a7")
    (finding,) = error.value.findings
    assert finding.code == "E-BASE"
    assert all(name in finding.expected for name in ("cpu", "a2", "a3"))


def test_requests(tmp_path: Path) -> None:
    archive = tmp_path / "base.tar"
    archive.write_bytes(b"")
    assert kind_of_request(BASES, VERSION, "a3") == "known"
    assert kind_of_request(BASES, VERSION, str(archive)) == "archive"
    assert kind_of_request(BASES, VERSION, "mirror.example:5000/ascend/vllm-ascend:v0.23.0-a3") == "reference"
    assert kind_of_request(BASES, VERSION, "local:tag") == "reference"


@pytest.mark.parametrize("request_", ["a33", "nope", "bad ref/with space:1"])
def test_a_slip_is_no_reference(request_: str) -> None:
    with pytest.raises(StrataError) as error:
        kind_of_request(BASES, VERSION, request_)
    assert codes(error) == ["E-BASE"]


def test_missing_archive_is_named() -> None:
    with pytest.raises(StrataError) as error:
        kind_of_request(BASES, VERSION, "./not-there.tar")
    assert error.value.findings[0].where == "./not-there.tar"


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("mirror.example/x/vllm-ascend:v0.23.0-a3", "a3"),
        ("mirror.example:5000/vllm-ascend:v0.23.0", "a2"),
        ("mirror.example:5000/vllm-ascend", None),
        ("x/y:latest", None),
    ],
)
def test_reference_tells_its_base(reference: str, name: str | None) -> None:
    assert guess_from_reference(BASES, VERSION, reference) == name


def test_host_decides_without_base() -> None:
    assert choose(BASES, VERSION, None, [], None).known.name == "cpu"
    assert choose(BASES, VERSION, None, ["/dev/davinci0"], "a3").known.name == "a3"
    with pytest.raises(StrataError) as error:
        choose(BASES, VERSION, None, ["/dev/davinci0"], None)
    assert "BASE=" in error.value.findings[0].hint


def test_identify_by_label_soc_and_tag() -> None:
    label = {"ai.strata.base.name": "0.23.0-cpu"}
    assert identify(BASES, VERSION, label, ["SOC_VERSION=ascend910b1"], "x:1").name == "cpu"
    assert identify(BASES, VERSION, label, ["SOC_VERSION=ascend910_9391"], "x:1").name == "a3", (
        "labels are inherited"
    )
    assert identify(BASES, VERSION, {}, ["A=b", "SOC_VERSION=ascend910_9391"], "x:1").name == "a3"
    assert identify(BASES, VERSION, {}, ["SOC_VERSION=ascend910b1"], "x:1").name == "a2"
    assert identify(BASES, VERSION, {}, [], "m/vllm-ascend:v0.23.0-a3").name == "a3"


def test_identify_refuses_what_it_cannot_tell() -> None:
    for environment in ([], ["SOC_VERSION=ascend310p1"]):
        with pytest.raises(StrataError) as error:
            identify(BASES, VERSION, {}, environment, "x:1")
        assert codes(error) == ["E-BASE"]


def test_a_device_base_needs_a_reference() -> None:
    data = BASES.model_dump(by_alias=True)
    del data["releases"][VERSION]["bases"]["a3"]["reference"]
    with pytest.raises(StrataError) as error:
        validate(data, BasesFile, "bases.yaml")
    assert codes(error) == ["E-CONFIG"]


def test_pin_changes_three_lines_and_keeps_the_rest(tmp_path: Path) -> None:
    text = (ROOT / "images" / "bases.yaml").read_text()
    digest, rootfs = "sha256:" + "a" * 64, "sha256:" + "b" * 64
    trees = "{vllm: " + "c" * 64 + ", vllm-ascend: " + "d" * 64 + "}"
    new = base_module.set_pin(text, VERSION, "a3", {"digest": digest, "rootfs": rootfs, "trees": trees})
    changed = [(a, b) for a, b in zip(text.splitlines(), new.splitlines(), strict=True) if a != b]
    assert len(changed) == 3
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "bases.yaml").write_text(new)
    known = find_base(load_bases(tmp_path), VERSION, "a3")
    assert (known.base.digest, known.base.rootfs) == (digest, rootfs)
    assert known.expected_trees == {"vllm": "c" * 64, "vllm-ascend": "d" * 64}
    assert find_base(load_bases(tmp_path), VERSION, "a2").base.digest is None


def test_pin_says_which_line_is_missing() -> None:
    text = (ROOT / "images" / "bases.yaml").read_text().replace("        rootfs: null\n", "")
    with pytest.raises(StrataError) as error:
        base_module.set_pin(text, VERSION, "a3", {"rootfs": "sha256:" + "b" * 64})
    assert "rootfs" in error.value.findings[0].message


def fake_image(layers: list[str], digests: list[str]) -> SimpleNamespace:
    return SimpleNamespace(
        id="sha256:" + "0" * 64, tags=["x:1"], attrs={"RootFS": {"Layers": layers}, "RepoDigests": digests}
    )


def test_verify_names_each_difference() -> None:
    data = BASES.model_dump(by_alias=True)
    image = fake_image(["sha256:1", "sha256:2"], ["q.example/x@sha256:" + "e" * 64])
    other = fake_image(["sha256:1", "sha256:3"], [])
    data["releases"][VERSION]["bases"]["a3"] |= {
        "digest": "sha256:" + "e" * 64,
        "rootfs": base_module.root_hash(image),  # type: ignore[arg-type]
        "trees": {"vllm": "1" * 64, "vllm-ascend": "2" * 64},
    }
    known = find_base(validate(data, BasesFile, "x"), VERSION, "a3")
    same = {"vllm": "1" * 64, "vllm-ascend": "2" * 64}
    assert base_module.verify(known, image, same) == []  # type: ignore[arg-type]
    found = base_module.verify(known, other, same | {"vllm": "3" * 64})  # type: ignore[arg-type]
    assert [f.message.split("'s ")[1].split(" is")[0] for f in found] == [
        "root filesystem",
        "vllm source tree",
    ]
    pulled_again = fake_image(["sha256:1", "sha256:2"], ["q.example/x@sha256:" + "f" * 64])
    (finding,) = base_module.verify(known, pulled_again, same)  # type: ignore[arg-type]
    assert "manifest digest" in finding.message


def test_unpinned_device_base_has_nothing_to_differ_from() -> None:
    known = find_base(BASES, VERSION, "a3")
    assert base_module.verify(known, fake_image([], []), {"vllm": "x", "vllm-ascend": "y"}) == []  # type: ignore[arg-type]
