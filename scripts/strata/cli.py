"""The ``strata`` command: finds the subcommand, turns findings into text or JSON and exit codes."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import click

from strata import __version__
from strata.errors import EXIT_COULD_NOT_RUN, EXIT_NEEDS_PERSON, Finding, StrataError

# command -> (module, attribute, help); imported when used, so that one part's dependencies don't load for another
COMMANDS: dict[str, tuple[str, str, str]] = {
    "check": ("strata.commands.series", "check", "Give every patch its verdict on a base."),
    "apply": ("strata.commands.series", "apply", "Apply the series to a pair of source trees, all or nothing."),
    "diff": ("strata.commands.series", "diff", "Show what the series changes as a unified diff."),
    "why": ("strata.commands.series", "why", "Say what a patch or a symbol is about, and who touches it."),
    "affirm": ("strata.commands.series", "affirm", "Record that a person has seen the code a patch stands on."),
    "base": ("strata.commands.base", "base", "Build, verify and pin bases; copy their trees out."),
    "image": ("strata.commands.image", "image", "Plan and build a tuned image."),
    "kernels": ("strata.commands.kernels", "kernels", "Build and prove the operators."),
    "preset": ("strata.commands.preset", "preset", "List, check and render serving presets."),
}


class Lazy(click.Group):
    """A group that imports a subcommand's module only when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="strata")
def cli() -> None:
    """Tuned serving images for vllm-ascend, and a patch series that follows upstream."""


def main(argv: list[str] | None = None) -> int:
    """Run the command. Exit code 0 good, 1 needs a person, 2 could not run; findings go to stderr, or with
    ``--json`` anywhere on the line to stdout as ``{"findings": [...]}``."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        code = cli.main(args=arguments, prog_name="strata", standalone_mode=False)
    except StrataError as error:
        if "--json" in arguments:
            body: dict[str, Any] = {"findings": [f.as_dict() for f in error.findings], "exit": error.exit_code}
            click.echo(json.dumps(body, indent=1))
        else:
            click.echo("\n\n".join(f.render() for f in error.findings), err=True)
        code = error.exit_code
    except click.ClickException as error:
        error.show()
        code = EXIT_COULD_NOT_RUN
    except RecursionError:
        finding = Finding(
            "E-DEPTH",
            "code is nested too deeply to be looked at",
            expected="expressions of ordinary depth, in the trees and in the series",
            found=f"more than {sys.getrecursionlimit()} levels",
            hint="look for what a generator or a damaged download left there",
        )
        click.echo(finding.render(), err=True)
        code = EXIT_COULD_NOT_RUN
    except click.Abort:
        click.echo("stopped", err=True)
        code = EXIT_NEEDS_PERSON
    if argv is None:
        sys.exit(code or 0)
    return int(code or 0)


if __name__ == "__main__":
    main()
