"""Which base an image build stands on: from ``VERSION=``, ``BASE=`` and the host. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from strata.bases import BasesFile, KnownBase, find_base, find_release, guess_from_reference, kind_of_request
from strata.errors import Finding, StrataError

How = Literal["known", "reference", "archive"]


@dataclass(frozen=True)
class Choice:
    """The base to build on. source: image reference, or path of an archive; why: one line for a person."""

    known: KnownBase
    how: How
    source: str
    why: str


def choose(
    bases: BasesFile, version: str, request: str | None, npus: Sequence[str], generation: str | None
) -> Choice:
    """The base for ``BASE=request`` (None: what the host suggests).

    npus: the host's NPU device nodes; generation: ``a2`` or ``a3`` where the host's NPUs could be told. A
    reference or an archive whose base cannot be told by its name is decided later, by the image
    (:func:`identify`); until then it stands for the first device base. E-VERSION, E-BASE.
    """
    release = find_release(bases, version)
    if request is None:
        if not npus:
            known = find_base(bases, version, "cpu")
            return Choice(known, "known", known.image, "no NPU on this host: the cpu base, built here")
        if generation is None or generation not in release.bases:
            devices = [n for n, b in release.bases.items() if b.kind == "device"]
            raise StrataError(
                Finding(
                    "E-BASE",
                    "this host has NPUs, and their generation cannot be told",
                    found=", ".join(npus[:4]),
                    expected="\n".join(f"{n}: {release.bases[n].title}" for n in devices),
                    hint=f"say which: make image BASE={devices[-1] if devices else 'cpu'}",
                )
            )
        known = find_base(bases, version, generation)
        return Choice(known, "known", known.image, f"{len(npus)} NPUs on this host ({known.base.title})")
    how = kind_of_request(bases, version, request)
    if how == "known":
        known = find_base(bases, version, request)
        return Choice(known, how, known.image, "asked for")
    guess = guess_from_reference(bases, version, request) if how == "reference" else None
    name = guess or next(n for n, b in release.bases.items() if b.kind == "device")
    return Choice(find_base(bases, version, name), how, request, "asked for")


def identify(
    bases: BasesFile, version: str, labels: dict[str, str], environment: Sequence[str], source: str
) -> KnownBase:
    """The base that an image of unknown name is: by Strata's label, by its SOC_VERSION, by its tag. E-BASE
    otherwise.
    """
    release = find_release(bases, version)
    label = labels.get("ai.strata.base.name", "")
    soc = next((e.partition("=")[2] for e in environment if e.startswith("SOC_VERSION=")), "")
    # labels are inherited: an image made from a base has its label, and perhaps another SoC
    for name, base in release.bases.items():
        if label == f"{version}-{name}" and base.soc == soc:
            return find_base(bases, version, name)
    for name, base in release.bases.items():
        if base.kind == "device" and base.soc == soc:
            return find_base(bases, version, name)
    guess = guess_from_reference(bases, version, source)
    if guess and not soc:
        return find_base(bases, version, guess)
    raise StrataError(
        Finding(
            "E-BASE",
            "cannot tell which base this image is",
            where=source,
            expected="SOC_VERSION of " + ", ".join(f"{n} ({b.soc})" for n, b in release.bases.items()),
            found=f"SOC_VERSION={soc}" if soc else "no SOC_VERSION in the image's environment",
            hint="add the base to images/bases.yaml, or tag the image like a known one (…:v0.23.0-a3)",
        )
    )
