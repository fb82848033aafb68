"""Stand-in for ``mooncake.store``."""

from mooncake._standin import Unavailable


class ReplicateConfig(Unavailable):
    """Replication settings of a Mooncake store."""


class MooncakeDistributedStore(Unavailable):
    """Client of a Mooncake store."""
