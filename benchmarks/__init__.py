"""Benchmarks: `python -m benchmarks --help` says what can be measured, docs/benchmarks.md how and what it means."""
