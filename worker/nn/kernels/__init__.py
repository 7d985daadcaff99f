"""Triton kernels, for GPUs only. Each has a twin of plain torch operations that it is tested by."""
