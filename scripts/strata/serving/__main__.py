"""``strata`` inside the image: entrypoint, verify, preset, env, health."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from strata.errors import EXIT_COULD_NOT_RUN, Finding, StrataError


def _entrypoint(arguments: Sequence[str]) -> int:
    from strata.serving import entrypoint

    return entrypoint.main(arguments)


def _health(arguments: Sequence[str]) -> int:
    from strata.serving import health

    fault = health.healthy(health.port())
    print(fault or "healthy")
    return 1 if fault else 0


def _verify(arguments: Sequence[str]) -> int:
    from strata.serving import entrypoint, image

    record = "--record" in arguments
    done = entrypoint.run_verify(image.load(), *(a for a in arguments if a != "--record"))
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr if done.returncode else "")
    if record and not done.returncode:
        image.record_live("passed")
    return done.returncode


def _env(arguments: Sequence[str]) -> int:
    import os

    from strata.serving import environment

    style = arguments[1] if arguments[:1] == ["--format"] and len(arguments) > 1 else "shell"
    writers = {"docker": environment.as_docker, "shell": environment.as_shell}
    if style not in writers:
        raise StrataError(Finding("E-COMMAND", "unknown format", expected="docker or shell", found=style))
    before = {k: v for k, v in os.environ.items() if k != "STRATA_ENV"}
    # this interpreter's own library path came with the strata command, not with the image
    before["PYTHONPATH"] = ":".join(
        p for p in before.get("PYTHONPATH", "").split(":") if p and p != "/opt/strata/lib"
    )
    sys.stdout.write(writers[style](environment.difference(before, environment.effective(before))))
    return 0


def _preset(arguments: Sequence[str]) -> int:
    from strata.serving import command

    return command.main(arguments)


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "entrypoint": (_entrypoint, "start: serve the preset, or run a command (the image's ENTRYPOINT)"),
    "verify": (_verify, "the live proof: every edited symbol is ours and calls our code [--json] [--record]"),
    "preset": (_preset, "list | show NAME | render NAME | lint -- ARGUMENTS | catalogue"),
    "env": (_env, "what CANN, ATB and jemalloc set [--format docker|shell]"),
    "health": (_health, "ask the server in this container whether it is up"),
}


def main(arguments: Sequence[str]) -> int:
    """Run one command; findings go to stderr."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("help", ())
    if name in ("help", "--help", "-h"):
        print("strata (in the image)\n" + "\n".join(f"  {n:<12}{text}" for n, (_, text) in COMMANDS.items()))
        return 0
    try:
        if name not in COMMANDS:
            raise StrataError(
                Finding("E-COMMAND", f"no command {name!r}", expected=", ".join(COMMANDS), found=name)
            )
        return COMMANDS[name][0](rest)
    except StrataError as error:
        print("\n\n".join(f.render() for f in error.findings), file=sys.stderr)
        return error.exit_code or EXIT_COULD_NOT_RUN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
