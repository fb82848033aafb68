"""``strata base``: fetch a release's sources, build, verify and pin bases."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from strata.bases import KnownBase, find_base, load_bases
from strata.errors import EXIT_NEEDS_PERSON, Finding, StrataError
from strata.paths import repository

if TYPE_CHECKING:
    from docker.models.images import Image


def say(text: str) -> None:
    """Progress of long work: one line on stderr, so that stdout stays for results."""
    click.echo(f"strata: {text}", err=True)


@click.group()
def base() -> None:
    """Build, verify and pin bases; copy their trees out."""


@base.command()
@click.option("--version", default="0.23.0", show_default=True, help="The vllm-ascend release.")
def trees(version: str) -> None:
    """Fetch the release's source trees to .strata/trees/VERSION and print the directory."""
    from strata.host import architecture
    from strata.sources import make_trees

    root = repository()
    known = find_base(load_bases(root), version, "cpu")
    click.echo(make_trees(known, root, architecture(), say))


@base.command()
@click.option("--version", default="0.23.0", show_default=True, help="The vllm-ascend release.")
@click.option("--offline", is_flag=True, help="Use the wheelhouse only.")
@click.option("--force", is_flag=True, help="Build even where the recipe has not changed.")
def build(version: str, offline: bool, force: bool) -> None:
    """Build the cpu base and print its tag."""
    from strata.base import build_cpu_base
    from strata.engine import Engine

    root = repository()
    known = find_base(load_bases(root), version, "cpu")
    build_cpu_base(known, root, Engine(), say, offline=offline, force=force)
    click.echo(known.image)


def _base_and_image(name: str, offline: bool) -> tuple[KnownBase, Image, Path, Path]:
    """A base named like ``0.23.0-a3``, its image on this engine, the copied trees, and the repository."""
    from strata.base import image_trees
    from strata.choice import Choice
    from strata.engine import Engine
    from strata.image import obtain

    root = repository()
    version, _, short = name.rpartition("-")
    known = find_base(load_bases(root), version, short)
    engine = Engine()
    found = obtain(Choice(known, "known", known.image, "asked for"), root, engine, say, offline=offline)
    engine.require_architecture(found, known.image)
    return known, found, image_trees(engine, found, root, say), root


@base.command()
@click.argument("name", metavar="VERSION-NAME")
@click.option("--offline", is_flag=True, help="Don't pull.")
def verify(name: str, offline: bool) -> int:
    """Compare a base's image with what images/bases.yaml records. Exit 1 where something differs."""
    from strata.base import tree_hashes
    from strata.base import verify as differences

    known, found, trees, _ = _base_and_image(name, offline)
    findings = differences(known, found, tree_hashes(trees))
    if findings:
        raise StrataError(findings, EXIT_NEEDS_PERSON)
    recorded = "as recorded" if known.expected_trees else "nothing is recorded of it yet (strata base pin)"
    click.echo(f"{known.full_name}: {recorded}")
    return 0


@base.command()
@click.argument("name", metavar="VERSION-NAME")
def pin(name: str) -> None:
    """Record a device base's digest, root filesystem and trees in images/bases.yaml, from the image that is
    here.
    """
    from strata.base import pin as record
    from strata.base import tree_hashes

    known, found, trees, root = _base_and_image(name, offline=False)
    if known.base.kind == "embedded":
        raise StrataError(
            Finding(
                "E-PIN",
                "the cpu base is built here: its source trees are recorded with the release",
                found=name,
            )
        )
    for key, value in record(known, found, tree_hashes(trees), root).items():
        click.echo(f"{key}: {value}")
