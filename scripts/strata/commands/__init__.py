"""The commands behind ``strata``, one module per part."""
