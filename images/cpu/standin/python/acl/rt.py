"""Stand-in for CANN's runtime calls."""

from __future__ import annotations

from typing import Any, NoReturn


def memcpy(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises NotImplementedError: there is no device memory."""
    raise NotImplementedError("acl.rt.memcpy needs CANN: this is Strata's stand-in on a CPU host")
