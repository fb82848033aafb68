"""``strata check | apply | diff | why | affirm``: the patch series on a pair of source trees."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click

from strata.affirm import Change
from strata.affirm import affirm as new_locks
from strata.check import Base, Survey, plan_on, survey, touching
from strata.errors import EXIT_NEEDS_PERSON, Finding, StrataError
from strata.export import series_data, write_out
from strata.fingerprint import tree_hash
from strata.lock import lock_path, locked_versions, write_lock
from strata.model import At
from strata.report import as_data, as_text
from strata.series import Series, load_series
from strata.trees import Trees


@dataclass(frozen=True)
class Setting:
    """Where a command works. root: repository; version: base release; directory: holds the two trees."""

    root: Path
    version: str
    directory: Path

    def base(self, series: Series, *, pristine: bool = True) -> Base:
        """The trees. pristine: E-DIRTY where a series is applied to them, for verdicts are about what
        upstream wrote.
        """
        from strata.apply import already_applied, unfinished

        trees = Trees.at(self.directory)
        stamp = trees.roots["vllm-ascend"] / ".strata" / "applied.json"
        # a run that was killed is undone here, before anything reads half-patched files
        if pristine and (stamp.exists() or unfinished(trees)) and already_applied(series, trees):
            raise StrataError(
                Finding(
                    "E-DIRTY",
                    "the series is applied to these trees",
                    where=str(self.directory),
                    expected="pristine sources",
                    found="patched ones",
                    hint=f"strata apply --revert --trees {self.directory}",
                )
            )
        work = self.root / ".strata"
        return Base(trees, self.version, work / "cache" if work.is_dir() else None)

    def series(self) -> Series:
        return load_series(self.root)


def _setting(trees: Path | None, base: str | None, root: Path | None) -> Setting:
    root = find_root(root)
    version = default_version(root) if base is None else release(root, base)
    directory = trees or root / ".strata" / "trees" / version
    if trees is None and not directory.is_dir():
        raise StrataError(
            Finding(
                "E-TREE",
                f"the sources of {version} are not here",
                expected=str(directory),
                found="no such directory",
                hint=f"make sources VERSION={version}\n"
                "or name the trees: --trees DIR (holds vllm-ascend/ and vllm/)",
            )
        )
    return Setting(root, version, directory)


def find_root(given: Path | None) -> Path:
    """The directory that holds ``layers/source/series.yaml``: the given one, or the nearest above the working
    directory.
    """
    start = (given or Path.cwd()).resolve()
    for directory in [start] if given else [start, *start.parents]:
        if (directory / "layers" / "source" / "series.yaml").is_file():
            return directory
    raise StrataError(
        Finding(
            "E-ROOT",
            "no patch series here",
            where=str(start),
            expected="layers/source/series.yaml" + ("" if given else " here or in a directory above"),
            found="no such file",
            hint="run it inside the repository, or name it: --root DIR",
        )
    )


def release(root: Path, name: str) -> str:
    """A release as its locks are filed, without the ``v`` of its tag; E-BASE for what is no version."""
    from packaging.version import InvalidVersion, Version

    try:
        Version(name)
    except InvalidVersion as error:
        known = ", ".join(locked_versions(root))
        raise StrataError(
            Finding(
                "E-BASE",
                "no release has this name",
                expected="a version" + (f" such as {known}" if known else ""),
                found=repr(name),
                hint="name a release of vllm-ascend: --base VERSION",
            )
        ) from error
    return name.strip().removeprefix("v")


def default_version(root: Path) -> str:
    """The base that is meant when none is named: the newest that has locks, else the newest in
    images/bases.yaml.
    """
    versions = locked_versions(root)
    if not versions and (root / "images" / "bases.yaml").is_file():
        from packaging.version import Version

        from strata.bases import BasesFile
        from strata.config import load

        versions = sorted(load(root / "images" / "bases.yaml", BasesFile).releases, key=Version)
    if versions:
        return versions[-1]
    raise StrataError(
        Finding(
            "E-BASE",
            "no base is named and none is known",
            expected="a directory below patches/locks, or images/bases.yaml",
            found="neither",
            hint="name it: --base VERSION",
        )
    )


def _places(command: Callable[..., Any]) -> Callable[..., Any]:
    """The three options that say where to work, handed on as one ``setting``."""

    @wraps(command)
    def run(trees: Path | None, base: str | None, root: Path | None, **rest: Any) -> Any:
        return command(setting=_setting(trees, base, root), **rest)

    for option in (
        click.option(
            "--root", type=click.Path(path_type=Path), help="Repository (default: found from here upwards)."
        ),
        click.option("--base", metavar="VERSION", help="Base release (default: the newest with locks)."),
        click.option(
            "--trees",
            type=click.Path(path_type=Path),
            help="Directory that holds vllm-ascend/ and vllm/ (default: .strata/trees/VERSION).",
        ),
    ):
        run = option(run)
    return run


def _known(series: Series, ids: Collection[str]) -> list[str]:
    for patch_id in ids:
        series[patch_id]
    return list(ids) or series.ids


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
@_places
def check(ids: tuple[str, ...], as_json: bool, setting: Setting) -> int:
    """Give every patch its verdict on a base. Exit 0: all may go, 1: a person is needed, 2: could not run."""
    series = setting.series()
    chosen = _known(series, ids)
    result = survey(series, setting.base(series))
    if as_json:
        click.echo(json.dumps(as_data(result, chosen), indent=1, ensure_ascii=False))
    else:
        click.echo(as_text(result, chosen, colour=sys.stdout.isatty()))
    return result.exit_code(chosen)


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), help="Write new and changed files here; leave the trees alone."
)
@click.option("--without", multiple=True, metavar="ID", help="Leave a patch out (may be repeated).")
@click.option("--dry-run", is_flag=True, help="Check and plan, write nothing.")
@click.option("--revert", is_flag=True, help="Take the applied series out again.")
@_places
def apply(out: Path | None, without: tuple[str, ...], dry_run: bool, revert: bool, setting: Setting) -> int:
    """Apply the series, all or nothing. Refuses unless every patch may go; a second run changes nothing."""
    from strata import apply as engine
    from strata import proof

    if revert and (out is not None or without or dry_run):
        raise click.UsageError("--revert goes alone: it takes out whatever was applied")
    if revert:
        restored = engine.revert(Trees.at(setting.directory))
        click.echo(f"{len(restored)} files put back" if restored else "nothing is applied here")
        return 0
    series = setting.series().without(list(without))
    base = setting.base(series, pristine=out is not None)
    if out is None and engine.already_applied(series, base.trees):
        click.echo(f"already applied: {len(series.patches)} patches on {setting.version}, nothing to do")
        return 0
    click.echo(f"checking {len(series.patches)} patches on {setting.version}", err=True)
    result = survey(series, base, subsets=False)
    if not result.go():
        raise StrataError(_refusal(result), EXIT_NEEDS_PERSON)
    plan = result.plan
    if dry_run:
        for tree, file in sorted(plan.files):
            click.echo(f"would write {tree}: {file}")
        return 0
    if out is not None:
        engine.compile_check(plan)
        counts = write_out(out, plan.files, series, plan.executable)
        proof.write(out / "proof.json", plan, series)
        click.echo(
            f"{len(series.patches)} patches: {counts['source']} source files, "
            f"{counts['csrc']} build inputs in {out}"
        )
        return 0
    written = engine.write(plan, base.trees, series.digest())
    click.echo(
        f"{len(series.patches)} patches applied: {len(written)} files written below {setting.directory}"
    )
    return 0


def _refusal(result: Survey) -> list[Finding]:
    """Every stopping finding, with its verdict in front where the code doesn't say it."""
    found = []
    for patch_id in result.series.ids:
        for verdict in result.verdicts[patch_id]:
            if not verdict.go and verdict.finding:
                found.append(verdict.finding)
    names = sorted({v.patch for vs in result.verdicts.values() for v in vs if not v.go})
    return [
        *found,
        Finding(
            "E-VERDICT",
            f"nothing was written: {len(names)} of {len(result.series.ids)} patches need a person",
            found=", ".join(names),
            hint="strata check",
        ),
    ]


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--tree", type=click.Choice(["vllm-ascend", "vllm"]), help="Only this tree.")
@_places
def diff(ids: tuple[str, ...], tree: str | None, setting: Setting) -> int:
    """Show what the series (or some patches with what they require) changes, as an ordinary unified diff.

    Paths are relative to the tree, for `git apply` or `patch -p1` there. Where both trees change, they begin
    with the tree's directory and the diff is for the directory that holds both.
    """
    from strata.udiff import unified

    series = setting.series()
    only = series.closure(_known(series, ids))
    plan = plan_on(series, setting.base(series), only)
    if plan.faults:
        raise StrataError([f.finding for f in plan.faults], EXIT_NEEDS_PERSON)
    paths = [path for path in sorted(plan.files) if tree in (None, path[0])]
    several = len({path[0] for path in paths}) > 1
    for path in paths:
        name = f"{path[0]}/{path[1]}" if several else path[1]
        click.echo(unified(name, plan.original.get(path), plan.files[path]), nl=False)
    return 0


@click.command()
@click.argument("what", metavar="ID|SYMBOL|FILE")
@_places
def why(what: str, setting: Setting) -> int:
    """Say what a patch or a symbol is about, and who else touches it."""
    series = setting.series()
    result = survey(series, setting.base(series), subsets=False)
    if what in series.ids:
        click.echo(_about_patch(what, result, setting))
        return result.exit_code([what])
    try:
        at = At.parse(what)
    except ValueError:
        at = At(file=what)
    found = touching(result, at) or _by_name(result, what)
    if not found:
        raise StrataError(
            Finding(
                "E-PATCH",
                "no patch has this id, and none edits or uses this symbol or file",
                found=what,
                expected="a patch id, [tree::]file, or [tree::]file::symbol",
                hint="strata check lists the patches",
            ),
            EXIT_NEEDS_PERSON,
        )
    for patch_id, role, place in found:
        click.echo(f"{patch_id} {role} {place}")
        click.echo(f"    {series[patch_id].spec.title}")
    return 0


def _by_name(result: Survey, name: str) -> list[tuple[str, str, At]]:
    """Places whose symbol is ``name``, or ends with it after a dot; or whose file ends so."""

    def fits(at: At) -> bool:
        symbol = at.symbol or ""
        return (
            symbol == name or symbol.endswith(f".{name}") or at.file == name or at.file.endswith(f"/{name}")
        )

    found = []
    for patch_id in result.series.ids:
        found += [(patch_id, "edits", s.at) for s in result.seen[patch_id] if fits(s.at)]
        found += [(patch_id, "uses", u) for u in result.series[patch_id].spec.uses if fits(u)]
    return found


def _about_patch(patch_id: str, result: Survey, setting: Setting) -> str:
    patch = result.series[patch_id]
    spec = patch.spec
    lines = [f"{patch_id} ({patch.group}, {spec.kind}): {spec.title}", "", *_wrapped(spec.why)]
    if spec.differs:
        lines += ["", "differs from the published form:", *_wrapped(spec.differs)]
    if spec.switch:
        lines += ["", f"switch: {spec.switch.name}, default {'on' if spec.switch.default else 'off'}"]
    elif spec.kind == "build":
        lines += ["", f"switch: at build time, make image WITHOUT={patch_id}"]
    for name, values in (("requires", spec.requires), ("conflicts", spec.conflicts)):
        if values:
            lines.append(f"{name}: {', '.join(values)}")
    lines += ["", "evidence:" if spec.evidence else "evidence: none given"]
    for item in spec.evidence:
        figures = " → ".join(str(v) for v in (item.before, item.after) if v is not None)
        state = "verified here" if item.verified_here else "not verified here"
        model = f" ({item.model})" if item.model else ""
        lines.append(f"  {item.metric}{model}: {figures or 'no figure'}; {item.source}; {state}")
    lines += ["", "edits:"]
    for seen in result.seen[patch_id]:
        lines.append(f"  {seen.where}")
        lines += [
            f"      also: {i} {role} {at}" for i, role, at in touching(result, seen.place) if i != patch_id
        ]
    if spec.uses:
        lines += ["", "uses:"]
    for use in spec.uses:
        lines.append(f"  {use}")
        lines += [f"      also: {i} {role} {at}" for i, role, at in touching(result, use) if i != patch_id]
    if patch.files:
        lines += ["", "new files:", *(f"  {tree}: {file}" for tree, file in sorted(patch.files))]
    lock = result.locks[patch_id]
    lines += ["", f"on {setting.version}: {_state(result, patch_id)}"]
    if lock is None:
        lines.append("lock: none")
    else:
        path = lock_path(Path(), setting.version, patch_id)
        lines.append(f"lock: {path}: {len(lock.edits)} edited, {len(lock.uses)} used symbols")
        for entry in lock.affirmed:
            condition = f" [{entry.condition}]" if entry.condition else ""
            lines.append(f"  {entry.date} {entry.verdict} {entry.symbol}{condition}: {entry.reason}")
    stopping = [v.finding for v in result.verdicts[patch_id] if not v.go and v.finding]
    return "\n".join([*lines, *("\n" + f.render() for f in stopping)])


def _state(result: Survey, patch_id: str) -> str:
    found = result.worst(patch_id)
    return found.name if found else "UNTOUCHED"


def _wrapped(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(" ".join(text.split()), 100, initial_indent="  ", subsequent_indent="  ")


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--symbol", metavar="AT", help="Affirm one symbol for every patch that edits or uses it.")
@click.option("--all", "everything", is_flag=True, help="Affirm every patch of the series.")
@click.option("--reason", required=True, help="Why the patch is right on this code; kept in the lock.")
@_places
def affirm(ids: tuple[str, ...], symbol: str | None, everything: bool, reason: str, setting: Setting) -> int:
    """Record that a person has seen the code a patch stands on: fingerprints and the reason go into its
    lock.
    """
    reason = " ".join(reason.split())
    if not reason or not any(c.isalnum() for c in reason):
        raise StrataError(
            Finding(
                "E-AFFIRM",
                "an affirmation needs a reason",
                expected="what you looked at and why it is right",
                found=repr(reason),
                hint='--reason "…"',
            )
        )
    if sum((bool(ids), symbol is not None and not ids, everything)) != 1:
        raise click.UsageError("name patches, or --symbol AT, or --all")
    at = None
    if symbol is not None:
        try:
            at = At.parse(symbol)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
    series = setting.series()
    base = setting.base(series)
    result = survey(series, base)
    locks, changes = new_locks(
        result,
        base,
        ids=_known(series, ids) if (ids or everything) else (),
        symbol=at,
        reason=reason,
        date=datetime.date.today().isoformat(),
        trees=lambda: {tree: tree_hash(root) for tree, root in base.trees.roots.items()},
    )
    if not locks:
        click.echo("nothing to affirm: the locks say what the trees say")
        return 0
    for line in _told(changes):
        click.echo(line)
    for patch_id, lock in locks.items():
        path = write_lock(setting.root, patch_id, lock)
        click.echo(f"affirmed {patch_id}: {path.relative_to(setting.root)}")
    return 0


def _told(changes: list[Change]) -> list[str]:
    """What changed since the locks were written: names, lines and fingerprints, no code."""
    lines = []
    for change in changes:
        distance = "" if change.near is None else (" near" if change.near else " far")
        lines.append(f"{change.patch}: {change.verdict}{distance} {change.where}")
        if change.before and change.before != change.after:
            lines.append(f"    locked {change.before}, now {change.after or 'gone'}")
    return lines


__all__ = ["affirm", "apply", "check", "diff", "series_data", "why"]
