"""``strata kernels``: list a release's operators, compare with a tree, prove a package's wrappers."""

from __future__ import annotations

import json
from pathlib import Path

import click

from strata import kernels as ops
from strata.errors import EXIT_GOOD, EXIT_NEEDS_PERSON
from strata.kernels_descriptors import from_package, without_binary
from strata.kernels_prove import environment, passed, prove
from strata.kernels_tree import Package

ROOT = Path(__file__).resolve().parents[3]


@click.group()
def kernels() -> None:
    """Build and prove the operators."""


@kernels.command("list")
@click.option("--version", "version", default="0.23.0", show_default=True, help="The release.")
@click.option("--chip", help="Only operators of this chip family, for example ascend910_93.")
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
def list_(version: str, chip: str | None, as_json: bool) -> None:
    """List a release's operators."""
    recorded = ops.release(ROOT, version)
    shown = recorded.on(chip) if chip else tuple(sorted(recorded.operators, key=lambda o: o.name))
    if as_json:
        click.echo(json.dumps([o.model_dump() for o in shown], indent=1))
        return
    for operator in shown:
        extra = "  catlass" if operator.catlass else ""
        click.echo(f"{operator.name:<52}{operator.kind:<8}{', '.join(operator.chips)}{extra}")
    for name in recorded.chips:
        on = recorded.on(name)
        click.echo(f"{name}: {len(on)} operators, {sum(o.kind == 'aicore' for o in on)} of them AI core")


@kernels.command()
@click.option("--version", "version", default="0.23.0", show_default=True, help="The release.")
@click.option("--tree", type=click.Path(path_type=Path), required=True, help="A vllm-ascend tree with csrc/.")
def verify(version: str, tree: Path) -> int:
    """Compare layers/kernels/ops.yaml with a tree's own operator build."""
    findings = ops.compare(ops.release(ROOT, version), tree)
    for finding in findings:
        click.echo(finding.render(), err=True)
    if not findings:
        click.echo("ops.yaml and the tree agree")
    return EXIT_NEEDS_PERSON if findings else EXIT_GOOD


@kernels.command("prove")
@click.option(
    "--package",
    type=click.Path(path_type=Path),
    required=True,
    help="An operator package (_cann_ops_custom).",
)
@click.option(
    "--ascend", type=click.Path(path_type=Path), default=Path("/usr/local/Ascend"), show_default=True
)
@click.option("--compute-unit", default="ascend910b", show_default=True)
@click.option("--all-descriptors", is_flag=True, help="Every recorded descriptor, not one for each operator.")
@click.option("--absent", is_flag=True, help="With all optional inputs absent.")
def prove_(package: Path, ascend: Path, compute_unit: str, all_descriptors: bool, absent: bool) -> int:
    """Run a package's wrappers through the toolkit's compiler, where the package lies."""
    found = Package.at(package)
    env = environment([ascend / "ascend-toolkit" / "set_env.sh", ascend / "nnal" / "atb" / "set_env.sh"])
    descriptors = from_package(found, compute_unit, every=all_descriptors, absent=absent)
    outcomes = prove(found, descriptors, env)
    for outcome in outcomes:
        if not outcome.ok:
            click.echo(f"{outcome.op_file}: {outcome.reason}")
    good, bad = passed(outcomes)
    for op_type in without_binary(found, compute_unit):
        click.echo(f"{op_type}: no recorded binary, nothing to run")
    click.echo(f"operators: {len(good)} of {len(good) + len(bad)} pass")
    click.echo(f"descriptors: {sum(o.ok for o in outcomes)} of {len(outcomes)} pass")
    return EXIT_NEEDS_PERSON if bad else EXIT_GOOD
