"""Stand-in for torch_npu's operator plug-in package."""
