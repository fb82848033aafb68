"""Change one line of a patch's own code and see that its tests notice, for each mutant in this directory.

    run.py --image REF                                     in the tuned image (tests/patches run there)
    run.py --python PYTHON --tree DIR [--path DIR]…        in a tree that `strata apply` patched, no engine
    run.py … --sample 8                                    some: the same ones as long as the series is
    run.py … greedy-fast-path min-tokens-mask-cache#2      those of a patch, or one
    run.py --list

Each mutant is a copy-on-write view of the tree (symbolic links, one real file) on which only the tests that
it names run. A mutant is caught if one of them fails that passes on the unchanged code. Mutants whose tests
are unit tests run on a copy of this repository, with this Python.
Exit 0: all caught; 1: not; 2: could not run, or a mutant cannot be made.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from mutants import Mutant, MutantError, Outcome, Report, confirm, judge, mutate, read, sample, table  # noqa: E402

IMAGE_TREE = "/vllm-workspace/vllm-ascend"
IMAGE_PYTHON = "/opt/base/venv/bin/python"
IMAGE_STUBS = "/opt/base/stubs"
COPIED = ("docs", "images", "layers", "patches", "scripts", "tests")
TIMEOUT_S = 300
# as the conftest of tests/patches has it; torch reads these when it is imported
ENVIRONMENT = {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_PLUGINS": "ascend",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


@dataclass(frozen=True)
class Host:
    """Where the mutants of a patched tree run.

    python: the base's interpreter; tree: the source tree with ``vllm_ascend``; path: directories for
    PYTHONPATH behind it (stand-in modules on a host without NPU); free: preloaded processes that nobody uses
    now, None for a new process each time.
    """

    python: Path
    tree: Path
    path: tuple[Path, ...]
    free: queue.Queue[subprocess.Popen[str]] | None = None


def known_mutants() -> list[Mutant]:
    """All mutants of this directory, by patch. Raises MutantError."""
    return [mutant for path in sorted(HERE.glob("*.yaml")) for mutant in read(path)]


def chosen(mutants: Sequence[Mutant], names: Sequence[str]) -> list[Mutant]:
    """Those of the named patches, and those named themselves. Raises MutantError for an unknown name."""
    known = {mutant.id for mutant in mutants} | {mutant.patch for mutant in mutants}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise MutantError(f"no mutants of {', '.join(unknown)}; there are some of {', '.join(sorted(known))}")
    return [m for m in mutants if not names or m.patch in names or m.id in names]


def patch_file(mutant: Mutant, root: Path = ROOT) -> Path:
    """The file that the mutant changes, in the repository. Raises MutantError if there is none."""
    found = sorted((root / "patches").glob(f"*/{mutant.patch}/{mutant.file}"))
    if len(found) != 1:
        raise MutantError(
            f"{mutant.id}: {len(found)} files patches/*/{mutant.patch}/{mutant.file}, expected one"
        )
    return found[0]


def content_digest(root: Path = ROOT) -> str:
    """A hash of the patches and the mutants: what the choice of a sample depends on."""
    total = hashlib.sha256()
    paths = [*(root / "patches").rglob("*"), *(root / "tests" / "mutants").glob("*.yaml")]
    for path in sorted(path for path in paths if path.is_file() and "__pycache__" not in path.parts):
        total.update(f"{path.relative_to(root)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def overlay(tree: Path, file: str, content: str | None, into: Path) -> None:
    """A view of ``tree``'s package at ``into``: links, and a real ``file`` with ``content``.

    file: relative to the tree, below ``vllm_ascend``; content None leaves the file as it is.
    """
    here, there = into, tree
    parts = Path(file).parts
    for depth, part in enumerate(parts):
        here.mkdir()
        if depth:  # the tree's top holds more than the package; only the package is wanted
            for entry in there.iterdir():
                if entry.name not in (part, "__pycache__"):
                    (here / entry.name).symlink_to(entry)
        here, there = here / part, there / part
    if content is None:
        here.symlink_to(there)
    else:
        here.write_text(content, encoding="utf-8")


def run_on_tree(mutant: Mutant, host: Host) -> Outcome:
    """Run a mutant of a file in the patched tree. Raises MutantError if it cannot be made."""
    source = host.tree / mutant.target
    try:
        text = source.read_text(encoding="utf-8")
    except OSError as error:
        raise MutantError(
            f"{mutant.id}: {source} is not there ({error}); was the tree patched without it?"
        ) from error
    mutated = mutate(text, mutant, f"{source} (was the tree patched with another state of the series?)")
    with tempfile.TemporaryDirectory(prefix="strata-mutant-") as directory:
        view = Path(directory).resolve() / "tree"
        overlay(host.tree, mutant.target, mutated, view)
        tests = [str(ROOT / test) for test in mutant.tests]
        return timed(mutant, host, [view, *host.path], view, tests, Path(directory))


def run_on_repository(mutant: Mutant) -> Outcome:
    """Run a mutant of a patch's file on a copy of the repository. Raises MutantError if it cannot be made."""
    original = patch_file(mutant)
    mutated = mutate(original.read_text(encoding="utf-8"), mutant, str(original))
    with tempfile.TemporaryDirectory(prefix="strata-mutant-") as directory:
        copy = copy_repository(Path(directory).resolve() / "repository")
        (copy / original.relative_to(ROOT)).write_text(mutated, encoding="utf-8")
        tests = [str(copy / test) for test in mutant.tests]
        return timed(mutant, None, [copy / "scripts"], None, tests, Path(directory))


def copy_repository(into: Path) -> Path:
    """What unit tests need of the repository, at ``into``."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", ".hypothesis", "*.egg-info")
            shutil.copytree(ROOT / name, into / name, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, into / path.name)
    return into


def timed(
    mutant: Mutant,
    host: Host | None,
    path: Sequence[Path],
    root: Path | None,
    tests: Sequence[str],
    out: Path,
) -> Outcome:
    """Run the tests of a made mutant and judge."""
    start = time.monotonic()
    code, report = pytest_run(host, path, root, tests, out, stop_early=True)
    took = time.monotonic() - start
    if code is None:
        return Outcome(mutant, "timeout", note=f"no end within {TIMEOUT_S} s", seconds=took)
    return dataclasses.replace(judge(mutant, code, report), seconds=took)


def pytest_run(
    host: Host | None,
    path: Sequence[Path],
    root: Path | None,
    tests: Sequence[str],
    out: Path,
    *,
    stop_early: bool,
) -> tuple[int | None, Report | None]:
    """Run pytest on ``tests`` in a process group of its own: exit code (None: timeout) and report.

    host: whose Python runs it, None for this one; root: where vllm_ascend must come from; out: a directory
    for what the run writes.
    """
    result = out / "report.json"
    result.unlink(missing_ok=True)
    work = out / "work"
    work.mkdir(exist_ok=True)
    path = [*path, HERE / "plugin"]
    environment = {
        **(ENVIRONMENT if host else {}),
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(work / "hypothesis"),
        "STRATA_MUTANT_REPORT": str(result),
        "STRATA_MUTANT_ROOT": str(root or ""),
        "STRATA_TREES": os.environ.get("STRATA_TREES", str(ROOT / ".strata" / "trees" / "0.23.0")),
    }
    options = ["-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-p", "strata_mutant_report"]
    arguments = [*options, *(["-x"] if stop_early else []), *tests]
    if host and host.free:
        request = {
            "args": arguments,
            "path": [str(directory) for directory in path],
            "env": environment,
            "cwd": str(work),
            "output": str(out / "output.txt"),
            "timeout": TIMEOUT_S,
        }
        code = _ask(host.free, request)
    else:
        python = host.python if host else Path(sys.executable)
        code = _run([str(python), "-m", "pytest", *arguments], work, {**os.environ, **environment})
    report = None
    if code is not None and result.is_file():
        fields = json.loads(result.read_text(encoding="utf-8"))
        report = Report(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
    return code, report


def _run(command: Sequence[str], cwd: Path, environment: dict[str, str]) -> int | None:
    null = subprocess.DEVNULL
    with subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=null, stderr=null, start_new_session=True
    ) as process:
        try:
            return process.wait(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):  # workers of a test outlive it only if it hung
                os.killpg(process.pid, signal.SIGKILL)


def _ask(free: queue.Queue[subprocess.Popen[str]], request: dict[str, object]) -> int | None:
    server = free.get()
    try:
        assert server.stdin and server.stdout
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        reply = server.stdout.readline()
    finally:
        free.put(server)
    if not reply:
        raise MutantError(f"the process that runs the tests ended with exit code {server.poll()}")
    code: int | None = json.loads(reply)
    return code


@contextmanager
def preloaded(host: Host, number: int) -> Iterator[Host]:
    """``host`` with ``number`` processes that have loaded what all runs load (preloaded.py)."""
    path = [str(host.tree), *map(str, host.path)]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": ""}
    servers = [
        subprocess.Popen(
            [str(host.python), str(HERE / "preloaded.py"), *path],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(number)
    ]
    free: queue.Queue[subprocess.Popen[str]] = queue.Queue()
    try:
        for server in servers:
            assert server.stdout
            count = json.loads(server.stdout.readline() or "0")
            if not count:
                raise MutantError(
                    f"{host.python} with {os.pathsep.join(path)} does not load vllm_ascend; "
                    "see what is wrong with --fresh"
                )
            free.put(server)
        yield dataclasses.replace(host, free=free)
    finally:
        for server in servers:
            server.kill()
            server.communicate()


def unchanged(outcomes: Sequence[Outcome], host: Host | None) -> set[str]:
    """Node ids of the catching tests that pass on the unchanged code; each test file runs once."""
    passed: set[str] = set()
    jobs: dict[tuple[bool, str], set[str]] = {}
    for outcome in outcomes:
        if outcome.state == "caught":
            for test in outcome.by:
                jobs.setdefault((outcome.mutant.in_repository, test.partition("::")[0]), set()).add(test)
    for (in_repository, _), tests in sorted(jobs.items()):
        with tempfile.TemporaryDirectory(prefix="strata-unchanged-") as directory:
            out = Path(directory).resolve()
            if in_repository:
                where = [str(ROOT / test) for test in sorted(tests)]
                _, report = pytest_run(None, [ROOT / "scripts"], None, where, out, stop_early=False)
            else:
                assert host is not None
                view = out / "tree"
                overlay(host.tree, "vllm_ascend/strata/__init__.py", None, view)
                where = [str(ROOT / "tests" / "patches" / test) for test in sorted(tests)]
                _, report = pytest_run(host, [view, *host.path], view, where, out, stop_early=False)
        passed.update(report.passed if report else ())
    return passed


def run_here(mutants: Sequence[Mutant], host: Host | None, jobs: int) -> list[Outcome]:
    """Run them on this machine, each result printed as it comes. Raises MutantError."""

    def one(mutant: Mutant) -> Outcome:
        if mutant.in_repository:
            outcome = run_on_repository(mutant)
        else:
            assert host is not None
            outcome = run_on_tree(mutant, host)
        print(f"  {outcome.state} {outcome.mutant.id} ({outcome.seconds:.0f} s)", file=sys.stderr, flush=True)
        return outcome

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        outcomes = list(pool.map(one, mutants))
    return confirm(outcomes, unchanged(outcomes, host))


def run_in_image(mutants: Sequence[Mutant], image: str, jobs: int) -> list[Outcome]:
    """Run those of patched trees in one container without network. Raises MutantError."""
    with tempfile.TemporaryDirectory(prefix="strata-mutants-") as directory:
        out = Path(directory).resolve()
        done = subprocess.run(image_command(image, [m.id for m in mutants], out, jobs), check=False)
        result = out / "outcomes.json"
        if not result.is_file():
            raise MutantError(f"{image}: the run ended with exit code {done.returncode} and no results")
        fields = {entry["id"]: entry for entry in json.loads(result.read_text(encoding="utf-8"))}
    missing = [m.id for m in mutants if m.id not in fields]
    if missing:
        raise MutantError(f"{image}: no result for {', '.join(missing)}")
    return [
        Outcome(m, f["state"], tuple(f["by"]), f["note"], f["seconds"])
        for m in mutants
        for f in [fields[m.id]]
    ]


def image_command(image: str, names: Sequence[str], out: Path, jobs: int) -> list[str]:
    """The command that runs this script in ``image``; it leaves ``outcomes.json`` in ``out``."""
    run = ["docker", "run", "--rm", "--init", "--network", "none"]
    run += ["--volume", f"{ROOT / 'patches'}:/repository/patches:ro"]
    run += ["--volume", f"{ROOT / 'tests'}:/repository/tests:ro", "--volume", f"{out}:/out"]
    run += ["--env", "PYTHONDONTWRITEBYTECODE=1", "--entrypoint", IMAGE_PYTHON, image]
    inner = ["/repository/tests/mutants/run.py", "--python", IMAGE_PYTHON, "--tree", IMAGE_TREE]
    return [*run, *inner, "--path", IMAGE_STUBS, "--jobs", str(jobs), "--json", "/out/outcomes.json", *names]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="PATCH[#N]")
    parser.add_argument("--image")
    parser.add_argument("--python", type=Path)
    parser.add_argument("--tree", type=Path)
    parser.add_argument("--path", type=Path, action="append", default=[])
    parser.add_argument("--sample", type=int, metavar="N", help="run N of them; 0: all")
    parser.add_argument("--seed", help="another sample; default: the content of patches and mutants")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--fresh", action="store_true", help="a new process for each run, nothing preloaded")
    parser.add_argument("--json", type=Path, help="write the outcomes there too")
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    given = parser.parse_args(arguments)
    if not given.list and bool(given.image) == bool(given.python and given.tree):
        parser.error("give --image, or --python and --tree")
    if given.jobs < 1 or (given.sample or 0) < 0:
        parser.error("--jobs is at least 1, --sample at least 0")
    try:
        mutants = chosen(known_mutants(), given.names)
        if given.sample:
            mutants = sample(mutants, given.sample, given.seed or content_digest())
        for mutant in mutants:  # all can be made, before anything runs
            source = patch_file(mutant)
            mutate(source.read_text(encoding="utf-8"), mutant, str(source))
        if given.list:
            print("\n".join(f"{m.id}  {m.file}: {m.find.strip()}" for m in mutants))
            return 0
        in_trees = [mutant for mutant in mutants if not mutant.in_repository]
        here = [mutant for mutant in mutants if mutant.in_repository]
        if given.image:
            outcomes = run_in_image(in_trees, given.image, given.jobs) if in_trees else []
            outcomes += run_here(here, None, given.jobs)
        else:
            path = tuple(directory.absolute() for directory in given.path)
            host = Host(given.python.absolute(), given.tree.resolve(), path)
            if given.fresh or not in_trees:
                outcomes = run_here(mutants, host, given.jobs)
            else:
                with preloaded(host, min(given.jobs, len(in_trees))) as ready:
                    outcomes = run_here(mutants, ready, given.jobs)
    except MutantError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.json:
        fields = [
            {"id": o.mutant.id, "state": o.state, "by": o.by, "note": o.note, "seconds": o.seconds}
            for o in outcomes
        ]
        given.json.write_text(json.dumps(fields, indent=1), encoding="utf-8")
    print("\n".join(table(outcomes)))
    return 0 if all(outcome.state == "caught" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
