"""Shapes are checked at run time in every test; hypothesis is repeatable and never judges by the clock."""

import importlib.util
import os

# Some AMX kernels for bfloat16 end in an illegal instruction on virtual machines; must be said before torch is loaded.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import hypothesis
import torch
from jaxtyping import install_import_hook

if importlib.util.find_spec("beartype"):  # in the development extra; not on every machine with a GPU
    install_import_hook("compressm", "beartype.beartype")

# One thread: on a shared machine with few cores two can be ten times slower than one.
torch.set_num_threads(1)

hypothesis.settings.register_profile(
    "default",
    max_examples=100,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("default")
