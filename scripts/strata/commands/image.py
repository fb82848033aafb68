"""``strata image``: plan, build and export the tuned image; fill the wheelhouse."""

from __future__ import annotations

import click

from strata.commands.base import say
from strata.paths import repository

_VERSION = click.option("--version", default="0.23.0", show_default=True, help="The vllm-ascend release.")
_BASE = click.option(
    "--base", help="cpu, a2, a3, an image reference, or an archive (default: what the host suggests)."
)


@click.group()
def image() -> None:
    """Plan and build a tuned image."""


@image.command()
@_VERSION
@_BASE
@click.option("--without", default="", help="Patch ids to leave out, separated by commas.")
@click.option("--offline", is_flag=True, help="Use only what is here: the engine, the base, the wheelhouse.")
@click.option("--plan", "only_plan", is_flag=True, help="Print the complete plan and stop; needs no engine.")
@click.option("--force", is_flag=True, help="Build on a base that differs from the recorded one.")
@click.option("--keep-env", is_flag=True, help="Leave .env as it is: compose keeps its image.")
def build(
    version: str, base: str | None, without: str, offline: bool, only_plan: bool, force: bool, keep_env: bool
) -> None:
    """Build the tuned image for a release and a base, and point compose at it."""
    from strata import image as images

    root = repository()
    ids = tuple(i.strip() for i in without.split(",") if i.strip())
    request = images.Request(version.removeprefix("v"), base or None, ids, offline, force, not keep_env)
    if only_plan:
        click.echo(images.plan(request, root, say))
        return
    known = images.build(request, root, say, click.echo)
    serve = "docker compose --profile c1 up"
    if known.base.kind == "embedded":
        click.echo(f"{known.tuned_tag} is ready, on the cpu base (no NPU, no compiled operators): {serve}")
    else:
        click.echo(f"{known.tuned_tag} is ready for {known.base.title}: {serve}")


@image.command()
@_VERSION
@_BASE
def wheelhouse(version: str, base: str | None) -> None:
    """Fetch everything that an offline build needs into .strata/wheelhouse."""
    from strata.wheelhouse import fill

    click.echo(fill(version.removeprefix("v"), base or None, repository(), say))


@image.command()
@_VERSION
@_BASE
def export(version: str, base: str | None) -> None:
    """Write the image and the compose files for another host to dist/."""
    from strata.bundle import export as write_bundle

    click.echo(write_bundle(version.removeprefix("v"), base or None, repository(), say))
