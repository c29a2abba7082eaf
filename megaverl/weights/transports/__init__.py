"""Transports: what carries a plan's boxes, one file each; `megaverl.weights.reshard` has their order."""
