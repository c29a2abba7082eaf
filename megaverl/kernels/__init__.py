"""Kernels of our own, for what PyTorch has none that is fast; each says where it can be used and what is used else."""
