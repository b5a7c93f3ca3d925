"""Benchmarks of the ops of `pallas_kernels`: right first, then fast, on the device at hand."""
