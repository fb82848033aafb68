"""The image's ENTRYPOINT: sets the environment, refuses what cannot work, renders the preset, hands over by
exec.

``serve`` (the default) serves the preset named by STRATA_PRESET; anything else is run as a command in that
environment.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from strata.errors import EXIT_COULD_NOT_RUN, Finding, StrataError
from strata.serving import environment as env
from strata.serving import facts, health, image, keys, parse, presets, render, tiny_model, verify

LIBRARY = Path(__file__).resolve().parents[2]
_ENGINE = "vllm.entrypoints.cli.main"
_DEFAULT_PRESET = "c1"
PROVED = Path("/var/cache/strata")
"""Where a container remembers that its live proof passed."""


def say(text: str) -> None:
    """One line of the container's log, marked as ours."""
    print(f"strata: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Never returns on success. Exit 2 with findings on stderr where it cannot start."""
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    try:
        _leave_library()
        os.environ.update(env.effective(os.environ))
        command = list(arguments) or ["serve"]
        if command[0] == "serve":
            serve(command[1:])
        run(command)
    except StrataError as error:
        print("\n\n".join(f.render() for f in error.findings), file=sys.stderr, flush=True)
        return error.exit_code


def _leave_library() -> None:
    """Take our own library off PYTHONPATH: the strata command put it there for itself, not for what it
    starts.
    """
    left = [p for p in os.environ.get("PYTHONPATH", "").split(":") if p and Path(p) != LIBRARY]
    os.environ["PYTHONPATH"] = ":".join(left)
    if not left:
        del os.environ["PYTHONPATH"]


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    # before the handover this process may be the container's first, which the kernel shields from default
    # actions
    for child in _children:
        if child.poll() is None:
            child.terminate()
    sys.exit(128 + number)


_children: list[subprocess.Popen[str]] = []


def run(command: Sequence[str]) -> NoReturn:
    """Replace this process by ``command``; E-COMMAND where there is no such program."""
    found = shutil.which(command[0])
    if found is None:
        raise StrataError(
            Finding(
                "E-COMMAND",
                f"no command {command[0]!r} in this image",
                found=shlex.join(command),
                expected="serve, or a program",
                hint="docker run IMAGE serve, or docker run IMAGE bash",
            )
        )
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(found, list(command))


def serve(extra: Sequence[str]) -> NoReturn:
    """Render the preset and become the server. extra: none are taken; options belong to the preset or the
    environment.
    """
    if extra:
        raise StrataError(
            Finding(
                "E-COMMAND",
                "serve takes no arguments",
                found=shlex.join(extra),
                hint="set environment variables (MODEL, MAX_NUM_SEQS, …), or run vllm serve yourself",
            )
        )
    this = image.load()
    _guard(this)
    port = _port()
    name = os.environ.get("STRATA_PRESET", "").strip() or _DEFAULT_PRESET
    preset = presets.load(name)
    catalogue = facts.catalogue(this.version)
    source = image.WORKSPACE / "vllm-ascend" / "vllm_ascend"
    additional = keys.of_package(source) if source.is_dir() else None
    rendered = render.render(
        preset,
        catalogue,
        patches=this.patches,
        additional=additional,
        host=os.environ.get("STRATA_HOST") or "0.0.0.0",
        port=port,
    )
    say(f"preset {name} ({preset.title.lower()}) on base {this.base}")
    say(f"arguments for vllm-ascend {this.version}: {shlex.join(rendered.arguments)}")
    for note in rendered.notes:
        say(note)
    if this.live != "passed":
        prove(this)
    if this.serve_python:
        serve_on_cpu(this, catalogue, rendered)
    run([this.python, "-m", _ENGINE, "serve", *rendered.arguments])


def serve_on_cpu(this: image.Image, catalogue: facts.Catalogue, rendered: render.Rendered) -> NoReturn:
    """The cpu base: check the line with the base's own parser, then serve with the CPU engine what it can
    serve.
    """
    assert this.serve_python is not None
    checking = parse.in_base(this.python, rendered.arguments, env.python_path(str(LIBRARY), this.stubs))
    _children.append(checking)
    tiny = None
    if not os.environ.get("MODEL", "").strip() and not os.environ.get("STRATA_MODEL", "").strip():
        tiny = make_tiny_model(this.serve_python)
    parse.outcome(checking)
    say(f"the arguments are accepted by the parser of vLLM {this.version} with vllm-ascend as its platform")
    here = render.for_cpu_engine(
        rendered,
        catalogue,
        model=str(tiny) if tiny else None,
        limit=tiny_model.MAX_POSITIONS if tiny else None,
    )
    for note in here.notes:
        say(f"CPU engine: {note}")
    say(f"arguments for the CPU engine: {shlex.join(here.arguments)}")
    # the base's metadata announces vllm-ascend's platform, which the CPU engine must not load
    os.environ["VLLM_PLUGINS"] = ""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # its sampler would call a C++ compiler at the first request, for which the image has no Python headers
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    _without_cann()
    if tiny:
        os.environ["HF_HUB_OFFLINE"] = "1"
    run([this.serve_python, "-m", _ENGINE, "serve", *here.arguments])


def _without_cann() -> None:
    """Take CANN and ATB off this process's paths: the CPU engine's Triton would try the stand-in compiler."""
    for name in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH"):
        kept = [
            p for p in os.environ.get(name, "").split(":") if p and not p.startswith("/usr/local/Ascend/")
        ]
        if kept:
            os.environ[name] = ":".join(kept)
        else:
            os.environ.pop(name, None)


def make_tiny_model(python: str) -> Path:
    """The tiny model's directory, made where it is not there yet (a few seconds)."""
    directory = tiny_model.place()
    if tiny_model.ready(directory):
        return directory
    say(f"MODEL is not set: making a tiny model with random weights in {directory}")
    made = subprocess.Popen(
        [python, "-m", "strata.serving.tiny_model", str(directory)],
        text=True,
        env={**env.python_path(str(LIBRARY)), "VLLM_PLUGINS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    _children.append(made)
    _, errors = made.communicate()
    if made.returncode or not tiny_model.ready(directory):
        raise StrataError(
            Finding(
                "E-MODEL",
                "the tiny model could not be made",
                where=str(directory),
                found=errors.strip()[-500:],
                hint="set MODEL to a model of your own",
            )
        )
    return directory


def prove(this: image.Image) -> None:
    """The live proof that the build deferred: once per container, before serving. E-PROOF where it does not
    hold.
    """
    proof = Path(os.environ.get("STRATA_PROOF_JSON") or verify.PROOF_JSON)
    identity = hashlib.sha256(proof.read_bytes()).hexdigest() if proof.is_file() else "none"
    marker = PROVED / f"proved-{identity}"
    if marker.is_file():
        return
    say("live proof: deferred by the build, run now")
    done = run_verify(this)
    if done.returncode:
        raise StrataError(
            Finding(
                "E-PROOF",
                "the live proof failed: not everything that the image claims is what runs",
                where=str(proof),
                found=(done.stdout + done.stderr).strip()[-2500:],
                hint="do not serve from this image; strata verify shows it again",
            ),
            EXIT_COULD_NOT_RUN,
        )
    say("live proof: passed")
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError as error:
        say(f"the proof cannot be remembered ({error.strerror}); it runs again at the next start")


def run_verify(this: image.Image, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the live proof in the base's Python, with the stand-in modules where there are some."""
    standin = ["--standin"] if this.stubs else []
    return subprocess.run(
        [this.python, "-m", "strata.serving.verify", *standin, *options],
        text=True,
        capture_output=True,
        check=False,
        env={
            **env.python_path(str(LIBRARY), this.stubs),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"
            if this.stubs
            else os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1"),
        },
    )


def _guard(this: image.Image) -> None:
    findings = image.may_serve(this, os.environ, image.devices())
    built = this.architecture
    if built and built != platform.machine():
        findings.append(
            Finding(
                "E-ARCH",
                "this image is for another architecture",
                expected=platform.machine(),
                found=built,
                hint="build it on this host",
            )
        )
    if findings:
        raise StrataError(findings)


def _port() -> int:
    """The port inside the container; E-ENV where it is none, E-PORT where it is taken."""
    try:
        port = health.port()
        if not 0 < port < 65536:
            raise ValueError
    except ValueError:
        raise StrataError(
            Finding(
                "E-ENV",
                "STRATA_PORT is no port",
                where="environment: STRATA_PORT",
                expected="1 to 65535",
                found=os.environ.get("STRATA_PORT", ""),
            )
        ) from None
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError as error:
            raise StrataError(
                Finding(
                    "E-PORT",
                    f"port {port} is in use",
                    where="STRATA_PORT",
                    found=error.strerror or str(error),
                    hint="stop what holds it, or set STRATA_PORT to a free one",
                )
            ) from error
    return port
