"""Stand-in for ``mooncake.engine``."""

from mooncake._standin import Unavailable


class TransferEngine(Unavailable):
    """Transfer engine of Mooncake."""
