"""Tests; the tree mirrors `src/gleanrl`."""

import os
from multiprocessing import shared_memory

# Names of shared memory tell `tests.leaks` which process made it; the names that Python gives have no number.
shared_memory._SHM_NAME_PREFIX = f"/psm_{os.getpid()}_"
shared_memory._SHM_SAFE_NAME_LENGTH = 30
