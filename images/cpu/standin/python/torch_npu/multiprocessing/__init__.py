"""Stand-in for torch_npu's multiprocessing package."""
