"""What cannot be saved is not written, and what is not whole is not loaded."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn.parameter import Buffer

from compressm import layers, load_model, save_model
from compressm.adapters import SSMAdapter, adapts, write
from compressm.compression import KeepFraction, SavingError, compress_, load_checkpoint, savable, save_checkpoint
from compressm.control import DiagonalSystem
from compressm.layers import LRU, S4D
from compressm.layers.discretisation import Discretisation
from compressm.models import LayerNorm, SequenceClassifier
from compressm.models.normalisation import Norm, StepNorm
from compressm.saving import kinds
from compressm.saving.models import _digest
from compressm.saving.rebuilding import filled_by
from tests import unhooked
from tests.saving.test_saving import check_round_trip, check_same_state, classifier


@pytest.fixture(autouse=True)
def _kinds(monkeypatch):
    """What a test says to be savable is forgotten after it."""
    monkeypatch.setattr(kinds, "_KINDS", dict(kinds._KINDS))


@dataclass(frozen=True)
class TheirNorm(Norm):
    scale: float

    def build(self, width):
        return StepNorm(width, eps=self.scale)


class TheirLayer(layers.LTILayer):
    STATE_AXES = LRU.STATE_AXES
    log_poles, matrices, _mix, step, initial_state = LRU.log_poles, LRU.matrices, LRU._mix, LRU.step, LRU.initial_state
    parameters_of_system = LRU.parameters_of_system

    def __init__(self, width, order, **options):
        super().__init__(width, order)
        inner = LRU(width, order, **options)
        self.path = None
        self.bend = torch.sin
        for name, parameter in inner.named_parameters():
            setattr(self, name, parameter)
        self.nu_log._no_weight_decay = True


class Decays(nn.Module):
    """Somebody else's layer, of which only an adapter knows where its states stand."""

    def __init__(self, channels, count):
        super().__init__()
        self.rate, self.C = nn.Parameter(torch.rand(count)), nn.Parameter(torch.randn(channels, count))


@adapts(Decays)
class DecaysAdapter(SSMAdapter):
    def read(self, module):
        C = module.C.double() + 0j
        return DiagonalSystem(torch.sigmoid(module.rate.double()) + 0j, torch.ones_like(C).mT, C)

    def encode(self, module, system):
        return {"rate": torch.logit(system.poles.real), "C": (system.C * system.B.mT).real}


class WithMore(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.more = nn.Parameter(torch.ones(size))


class TheirModel(nn.Module):
    def __init__(self, width, *, buffer=None):
        super().__init__()
        self.first, self.second = Decays(width, 4), LRU(width, 3)
        if buffer is not None:
            self.register_buffer("table", torch.arange(3), persistent=buffer)


def test_layers_and_choices_of_others_are_saved_once_they_are_said_to_be(tmp_path):
    savable(TheirNorm)
    savable(TheirLayer)
    model = classifier(TheirLayer, norm=TheirNorm(0.1), layer_options={"r_min": 0.2})
    loaded = check_round_trip(model, tmp_path)
    assert type(loaded.blocks[0].ssm) is TheirLayer
    assert loaded.blocks[0].ssm.nu_log._no_weight_decay


def test_adapted_layers_of_others_come_back_at_the_order_they_were_cut_to(tmp_path):
    savable(TheirModel)
    model = TheirModel(2, buffer=True)
    write(model.first, {"rate": torch.tensor([0.5, 1.0]), "C": torch.ones(2, 2)})
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    check_same_state(loaded, model)
    assert json.loads((tmp_path / "config.json").read_text())["orders"] == {"first": 2, "second": 3}


def test_a_class_is_named_when_it_is_not_known(tmp_path):
    cases = [
        (classifier(TheirLayer), "TheirLayer.*savable"),
        (classifier(norm=TheirNorm(0.1)), r"norm is TheirNorm\(scale=0.1\).*TheirNorm.*savable.*state_dict"),
        (nn.Sequential(LRU(2, 2), nn.Conv1d(2, 2, 1)), "1 is a Conv1d"),
        (TheirModel(2), "TheirModel"),
    ]
    replaced = classifier()
    replaced.head = nn.Softsign()
    removed = classifier()
    del removed.blocks[1].dropout
    for model, said in [*cases, (replaced, "head is a Softsign"), (removed, r"blocks\.1\.dropout.*Identity")]:
        with pytest.raises(SavingError, match=said):
            save_model(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_rule_of_ones_own_in_the_options_of_a_layer_is_named(tmp_path):
    class Rule(Discretisation):
        def __call__(self, a, step):
            return layers.ZOH()(a, step)

    with pytest.raises(SavingError, match=r"layer_options\.discretisation.*Rule"):
        save_model(classifier(S4D, layer_options={"discretisation": Rule()}), tmp_path)


def without_arguments():
    layer = LRU(2, 2)
    del vars(layer)["_built_with"]
    return layer


def narrowed():
    model = classifier()
    model.head.weight = nn.Parameter(torch.ones(2, 4))
    return model


def wrong_number():
    layer = LRU(2, 2)
    layer.path = float("nan")
    return layer


@pytest.mark.parametrize("when", ["before a cut", "after a cut", "after two"])
@pytest.mark.parametrize("where", ["", "blocks.0.ssm", "head"])
@pytest.mark.parametrize("kind", [nn.Parameter, Buffer], ids=["a parameter", "a buffer"])
def test_a_tensor_that_was_registered_later_is_named_with_the_cure(kind, where, when, tmp_path):
    model, name = classifier(), f"{where}.more" if where else "more"
    for _ in range(["before a cut", "after a cut", "after two"].index(when)):
        compress_(model, keep=KeepFraction(0.5))
    model.get_submodule(where).more = kind(torch.ones(2))
    said = f"{name}: registered after the SequenceClassifier was built.* Register it in the constructor of a class of"
    with pytest.raises(SavingError, match=f"^{said}.*savable.*a module that you put into the model.*save_checkpoint"):
        save_model(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    model.get_submodule(where)._parameters.pop("more", None)
    model.get_submodule(where)._buffers.pop("more", None)
    # What the error advises.
    model.add_module("beside", savable(WithMore)(2))
    save_model(model, tmp_path / "model")
    assert load_model(tmp_path / "model").beside.more.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: LRU(2, 2).to("meta"), "nu_log is on the meta device"),
        (without_arguments, "built before its class was savable"),
        (narrowed, r"head.weight has shape \(2, 4\), and its constructor makes \(3, 4\).* Put a whole module of the"),
        (wrong_number, "path is nan"),
        (lambda: savable(TheirModel)(2, buffer=False), "table is not in the state dict"),
    ],
)
def test_what_could_not_be_loaded_is_not_written(make, said, tmp_path):
    with pytest.raises(SavingError, match=said):
        save_model(make(), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_model_that_is_not_finite_replaces_no_good_one(tmp_path):
    model = classifier()
    save_model(model, tmp_path / "model")
    save_checkpoint(tmp_path / "point", model=model, step=1)
    model.blocks[0].ssm.theta_log.data[1] = torch.inf
    said = r"blocks\.0\.ssm\.theta_log holds 1 entries that are not finite"
    with pytest.raises(SavingError, match=said):
        save_model(model, tmp_path / "model")
    with pytest.raises(SavingError, match=said):
        save_checkpoint(tmp_path / "point", model=model)
    layers.check_finite(load_model(tmp_path / "model"))
    assert load_checkpoint(tmp_path / "point", model=model).step == 1
    layers.check_finite(model)
    model.head.bias.data[:2] = torch.nan
    for save in (save_model, lambda model, path: save_checkpoint(path, model=model)):
        with pytest.raises(SavingError, match=r"head\.bias holds 2 entries that are NaN, expected none"):
            save(model, tmp_path / "diverged")
    assert not (tmp_path / "diverged").exists()


def test_infinity_outside_ssm_layers_and_buffers_of_any_content_are_saved(tmp_path):
    model = classifier()
    model.head.bias.data[0] = -torch.inf  # a class that is masked out
    model.blocks[0].norm.running_mean[0] = torch.nan
    save_model(model, tmp_path / "model")
    save_checkpoint(tmp_path / "point", model=model)
    assert torch.equal(load_model(tmp_path / "model").head.bias, model.head.bias)


PLAIN = {
    "save_model(3, 'x')": "model is a int, expected an nn.Module",
    "load_model('x', dtype='float32')": "dtype is 'float32', expected a floating-point dtype",
    "savable(3)": "got 3",
    "savable(int)": "got <class 'int'>",
    "save_checkpoint('x', model=LRU(1, 1), step=-1)": "step is -1",
    "save_checkpoint('x', model=LRU(1, 1), step=True)": "step is True",
    "save_checkpoint('x', model=LRU(1, 1), step='1')": "step is '1'",
}


def test_bad_input_is_refused_by_name():
    names = "load_model, savable, save_checkpoint, save_model"
    preamble = f"from compressm.compression import {names}\nfrom compressm.layers import LRU\n"
    for case, (kinds_of_error, message) in unhooked.outcomes(preamble, {case: case for case in PLAIN}).items():
        assert "SavingError" in kinds_of_error, (case, message)
        assert PLAIN[case] in message


def crashing(monkeypatch, after):
    """From the given file on, what was written never takes its place."""
    replace, calls = os.replace, []

    def crash(source, target):
        calls.append(target)
        if len(calls) > after:
            raise OSError("no power")
        replace(source, target)

    monkeypatch.setattr(os, "replace", crash)


def test_a_crash_leaves_the_old_model_whole(tmp_path, monkeypatch):
    old = classifier()
    save_model(old, tmp_path / "model")
    (tmp_path / "model" / "notes.txt").write_text("mine")
    crashing(monkeypatch, after=0)
    with pytest.raises(OSError, match="no power"):
        save_model(classifier(width=5), tmp_path / "model")
    check_same_state(load_model(tmp_path / "model"), old)
    names = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert names == ["config.json", "model.safetensors", "notes.txt"]


def test_a_config_that_is_not_the_one_loaded_is_told(tmp_path, monkeypatch):
    """After a crash between the two files, or an edit: the one inside the weights counts."""
    save_model(classifier(), tmp_path)
    crashing(monkeypatch, after=1)
    with pytest.raises(OSError, match="no power"):
        save_model(classifier(width=5), tmp_path)
    with pytest.warns(UserWarning, match=r"config\.json differs"):
        assert load_model(tmp_path).width == 5
    (tmp_path / "config.json").write_text("{")
    with pytest.warns(UserWarning, match=r"config\.json differs"):
        load_model(tmp_path)
    (tmp_path / "config.json").unlink()
    assert load_model(tmp_path).width == 5


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "model").write_text("mine")
    with pytest.raises(SavingError, match=r"is a file, expected a directory"):
        save_model(classifier(), tmp_path / "model")
    assert (tmp_path / "model").read_text() == "mine"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "layer.safetensors"
    layer = LRU(1, 2)
    save_model(layer, path)
    return layer, path.read_bytes(), path.with_name("other.safetensors")


@given(share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused(saved, share):
    _, data, path = saved
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(SavingError, match=path.name):
        load_model(path)


@given(share=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_bit_that_flipped_is_never_loaded(saved, share, bit):
    layer, data, path = saved
    place = int(share * len(data))
    path.write_bytes(bytes([*data[:place], data[place] ^ (1 << bit), *data[place + 1 :]]))
    try:
        loaded = load_model(path)
    except SavingError:
        return
    check_same_state(loaded, layer)


def test_files_of_others_are_refused(tmp_path):
    path = tmp_path / "other.safetensors"
    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(SavingError, match=r"other\.safetensors was not written by save_model.*nothing"):
        load_model(path)
    save_file({"weight": torch.ones(2)}, path, {"format": "pt", "compressm": "{"})
    with pytest.raises(SavingError, match="not JSON"):
        load_model(path)
    save_file({"weight": torch.ones(2)}, path, {"compressm": "[1]"})
    with pytest.raises(SavingError, match=r"\[1\], expected an object"):
        load_model(path)
    torch.save({"weight": torch.ones(2)}, path)
    with pytest.raises(SavingError, match="not a whole safetensors file"):
        load_model(path)


def test_what_is_not_there_is_a_missing_file(tmp_path):
    for path in (tmp_path, tmp_path / "none", tmp_path / "none.safetensors"):
        with pytest.raises(SavingError, match="does not exist"):
            load_model(path)
        with pytest.raises(FileNotFoundError):
            load_model(path)


def test_a_dtype_that_is_not_of_floats_is_refused(tmp_path):
    save_model(LRU(1, 1), tmp_path)
    with pytest.raises(SavingError, match=r"torch\.int64"):
        load_model(tmp_path, dtype=torch.int64)


def rewritten(path, change, *, honest=True):
    """The file with another config, its digest made right again."""
    with safe_open(path, framework="pt") as file:
        config, tensors = json.loads(file.metadata()["compressm"]), {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    change(config, tensors)
    if honest:
        config["sha256"] = _digest(config, tensors)
    save_file(tensors, path, {"compressm": json.dumps(config)})


CHANGES = {
    "version": (lambda c, t: c.update(version=2), "version 2, this compressm reads version 1"),
    "no version": (lambda c, t: c.pop("version"), "version None"),
    "another field": (lambda c, t: c.update(colour="red"), "the config has changed, colour.*expected model, orders"),
    "a field less": (lambda c, t: c.pop("frozen"), "expected model, orders"),
    "a field of another type": (lambda c, t: c.update(orders=[1]), r"orders in the config is \[1\], expected a dict"),
    "an order": (lambda c, t: c["orders"].update({"blocks.1.ssm": 5}), r"blocks\.1\.ssm\.\w+ has shape .*6.*5"),
    "an order of 0": (lambda c, t: c["orders"].update({"blocks.1.ssm": 0}), "the order 0 for 'blocks.1.ssm'"),
    "an order of text": (lambda c, t: c["orders"].update({"blocks.1.ssm": "6"}), "order '6'"),
    "an order too many": (lambda c, t: c["orders"].update({"blocks.7.ssm": 5}), r"blocks\.7\.ssm.*expected those of"),
    "an order too few": (lambda c, t: c["orders"].pop("blocks.0.ssm"), r"expected those of 'blocks\.0\.ssm'"),
    "depth": (lambda c, t: c["model"].update(depth=3), r"expected those of .*blocks\.2\.ssm"),
    "width": (lambda c, t: c["model"].update(width=5), r"encoder\.linear\.weight has shape \(4, 2\).*\(5, 2\)"),
    "width of text": (lambda c, t: c["model"].update(width="4"), "the model cannot be built"),
    "a huge width": (lambda c, t: c["model"].update(width=10**30), "the model cannot be built"),
    "an argument": (lambda c, t: c["model"].update(colour=1), "the model cannot be built.*colour"),
    "norm": (lambda c, t: c["model"].update(norm="LayerNorm"), "the model cannot be built"),
    "momentum": (lambda c, t: c["model"]["norm"].update(momentum=7.0), "norm cannot be built.*momentum is 7"),
    "an unknown kind": (lambda c, t: c["model"].update(kind="os.system"), "'os.system', which is not known here"),
    "a kind that is no text": (lambda c, t: c["model"].update(kind=[1]), r"kind \[1\]"),
    "no module": (lambda c, t: c.update(model={"kind": "LayerNorm", "affine": True}), "no nn.Module"),
    "an unknown class": (lambda c, t: c["model"].update(layer={"class": "GRU"}), "'GRU', which is not known"),
    "replaced": (lambda c, t: c["replaced"].update({"a.b": {"kind": "Identity"}}), "'a.b' cannot be put in its place"),
    "changed": (lambda c, t: c["changed"].update({"blocks.0.forward": 1}), "changes 'blocks.0.forward'"),
    "shared": (lambda c, t: c["shared"].update({"head.weight": "tail"}), "shares 'head.weight' with 'tail'"),
    "a tensor too few": (lambda c, t: t.pop("head.bias"), "head.bias missing, nothing not expected"),
    "a tensor too many": (lambda c, t: t.update(more=torch.ones(1)), "nothing missing, more not expected"),
    "a tensor of another shape": (lambda c, t: t.update({"head.bias": torch.ones(1)}), r"head.bias has shape \(1,\)"),
    "one axis more": (lambda c, t: t.update({"head.bias": torch.ones(3, 1)}), r"head.bias has shape \(3, 1\)"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_config_that_does_not_fit_is_refused_by_what_is_wrong(case, tmp_path):
    change, said = CHANGES[case]
    path = tmp_path / "model.safetensors"
    save_model(classifier(), path)
    rewritten(path, change)
    with pytest.raises(SavingError, match=said) as raised:
        load_model(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("change", [lambda c, t: c["model"].update(depth=1), lambda c, t: t["head.bias"].add_(1)])
def test_contents_that_were_tampered_with_are_refused(change, tmp_path):
    path = tmp_path / "model.safetensors"
    save_model(classifier(), path)
    rewritten(path, change, honest=False)
    with pytest.raises(SavingError, match="SHA-256"):
        load_model(path)


def test_a_model_of_a_class_that_is_not_imported_says_so(tmp_path, monkeypatch):
    savable(TheirNorm)
    save_model(classifier(norm=TheirNorm(0.5)), tmp_path)
    monkeypatch.setattr(kinds, "_KINDS", {k: v for k, v in kinds._KINDS.items() if v is not TheirNorm})
    with pytest.raises(SavingError, match=r"norm is of the kind '.*TheirNorm'.*import what defines it.*LRU"):
        load_model(tmp_path)


def test_a_tie_that_the_constructor_makes_and_somebody_undid_is_refused(tmp_path):
    @savable
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
            self.two.weight = self.one.weight

    save_model(Tied(), tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.two.weight is loaded.one.weight
    loaded.two.weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(SavingError, match=r"two\.weight: shared by the constructor"):
        save_model(loaded, tmp_path)


def test_defaults_are_written_so_that_new_ones_change_no_old_file(tmp_path):
    model = SequenceClassifier(LRU, depth=1, width=2, order=2, inputs=1, classes=2, norm=LayerNorm())
    save_model(model, tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["model"]
    assert stored["norm"] == {"kind": "LayerNorm", "affine": True}
    assert stored["dropout"] == {"kind": "PerElement", "rate": 0.1}
    assert stored["layer"] == {"class": "LRU"}


@pytest.mark.parametrize("key", ["depth", "width", "order", "classes"])
@pytest.mark.parametrize("size", [5000, 10**9, 10**30])
def test_a_forged_size_is_refused_at_once(key, size, tmp_path):
    """A depth of 10⁹ built blocks until somebody stopped it."""
    model = classifier()
    forged = forge(model, tmp_path / "m.safetensors", {key: size})
    if key == "order" and size == 5000:
        check_same_state(load_model(forged), model)  # layers take their orders from the tensors
        return
    start = time.perf_counter()
    with pytest.raises(SavingError, match=f"{size}|too many for the"):
        load_model(forged)
    assert time.perf_counter() - start < 20


def forge(model, path, changed):
    """A saved model with other arguments and a digest that fits."""
    save_model(model, path)
    with safe_open(path, "pt") as opened:
        config = json.loads(opened.metadata()["compressm"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    config["model"] |= changed
    config["sha256"] = _digest(config, tensors)
    save_file(tensors, path, {"format": "pt", "compressm": json.dumps(config)})
    return path


def test_other_threads_may_build_models_while_one_is_loaded(tmp_path):
    with filled_by({}), ThreadPoolExecutor(1) as pool:
        assert len(pool.submit(lambda: nn.Sequential(*(nn.Identity() for _ in range(2000)))).result()) == 2000
        with pytest.raises(SavingError, match="too many"):
            nn.Sequential(*(nn.Identity() for _ in range(2000)))
    assert len(nn.Sequential(*(nn.Identity() for _ in range(2000)))) == 2000
