"""Stand-in for the Mooncake KV transfer engine."""

__strata_stand_in__ = True
