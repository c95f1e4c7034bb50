"""Benchmarks of layer normalization. docs/benchmarks.md describes the commands of `python -m benchmarks`."""
