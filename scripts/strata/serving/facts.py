"""Data that the serving code reads: where it lies, the catalogue of a base, spellings by version, stale
names.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from strata.config import Strict, load, near
from strata.errors import Finding, StrataError

INSTALLED = Path("/opt/strata/serving")
Version = Annotated[str, Field(pattern=r"^\d+(\.\d+)*$")]


def directory() -> Path:
    """``layers/serving`` as installed in the image, or as it lies in the checkout that this package runs
    from.
    """
    given = os.environ.get("STRATA_SERVING_DIR")
    checkout = Path(__file__).resolve().parents[3] / "layers" / "serving"
    for path in [Path(given)] if given else [INSTALLED, checkout]:
        if (path / "defaults.yaml").is_file():
            return path
    raise StrataError(
        Finding(
            "E-SERVING",
            "the serving data is missing",
            expected=f"{INSTALLED}/defaults.yaml",
            found=f"nothing at {given or INSTALLED}",
            hint="this image is incomplete: rebuild it with make image",
        )
    )


def version_key(version: str) -> tuple[int, ...]:
    """``0.23.0rc1`` or ``0.23.0.post1`` as (0, 23, 0): release numbers order, suffixes don't decide a
    spelling.
    """
    numbers: list[int] = []
    for part in version.split("."):
        digits = ""
        for c in part:
            if not c.isdigit():
                break
            digits += c
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


class Flag(Strict):
    """One option of ``vllm serve``. takes: ``nothing``, ``one`` value, ``many`` values, ``maybe`` one."""

    names: tuple[str, ...]
    takes: Literal["nothing", "one", "many", "maybe"]
    type: str | None = None
    choices: tuple[str, ...] | None = None


class Catalogue(Strict):
    """What one base accepts, as its own parser and sources say (``strata preset catalogue`` writes it).

    configs: option -> the keys its JSON knows, nested keys with a dot; additional: keys of
    ``--additional-config``; methods: speculative methods with a note for each that is deprecated;
    environment: names that the base reads.
    """

    version: str
    flags: tuple[Flag, ...]
    configs: dict[str, tuple[str, ...]]
    additional: tuple[str, ...]
    graph_modes: tuple[str, ...]
    methods: tuple[str, ...]
    mtp_aliases: tuple[str, ...]
    environment: tuple[str, ...]

    def flag(self, name: str) -> Flag | None:
        """The option of that exact spelling (``--no-`` forms included)."""
        return self._by_name().get(name)

    def names(self) -> list[str]:
        return list(self._by_name())

    def _by_name(self) -> dict[str, Flag]:
        return _names_of(self.flags)


@cache
def _names_of(flags: tuple[Flag, ...]) -> dict[str, Flag]:
    return {name: flag for flag in flags for name in flag.names}


class Spelling(Strict):
    """How one version range writes a wish. since/before: first version that has it / first that has it no
    more.

    additional_config, compilation_config, speculative_config: what is merged into these options; arguments:
    plain ones. impossible: the reason why this range cannot do it. patch: id of the Strata patch that brings
    it to this range.
    """

    since: Version
    before: Version | None = None
    additional_config: dict[str, Any] = Field(default_factory=dict)
    compilation_config: dict[str, Any] = Field(default_factory=dict)
    speculative_config: dict[str, Any] = Field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    impossible: str | None = None
    patch: str | None = None

    def holds(self, version: str) -> bool:
        key = version_key(version)
        return version_key(self.since) <= key and (self.before is None or key < version_key(self.before))


class Wish(Strict):
    """A feature that a preset can wish for. needs_npu: nothing that a CPU engine could do."""

    title: str
    needs_npu: bool = False
    requires: tuple[str, ...] = ()
    graph_modes: tuple[str, ...] = ()
    wanted: tuple[Spelling, ...]
    unwanted: tuple[Spelling, ...] = ()


class Stale(Strict):
    """A name that a version no longer knows or reads. since: the version from which that holds.

    becomes: the successor as text to type, None where there is none; how: ``renamed`` (value kept),
    ``replaced`` (value given by ``value`` or moved), ``default`` (what it asked for is the default now),
    ``dropped``. silent: upstream accepts it without effect. values: old value -> new value where a renamed
    option changed those too. note: the reason, shown to the user.
    """

    name: str
    since: Version
    how: Literal["renamed", "replaced", "default", "dropped"]
    becomes: str | None = None
    value: Any = None
    values: dict[str, str] = Field(default_factory=dict)
    silent: bool = False
    note: str


class Facts(Strict):
    """``spellings.yaml``: wishes by name, stale options, stale keys of JSON options, stale environment
    names, and by patch the keys that it adds to ``--additional-config`` beside those of the wishes.
    """

    wishes: dict[str, Wish]
    speculation: dict[str, Wish]
    stale_flags: tuple[Stale, ...]
    stale_keys: dict[str, tuple[Stale, ...]]
    stale_environment: tuple[Stale, ...]
    patch_keys: dict[str, tuple[str, ...]]


@cache
def facts() -> Facts:
    """The spelling tables."""
    return load(directory() / "spellings.yaml", Facts)


@cache
def catalogue(version: str) -> Catalogue:
    """The catalogue recorded for ``version``; E-CATALOGUE naming those known otherwise."""
    folder = directory() / "catalogues"
    known = sorted(p.stem for p in folder.glob("*.yaml"))
    if version not in known:
        guess = near(version, known)
        raise StrataError(
            Finding(
                "E-CATALOGUE",
                f"no catalogue of options for vllm-ascend {version}",
                where=str(folder),
                expected="one of " + ", ".join(known),
                found=version,
                hint=f"did you mean {guess}?"
                if guess
                else "in its image: strata preset catalogue > layers/serving/catalogues/<version>.yaml",
            )
        )
    return load(folder / f"{version}.yaml", Catalogue)


def spelling(wish: Wish, name: str, version: str, *, on: bool = True) -> Spelling:
    """The spelling of a wish for ``version``; E-SPELLING where none is recorded, it is impossible, or needs a
    patch.
    """
    for candidate in wish.wanted if on else wish.unwanted:
        if candidate.holds(version):
            if candidate.impossible:
                raise StrataError(
                    Finding(
                        "E-SPELLING",
                        f"{name}: {wish.title} is not possible on {version}",
                        found=candidate.impossible,
                        hint=f"take {name} out of the preset",
                    )
                )
            return candidate
    entries = wish.wanted if on else wish.unwanted
    ranges = ", ".join(f"{s.since}{' to below ' + s.before if s.before else ' and later'}" for s in entries)
    raise StrataError(
        Finding(
            "E-SPELLING",
            f"{name}: no spelling of it is recorded for vllm-ascend {version}",
            expected=f"a version in {ranges}",
            found=version,
            hint="add the range to layers/serving/spellings.yaml",
        )
    )
