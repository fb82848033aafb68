"""The finished images: what is where, and what the tuned one adds to its base."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from conftest import BASE, TUNED
from strata.engine import Engine
from testinfra.host import Host

pytestmark = pytest.mark.engine
GB = 1_000_000_000
ASCEND = "/vllm-workspace/vllm-ascend"
OPERATORS = f"{ASCEND}/vllm_ascend/_cann_ops_custom/"
OURS = ("/opt/strata/", "/etc/strata/", "/usr/local/bin/strata")


def listing(host: Host) -> dict[str, str]:
    """Every regular file: size, modification time, mode."""
    done = host.run(
        "find / -xdev -type f -not -path '/proc/*' -not -path '/sys/*' -printf '%p\\t%s %T@ %m\\n'"
    )
    files = dict(line.split("\t", 1) for line in done.stdout.splitlines())
    # the engine's own, different in every container
    return {
        p: s
        for p, s in files.items()
        if p not in ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/.dockerenv")
    }


def test_sizes(engine: Engine) -> None:
    base, tuned = engine.image(BASE), engine.image(TUNED)
    assert base is not None and tuned is not None
    assert tuned.attrs["Size"] < 5 * GB
    assert tuned.attrs["Size"] - base.attrs["Size"] < 0.2 * GB


def test_tuned_stands_on_this_base(engine: Engine) -> None:
    base, tuned = engine.image(BASE), engine.image(TUNED)
    assert base is not None and tuned is not None
    layers = base.attrs["RootFS"]["Layers"]
    assert tuned.attrs["RootFS"]["Layers"][: len(layers)] == layers


def test_tuned_adds_only_what_changed(base: Host, tuned: Host, facts: dict[str, Any]) -> None:
    before, after = listing(base), listing(tuned)
    assert set(before) <= set(after), "the tuned image removes nothing"
    changed = {p for p in after if after[p] != before.get(p)}
    planned = set(facts["files"])
    bytecode = {p for p in changed if p.endswith(".pyc") and "/__pycache__/" in p}
    sources = {p.replace("/__pycache__", "").rsplit(".", 2)[0] + ".py" for p in bytecode}
    unexpected = {
        p for p in changed - planned - bytecode if not p.startswith(OPERATORS) and not p.startswith(OURS)
    }
    assert unexpected == set()
    assert {s for s in sources if not s.startswith(OURS)} <= planned, "bytecode of changed files only"
    assert planned <= changed | set(before)


def test_every_planned_file_is_there(tuned: Host, facts: dict[str, Any]) -> None:
    for path, digest in facts["files"].items():
        assert hashlib.sha256(tuned.file(path).content).hexdigest() == digest, path


def test_tools_stay_outside(tuned: Host) -> None:
    for path in ("/opt/tools", "/strata", "/step", "/wheels", "/root/.cache/pip"):
        assert not tuned.file(path).exists, path


@pytest.mark.parametrize("package", ["vllm", "vllm_ascend"])
def test_editable_installs_of_the_release(tuned: Host, package: str) -> None:
    code = f"import importlib.metadata as m, {package}; print(m.version('{package}'), {package}.__file__)"
    done = tuned.run(f'/opt/base/venv/bin/python -c "{code}"')
    directory = package.replace("_", "-")
    assert done.stdout.split() == ["0.23.0", f"/vllm-workspace/{directory}/{package}/__init__.py"], (
        done.stderr
    )


def test_one_torch_for_both_engines(tuned: Host) -> None:
    code = "import torch; print(torch.__version__, torch.__file__)"
    one, two = (
        tuned.run(f'{python} -c "{code}"').stdout
        for python in ("/opt/base/venv/bin/python", "/opt/serve/venv/bin/python")
    )
    assert one == two and "+cpu" in one


def test_the_serving_engine_sees_its_own_vllm(tuned: Host) -> None:
    code = (
        "import importlib.util as u, importlib.metadata as m; "
        "print(m.version('vllm'), u.find_spec('vllm').origin, u.find_spec('vllm_ascend'))"
    )
    version, origin, ascend = tuned.run(f'/opt/serve/venv/bin/python -c "{code}"').stdout.split()
    assert version.endswith("+cpu") and origin.startswith("/opt/serve/venv/") and ascend == "None"


def test_python_is_first_on_the_path(tuned: Host) -> None:
    assert tuned.run("python -c 'import sys; print(sys.executable, sys.version_info[:2])'").stdout.split(
        " ", 1
    ) == [
        "/opt/base/venv/bin/python",
        "(3, 11)\n",
    ]


def test_unit_tests_operators_and_stand_ins_are_there(tuned: Host) -> None:
    for path in (
        f"{ASCEND}/tests/ut",
        f"{ASCEND}/csrc",
        OPERATORS.rstrip("/"),
        "/opt/base/stubs/torch_npu",
        "/usr/local/Ascend/ascend-toolkit/set_env.sh",
        "/usr/local/Ascend/nnal/atb/set_env.sh",
    ):
        assert tuned.file(path).exists, path


def test_image_json(facts: dict[str, Any]) -> None:
    assert facts["base"]["name"] == "0.23.0-cpu"
    assert facts["proof"]["static"] == "passed" and facts["proof"]["live"] == "passed"
    assert len(facts["operators"]) >= 36 and {o["compiler"] for o in facts["operators"]} <= {"stand-in", None}
    assert all(p["state"] == "applied" for p in facts["series"]["patches"])


def test_labels_and_configuration(engine: Engine, facts: dict[str, Any]) -> None:
    image = engine.image(TUNED)
    assert image is not None
    labels, config = image.labels, image.attrs["Config"]
    assert labels["ai.strata.base"] == facts["base"]["name"]
    assert labels["ai.strata.series"] == facts["series"]["digest"]
    assert labels["ai.strata.patches"].split(",") == [p["id"] for p in facts["series"]["patches"]]
    assert labels["ai.strata.live-proof"] == facts["proof"]["live"]
    assert labels["org.opencontainers.image.base.name"]
    assert config["Entrypoint"] == ["/usr/local/bin/strata", "entrypoint"]
    assert config["Healthcheck"]["Test"][:2] == ["CMD", "/usr/local/bin/strata"]
    assert config["Healthcheck"]["StartPeriod"] >= 600 * 10**9


def test_no_secrets_and_no_host_paths(engine: Engine) -> None:
    image = engine.image(TUNED)
    assert image is not None
    assert not [e for e in image.attrs["Config"]["Env"] if e.startswith(("PIP_", "HTTP", "http"))]
