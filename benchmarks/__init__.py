"""Benchmarks of gleanrl against hand-written loops, plain gathers and other libraries: `python -m benchmarks`."""
