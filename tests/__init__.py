"""Tests; the tree mirrors `src/gleanrl`."""

import os
from multiprocessing import shared_memory

# `tests.leaks` reads the process number from names of shared memory. Python's default names have no number.
shared_memory._SHM_NAME_PREFIX = f"/psm_{os.getpid()}_"
shared_memory._SHM_SAFE_NAME_LENGTH = 30
