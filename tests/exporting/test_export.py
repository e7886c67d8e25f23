"""Exports run in their own runtimes against the model; a file that differs is not left behind."""

import functools
import itertools
import json
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import compressm as cs
from compressm.exporting import ONNX, AOTInductor, ExecuTorch, ExportError, Loaded, TorchExport, flat
from compressm.exporting.recurrences import LONGEST
from compressm.exporting.writing import Case
from compressm.layers import LRU, SequenceError, SSMLayer
from compressm.models import LanguageModel, SequenceClassifier
from tests.exporting.models import INPUTS, LAYERS, MODELS, VOCABULARY, build
from tests.marks import later

RUNTIMES = {
    "torch.export": TorchExport(),
    "onnxruntime": ONNX(),
    "portable": ExecuTorch(),
    "xnnpack": ExecuTorch(backend="xnnpack"),
    "AOTInductor": AOTInductor(),
}
compiles = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="AOTInductor needs a C++ compiler"
)
# The formats whose files of a step tests share.
STEPPING = (TorchExport(), ONNX(), ExecuTorch(batch=3))
CELLS = list(itertools.product(LAYERS, MODELS, (None, cs.Baked())))
NAMES = [f"{layer}-{model}-{'whole' if cut is None else 'cut'}" for layer, model, cut in CELLS]


def exported(model, folder, format, **options):
    done = cs.export(model, folder / f"model{format.SUFFIX}", format=format, **{"check": 8} | options)
    assert done.difference <= done.tolerance
    assert done.path.stat().st_size == done.bytes
    return done


@pytest.fixture(scope="module")
def stepping(tmp_path_factory):
    """The export of a step by each format, made once for tests that read it."""

    @functools.cache
    def made(format):
        wanted = {
            TorchExport(): ("LRU", "language", cs.Baked()),
            ONNX(): ("Mamba", "classifier", cs.Baked()),
            ExecuTorch(batch=3): ("S5", "language", None),
        }
        layer, model, cut = wanted[format]
        return exported(build(layer, model, cut=cut), tmp_path_factory.mktemp("export"), format)

    return made


@pytest.mark.parametrize("layer", [layer for layer in LAYERS if layer != "LRU"])
def test_a_step_runs_in_torch_export(layer, tmp_path):
    assert exported(build(layer, "language", cut=cs.Baked()), tmp_path, TorchExport()).difference < 5e-6


@pytest.mark.parametrize("format", STEPPING, ids=["torch.export", "onnxruntime", "executorch"])
def test_a_step_runs_in_its_runtime(format, stepping):
    assert stepping(format).difference < 5e-6


def test_a_forward_pass_runs_in_torch_export(tmp_path):
    assert exported(build("S4D", "classifier", depth=1), tmp_path, TorchExport(), what="forward").difference < 5e-6


def test_a_forward_pass_runs_in_onnxruntime(tmp_path):
    assert exported(build("LRU", "language", depth=1), tmp_path, ONNX(), what="forward").difference < 5e-6


def test_a_file_of_executorch_says_its_largest_batch(stepping):
    assert stepping(ExecuTorch(batch=3)).metadata["largest_batch"] == 3


@compiles
def test_a_step_runs_in_aotinductor(tmp_path):
    assert exported(build("LRU", "classifier", depth=1), tmp_path, AOTInductor()).difference < 5e-6


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(("layer", "model", "cut"), CELLS, ids=NAMES)
def test_steps_of_all_models_run_in_all_runtimes(layer, model, cut, runtime, tmp_path):
    assert exported(build(layer, model, cut=cut), tmp_path, RUNTIMES[runtime], check=64).difference < 5e-6


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["torch.export", "onnxruntime"])
@pytest.mark.parametrize(("layer", "model", "cut"), CELLS, ids=NAMES)
def test_forward_passes_of_all_models_run_where_lengths_may_change(layer, model, cut, runtime, tmp_path):
    assert (
        exported(build(layer, model, cut=cut), tmp_path, RUNTIMES[runtime], what="forward", check=64).difference < 5e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["onnxruntime", "portable", "AOTInductor"])
def test_maps_of_a_cut_run_in_all_runtimes(runtime, tmp_path):
    assert (
        exported(build("Mamba", "language", cut=cs.PerChannel("mean")), tmp_path, RUNTIMES[runtime]).difference < 5e-6
    )


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_forward_passes_of_all_layers_run_in_aotinductor(layer, tmp_path):
    done = exported(build(layer, "language", cut=cs.Baked()), tmp_path, AOTInductor(), what="forward", check=64)
    assert done.difference < 5e-6


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["torch.export", "portable", "xnnpack", "AOTInductor"])
@pytest.mark.parametrize("layer", LAYERS)
def test_bfloat16_runs_where_the_runtime_can(layer, runtime, tmp_path):
    assert 1e-4 < exported(build(layer, "language").bfloat16(), tmp_path, RUNTIMES[runtime]).difference < 5e-2


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_forward_passes_run_in_bfloat16(layer, tmp_path):
    done = exported(build(layer, "classifier").bfloat16(), tmp_path, TorchExport(), what="forward")
    assert 1e-4 < done.difference < 5e-2


def test_bfloat16_keeps_the_weights_and_not_the_state_in_half_precision(tmp_path):
    done = exported(build("LRU", "language").bfloat16(), tmp_path, TorchExport())
    held = torch.export.load(done.path).state_dict
    assert {value.dtype for name, value in held.items() if name.endswith("weight")} == {torch.bfloat16}
    assert {value.dtype for name, value in held.items() if not name.endswith("weight")} == {torch.float32}
    assert (done.metadata["dtype"], done.metadata["state_dtype"]) == ("bfloat16", "float32")


def test_a_runtime_that_cannot_run_a_file_gives_its_own_reason(tmp_path):
    with pytest.raises(ExportError, match=r"onnxruntime .* NOT_IMPLEMENTED"):
        exported(build("LRU", "language", depth=1).bfloat16(), tmp_path, ONNX())
    assert not list(tmp_path.iterdir())


def test_float64_is_exported_as_it_is(tmp_path):
    for gelu in ("exact", "tanh"):
        model = build("LRU", "classifier", depth=1, gelu=gelu).double()
        assert exported(model, tmp_path, TorchExport()).difference < 1e-12


def test_numbers_of_float64_are_not_rounded_on_the_way_to_a_runtime(tmp_path):
    assert exported(build("LRU", "classifier", depth=1, gelu="tanh").double(), tmp_path, ONNX()).difference < 1e-12


def test_of_several_dtypes_the_widest_is_that_of_the_file(tmp_path):
    model = build("LRU", "language")
    model.encoder.bfloat16()
    done = exported(model, tmp_path, TorchExport())
    assert (done.metadata["dtype"], done.tolerance) == ("float32", 1e-4)
    assert done.difference < 5e-6


def test_parameters_that_are_no_floats_are_refused_by_name(tmp_path):
    model = build("LRU", "language", tied=False)
    model.head.weight = torch.nn.Parameter(model.head.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ExportError, match=r"head\.weight is torch\.float8_e4m3fn on cpu, expected floats"):
        cs.export(model, tmp_path / "model.pt2")


def test_the_file_has_neither_the_default_device_nor_the_autocast_of_the_caller(tmp_path):
    model = build("LRU", "classifier", depth=1)
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        assert exported(model, tmp_path, TorchExport()).difference < 5e-6


def test_a_file_says_what_it_is(stepping):
    model, done = build("Mamba", "classifier", cut=cs.Baked()), stepping(ONNX())
    told = ONNX().load(done.path).metadata
    assert told == json.loads(json.dumps(done.metadata))
    assert told["orders"] == {"blocks.0.ssm": 2, "blocks.1.ssm": 3}
    assert (told["inputs"], told["outputs"]) == (["x", "state"], ["y", "next_state"])
    assert (told["what"], told["model"], told["compressm"]) == ("step", "SequenceClassifier", cs.__version__)
    assert [part["name"] for part in told["states"]] == ["blocks.0.ssm", "blocks.1.ssm", "pooled", "steps"]
    assert told["state_size"] == flat(model.eval().initial_state(1)).shape[1] == told["states"][-1]["stop"]
    assert told["initial_state"] == "zeros"
    assert str(done.path) in str(done)
    assert " ran 1 step of 1 sequence, the largest" in str(replace(done, steps=1, batch=1))
    assert " ran 3 steps of 2 sequences, the largest" in str(replace(done, steps=3, batch=2))


def test_a_state_of_the_model_goes_on_in_the_file(tmp_path):
    model = build("S4D", "language").eval()
    path = exported(model, tmp_path, TorchExport()).path
    tokens = torch.randint(VOCABULARY, (2, 5))
    _, state = model(tokens)
    y, after = TorchExport().load(path)(tokens[:, 0], flat(state))
    expected, wanted = model.step(tokens[:, 0], state)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after, flat(wanted), rtol=1e-4, atol=1e-5)


def test_a_model_in_training_stays_as_it_was(tmp_path):
    model = build("LRU", "classifier", depth=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert exported(model, tmp_path, TorchExport()).difference < 5e-6
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_file_that_differs_is_not_kept(tmp_path):
    model = build("LRU", "classifier", depth=1)
    kept = tmp_path / "model.pt2"
    kept.write_text("earlier")
    model.head.register_forward_hook(lambda module, given, y: y + 1e-2)
    with pytest.raises(ExportError, match=r"the step differs from the model by .*: the file is not kept"):
        cs.export(model, kept, check=4)
    assert kept.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [kept]


def test_a_model_that_is_not_finite_itself_is_said_to_be(tmp_path):
    model = build("LRU", "classifier", depth=1)
    model.blocks[0].norm.running_var[0] = torch.nan
    with pytest.raises(ExportError, match=r"y of the SequenceClassifier itself is not finite.* such as running_var"):
        cs.export(model, tmp_path / "model.pt2", check=2)
    assert not list(tmp_path.iterdir())


def test_a_model_that_cannot_be_copied_is_refused(tmp_path):
    model = build("LRU", "classifier", depth=1)
    model.lock = threading.Lock()
    with pytest.raises(ExportError, match="the SequenceClassifier cannot be copied: TypeError: cannot pickle"):
        cs.export(model, tmp_path / "model.pt2")


def test_a_small_state_that_differs_is_not_hidden_by_a_large_one(tmp_path):
    model = build("LRU", "classifier")
    case = Case(model, "step", None, 8)
    assert case.metadata()["states"][0] == {"name": "blocks.0.ssm", "start": 0, "stop": 10, "shape": [2, 5]}

    def run(given):
        y, state = case.graph(*given)
        state[:, 0] += 1e-3  # the number of steps is 8
        return y, state

    with torch.no_grad():
        assert case.difference(Loaded(run, case.metadata()), TorchExport()) > 5e-4


def test_examples_are_what_the_check_reads(tmp_path):
    model = build("LRU", "classifier", depth=1)
    done = cs.export(model, tmp_path / "new" / "model.pt2", example=torch.randn(5, 3, INPUTS), check=7)
    assert (done.batch, done.steps) == (5, 7)
    with pytest.raises(ExportError, match="example has values that are not finite"):
        cs.export(model, tmp_path / "model.pt2", example=torch.full((1, 3, INPUTS), torch.nan), check=2)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("model.bin", {}, r"ends in '.bin', expected .onnx, .pt2 \(TorchExport\) or .pte"),
        ("model", {}, "ends in ''"),
        ("model.onnx", {"format": TorchExport()}, "ends in '.onnx', expected .pt2 for TorchExport"),
        ("model.onnx", {"format": "onnx"}, r"format is 'onnx', expected one of ONNX\(\)"),
        ("model.onnx", {"format": ONNX}, "expected one of ONNX"),
        ("model.pt2", {"what": "steps"}, "what is 'steps', expected 'step' or 'forward'; did you mean 'step'"),
        ("model.pte", {"what": "forward"}, "ExecuTorch takes 'step' only"),
        ("model.pt2", {"check": 0}, "check is 0, expected an integer of at least 1"),
        ("model.pt2", {"check": True}, "check is True"),
        ("model.pt2", {"check": 131_073, "what": "forward"}, "check is 131073, expected at most 131072"),
        ("model.pt2", {"example": 3}, r"example is int, expected a tensor of \(batch, length, 2\) numbers"),
        ("model.pt2", {"example": torch.zeros(2, 3, dtype=torch.int64)}, "example is torch.int64"),
        (
            "model.pt2",
            {"example": torch.zeros(2, 3, 4)},
            r"example has shape \(2, 3, 4\), expected \(batch, length, 2\)",
        ),
        ("model.pt2", {"example": torch.zeros(2, 3, 2).to_sparse()}, "example is .*, torch.sparse_coo on cpu"),
        ("model.pt2", {"example": torch.zeros(2, 3, 2, device="meta")}, "torch.strided on meta, expected a tensor of"),
        ("folder.pt2", {}, "is a folder, expected a file"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(name, options, says, tmp_path):
    model = SequenceClassifier(LRU, depth=1, width=4, order=3, inputs=INPUTS, classes=2)
    (tmp_path / "folder.pt2").mkdir()
    with pytest.raises((ExportError, SequenceError), match=says):
        cs.export(model, tmp_path / name, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.pt2"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ONNX(opset=9), "opset is 9, expected at least 18"),
        (lambda: ExecuTorch(backend="xnpack"), "did you mean 'xnnpack'"),
        (lambda: ExecuTorch(batch=0), "batch is 0"),
    ],
)
def test_bad_formats_are_refused(make, says):
    with pytest.raises((ExportError, SequenceError), match=says):
        make()


def test_tokens_are_no_complex_numbers(tmp_path):
    with pytest.raises(ExportError, match=r"example is torch.complex64, expected a tensor of \(batch, length\) tokens"):
        cs.export(build("LRU", "language"), tmp_path / "model.pt2", example=torch.ones(2, 3) + 0j)


def test_tokens_of_an_example_are_within_the_vocabulary(tmp_path):
    with pytest.raises(ExportError, match="example has tokens outside 0 to 10"):
        cs.export(build("LRU", "language"), tmp_path / "model.pt2", example=torch.full((2, 3), VOCABULARY))


def test_other_models_are_refused_by_name(tmp_path):
    with pytest.raises(ExportError, match="model is a Linear, expected a LanguageModel"):
        cs.export(torch.nn.Linear(2, 2), tmp_path / "model.pt2")
    with pytest.raises(ExportError, match="model is a int"):
        cs.export(3, tmp_path / "model.pt2")
    average = torch.optim.swa_utils.AveragedModel(build("LRU", "language"))
    with pytest.raises(ExportError, match=r"AveragedModel, expected .*: export its part module, a LanguageModel"):
        cs.export(average, tmp_path / "model.pt2")


def test_models_of_transformers_are_refused_with_a_cure(tmp_path):
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=4, num_hidden_layers=1, state_size=2))
    with pytest.raises(ExportError, match=r"MambaForCausalLM, expected .*: write it by save_pretrained"):
        cs.export(model, tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("package", "format", "extra"),
    [("onnxscript", ONNX(), "onnx"), ("onnxruntime", ONNX(), "onnx"), ("executorch.exir", ExecuTorch(), "executorch")],
)
def test_without_its_packages_a_format_says_how_to_install_them(package, format, extra, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ExportError, match=rf"needs the package {package}: pip install 'compressm\[{extra}\]'"):
        cs.export(build("LRU", "language"), tmp_path / f"model{format.SUFFIX}")


@pytest.mark.parametrize("format", RUNTIMES.values(), ids=RUNTIMES)
def test_damaged_files_are_refused_by_name_when_they_are_loaded(format, tmp_path):
    with pytest.raises(ExportError, match=r"is not a file, expected one that cs.export wrote"):
        format.load(tmp_path / "none")
    for k, content in enumerate((b"", b"text", bytes(range(256)) * 8)):
        (path := tmp_path / f"{k}{format.SUFFIX}").write_bytes(content)
        with pytest.raises(ExportError, match=rf"{path.name} does not load in .*: expected a whole file"):
            format.load(path)


@pytest.mark.parametrize("format", STEPPING, ids=["torch.export", "onnx", "executorch"])
def test_a_file_that_lost_its_end_is_refused_when_it_is_loaded(format, stepping, tmp_path):
    whole = stepping(format).path
    path = tmp_path / whole.name
    path.write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(ExportError, match="does not load in"):
        format.load(path)


@compiles
@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_ends_no_process_that_compiles(tmp_path):
    (tmp_path / "full.pt2").symlink_to("/dev/full")
    script = f"""
from pathlib import Path
from compressm.exporting import AOTInductor
from compressm.exporting.writing import Case
from compressm.layers import LRU
case = Case(LRU(4, 3), "step", None, 2)
try:
    AOTInductor().write(case.program(AOTInductor()), case.names, Path({str(tmp_path / "full.pt2")!r}), "{{}}")
except OSError as error:
    print(error.strerror)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "No space left on device\n"), done.stderr[-2000:]


@compiles
@pytest.mark.slow
def test_compiled_code_reads_no_other_memory_than_that_of_its_inputs(tmp_path):
    model = build("LRU", "language").eval()
    loaded = AOTInductor().load(cs.export(model, tmp_path / "MODEL.PT2", format=AOTInductor(), check=4).path)
    tokens, state = torch.arange(3), torch.randn(loaded.metadata["state_size"], 3).T
    for given, expected in zip(loaded(tokens, state), loaded(tokens, state.contiguous()), strict=True):
        torch.testing.assert_close(given, expected, rtol=0, atol=0)
    with pytest.raises(ExportError, match=r"state is torch.float32 of shape \(3, 5\).* on cpu, expected"):
        loaded(tokens, torch.zeros(3, 5))


STATE = torch.zeros(2, 10)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ((torch.zeros(2, dtype=torch.int64),), r"the inputs are \(Tensor\), expected the tensors x and state"),
        (([0, 1], STATE), r"the inputs are \(list, Tensor\)"),
        ((torch.zeros(2), STATE), r"x is torch.float32 of shape \(2,\) on cpu, expected torch.int64 of shape \(2,\)"),
        ((torch.zeros(2, 1, dtype=torch.int64), STATE), r"x is torch.int64 of shape \(2, 1\)"),
        ((torch.tensor(0), STATE), r"expected torch.int64 of shape \(batch,\)"),
        ((torch.zeros(3, dtype=torch.int64), STATE), r"state is .* \(2, 10\) on cpu, expected .* \(3, 10\)"),
        ((torch.zeros(2, dtype=torch.int64), STATE.double()), r"state is torch.float64"),
        ((torch.zeros(2, dtype=torch.int64), STATE.to("meta")), r"\(2, 10\) on meta, expected .* on the CPU"),
        ((torch.tensor([0, -1]), STATE), "the tokens in x run from -1 to 0, expected 0 to 10"),
        ((torch.tensor([0, VOCABULARY]), STATE), "the tokens in x run from 0 to 11, expected 0 to 10"),
        ((torch.zeros(0, dtype=torch.int64), STATE[:0]), r"x has shape \(0,\), expected one sequence and one step"),
    ],
)
def test_inputs_that_a_runtime_would_misread_are_refused(inputs, says, tmp_path):
    loaded = Loaded(list, Case(build("LRU", "language", depth=1), "step", None, 2).metadata())
    with pytest.raises(ExportError, match=says):
        loaded(*inputs)


@pytest.mark.parametrize("towers", [1, 2])
def test_lengths_are_one_for_each_sequence(towers):
    model = SequenceClassifier(LRU, depth=1, width=4, order=3, inputs=INPUTS, classes=2, towers=towers)
    loaded = Loaded(list, Case(model, "forward", None, 2).metadata())
    shape = (3,) if towers == 1 else (3, 2)
    assert len(loaded(torch.zeros(*shape, 7, INPUTS), torch.ones(shape, dtype=torch.int64))) == 2
    for lengths in (torch.ones(shape), torch.ones(3, 3, dtype=torch.int64), torch.ones(4, *shape[1:])):
        with pytest.raises(ExportError, match="lengths is"):
            loaded(torch.zeros(*shape, 7, INPUTS), lengths)
    for wrong in (0, -1, 8):
        with pytest.raises(ExportError, match=rf"lengths run from {wrong} to {wrong}, expected 1 to 7"):
            loaded(torch.zeros(*shape, 7, INPUTS), torch.full(shape, wrong))
    with pytest.raises(ExportError, match="expected one sequence and one step at least"):
        loaded(torch.zeros(*shape, 0, INPUTS), torch.ones(shape, dtype=torch.int64))


def test_sequences_that_are_longer_than_a_forward_pass_remembers_are_refused():
    metadata = Case(LRU(1, 3), "forward", None, 2).metadata()
    assert metadata["longest"] == LONGEST
    with pytest.raises(ExportError, match="x has 131073 steps, expected at most 131072: step through longer sequences"):
        Loaded(list, metadata)(torch.zeros(1, LONGEST + 1, 1), torch.tensor([3]))


def test_a_batch_for_which_no_memory_is_planned_is_refused():
    loaded = Loaded(list, Case(LRU(4, 3), "step", None, 2).metadata() | {"largest_batch": 2})
    assert len(loaded(torch.zeros(2, 4), torch.zeros(2, 6))) == 2
    with pytest.raises(ExportError, match=r"x has 3 sequences, expected at most 2: export with ExecuTorch\(batch=3\)"):
        loaded(torch.zeros(3, 4), torch.zeros(3, 6))


class Leaky(SSMLayer):
    """Somebody's own layer."""

    def __init__(self, width, order):
        super().__init__(width, order)
        self.decay = torch.nn.Parameter(torch.full((order,), 0.5))

    order = property(lambda self: len(self.decay))

    def shape_at(self, name, order):
        return (order,)

    def forward(self, x, state=None, lengths=None, *, keep_state=True):
        h, ys = self.initial_state(len(x)), []
        for u in x.unbind(1):
            y, h = self.step(u, h)
            ys.append(y)
        return torch.stack(ys, 1), h

    def step(self, x, state):
        state = self.decay[:, None] * state + x[:, None]
        return state.tanh().sum(1), state

    def initial_state(self, batch):
        return self.decay.new_zeros(batch, self.order, self.width)

    def dynamics(self):
        yield self.decay


def test_a_layer_of_ones_own_is_traced_or_refused_with_advice(tmp_path):
    model = LanguageModel(Leaky, depth=1, width=4, order=2, vocabulary=VOCABULARY)
    assert exported(model, tmp_path, TorchExport()).metadata["layers"] == {"blocks.0.ssm": "Leaky"}
    with pytest.raises(
        ExportError, match=r"torch.export cannot trace .*; the forward pass of Leaky must be .*: export the step"
    ):
        cs.export(model, tmp_path / "forward.pt2", what="forward")
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]


def test_a_single_layer_is_a_model_too(tmp_path):
    assert exported(LRU(4, 3), tmp_path, TorchExport()).metadata["orders"] == {"layer": 3}


@pytest.mark.slow
def test_executorch_takes_one_sequence_alone(tmp_path):
    assert exported(build("LRU", "language"), tmp_path, ExecuTorch(batch=1)).batch == 1


@pytest.mark.parametrize("what", later(["step", "forward"], "step"))
def test_a_layer_that_blocks_share_has_a_state_in_each_of_them(tmp_path, what):
    model = build("LRU", "language")
    model.blocks[1].ssm = model.blocks[0].ssm
    done = cs.export(model, tmp_path / "model.pt2", what=what, check=9)
    assert [part["name"] for part in done.metadata["states"]] == ["blocks.0.ssm", "blocks.1.ssm"]
    assert done.metadata["state_size"] == sum(model.initial_state(1)[k].numel() for k in range(2))
