"""Stand-in for the ATB operators' registration."""


def _register_atb_extensions() -> None:
    """Nothing to register without ATB."""
