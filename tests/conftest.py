"""Shapes are checked at run time in every test; hypothesis is repeatable and never judges by the clock."""

import ctypes
import gc
import importlib.util
import os
import shutil
import sys
import tempfile

# Some AMX kernels for bfloat16 end in an illegal instruction on virtual machines; must be said before torch is loaded.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Said to what is loaded from here on, and to processes that tests start; NumPy may be there already, see below.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Tables as wide as their words, wherever tests run; consoles look when they are made.
os.environ["COLUMNS"] = "160"
# Tests and the library are compiled once, not by every worker and every process that tests start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Files of tests lie in memory where it has room for them: a disk takes 4 ms to sync one, thousands of times.
if "TMPDIR" not in os.environ and os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 2**30:
    tempfile.tempdir = os.environ["TMPDIR"] = "/dev/shm"

import hypothesis
import pytest
import torch

# Without a GPU its kernels are interpreted; must be said before they are loaded.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


if importlib.util.find_spec("beartype"):  # in the development extra; not on every machine with a GPU
    from tests import shape_checks

    shape_checks.install()


def _keep_process_groups():
    """Let no group of gloo that a test makes in this process end before the process does.

    Its end waits for threads that wait for the interpreter, which a collection of a DistributedDataParallel holds.
    """
    import torch.distributed as dist

    destroy = dist.destroy_process_group

    def destroy_process_group(*given, **named):
        for group in list(dist.distributed_c10d._world.pg_map):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        destroy(*given, **named)

    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = destroy_process_group


_keep_process_groups()


def pytest_collection_finish():
    """What was imported stays: without it a collection has 100 000 objects to look at in the place of 500 000."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    """Plans of kernels follow from constants that tests change."""
    if "compressm.ops.launching_triton" in sys.modules:
        sys.modules["compressm.ops.launching_triton"].forget_plans()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """So does what a file of tests leaves behind, such as packages it imported: up to 200 000 objects."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


# One thread: on a shared machine with few cores two can be ten times slower than one. Those of NumPy wait for each
# other by spinning: 2.7 s in the place of 5 ms for the singular values of a matrix of 180 rows.
torch.set_num_threads(1)
if importlib.util.find_spec("threadpoolctl"):  # comes with scikit-learn
    importlib.import_module("threadpoolctl").threadpool_limits(1)

hypothesis.settings.register_profile(
    "default",
    max_examples=25,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.register_profile("thorough", hypothesis.settings.get_profile("default"), max_examples=250)
hypothesis.settings.load_profile("default")
