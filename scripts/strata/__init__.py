"""Strata: tuned serving images for vllm-ascend, and a patch series that follows upstream."""

__version__ = "0.1.0"
