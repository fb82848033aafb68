"""Code that Strata brings into vllm-ascend.

Hooks in upstream files import their module as ``from vllm_ascend.strata import <module>``. That form asks
this package for the attribute first, which is where an import failure gets the name of the patch that
brought the module: the start stops with :class:`PatchImportError` instead of an error that an
optional-import guard somewhere might swallow.
"""

from __future__ import annotations

import importlib
from types import ModuleType


class PatchImportError(RuntimeError):
    """A module of a Strata patch cannot be imported. Not an ImportError, so that nobody takes it for an
    absent option.
    """


def __getattr__(name: str) -> ModuleType:
    """The submodule ``name``.

    Raises PatchImportError, naming the patch, if the submodule exists and fails to import; AttributeError
    if there is no such submodule.
    """
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    full_name = f"{__name__}.{name}"
    try:
        return importlib.import_module(full_name)
    except ModuleNotFoundError as error:
        if error.name == full_name:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from error
        raise _stop(name, error) from error
    except PatchImportError:
        raise
    except Exception as error:
        raise _stop(name, error) from error


def _stop(name: str, error: Exception) -> PatchImportError:
    return PatchImportError(
        f"Strata patch {_owner(name)!r}: vllm_ascend/strata/{name}.py does not import "
        f"({type(error).__name__}: {error}). "
        "The image and this patch do not fit together; build the image without the patch, or mend it."
    )


def _owner(name: str) -> str:
    """The patch that brings the module; this package's own patch where the series cannot be read either."""
    try:
        series = importlib.import_module(f"{__name__}.series")
        return series.owner_of(name)
    except Exception:
        return "runtime-switches"
