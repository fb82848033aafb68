"""The tuned build: arguments, plan text, what compose reads, what a failed build says."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from strata import bytecode, final_stage, image
from strata.bases import find_base, load_bases
from strata.choice import choose
from strata.engine import Engine, build_failed
from strata.errors import StrataError
from strata.series import load_series

ROOT = Path(__file__).resolve().parents[2]
BASES = load_bases(ROOT)
CPU = find_base(BASES, "0.23.0", "cpu")
A3 = find_base(BASES, "0.23.0", "a3")


def fake_image() -> SimpleNamespace:
    return SimpleNamespace(
        id="sha256:" + "7" * 64,
        tags=["b:1"],
        attrs={"RootFS": {"Layers": ["sha256:1"]}, "RepoDigests": [], "Architecture": "amd64"},
    )


def test_build_arguments_name_the_base_as_a_context(tmp_path: Path) -> None:
    build = image.tuned_build(A3, ROOT, "mirror/x:1", tmp_path / "w", tmp_path / "f", ["a", "b"], {"k": "v"})
    assert build.contexts["base"] == "docker-image://mirror/x:1"
    assert build.arguments == {"VERSION": "0.23.0", "WITHOUT": "a,b", "LIVE": "deferred"}
    assert (build.tag, build.network) == ("strata:0.23.0-a3", "none")
    assert image.tuned_build(CPU, ROOT, "x", tmp_path, tmp_path, [], {}).arguments["LIVE"] == "at-build"


def test_dockerfiles_use_no_registry_and_no_frontend_line() -> None:
    for path in ROOT.glob("images/*/*Dockerfile"):
        lines = path.read_text().splitlines()
        assert not any(line.startswith("# syntax=") for line in lines)
        stages = {
            line.split(" AS ")[1].strip() for line in lines if line.startswith("FROM ") and " AS " in line
        }
        for line in lines:
            if line.startswith("FROM "):
                assert line.split()[1] in {"base", "rootfs", "debian", "scratch", *stages}, (path, line)


def test_kernels_context_holds_only_what_decides_the_operators(tmp_path: Path) -> None:
    facts = image.facts_for(CPU, fake_image(), {"vllm": "1", "vllm-ascend": "2"}, "3.11")  # type: ignore[arg-type]
    image.write_context(tmp_path, facts)
    kernels = json.loads((tmp_path / "kernels.json").read_text())
    assert kernels == {
        "name": "0.23.0-cpu",
        "version": "0.23.0",
        "variant": "cpu",
        "soc_version": "ascend910b1",
    }
    assert json.loads((tmp_path / "image.json").read_text())["trees"] == {"vllm": "1", "vllm-ascend": "2"}


def test_facts_by_kind_of_base() -> None:
    cpu, a3 = (image.facts_for(k, fake_image(), {}, "3.12") for k in (CPU, A3))  # type: ignore[arg-type]
    assert (cpu["live"], a3["live"]) == ("pending", "deferred")
    assert cpu["serve_python"] and a3["serve_python"] is None and a3["stubs"] is None


def test_labels_say_base_series_and_compiler() -> None:
    series = load_series(ROOT)
    labels = image.labels_for(CPU, fake_image(), series, ROOT, operators=True)  # type: ignore[arg-type]
    assert labels["ai.strata.base"] == "0.23.0-cpu"
    assert labels["ai.strata.series"] == series.digest()
    assert labels["ai.strata.operators"] == "stand-in"
    assert labels["ai.strata.patches"].split(",") == series.ids
    a3 = image.labels_for(A3, fake_image(), series, ROOT, operators=False)  # type: ignore[arg-type]
    assert (a3["ai.strata.live-proof"], a3["ai.strata.operators"]) == ("deferred", "as shipped")
    assert "CPU only" in labels["ai.strata.needs-npu"] and "live proof" in a3["ai.strata.needs-npu"]


def test_plan_text_is_complete() -> None:
    choice = choose(BASES, "0.23.0", "a3", [], None)
    series = load_series(ROOT)
    text = image.plan_text(
        choice,
        series,
        None,
        {
            "image": "to be pulled",
            "architecture": "x86_64",
            "trees": "nothing",
            "network": "its registry",
            "operators": image.operators_text(choice.known, ROOT, None),
        },
    )
    for part in (
        "ascend910_9391",
        "42 operators",
        "bisheng",
        "strata:0.23.0-a3",
        "9.1.0",
        "aarch64",
        "its registry",
        *(f"  {stage} " for stage in ("tools", "edits", "kernels", "final")),
        *series.ids,
    ):
        assert part in text, part


def test_plan_needs_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent.sock")
    monkeypatch.setattr(image, "_judge_for_plan", lambda *_: (_ for _ in ()).throw(no_network()))
    text = image.plan(image.Request("0.23.0", "a3"), ROOT, lambda _: None)
    assert "no engine here to ask" in text and "E-PIP" in text


def no_network() -> StrataError:
    from strata.errors import Finding

    return StrataError(Finding("E-PIP", "pip could not fetch vllm==0.23.0"))


def test_no_engine_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent.sock")
    with pytest.raises(StrataError) as error:
        Engine()
    assert [f.code for f in error.value.findings] == ["E-ENGINE"]
    assert error.value.exit_code == 2


def test_another_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.host.architecture", lambda: "x86_64")
    engine = Engine.__new__(Engine)
    engine.require_architecture(SimpleNamespace(attrs={"Architecture": "amd64"}), "x")  # type: ignore[arg-type]
    with pytest.raises(StrataError) as error:
        engine.require_architecture(SimpleNamespace(attrs={"Architecture": "arm64"}), "x:1")  # type: ignore[arg-type]
    (finding,) = error.value.findings
    assert (finding.code, finding.expected, finding.found) == ("E-ARCH", "x86_64", "aarch64")


def test_a_tuned_image_is_no_base() -> None:
    image.require_untuned(SimpleNamespace(labels={}), "x")  # type: ignore[arg-type]
    with pytest.raises(StrataError) as error:
        image.require_untuned(SimpleNamespace(labels={"ai.strata.series": "d"}), "x:1")  # type: ignore[arg-type]
    assert error.value.findings[0].code == "E-BASE"


def test_archive_that_is_no_image(tmp_path: Path) -> None:
    plain = tmp_path / "files.tar"
    with tarfile.open(plain, "w") as tar:
        tar.add(__file__, "etc/hosts")
    (tmp_path / "noise.tar").write_bytes(b"noise" * 300)
    for name, message in (("files.tar", "files, not an image"), ("noise.tar", "not an image archive")):
        with pytest.raises(StrataError) as error:
            image.load_archive(tmp_path / name, Engine.__new__(Engine), lambda _: None)
        assert message in error.value.findings[0].message


def test_tool_pins_come_from_the_lock() -> None:
    pins = image.tool_pins((ROOT / "requirements.lock").read_text())
    assert len(pins) == len(image.TOOLS) and all("==" in p for p in pins)
    with pytest.raises(StrataError):
        image.tool_pins("click==8.1.7\n")


def test_environment_keeps_other_lines() -> None:
    old = "# mine\nMODEL=/models/x\nSTRATA_IMAGE=strata:old\n"
    new = image.environment_text(old, {"STRATA_IMAGE": "strata:new", "COMPOSE_FILE": "compose.yaml"})
    assert new == "# mine\nMODEL=/models/x\nSTRATA_IMAGE=strata:new\nCOMPOSE_FILE=compose.yaml\n"
    assert image.environment_text(new, {"STRATA_IMAGE": "strata:new", "COMPOSE_FILE": "compose.yaml"}) == new


def test_compose_files_by_kind_of_base(tmp_path: Path) -> None:
    image.write_environment(tmp_path / ".env", CPU)
    assert "COMPOSE_FILE=compose.yaml:compose.cpu.yaml\n" in (tmp_path / ".env").read_text()
    image.write_environment(tmp_path / ".env", A3)
    text = (tmp_path / ".env").read_text()
    assert "COMPOSE_FILE=compose.yaml\n" in text and "STRATA_IMAGE=strata:0.23.0-a3\n" in text


def test_failed_build_shows_the_findings_of_its_step() -> None:
    log = [
        "#9 [edits 4/4] RUN ...",
        "#9 1.10 checking 6 patches",
        "#9 2.31 NEEDS_REVIEW: f changed",
        "#9 2.31   patch:    p",
        "#9 ERROR: process did not complete",
        "------",
        "Dockerfile:20",
    ]
    (finding,) = build_failed("t:1", log, 1).findings
    assert (finding.code, finding.message) == ("NEEDS_REVIEW", "f changed")
    assert finding.details == ("  patch:    p",)


def test_failed_build_without_finding_shows_the_end_of_the_log() -> None:
    (finding,) = build_failed("t:1", [f"#9 0.1 line {n}" for n in range(30)], 1).findings
    assert finding.code == "E-BUILD" and finding.details[-1] == "line 29" and len(finding.details) == 12
    (full,) = build_failed("t:1", ["#9 0.1 write: no space left on device"], 1).findings
    assert full.code == "E-SPACE"


# --- bytecode and static proof


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    """``--out`` of the edits stage with one module, one data file, one build input."""
    out = tmp_path / "out"
    for name, text in (
        ("source/vllm/vllm/a.py", "def f():\n    return 1\n"),
        ("source/vllm/vllm/x.json", "{}"),
        ("csrc/vllm-ascend/csrc/gen.py", "print(1)\n"),
    ):
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (out / "series.json").write_text('{"digest": "d", "patches": []}')
    assert bytecode.main([str(out)]) == 0
    return out


def installed(out: Path, root: Path) -> dict[str, dict[str, str | None]]:
    for part in ("source", "csrc"):
        subprocess.run(["cp", "-r", f"{out / part}/.", str(root / "vllm-workspace")], check=True)
    files: dict[str, dict[str, str | None]] = json.loads((out / "plan.json").read_text())["files"]
    return files


def test_bytecode_only_for_modules_and_bound_to_content(planned: Path, tmp_path: Path) -> None:
    files = json.loads((planned / "plan.json").read_text())["files"]
    assert [p for p, f in files.items() if f["bytecode"]] == ["/vllm-workspace/vllm/vllm/a.py"]
    made = next((planned / "source").rglob("*.pyc"))
    before = made.read_bytes()
    source = planned / "source/vllm/vllm/a.py"
    source.touch()
    made.unlink()
    assert bytecode.main([str(planned)]) == 0
    assert made.read_bytes() == before, "another time, the same bytes: the build's cache must hold"


def test_static_proof_holds_and_breaks(planned: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "vllm-workspace").mkdir(parents=True)
    files = installed(planned, root)
    assert final_stage.static_faults(files, root) == []
    module = root / "vllm-workspace/vllm/vllm/a.py"
    module.write_text("def f():\n    return 2\n")
    (fault,) = final_stage.static_faults(files, root)
    assert "not the planned content" in fault
    module.unlink()
    assert "missing" in final_stage.static_faults(files, root)[0]


def test_static_proof_refuses_foreign_bytecode(planned: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "vllm-workspace").mkdir(parents=True)
    files = installed(planned, root)
    compiled = next(root.rglob("*.pyc"))
    data = compiled.read_bytes()
    for spoilt, word in (
        (b"\0\0\r\n" + data[4:], "another Python"),
        (data[:8] + bytes(8) + data[16:], "not this source"),
    ):
        compiled.write_bytes(spoilt)
        assert word in final_stage.static_faults(files, root)[0]
    compiled.unlink()
    assert "no bytecode" in final_stage.static_faults(files, root)[0]


def test_a_patched_file_that_does_not_compile_stops_the_stage(
    planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (planned / "source/vllm/vllm/a.py").write_text("def f(:\n")
    assert bytecode.main([str(planned)]) == 2
    assert "E-COMPILE" in capsys.readouterr().err
