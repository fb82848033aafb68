"""The known bases (``images/bases.yaml``) as typed models, and how a ``BASE=`` names one of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from strata.config import Strict, load, near
from strata.errors import Finding, StrataError
from strata.host import Architecture

Sha256 = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
TREES = ("vllm-ascend", "vllm")


class Source(Strict):
    """A source package: what to ask the package index for, the archive's sha256, the hash of its tree."""

    requirement: str
    sha256: Hex64
    tree: Hex64


class Toolchain(Strict):
    """Versions that a base carries; ``cann: stand-in`` where the compiler is Strata's preprocessor check."""

    cann: str
    python: Annotated[str, Field(pattern=r"^3\.\d+$")]
    torch: str | None = None
    torch_npu: str | None = Field(default=None, alias="torch-npu")
    triton_ascend: str | None = Field(default=None, alias="triton-ascend")


class ArchitecturePackages(Strict):
    """Packages whose version depends on the architecture."""

    torch: str
    torchvision: str


class Packages(Strict):
    """What the embedded base is made of: a Debian suite, and files (from the repository's root) that list
    packages.

    root: Debian packages of the root filesystem; wheels, serving: requirement files of the two venvs.
    """

    debian: str
    root: str
    wheels: str
    serving: str
    architecture: dict[Architecture, ArchitecturePackages]


class Base(Strict):
    """One base of a release. Exactly the embedded one has ``packages``; a device base has a ``reference``."""

    kind: Literal["embedded", "device"]
    title: str
    soc: Annotated[str, Field(pattern=r"^ascend[0-9a-z_]+$")]
    architectures: tuple[Architecture, ...]
    toolchain: Toolchain
    packages: Packages | None = None
    reference: str | None = None
    digest: Sha256 | None = None
    rootfs: Sha256 | None = None
    trees: dict[Literal["vllm-ascend", "vllm"], Hex64] | None = None

    @model_validator(mode="after")
    def _by_kind(self) -> Base:
        if self.kind == "embedded" and (self.packages is None or self.reference is not None):
            raise ValueError("an embedded base has 'packages' and no 'reference'")
        if self.kind == "device" and (self.reference is None or self.packages is not None):
            raise ValueError("a device base has a 'reference' and no 'packages'")
        return self


class Release(Strict):
    """A vllm-ascend release: its source packages and its bases by short name (cpu, a2, a3)."""

    sources: dict[Literal["vllm-ascend", "vllm"], Source]
    bases: dict[str, Base]


class BasesFile(Strict):
    """The content of ``images/bases.yaml``."""

    releases: dict[str, Release]


class KnownBase(Strict):
    """A base with the release that it belongs to and its short name."""

    version: str
    name: str
    base: Base
    release: Release

    @property
    def full_name(self) -> str:
        """``<version>-<name>``: how labels, image.json and tags call it."""
        return f"{self.version}-{self.name}"

    @property
    def image(self) -> str:
        """The device base's reference, or the tag under which Strata builds the cpu base."""
        return self.base.reference or f"strata-base:{self.full_name}"

    @property
    def tuned_tag(self) -> str:
        return f"strata:{self.full_name}"

    @property
    def expected_trees(self) -> dict[str, str] | None:
        """Tree hashes that this base must have; None for a device base that nobody has pinned yet."""
        if self.base.kind == "embedded":
            return {tree: source.tree for tree, source in self.release.sources.items()}
        return {str(k): v for k, v in self.base.trees.items()} if self.base.trees else None


def load_bases(root: Path) -> BasesFile:
    """Read ``images/bases.yaml`` below ``root``."""
    return load(root / "images" / "bases.yaml", BasesFile)


def find_release(bases: BasesFile, version: str) -> Release:
    """The release ``version`` (a leading ``v`` is ignored); E-VERSION, listing those known."""
    release = bases.releases.get(version.removeprefix("v"))
    if release is None:
        guess = near(version, bases.releases)
        raise StrataError(
            Finding(
                "E-VERSION",
                f"no release {version!r}",
                expected="one of " + ", ".join(bases.releases),
                found=version,
                hint=f"VERSION={guess or next(iter(bases.releases))}, or add it to images/bases.yaml",
            )
        )
    return release


def find_base(bases: BasesFile, version: str, name: str) -> KnownBase:
    """The base ``name`` of a release; E-BASE, listing those known, where there is none."""
    release = find_release(bases, version)
    version = version.removeprefix("v")
    base = release.bases.get(name)
    if base is None:
        guess = near(name, release.bases)
        known = "\n".join(f"{n}: {b.title}" for n, b in release.bases.items())
        raise StrataError(
            Finding(
                "E-BASE",
                f"no base {name!r} for {version}",
                expected=known,
                found=name,
                hint=f"BASE={guess}" if guess else "BASE=<one of these, an image reference, or an archive>",
            )
        )
    return KnownBase(version=version, name=name, base=base, release=release)


_REFERENCE = re.compile(r"^[\w.-]+(:\d+)?(/[\w.-]+)*(:[\w.-]+)?(@sha256:[0-9a-f]{64})?$")


def kind_of_request(bases: BasesFile, version: str, request: str) -> Literal["known", "archive", "reference"]:
    """What a ``BASE=`` value is: a known name, an image archive on disk, or an image reference.

    A bare word (no ``/``, ``:`` or file) that names no base is E-BASE rather than a reference: it's a slip of
    the keyboard far more often.
    """
    if request in find_release(bases, version).bases:
        return "known"
    path = Path(request).expanduser()
    if path.is_file():
        return "archive"
    if request.endswith((".tar", ".tar.gz", ".tgz", ".tar.zst")) or request.startswith((".", "~", "/")):
        raise StrataError(
            Finding(
                "E-BASE",
                "the image archive does not exist",
                where=request,
                expected="a file made by `docker save`",
                found="no such file",
            )
        )
    if not re.search(r"[:/]", request) or not _REFERENCE.match(request):
        find_base(bases, version, request)
    return "reference"


def guess_from_reference(bases: BasesFile, version: str, reference: str) -> str | None:
    """The base that a reference's tag speaks of (``…:v0.23.0-a3`` is a3), or None where it does not say."""
    release = find_release(bases, version)
    tag = reference.rpartition(":")[2] if ":" in reference.rpartition("/")[2] else ""
    for name, base in release.bases.items():
        known_tag = (base.reference or f":{version}-{name}").rpartition(":")[2]
        if tag and tag in (known_tag, f"{version}-{name}", known_tag.removeprefix("v")):
            return name
    return None
