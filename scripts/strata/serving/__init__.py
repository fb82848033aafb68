"""What runs inside the image: presets to argument lists, the entrypoint, the live proof, the health check.

Needs only the standard library, pydantic and yaml (every vLLM base has both) beside ``strata.errors`` and
``strata.config``. Nothing here imports vLLM or torch at module level.
"""
