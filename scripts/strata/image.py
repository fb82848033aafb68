"""The tuned image: planned, checked on the host, built by one multi-stage build, written down for compose."""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from docker.models.images import Image

from strata import __version__, host
from strata.bake import dockerfile_with_environment
from strata.base import (
    build_cpu_base,
    image_trees,
    manifest_digests,
    python_of,
    root_hash,
    tree_hashes,
    verify,
)
from strata.bases import BasesFile, KnownBase, load_bases
from strata.check import Base, Survey, no_findings, survey
from strata.choice import Choice, choose, identify
from strata.engine import Build, Engine
from strata.errors import EXIT_NEEDS_PERSON, Finding, StrataError
from strata.export import is_build_input
from strata.kernels import release
from strata.kernels_device import preflight
from strata.kernels_inputs import Needed, needed
from strata.kernels_tree import unit_for
from strata.paths import work_directory
from strata.series import Series, load_series
from strata.sources import wheelhouse
from strata.trees import Trees
from strata.wheels import Say, Target, asked_for, fetch_wheels

# what Strata imports in the edits stage; versions come from requirements.lock
TOOLS = (
    "annotated-types",
    "click",
    "markdown-it-py",
    "mdurl",
    "packaging",
    "pydantic",
    "pydantic_core",
    "Pygments",
    "PyYAML",
    "rich",
    "typing-inspection",
    "typing_extensions",
)
_SPACE = 3_000_000_000
NEEDS_NPU = {
    "embedded": "not shown by this image, needs an NPU and CANN: compiled operators, numerics of NPU kernels, graph "
    "capture, SuperKernel, multi-stream order, memory, every timing; this image serves on the CPU only",
    "device": "not shown at build, needs an NPU: the live proof (at the first start), numerics of NPU kernels, graph "
    "capture, SuperKernel, multi-stream order, memory, every timing",
}


@dataclass(frozen=True)
class Request:
    """What was asked for.

    base: as in ``BASE=``; without: patch ids; force: build on a base that differs from its pin; point_compose:
    write the image into ``.env``, from which compose takes it.
    """

    version: str
    base: str | None = None
    without: tuple[str, ...] = ()
    offline: bool = False
    force: bool = False
    point_compose: bool = True


def tool_pins(lock: str) -> list[str]:
    """The lines of requirements.lock that the edits stage needs. E-LOCK where one is missing."""
    normal = {_normal(line.partition("==")[0]): line for line in lock.splitlines() if "==" in line}
    missing = [name for name in TOOLS if _normal(name) not in normal]
    if missing:
        raise StrataError(
            Finding("E-LOCK", "requirements.lock lacks " + ", ".join(missing), where="requirements.lock")
        )
    return [normal[_normal(name)].strip() for name in TOOLS]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def tool_wheels(target: Target, root: Path, say: Say, *, offline: bool) -> Path:
    """Wheels of Strata's own dependencies for a base's Python."""
    directory = wheelhouse(root) / f"tools-{target.tag}"
    pins = tool_pins((root / "requirements.lock").read_text())
    if not (directory / ".complete").is_file() or (directory / ".complete").read_text() != asked_for(
        [], pins, target
    ):
        if offline:
            raise StrataError(
                Finding(
                    "E-OFFLINE",
                    f"the wheelhouse lacks Strata's own wheels for {target.tag}",
                    where=str(directory),
                    hint="make wheelhouse with the same BASE, then carry .strata/wheelhouse here",
                )
            )
        for old in directory.glob(
            "*.whl"
        ):  # the stage installs what is there: an older version must not stay
            old.unlink()
        fetch_wheels([], pins, target, directory, say)
    return directory


# --- the base's image


def obtain(choice: Choice, root: Path, engine: Engine, say: Say, *, offline: bool) -> Image:
    """The base's image on this engine: built (cpu), pulled (device), or loaded (archive)."""
    if choice.how == "archive":
        return load_archive(Path(choice.source).expanduser(), engine, say)
    if choice.how == "known" and choice.known.base.kind == "embedded":
        return build_cpu_base(choice.known, root, engine, say, offline=offline)
    image = engine.image(choice.source)
    if image is None:
        if choice.how == "known" and host.architecture() not in choice.known.base.architectures:
            raise StrataError(
                Finding("E-ARCH", f"{choice.source} is not published for {host.architecture()}")
            )
        if offline:
            raise StrataError(
                Finding(
                    "E-OFFLINE",
                    "the base is not on this engine",
                    where=choice.source,
                    hint="docker load an archive of it, or BASE=<archive>",
                )
            )
        image = engine.pull(choice.source, say)
    return image


def load_archive(path: Path, engine: Engine, say: Say) -> Image:
    """Load an archive made by ``docker save``. E-BASE where it holds no image, or several."""
    try:
        with tarfile.open(path) as tar:
            names = {m.name for m in tar}
    except (OSError, tarfile.TarError) as error:
        raise StrataError(
            Finding(
                "E-BASE",
                "not an image archive",
                where=str(path),
                expected="a file made by `docker save`",
                found=str(error),
            )
        ) from error
    if not names & {"manifest.json", "index.json"}:
        raise StrataError(
            Finding(
                "E-BASE",
                "the archive holds files, not an image",
                where=str(path),
                expected="manifest.json (made by `docker save`)",
                found="a plain tar archive",
                hint="save the image with docker save; an exported container lacks its environment",
            )
        )
    say(f"loading {path}")
    with path.open("rb") as file:
        images = engine.client.images.load(file)
    if len(images) != 1:
        raise StrataError(
            Finding(
                "E-BASE",
                "the archive holds several images",
                where=str(path),
                found=f"{len(images)} images",
                expected="one",
                hint="docker load it and name the one to take: BASE=<reference>",
            )
        )
    return images[0]


# --- the plan


@dataclass(frozen=True)
class Judged:
    """A series on the base's trees. trees: where they lie on the host."""

    series: Series
    trees: Path
    survey: Survey

    @property
    def needed(self) -> Needed:
        """What the changed build inputs call for: operators, extension."""
        return needed(
            file for tree, file in self.survey.plan.files if tree == "vllm-ascend" and is_build_input(file)
        )

    @property
    def counts(self) -> tuple[int, int]:
        """(source files, build inputs) that the series writes."""
        inputs = sum(is_build_input(file) for _, file in self.survey.plan.files)
        return len(self.survey.plan.files) - inputs, inputs

    def require_go(self) -> None:
        """Raise every finding that stops the series, exit code 1."""
        if not self.survey.go():
            raise StrataError(no_findings(self.survey, self.series.ids), EXIT_NEEDS_PERSON)


def judge(root: Path, trees: Path, version: str, without: Sequence[str]) -> Judged:
    """The verdicts of the series, less ``without``, on trees."""
    series = load_series(root).without(list(without))
    return Judged(series, trees, survey(series, Base(Trees.at(trees), version), subsets=False))


def plan_text(choice: Choice, series: Series, judged: Judged | None, facts: Mapping[str, str]) -> str:
    """The complete plan of a build for a person.

    facts: ``image`` (where the base's image is now), ``architecture`` (the host's), ``operators`` (what the
    kernels stage does), ``trees`` (what the verdicts were taken on, or why there are none).
    """
    known = choice.known
    base = known.base
    tools = ", ".join(f"{k} {v}" for k, v in base.toolchain.model_dump(by_alias=True).items() if v)
    lines = [
        f"base      {known.full_name}: {base.title} ({choice.why})",
        f"  image   {choice.source} ({facts['image']})",
        f"  pin     digest {base.digest or 'not recorded'}, trees "
        + ("recorded" if known.expected_trees else f"not recorded (strata base pin {known.full_name})"),
        f"  SoC     {base.soc} (from images/bases.yaml, never from a device); {tools}",
        f"  arch    {', '.join(base.architectures)}; this host: {facts['architecture']}",
        f"tag       {known.tuned_tag}",
        f"series    {len(series.ids)} patches, {series.digest()[:16]}; verdicts on {facts['trees']}",
    ]
    for patch in series.patches:
        verdict = judged.survey.worst(patch.id) if judged else None
        state = (verdict.name if verdict else "UNTOUCHED") if judged else "-"
        if verdict and verdict.go and verdict.condition:
            state += ", affirmed"
        switch = f"switch {patch.spec.switch.name}" if patch.spec.switch else "no run-time switch"
        lines.append(f"  {patch.group + '/' + patch.id:<44}{patch.spec.kind:<9}{state:<20}{switch}")
    sources, inputs = judged.counts if judged else (None, None)
    if judged and not judged.survey.go():
        stopped = [i for i in series.ids if not judged.survey.go([i])]
        lines.append(
            f"  stops   {len(stopped)} patches need a person first: strata check {' '.join(stopped)}"
        )
    lines += [
        "stages",
        f"  tools    Strata's dependencies for Python {base.toolchain.python} ({len(TOOLS)} wheels); "
        "stays out of the image",
        f"  edits    the series on the base's trees: {_count(sources, 'source files')} with bytecode, "
        f"{_count(inputs, 'build inputs')}",
        f"  kernels  {facts['operators']}",
        "  final    base + changed files + operator package + serving defaults; static proof"
        + (
            ", live proof"
            if base.kind == "embedded"
            else "; live proof at the first start (needs the driver)"
        ),
        "network   " + facts["network"],
    ]
    return "\n".join(lines)


def _count(number: int | None, what: str) -> str:
    return f"{number} {what}" if number is not None else what


def operators_text(known: KnownBase, root: Path, judged: Judged | None) -> str:
    """What the kernels stage will do, in one line."""
    recorded = release(root, known.version)
    chips = {chip for o in recorded.operators for chip in o.chips if known.base.soc.startswith(chip)}
    operators = recorded.on(max(chips, key=len)) if chips else ()
    cores = sum(o.kind == "aicore" for o in operators)
    if judged is not None and not judged.needed.operators and not judged.needed.extension:
        return f"no build input changes: the base's {len(operators)} operators stay as they are"
    if known.base.kind == "embedded":
        return (
            f"the {cores} generated wrappers for {known.base.soc}, regenerated and run through the "
            "stand-in compiler"
        )
    extension = ", then its extension" if judged is None or judged.needed.extension else ""
    return (
        f"{len(operators)} operators ({cores} AI core) for {known.base.soc} by the release's own build "
        f"with bisheng{extension}"
    )


def network_text(
    choice: Choice, request: Request, root: Path, architecture: str, present: bool | None
) -> str:
    """What the build asks of the network, as far as the host can tell now."""
    if request.offline:
        return "none (OFFLINE=1)"
    wanted = []
    known = choice.known
    if known.base.kind == "embedded" and not present:
        wanted += ["Debian packages (mmdebstrap)", "the base's wheels and source packages"]
    elif choice.how != "archive" and not present:
        wanted.append(f"the base from its registry ({choice.source.partition('/')[0]})")
    if not (
        wheelhouse(root) / f"tools-{Target(known.base.toolchain.python, architecture).tag}" / ".complete"
    ).is_file():
        wanted.append(f"{len(TOOLS)} wheels for the tools stage")
    return (", ".join(wanted) if wanted else "nothing: all is here") + "; no step of the build itself"


# --- building


def facts_for(known: KnownBase, image: Image, trees: Mapping[str, str], python: str) -> dict[str, object]:
    """What image.json says of the base, and of Strata. python: the version that the image itself reports."""
    embedded = known.base.kind == "embedded"
    digests = sorted(manifest_digests(image))
    return {
        "strata": __version__,
        "name": known.full_name,
        "version": known.version,
        "variant": known.name,
        "soc_version": known.base.soc,
        "architecture": host.DOCKER_ARCHITECTURES.get(
            image.attrs["Architecture"], image.attrs["Architecture"]
        ),
        "reference": next(iter(image.tags), known.image),
        "digest": digests[0] if digests else None,
        "rootfs": root_hash(image),
        "trees": dict(trees),
        "toolchain": {k: v for k, v in known.base.toolchain.model_dump(by_alias=True).items() if v}
        | {"python": python},
        "python": "/opt/base/venv/bin/python" if embedded else None,
        "serve_python": "/opt/serve/venv/bin/python" if embedded else None,
        "stubs": "/opt/base/stubs" if embedded else None,
        "live": "pending" if embedded else "deferred",
    }


def labels_for(
    known: KnownBase, image: Image, series: Series, root: Path, *, operators: bool
) -> dict[str, str]:
    """OCI and Strata labels of the tuned image. operators: whether the series has them built."""
    digests = sorted(manifest_digests(image))
    labels = {
        "org.opencontainers.image.title": f"Strata {known.full_name}",
        "org.opencontainers.image.description": f"vllm-ascend {known.version} with {len(series.ids)} patches",
        "org.opencontainers.image.version": __version__,
        "org.opencontainers.image.base.name": known.image,
        "org.opencontainers.image.base.digest": digests[0] if digests else str(image.id),
        "org.opencontainers.image.revision": revision(root),
        "ai.strata.base": known.full_name,
        "ai.strata.soc": known.base.soc,
        "ai.strata.series": series.digest(),
        "ai.strata.patches": ",".join(series.ids),
        "ai.strata.switches": ",".join(
            f"{p.spec.switch.name}={'on' if p.spec.switch.default else 'off'}"
            for p in series.patches
            if p.spec.switch
        ),
        "ai.strata.operators": ("stand-in" if known.base.kind == "embedded" else "bisheng")
        if operators
        else "as shipped",
        "ai.strata.live-proof": "passed" if known.base.kind == "embedded" else "deferred",
        "ai.strata.needs-npu": NEEDS_NPU[known.base.kind],
    }
    return {k: v for k, v in labels.items() if v}


def revision(root: Path) -> str:
    """The checkout's commit, with ``-dirty`` where files differ from it; empty outside git."""
    try:
        commit = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit + ("-dirty" if dirty else "")


def write_context(directory: Path, facts: Mapping[str, object]) -> None:
    """The ``facts`` context. kernels.json holds only what decides the operators, so that nothing else
    rebuilds them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    kernels = {k: facts[k] for k in ("name", "version", "variant", "soc_version")}
    (directory / "kernels.json").write_text(json.dumps(kernels, indent=1) + "\n")
    (directory / "image.json").write_text(json.dumps(facts, indent=1) + "\n")


def tuned_build(
    known: KnownBase,
    root: Path,
    base_image: str,
    wheels: Path,
    context: Path,
    without: Sequence[str],
    labels: Mapping[str, str],
) -> Build:
    """The one build of the tuned image, as arguments."""
    return Build(
        context=root,
        dockerfile=root / "images" / "tuned" / "Dockerfile",
        tag=known.tuned_tag,
        contexts={"base": f"docker-image://{base_image}", "tool-wheels": str(wheels), "facts": str(context)},
        arguments={
            "VERSION": known.version,
            "WITHOUT": ",".join(without),
            "LIVE": "at-build" if known.base.kind == "embedded" else "deferred",
        },
        labels=labels,
    )


def build(request: Request, root: Path, say: Say, out: Callable[[str], None]) -> KnownBase:
    """Build the tuned image and write ``.env``. ``say`` takes progress, ``out`` results."""
    bases = load_bases(root)
    choice = choose(bases, request.version, request.base, host.npu_devices(), host.npu_generation())
    out(f"base {choice.known.full_name if choice.how == 'known' else choice.source}: {choice.why}")
    series = load_series(root).without(list(request.without))
    engine = Engine()
    image = obtain(choice, root, engine, say, offline=request.offline)
    engine.require_architecture(image, choice.source)
    known = choice.known
    require_untuned(image, choice.source)
    if choice.how != "known":
        environment = image.attrs["Config"].get("Env") or []
        known = identify(bases, request.version, dict(image.labels), environment, choice.source)
        out(f"{choice.source} is a {known.full_name} base: {known.base.title}")
    trees = image_trees(engine, image, root, say)
    # verdicts before identity: of a base with a changed function a person wants to hear which function it is
    judged = judge(root, trees, known.version, request.without)
    judged.require_go()
    hashes = tree_hashes(trees)
    differs = verify(known, image, hashes)
    if differs and not request.force:
        raise StrataError(differs, EXIT_NEEDS_PERSON)
    for finding in differs:
        say(f"taken all the same (FORCE=1): {finding.message}")
    if known.base.kind == "device":
        require_build_inputs(known, trees, judged)
    if known.base.kind == "device" and not known.expected_trees:
        say(f"nothing is recorded of this base yet; once you trust it: strata base pin {known.full_name}")
    engine.require_space(_SPACE, "the tuned image")
    python = python_of(engine, image, root)
    wheels = tool_wheels(Target(python, host.architecture()), root, say, offline=request.offline)
    context = work_directory(root) / "build" / known.full_name
    write_context(context, facts_for(known, image, hashes, python))
    local = _local_name(image, engine)
    sources, inputs = judged.counts
    say(
        f"building {known.tuned_tag}: {len(series.ids)} patches, {sources} source files, "
        f"{inputs} build inputs"
    )
    labels = labels_for(known, image, series, root, operators=judged.needed.operators)
    tuned = tuned_build(known, root, local, wheels, context, request.without, labels)
    dockerfile = dockerfile_with_environment(
        tuned.dockerfile, engine, image, root, work_directory(root) / "build"
    )
    replace(tuned, dockerfile=dockerfile).run(say)
    if request.point_compose:
        write_environment(root / ".env", known)
    return known


def require_untuned(image: Image, source: str) -> None:
    """E-BASE where the image has been tuned already: patches are for a pristine base."""
    if "ai.strata.series" in image.labels:
        raise StrataError(
            Finding(
                "E-BASE",
                "the image is tuned already and cannot be a base",
                where=source,
                expected="a base: a release's image, or one by `strata base build`",
                found=f"patches {image.labels.get('ai.strata.patches', '')}",
                hint=f"BASE={image.labels.get('org.opencontainers.image.base.name', 'cpu')}",
            )
        )


def require_build_inputs(known: KnownBase, trees: Path, judged: Judged) -> None:
    """Before a device build that compiles operators: what it would fetch must be in the base (E-CATLASS)."""
    if judged.needed.operators:
        tree = trees / "vllm-ascend"
        preflight(tree, unit_for(tree, known.base.soc))


def _local_name(image: Image, engine: Engine) -> str:
    """A name by which BuildKit finds the image on this engine; one is given where it has none."""
    for tag in image.tags:
        found = engine.image(tag)
        if found is not None and found.id == image.id:
            return tag
    assert image.id is not None
    tag = f"strata-loaded:{image.id.partition(':')[2][:16]}"
    image.tag(tag)
    return tag


# --- what compose reads


def environment_text(old: str, values: Mapping[str, str]) -> str:
    """``.env`` with ``values`` set; every other line stays as it is."""
    lines = old.splitlines()
    todo = dict(values)
    for number, line in enumerate(lines):
        key = line.partition("=")[0].strip()
        if key in todo:
            lines[number] = f"{key}={todo.pop(key)}"
    return "\n".join([*lines, *(f"{k}={v}" for k, v in todo.items())]) + "\n"


def write_environment(path: Path, known: KnownBase) -> None:
    """Point compose at the image: STRATA_IMAGE and the compose files for this kind of base."""
    files = "compose.yaml:compose.cpu.yaml" if known.base.kind == "embedded" else "compose.yaml"
    old = path.read_text() if path.is_file() else "# written by `make image`; other lines are yours\n"
    text = environment_text(old, {"STRATA_IMAGE": known.tuned_tag, "COMPOSE_FILE": files})
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def plan(request: Request, root: Path, say: Say) -> str:
    """The plan as text; needs no engine, and no network where the trees are here."""
    bases: BasesFile = load_bases(root)
    choice = choose(bases, request.version, request.base, host.npu_devices(), host.npu_generation())
    series = load_series(root).without(list(request.without))
    architecture = host.architecture()
    present, where = _where(choice)
    judged, on = None, ""
    try:
        judged, on = _judge_for_plan(choice, root, request, architecture, say)
    except StrataError as error:
        on = f"nothing: {error.findings[0].code}: {error.findings[0].message}"
    return plan_text(
        choice,
        series,
        judged,
        {
            "image": where,
            "architecture": architecture,
            "trees": on,
            "operators": operators_text(choice.known, root, judged),
            "network": network_text(choice, request, root, architecture, present),
        },
    )


def _where(choice: Choice) -> tuple[bool | None, str]:
    if choice.how == "archive":
        return None, "to be loaded"
    try:
        image = Engine().image(choice.source)
    except StrataError:
        return None, "no engine here to ask"
    if image is not None:
        return True, "on this engine"
    return False, "to be built" if choice.known.base.kind == "embedded" else "to be pulled"


def _judge_for_plan(
    choice: Choice, root: Path, request: Request, architecture: host.Architecture, say: Say
) -> tuple[Judged, str]:
    """Verdicts on the release's source packages: all bases of a release have the same sources."""
    from strata.bases import find_base
    from strata.sources import make_trees

    release = find_base(load_bases(root), choice.known.version, "cpu")
    trees = make_trees(release, root, architecture, say)
    return judge(
        root, trees, choice.known.version, request.without
    ), f"the source packages of {choice.known.version}"
