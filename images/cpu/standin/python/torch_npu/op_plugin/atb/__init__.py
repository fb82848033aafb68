"""Stand-in for the ATB operator package."""
