"""Stand-in for torch_npu's Inductor registration: importing it registers nothing."""
