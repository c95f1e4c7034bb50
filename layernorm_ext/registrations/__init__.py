"""Modules that register the operators and layers with parts of torch, as soon as these are imported (_ops.py)."""
