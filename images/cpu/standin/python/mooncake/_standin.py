"""The one base of Mooncake's stand-in classes."""

from __future__ import annotations

from typing import Any


class Unavailable:
    """May be imported and named; instantiating raises NotImplementedError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} needs Mooncake: this is Strata's stand-in")
