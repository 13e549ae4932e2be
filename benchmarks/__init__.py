"""Benchmarks of gleanrl against plain loops, plain gathers and its peers; run with `python -m benchmarks`."""
