"""The Docker engine: one connection, and its failures as findings."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import docker
import docker.errors
import python_on_whales
from docker.models.containers import Container
from docker.models.images import Image

from strata import host
from strata.errors import Finding, StrataError
from strata.wheels import Say

_STEP = re.compile(r"^#\d+ \[([^\]]+)\] (.*)")
_OUTPUT = re.compile(r"^#\d+ \d+\.\d+ (.*)")
_SECONDS = 120


class Engine:
    """A reachable Docker engine. Raises E-ENGINE from the constructor where there is none."""

    def __init__(self) -> None:
        try:
            self.client = docker.from_env(timeout=600)
            self.client.ping()
        except docker.errors.DockerException as error:
            raise StrataError(
                Finding(
                    "E-ENGINE",
                    "no Docker engine answers",
                    found=_last_line(str(error)),
                    hint="scripts/bootstrap.sh engine sets one up on Debian as root; elsewhere install and "
                    "start Docker Engine 26 or newer, and join its group",
                )
            ) from error

    def require_space(self, needed: int, purpose: str) -> None:
        """E-SPACE where the engine's disk (if it is this host's) has less than ``needed`` bytes free."""
        directory = Path(self.client.info().get("DockerRootDir") or "/")
        if directory.is_dir():
            host.require_space(directory, needed, purpose)

    def image(self, reference: str) -> Image | None:
        """The local image, or None."""
        try:
            return self.client.images.get(reference)
        except docker.errors.ImageNotFound:
            return None

    def require_architecture(self, image: Image, what: str) -> None:
        """E-ARCH where the image is for another architecture than the host's: nothing is emulated."""
        found = host.DOCKER_ARCHITECTURES.get(image.attrs["Architecture"], image.attrs["Architecture"])
        if found != host.architecture():
            raise StrataError(
                Finding(
                    "E-ARCH",
                    f"{what} is for another architecture than this host",
                    expected=host.architecture(),
                    found=found,
                    hint="build on a host of that architecture; nothing is emulated",
                )
            )

    def pull(self, reference: str, say: Say, seconds: int = 15) -> Image:
        """Pull an image. E-REGISTRY where its registry does not answer the first request within ``seconds``.
        """
        say(f"pulling {reference}")
        short = docker.from_env(timeout=seconds)
        try:
            # the registry's answer about the manifest comes first, so that an unreachable one is said quickly
            short.images.get_registry_data(reference)
        except (docker.errors.APIError, OSError) as error:
            raise StrataError(
                Finding(
                    "E-REGISTRY",
                    "the base cannot be pulled: its registry does not answer, or lacks it",
                    where=reference,
                    found=_last_line(str(getattr(error, "explanation", None) or error)),
                    hint="BASE=<reference on a mirror of yours>, or BASE=<archive made by docker save>; "
                    "`make image BASE=cpu` needs no registry",
                )
            ) from error
        finally:
            short.close()
        python_on_whales.docker.pull(reference)
        image = self.image(reference)
        if image is None:
            raise StrataError(Finding("E-REGISTRY", "pulled, and not there", where=reference))
        return image


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


@dataclass(frozen=True)
class Build:
    """Arguments of one image build.

    context: directory of the Dockerfile's own context; contexts: named contexts (``docker-image://…`` or a
    path); network: ``none`` for hermetic builds, else the engine's default.
    """

    context: Path
    dockerfile: Path
    tag: str
    contexts: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None
    network: str | None = "none"

    def run(self, say: Say) -> None:
        """Build with plain BuildKit, each stage's steps as progress lines. E-BUILD with the end of the log.
        """
        started = time.monotonic()
        lines: list[str] = []
        try:
            log = python_on_whales.docker.buildx.build(
                self.context,
                file=self.dockerfile,
                tags=self.tag,
                build_contexts=dict(self.contexts),
                build_args=dict(self.arguments),
                labels=dict(self.labels),
                target=self.target,
                network=self.network,
                builder=_builder(),
                progress="plain",
                stream_logs=True,
                provenance=False,
            )
            assert log is not None and not isinstance(log, python_on_whales.Image)
            for line in log:
                lines.append(line.rstrip())
                step = _STEP.match(line)
                if step and "internal" not in step[1]:
                    say(f"{time.monotonic() - started:5.0f} s  [{step[1]}] {step[2][:100]}")
        except python_on_whales.exceptions.DockerException as error:
            raise build_failed(self.tag, lines, error.return_code) from error


def _builder() -> str:
    """The builder that sees the engine's local images: the one named like the Docker context."""
    name = python_on_whales.docker.context.inspect(None).name
    return str(name)


def build_failed(tag: str, lines: list[str], code: int) -> StrataError:
    """E-BUILD, or the finding that a step printed itself (``E-…: message`` and what follows it)."""
    output = [m[1] for line in lines if (m := _OUTPUT.match(line))]
    start = next(
        (n for n, line in enumerate(output) if re.match(r"^(E-[A-Z-]+|[A-Z]+(_[A-Z]+)*): ", line)), None
    )
    if start is not None:
        code_text, _, message = output[start].partition(": ")
        return StrataError(
            Finding(code_text, message, where=f"build of {tag}", details=tuple(output[start + 1 :]))
        )
    if any("no space left on device" in line for line in lines):
        return StrataError(
            Finding(
                "E-SPACE",
                "the disk filled up during the build",
                where=tag,
                hint="free some space (docker system df shows what images take), then run it again",
            )
        )
    tail = output[-12:] or [line for line in lines if line.strip()][-12:]
    return StrataError(
        Finding("E-BUILD", f"the build of {tag} failed", found=f"exit code {code}", details=tuple(tail))
    )


@contextmanager
def container_of(engine: Engine, image: str) -> Iterator[Container]:
    """A created, never started container of ``image``: a view of its files."""
    container = engine.client.containers.create(image, command=["true"], network_disabled=True)
    try:
        yield container
    finally:
        container.remove(force=True)
