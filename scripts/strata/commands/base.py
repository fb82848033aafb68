"""``strata base``: fetch a release's sources, build, verify and pin bases."""

from __future__ import annotations

import click

from strata.bases import find_base, load_bases
from strata.paths import repository


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
