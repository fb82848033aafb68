"""The checker for compose files, and the files of this repository."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from strata import compose
from strata.serving import facts, presets, render

ROOT = Path(__file__).resolve().parents[2]
CONTROL = ["/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"]
DRIVER = [f"{m}:{m}:ro" for m in compose.DRIVER_MOUNTS]


def check(
    service: dict[str, object], tmp_path: Path, environment: dict[str, str] | None = None
) -> list[compose.Finding]:
    path = tmp_path / "compose.yaml"
    path.write_text(yaml.safe_dump({"services": {"s": service}}))
    return compose.check_files([path], environment or {})


def npu(**more: object) -> dict[str, object]:
    return {"devices": ["/dev/davinci0", "/dev/davinci1", *CONTROL], "volumes": list(DRIVER), **more}


def codes(findings: list[compose.Finding]) -> list[str]:
    return [f.code for f in findings]


def test_the_repositorys_own_files() -> None:
    assert compose.check_files([ROOT / "compose.yaml", ROOT / "compose.cpu.yaml"], {}) == []


def test_the_repositorys_services_are_the_presets() -> None:
    data = yaml.load((ROOT / "compose.yaml").read_text(), Loader=compose._Loader)
    assert sorted(data["services"]) == presets.names()
    for name, service in data["services"].items():
        assert service["profiles"] == [name]
        assert service["environment"]["STRATA_PRESET"] == name
        assert isinstance(service["command"], list)
        assert "privileged" not in service
        assert service["pull_policy"] == "never"
        assert service["ports"] == ["127.0.0.1:${PORT:-8000}:8000"]
        assert set(presets.OVERRIDES) <= set(service["environment"]), "every override reaches the container"
        cards = [d for d in service["devices"] if d.removeprefix("/dev/davinci").isdigit()]
        assert len(cards) == presets.load(name, {}).devices


def test_a_complete_service_is_good(tmp_path: Path) -> None:
    service = npu(
        environment={"ASCEND_RT_VISIBLE_DEVICES": "0,1"}, command=["vllm", "serve", "M", "-tp", "2"]
    )
    assert check(service, tmp_path) == []


def test_c09_quotes_lost_on_the_way(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text(
        "services:\n  s:\n    command: bash -c "
        '"vllm serve M --compilation-config \'{"cudagraph_mode":"FULL_DECODE_ONLY"}\'"\n'
    )
    (finding,) = compose.check_files([path], {})
    assert finding.code == "E-COMPOSE-QUOTES"
    assert finding.found == "{cudagraph_mode:FULL_DECODE_ONLY}"
    assert "list" in finding.hint


@pytest.mark.parametrize("name", presets.names())
def test_c09_what_is_emitted_reads_back(name: str) -> None:
    arguments = ["vllm", "serve", *render.render(presets.load(name, {}), facts.catalogue("0.23.0")).arguments]
    assert compose.read_back(yaml.safe_load(yaml.safe_dump(compose.emit(arguments)))) == arguments


@given(
    st.lists(st.text(alphabet=st.characters(exclude_categories=["C"]), min_size=1), min_size=1, max_size=5)
)
def test_any_command_survives_the_compose_file(arguments: list[str]) -> None:
    assert compose.read_back(yaml.safe_load(yaml.safe_dump(compose.emit(arguments)))) == arguments


def test_c09_single_dollars(tmp_path: Path) -> None:
    assert codes(check({"command": ["echo", "$HOME"]}, tmp_path)) == ["E-COMPOSE-DOLLAR"]
    assert check({"command": ["echo", "$$HOME"]}, tmp_path) == []


def test_c10_ids_are_logical_inside(tmp_path: Path) -> None:
    service = {
        "devices": ["/dev/davinci4", "/dev/davinci5", *CONTROL],
        "volumes": DRIVER,
        "environment": {"ASCEND_RT_VISIBLE_DEVICES": "4,5"},
    }
    (finding,) = check(service, tmp_path)
    assert finding.code == "E-COMPOSE-IDS"
    assert "ASCEND_RT_VISIBLE_DEVICES=0,1" in finding.hint
    service["environment"] = {"ASCEND_RT_VISIBLE_DEVICES": "0,1"}
    assert check(service, tmp_path) == []
    service |= {"privileged": True}
    (finding,) = check(service, tmp_path)
    assert finding.expected == "4,5"


@pytest.mark.parametrize("text", ["0,0", "0,x", "0;1", "-1"])
def test_c10_ids_that_are_none(text: str, tmp_path: Path) -> None:
    assert "E-COMPOSE-IDS" in codes(check(npu(environment={"ASCEND_RT_VISIBLE_DEVICES": text}), tmp_path))


@pytest.mark.parametrize(
    "more",
    [
        {"command": ["vllm", "serve", "M", "-tp", "2", "--pipeline-parallel-size=2"]},
        {"command": "vllm serve M --tensor-parallel-size 4"},
        {"command": ["bash", "-c", "vllm serve M -tp 3"]},
        {"environment": ["TENSOR_PARALLEL=2", "DATA_PARALLEL=2"]},
        {"environment": {"STRATA_PRESET": "c1", "ASCEND_RT_VISIBLE_DEVICES": "0"}},
    ],
)
def test_c10_more_ranks_than_cards(more: dict[str, object], tmp_path: Path) -> None:
    assert codes(check(npu(**more), tmp_path)) == ["E-COMPOSE-PARALLEL"]


def test_c11_device_names_are_a_closed_list(tmp_path: Path) -> None:
    found = check(
        {"devices": ["/dev/davinci0", "/dev/dav_manager", "/dev/devmm_svm", "/dev/hisi_hdc"]}, tmp_path
    )
    assert codes(found) == ["E-COMPOSE-DEVICE", "E-COMPOSE-DEVICE", "E-COMPOSE-DRIVER"]
    assert "/dev/davinci_manager" in found[0].hint
    assert "/usr/local/Ascend/driver/lib64" in found[2].found


def test_c11_a_mounted_parent_counts(tmp_path: Path) -> None:
    mounts = [
        "/usr/local/dcmi:/usr/local/dcmi",
        "/usr/local/bin/npu-smi:/usr/local/bin/npu-smi",
        "/usr/local/Ascend/driver:/usr/local/Ascend/driver:ro",
        {"type": "bind", "source": "/etc/ascend_install.info", "target": "/etc/ascend_install.info"},
    ]
    assert check(npu(volumes=mounts), tmp_path) == []


def test_devices_named_twice(tmp_path: Path) -> None:
    service = {"devices": ["/dev/davinci0", "/dev/davinci0", *CONTROL], "volumes": DRIVER}
    assert codes(check(service, tmp_path)) == ["E-COMPOSE-DEVICE"]


def test_variables_are_put_in(tmp_path: Path) -> None:
    service = npu(environment={"ASCEND_RT_VISIBLE_DEVICES": "${CARDS:-0,1}"})
    assert check(service, tmp_path) == []
    assert codes(check(service, tmp_path, {"CARDS": "6,7"})) == ["E-COMPOSE-IDS"]


@pytest.mark.parametrize("text", ["a: [", "services: 3", "just text", "services:\n  s: {command: 'a \"b'}\n"])
def test_bad_files_are_told(text: str, tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text(text)
    (finding,) = compose.check_files([path], {})
    assert finding.code.startswith("E-")
    assert str(path) in finding.where


def test_read_back_splits_strings_as_compose_does() -> None:
    words = ["vllm", "serve", "M", "--compilation-config", json.dumps({"cudagraph_mode": "FULL"})]
    assert compose.read_back(shlex.join(words)) == words
