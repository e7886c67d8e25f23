"""Language models in other runtimes give the logits that they give in PyTorch, before and after a cut."""

import pytest
import torch

import deploy
from compressm_lab.reports.study_tables import deploy_grids
from compressm_lab.runs.measurement import Measurement


def row(**more):
    common = {"model": "LRU", "runtime": "onnxruntime", "order": 16, "rank": 4, "device": "cpu"}
    numbers = {"difference": 1e-7, "difference_cut": 2e-7, "bytes": 4e6, "bytes_cut": 1e6}
    return common | numbers | {"seconds": 3e-3, "seconds_cut": 1e-3} | more


def test_the_table_shows_each_runtime_before_and_after_the_cut():
    (grid,) = deploy_grids(Measurement("deploy", "t", 1, [row()]))
    assert grid.rows == (("LRU", "onnxruntime", "16 → 4", "1e-07 → 2e-07", "4 MB → 1 MB", "3 ms → 1 ms", "3.00×"),)


def test_streams_of_this_library_give_the_logits_of_the_whole_sequence():
    torch.manual_seed(0)
    make, orders, runtimes = deploy._models(deploy.QUICK)["LRU"]
    whole, small = (make(order).eval() for order in orders)
    ours = {name: runtimes[name] for name in ("PyTorch", "Stream")}
    found = list(deploy._rows(whole, small, deploy.Windows(0).ids[:12], ours))
    assert [one["runtime"] for one in found] == ["PyTorch", "Stream"]
    assert all(0 < one["difference"] < 1e-5 and 0 < one["difference_cut"] < 1e-5 for one in found)
    assert all(one["bytes_cut"] < one["bytes"] for one in found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # executorch warns of itself
def test_every_runtime_gives_the_logits_of_pytorch_and_files_shrink():
    found = deploy.measure_deploy(quick=True).rows
    runtimes = ["PyTorch", "Stream", "onnxruntime", "ExecuTorch", "transformers"]
    assert [one["runtime"] for one in found] == [*runtimes, *(["llama.cpp"] if deploy.has_llama() else [])]
    for one in found:
        assert max(one["difference"], one["difference_cut"]) < 1e-4, one["runtime"]
        assert one["bytes_cut"] < one["bytes"], one["runtime"]


@pytest.mark.slow
def test_a_process_of_a_runtime_cannot_import_compressm(tmp_path):
    with pytest.raises(RuntimeError, match="import of compressm halted"):
        deploy._run(
            "-c",
            f"import sys; sys.path.insert(0, {str(deploy.Path(deploy.__file__).parent)!r})\n"
            "import alone\nimport compressm",
        )
