import platform

import pytest
import torch

from compressm.ops.memory import empty_in_large_pages, keep_freed_memory


@pytest.mark.parametrize("shape", [(3, 5), (9, 2**20), (0,)])
def test_memory_in_large_pages_is_memory(shape):
    room = empty_in_large_pages(shape, torch.float32)
    assert room.shape == shape
    assert (room.fill_(2.0) == 2.0).all()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have other rules")
def test_freed_memory_is_used_again_without_new_pages():
    import resource

    def pages():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    keep_freed_memory()
    for _ in range(3):
        tensors = [torch.ones(2**18) for _ in range(10)]  # 10 MB, 2560 pages
        before = pages()
        del tensors
    tensors = [torch.ones(2**18) for _ in range(10)]
    assert len(tensors) == 10
    assert pages() - before < 256
