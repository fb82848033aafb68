"""The environment that upstream leaves in ``~/.bashrc``: CANN and ATB paths, jemalloc. One script sets it
everywhere.

``/etc/strata/env.sh`` is that script. The entrypoint runs it and takes what it exports; ``BASH_ENV`` makes
every bash in the container (``docker exec … bash -c``) run it too; ``strata env --format docker`` prints it
as ``ENV`` lines for the image, so that commands started without a shell see the same.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

from strata.errors import Finding, StrataError

SCRIPT = Path("/etc/strata/env.sh")
_PATH_LISTS = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "LD_PRELOAD")
_SHELL_OWN = ("_", "SHLVL", "PWD", "OLDPWD", "BASH_ENV", "BASH_EXECUTION_STRING")


def effective(environment: Mapping[str, str], script: Path = SCRIPT) -> dict[str, str]:
    """``environment`` after the script, duplicates in path lists removed (the first stays). E-ENV-SCRIPT
    where it fails.
    """
    clean = {k: v for k, v in environment.items() if k != "BASH_ENV"}
    if not script.is_file():
        raise StrataError(
            Finding(
                "E-ENV-SCRIPT",
                "the environment script is missing",
                where=str(script),
                hint="this image is incomplete: rebuild it with make image",
            )
        )
    run = subprocess.run(
        ["/bin/bash", "--noprofile", "--norc", "-c", 'source "$1" >&2 && exec env -0', "strata", str(script)],
        env=clean,
        capture_output=True,
        check=False,
    )
    if run.returncode:
        raise StrataError(
            Finding(
                "E-ENV-SCRIPT",
                "the environment script failed",
                where=str(script),
                found=run.stderr.decode(errors="replace").strip()[-500:],
            )
        )
    result = dict(
        item.split("=", 1) for item in run.stdout.decode(errors="surrogateescape").split("\0") if "=" in item
    )
    for name in _SHELL_OWN:
        result.pop(name, None)
        if name in environment:
            result[name] = environment[name]
    return tidy(result)


def tidy(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with each entry of a path list kept once, the first."""
    return {
        name: ":".join(dict.fromkeys(p for p in value.split(":") if p)) if name in _PATH_LISTS else value
        for name, value in environment.items()
    }


def difference(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """What the script added or changed."""
    return {k: v for k, v in sorted(after.items()) if before.get(k) != v and k not in _SHELL_OWN}


def as_docker(values: Mapping[str, str]) -> str:
    """``ENV`` lines; ``\\``, ``"`` and ``$`` escaped for the Dockerfile."""

    def quote(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$") + '"'

    return "".join(f"ENV {name}={quote(value)}\n" for name, value in values.items())


def as_shell(values: Mapping[str, str]) -> str:
    """``export`` lines."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())


def python_path(*entries: str | None) -> dict[str, str]:
    """This process's environment with ``entries`` first on PYTHONPATH."""
    path = [e for e in (*entries, *os.environ.get("PYTHONPATH", "").split(":")) if e]
    return {**os.environ, "PYTHONPATH": ":".join(dict.fromkeys(path))}
