"""Builds layernorm_ext: the PEP 517 backend, the choice about CUDA, the flags of every source."""
