"""Bases as images: the cpu base built, any base verified, its source trees copied out, a device base pinned.
"""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docker.errors import APIError, ContainerError, NotFound
from docker.models.images import Image

from strata import host, rootfs
from strata.bases import TREES, KnownBase, load_bases
from strata.engine import Build, Engine, container_of
from strata.errors import EXIT_NEEDS_PERSON, Finding, StrataError
from strata.fingerprint import is_tree_source, tree_hash
from strata.paths import work_directory
from strata.sources import make_trees, wheelhouse
from strata.wheels import Say, Target, asked_for, fetch_wheels, require_cpu_build, resolve

WORKSPACE = "/vllm-workspace"
RECIPE_LABEL = "ai.strata.base.recipe"
_SPACE = 6_000_000_000


# --- the cpu base


@dataclass(frozen=True)
class Wheels:
    """What one venv of the cpu base is installed from. The two disagree about versions, so each has its
    directory.
    """

    directory: Path
    files: tuple[Path, ...]
    pins: tuple[str, ...]
    target: Target

    @property
    def complete(self) -> bool:
        stamp = self.directory / ".complete"
        return stamp.is_file() and stamp.read_text() == asked_for(self.files, self.pins, self.target)


def wheels_wanted(known: KnownBase, root: Path, architecture: host.Architecture) -> tuple[Wheels, Wheels]:
    """Wheels of the base's venv and of the serving engine's; the first pin of the base's is torch."""
    packages = known.base.packages
    assert packages is not None
    versions = packages.architecture[architecture]
    target = Target(known.base.toolchain.python, architecture)
    place = wheelhouse(root)
    pins = (f"torch=={versions.torch}", f"torchvision=={versions.torchvision}")
    return (
        Wheels(place / f"base-{known.version}-{target.tag}", (root / packages.wheels,), pins, target),
        Wheels(place / f"serve-{known.version}-{target.tag}", (root / packages.serving,), (), target),
    )


def fetch_base_wheels(wanted: Sequence[Wheels], say: Say, *, offline: bool) -> None:
    """All wheels of the cpu base. E-TORCH-CUDA, before any download, where pip offers no CPU build of torch.
    """
    for wheels in wanted:
        if wheels.complete:
            continue
        if offline:
            raise StrataError(
                Finding(
                    "E-OFFLINE",
                    "the wheelhouse lacks the cpu base's wheels",
                    where=str(wheels.directory),
                    hint="make wheelhouse (with a network), then carry .strata/wheelhouse here",
                )
            )
        for pin in wheels.pins:
            if pin.startswith("torch=="):
                require_cpu_build(resolve(pin, wheels.target))
        fetch_wheels(wheels.files, wheels.pins, wheels.target, wheels.directory, say)


def recipe(known: KnownBase, root: Path, architecture: host.Architecture) -> str:
    """sha256 over everything that decides what the cpu base holds: files of images/cpu, pins, sources."""
    directory = root / "images" / "cpu"
    total = hashlib.sha256(f"{architecture}\n{known.base.model_dump_json()}\n".encode())
    total.update(rootfs.tag_of(known, root, architecture).encode())
    for tree, source in sorted(known.release.sources.items()):
        total.update(f"{tree} {source.sha256}\n".encode())
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.suffix != ".md" and "__pycache__" not in path.parts:
            relative = path.relative_to(directory).as_posix()
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{relative} {path.stat().st_mode & 0o111:o} {digest}\n".encode())
    return total.hexdigest()


def build_cpu_base(
    known: KnownBase, root: Path, engine: Engine, say: Say, *, offline: bool = False, force: bool = False
) -> Image:
    """The cpu base's image; built where it is missing or its recipe changed."""
    architecture = host.architecture()
    wanted = recipe(known, root, architecture)
    present = engine.image(known.image)
    if present is not None and present.labels.get(RECIPE_LABEL) == wanted and not force:
        return present
    say(f"building the base {known.full_name} ({known.base.title})")
    host.require_space(work_directory(root), _SPACE, "the cpu base's downloads")
    engine.require_space(_SPACE, "the cpu base")
    # torch first: where only a CUDA build is on offer, nothing has been fetched yet when that is said
    wheels, serving = wheels_wanted(known, root, architecture)
    fetch_base_wheels((wheels, serving), say, offline=offline)
    trees = make_trees(known, root, architecture, say)
    system = rootfs.ensure(known, root, architecture, engine, say, offline=offline)
    directory = root / "images" / "cpu"
    Build(
        context=directory,
        dockerfile=directory / "Dockerfile",
        tag=known.image,
        contexts={
            "rootfs": f"docker-image://{system}",
            "trees": str(trees),
            "wheels": str(wheels.directory),
            "serving-wheels": str(serving.directory),
        },
        arguments={
            "TORCH": wheels.pins[0].partition("==")[2],
            "TORCHVISION": wheels.pins[1].partition("==")[2],
            "VERSION": known.version,
            "SOC_VERSION": known.base.soc,
        },
        labels={
            RECIPE_LABEL: wanted,
            "ai.strata.base.name": known.full_name,
            "org.opencontainers.image.title": f"Strata base {known.full_name}",
            "org.opencontainers.image.description": known.base.title,
        },
    ).run(say)
    image = engine.image(known.image)
    assert image is not None
    return image


# --- any base


def root_hash(image: Image) -> str:
    """``sha256:<hex>`` over the diff-ids of the image's root filesystem: the same for a pulled and a loaded
    copy.
    """
    layers = image.attrs["RootFS"]["Layers"]
    return "sha256:" + hashlib.sha256("\n".join(layers).encode()).hexdigest()


def manifest_digests(image: Image) -> set[str]:
    """Manifest digests that registries gave the image; empty for a loaded or locally built one."""
    return {d.rpartition("@")[2] for d in image.attrs.get("RepoDigests") or ()}


def image_trees(engine: Engine, image: Image, root: Path, say: Say) -> Path:
    """The image's two source trees below ``.strata/trees/images/<image id>``, copied out once for each image.

    Only sources (strata.fingerprint.is_tree_source), no bytecode and build outputs. E-TREE where the image
    has no such trees.
    """
    assert image.id is not None
    destination = work_directory(root) / "trees" / "images" / image.id.partition(":")[2][:16]
    if destination.is_dir():
        return destination
    say("copying the source trees out of the base")
    destination.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=destination.parent) as scratch,
        container_of(engine, image.id) as container,
    ):
        made = Path(scratch, "trees")
        for tree in TREES:
            try:
                stream, _ = container.get_archive(f"{WORKSPACE}/{tree}", chunk_size=1 << 20)
            except NotFound as error:
                raise StrataError(
                    Finding(
                        "E-TREE",
                        f"the image has no {tree} source tree",
                        where=", ".join(image.tags) or image.id,
                        expected=f"{WORKSPACE}/{tree}",
                        found="no such directory",
                        hint="take a vllm-ascend image, or one built by `strata base build`",
                    )
                ) from error
            with tarfile.open(fileobj=io.BufferedReader(_Chunks(iter(stream)), 1 << 20), mode="r|") as tar:
                _extract_sources(tar, tree, made)
        made.rename(destination)
    return destination


def _extract_sources(tar: tarfile.TarFile, tree: str, destination: Path) -> None:
    for member in tar:
        name = member.name.partition("/")[2]
        if name and (member.isfile() or member.issym()) and is_tree_source(name):
            member.name = f"{tree}/{name}"
            tar.extract(member, destination, filter="tar")


class _Chunks(io.RawIOBase):
    """A file over the chunks of an HTTP response, for tarfile's streaming mode."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = chunk
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def python_of(engine: Engine, image: Image, root: Path) -> str:
    """The image's Python as ``3.12``, asked of the image itself once and kept beside its trees. E-PYTHON
    without one.
    """
    assert image.id is not None
    kept = work_directory(root) / "trees" / "images" / (image.id.partition(":")[2][:16] + ".python")
    if not kept.is_file():
        question = 'import sys; print("%d.%d" % sys.version_info[:2])'
        try:
            answer = engine.client.containers.run(
                image.id, ["-c", question], entrypoint=["python3"], remove=True, network_disabled=True
            )
        except (ContainerError, APIError) as error:
            raise StrataError(
                Finding(
                    "E-PYTHON",
                    "the base has no python3 that runs",
                    where=", ".join(image.tags) or image.id,
                    found=str(getattr(error, "explanation", None) or error)[-200:],
                )
            ) from error
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(bytes(answer).decode().strip())
    return kept.read_text()


def tree_hashes(trees: Path) -> dict[str, str]:
    return {tree: tree_hash(trees / tree) for tree in TREES}


def verify(known: KnownBase, image: Image, trees: dict[str, str]) -> list[Finding]:
    """What differs from what ``images/bases.yaml`` records of this base; empty where nothing does, or nothing
    is recorded.

    A manifest digest is compared where the image has one (it was pulled); the root filesystem and the trees
    always.
    """
    where = ", ".join(image.tags) or str(image.id)
    findings: list[Finding] = []
    base = known.base
    digests = manifest_digests(image)
    if base.digest and digests and base.digest not in digests:
        findings.append(_differs("manifest digest", where, base.digest, ", ".join(sorted(digests))))
    if base.rootfs and base.rootfs != root_hash(image):
        findings.append(_differs("root filesystem", where, base.rootfs, root_hash(image)))
    for tree, expected in (known.expected_trees or {}).items():
        if trees[tree] != expected:
            findings.append(_differs(f"{tree} source tree", where, expected, trees[tree]))
    return findings


def _differs(what: str, where: str, expected: str, found: str) -> Finding:
    return Finding(
        "E-BASE-CHANGED",
        f"the base's {what} is not the recorded one",
        where=where,
        expected=expected,
        found=found,
        hint="take the base again; if you mean this one: make image FORCE=1, or `strata base pin`",
    )


# --- pinning


def pin(known: KnownBase, image: Image, trees: dict[str, str], root: Path) -> dict[str, str]:
    """Record the image's identity in ``images/bases.yaml`` and return what was written (key -> value).

    The file's comments stay: only the three lines of this base change. E-PIN where they aren't there as
    expected.
    """
    digests = sorted(manifest_digests(image))
    values = {
        "digest": digests[0] if digests else "null",
        "rootfs": root_hash(image),
        "trees": "{" + ", ".join(f"{t}: {h}" for t, h in sorted(trees.items())) + "}",
    }
    path = root / "images" / "bases.yaml"
    text = set_pin(path.read_text(), known.version, known.name, values)
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)
    load_bases(root)
    return values


def set_pin(text: str, version: str, name: str, values: dict[str, str]) -> str:
    """``images/bases.yaml`` with the one-line values of a base replaced."""
    block = re.search(
        rf'^  "?{re.escape(version)}"?:\n(?:(?:    .*|\s*)\n)*?      {re.escape(name)}:\n((?:        .*\n)+)',
        text,
        re.M,
    )
    if block is None:
        raise StrataError(
            Finding("E-PIN", f"cannot find {version} / {name} in the file", where="images/bases.yaml")
        )
    body = block[1]
    for key, value in values.items():
        body, count = re.subn(rf"^        {key}: .*$", f"        {key}: {value}", body, flags=re.M)
        if count != 1:
            raise StrataError(
                Finding(
                    "E-PIN",
                    f"no line for {key!r}",
                    where=f"images/bases.yaml: {version} / {name}",
                    expected=f"        {key}: null",
                    hint="add the line to that base",
                    found=f"{count} such lines",
                ),
                EXIT_NEEDS_PERSON,
            )
    return text[: block.start(1)] + body + text[block.end(1) :]


def remove_tree_cache(root: Path, image_id: str) -> None:
    """Forget the trees copied out of an image."""
    path = work_directory(root) / "trees" / "images" / image_id.partition(":")[2][:16]
    if path.is_dir():
        shutil.rmtree(path)
