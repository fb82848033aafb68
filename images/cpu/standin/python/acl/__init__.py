"""Stand-in for CANN's Python binding on a host without CANN."""

from acl import rt

__all__ = ["rt"]
__strata_stand_in__ = True
