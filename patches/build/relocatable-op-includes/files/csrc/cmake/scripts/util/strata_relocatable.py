"""Compile options of a generated operator wrapper, written to hold wherever the package lies.

``strata_relocatable.cmake`` puts marks where an option named a path of the build host. Here they become
expressions over two variables that every wrapper has: ``PYF_PATH`` (the wrapper's directory; headers that
travel with the package lie in ``../ascendc/common``) and ``toolkit_path`` (the toolkit in use, from
``ASCEND_HOME_PATH``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SHIPPED = "__STRATA_SHIPPED__"
TOOLKIT = "__STRATA_TOOLKIT__"
_BASES = {
    SHIPPED: "os.path.join(PYF_PATH, '..', 'ascendc', 'common'{rest})",
    TOOLKIT: "os.path.join(toolkit_path{rest})",
}
_FLAGS = ("-I", "-isystem", "-iquote", "-include", "-imacros")


def expression(options: Mapping[str, Sequence[str]]) -> str:
    """Python source of a dict with the same keys and, for each, the list of options.

    options: chip name (or ``__ALLSOC__``) -> compile options, as the generator keeps them. Options without a
    mark are written as literals, so that an operator without marks gets the text that ``str(options)`` gives.
    Raises ValueError for an include option with an absolute path: it would hold on the build host only.
    """
    items = [f"{key!r}: [{', '.join(_option(o) for o in values)}]" for key, values in options.items()]
    return "{" + ", ".join(items) + "}"


def _option(option: str) -> str:
    for mark, base in _BASES.items():
        flag, found, rest = option.partition(mark)
        if found:
            parts = [p for p in rest.split("/") if p]
            path = base.format(rest="".join(f", {p!r}" for p in parts))
            return f"{flag!r} + {path}" if flag else path
    for flag in _FLAGS:
        if option.startswith(flag + "/"):
            raise ValueError(
                f"compile option {option!r} names a path of the build host; "
                "strata_relocatable.cmake should have made it relative to the package or the toolkit"
            )
    return repr(option)
