"""Register the pretended device as ``torch.pretended`` in every Python process that has this folder on its path.

GLEANRL_PRETENDED names the compiled library. So processes that a test starts have the device too.
"""

import contextlib
import os
import types

import torch

LIBRARY = os.environ.get("GLEANRL_PRETENDED")

if LIBRARY:
    torch.ops.load_library(LIBRARY)
    torch.utils.rename_privateuse1_backend("pretended")
    device = types.ModuleType("torch.pretended")
    device.device = contextlib.nullcontext  # there is only one
    device.is_available = lambda: True
    device.is_initialized = lambda: True
    device.current_device = lambda: 0
    device.device_count = lambda: 1
    device.synchronize = lambda device=None: None
    device.manual_seed_all = lambda seed: None  # it draws from the CPU's generator
    device._is_in_bad_fork = lambda: False
    torch._register_device_module("pretended", device)
    torch.utils.generate_methods_for_privateuse1_backend()
