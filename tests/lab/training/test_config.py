import json
import math
from itertools import pairwise

import pytest

from compressm_lab.training import ConfigError, Recipe, TrainingConfig
from compressm_lab.training.reading import make_recipe, read_recipe, with_settings
from tests.lab.training.tiny import CUTS, RECIPE, SPECTRA, recipe


def test_a_recipe_is_read_from_yaml_with_settings_on_top(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\ntask: {name: smnist}\nmodel: {depth: 2, width: 4, order: 6}\n"
        "training: {steps: 10, batch: 5, learning_rate: 1e-3}\ncompression: {tau: 0.1, when: {steps: [3, 7]}}\n"
    )
    found = read_recipe(path, ["model.order=8", "compression.tau=0.02", "seed=3", "model.layer_options.r_max=0.9"])
    assert (found.name, found.model.order, found.compression.tau, found.seed) == ("mine", 8, 0.02, 3)
    assert found.compression.when.steps == (3, 7)
    assert found.training.learning_rate == 1e-3  # which YAML takes for text
    assert found.model.layer_options == {"r_max": 0.9}
    assert (found.label, read_recipe(path, ["compression=null"]).label) == ("compressed", "baseline")


def test_what_is_stored_is_the_same_recipe():
    found = recipe(CUTS, SPECTRA, "compression.rollback={settle: 2}", "training.clip=1.0")
    assert make_recipe(found.as_dict()) == found
    assert isinstance(found, Recipe)


def test_settings_make_missing_parts_and_leave_the_original():
    contents = {"model": {"width": 4}, "spectra": None}
    changed = with_settings(contents, ["spectra.every=3", "a.b.c=[1, 2]", "model.width=null", "name=x=y", " seed =1"])
    expected = {"model": {"width": None}, "spectra": {"every": 3}, "a": {"b": {"c": [1, 2]}}, "name": "x=y", "seed": 1}
    assert changed == expected
    assert contents == {"model": {"width": 4}, "spectra": None}


def test_a_value_that_was_read_before_is_read_as_it_stands():
    assert with_settings({}, ["task={name: a}", "task.length=3"]) == {"task": {"name": "a", "length": 3}}
    assert with_settings({}, ["task={name: a}"]) == {"task": {"name": "a"}}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model.order", "--set 'model.order': expected key=value"),
        ("=3", "--set '=3': expected key=value"),
        ("model.order.deep=1", "order holds 6, which has no keys"),
        ("model.order=[1", "'[1' is not a value"),
        (
            "model={width: 3, width: 4}",
            "is not a value: width is there twice, at line 1, column 2 and line 1, column 12",
        ),
        ("training.batch=050", "050 at line 1, column 1, expected an integer in decimal digits, without a leading 0"),
        ("training.batch=1:30", "1:30 at line 1, column 1, expected an integer in decimal digits"),
        ("model=" + "[" * 3000 + "]" * 3000, "is not a value: more than 20 levels at line 1, column 21"),
    ],
)
def test_a_setting_that_cannot_be_made_is_refused(setting, said):
    with pytest.raises(ConfigError) as error:
        with_settings(RECIPE, [setting])
    assert said in str(error.value)


BAD_VALUES = [
    ("colour=red", "colour is not a key of a recipe"),
    ("model.colour=red", "model.colour is not a key of a recipe"),
    ("compression.when.colour=red", "compression.when.colour is not a key"),
    ("model.order=many", "model.order is 'many', expected an integer"),
    ("model.order=2.5", "model.order is 2.5, expected an integer"),
    ("model.order=0", "model: order is 0, expected at least 1"),
    ("model.width=true", "model.width is True: expected a number"),
    ("training.weight_decay=false", "training.weight_decay is False: expected a number"),
    ("compression.fold=1", "compression.fold is 1: expected true or false"),
    ("compression.when.steps=[5, true]", "compression.when.steps is True: expected a number"),
    ("model=null", "model is None: expected its keys, depth, width, order"),
    ("compression.rho=1", "compression: rho is 1.0, with which nothing is ever cut: expected a number below 1"),
    ("model.layer=GRU", "model.layer is 'GRU', expected 'LRU', 'S5', 'S4', 'S4D', 'LinOSS' or 'Mamba'"),
    ("model.dropout=1", "model: dropout is 1.0, expected a number at least 0 and below 1"),
    ("model.dropout=.nan", "model: dropout is nan"),
    ("training.learning_rate=-1", "training: learning_rate is -1.0, expected at least 0"),
    ("training.learning_rate=.inf", "training: learning_rate is inf"),
    ("training.precision=float16", "training.precision is 'float16', expected 'float32', 'tf32' or 'bfloat16'"),
    ("training.schedule=linear", "training.schedule is 'linear', expected 'constant' or 'cosine'"),
    ("training.learning_rate=.inf", "training: learning_rate is inf, expected a finite number, at least 0"),
    ("training.steps=0", "training: steps is 0, expected at least 1"),
    ("training.keep_checkpoints=0", "training: keep_checkpoints is 0, expected at least 1"),
    ("training.warmup=1.5", "training: warmup is 1.5, expected a number at least 0 and below 1"),
    ("compression.tau=0.1", "compression: compression has tau and rho, expected one of tau, rho, order"),
    ("compression.rho=null", "compression: compression has no policy, expected one of tau, rho, order"),
    ("compression.rho=0", "compression: rho is 0.0, expected a number above 0 and at most 1"),
    (
        "compression={bound: 0.1, gramian: measured, when: {steps: [5]}}",
        "bound is 0.1 with gramian measured, which has no",
    ),
    ("compression.gate=1.1", "compression: gate is 1.1, expected a number above 0 and at most 1"),
    ("compression.when={}", "when has nothing, expected one of warmup_cuts, every, steps"),
    ("compression.when={every: 2, steps: [1]}", "when has every and steps, expected one"),
    ("compression.when={warmup_cuts: 2, first: 1}", "first and last go with every"),
    ("compression.when={steps: []}", "steps is [], expected at least one step"),
    ("compression.when={steps: [4, 0]}", "steps is [4, 0], expected at least one step, counted from 1"),
    ("compression.when={steps: [4, 2, 4]}", "when: steps has 4 more than once, expected every step once"),
    ("compression.when=null", "compression.when is None"),
    ("compression.when=3", "compression.when is 3: expected its keys, warmup_cuts, every, first, last, steps"),
    ("compression.rollback={drop: 1}", "compression.rollback: drop is 1.0, expected a number at least 0 and below 1"),
    ("compression.rollback={settle: 0}", "compression.rollback: settle is 0, expected at least 1"),
    ("spectra={every: 0}", "spectra: every is 0, expected at least 1"),
    ("spectra={}", "spectra.every is missing"),
    ("task=5", "task is 5"),
    ("task={side: 8}", "task is {'side': 8}, expected its name and options"),
    ("training.steps=99999999999999999999", "training: steps is 1e+20, expected at most 1,000,000,000"),
    ("model.depth=100000000", "model: depth is 1e+08, expected at most 10,000"),
    ("model.order=1000000000", "model: order is 1e+09, expected at most 10,000,000"),
    (
        "training={steps: 5, batch: 2, learning_rate: 0.1, lowest_rate: 5, schedule: cosine}",
        "training: lowest_rate is 5.0, expected at most learning_rate, 0.1",
    ),
    ("seed=-1", "seed is -1, expected an integer from 0"),
    ("seed=2147483648", "seed is 2147483648, expected an integer from 0"),
]


@pytest.mark.parametrize(("setting", "said"), BAD_VALUES, ids=[setting for setting, _ in BAD_VALUES])
def test_a_bad_value_is_named_with_what_is_allowed(setting, said):
    with pytest.raises(ConfigError) as error:
        recipe(CUTS, setting)
    assert said in str(error.value)


HINTS = [
    ("modle.order=3", "modle is not a key of a recipe, expected one of name, task, model", "did you mean 'model'?"),
    ("model.ordr=3", "expected one of depth, width, order", "did you mean 'order'?"),
    ("compression.when.stepz=[3]", "expected one of warmup_cuts, every, first, last, steps", "did you mean 'steps'?"),
    ("tau=0.1", "tau is not a key of a recipe", "did you mean 'compression.tau'?"),
    ("order=3", "order is not a key of a recipe", "did you mean 'model.order' or 'compression.order'?"),
    ("model.layer=lru", "expected 'LRU', 'S5', 'S4', 'S4D', 'LinOSS' or 'Mamba'", "did you mean 'LRU'?"),
    ("compression.gramian=white-noise", "expected 'white_noise', 'measured' or 'modal'", "did you mean 'white_noise'?"),
]


@pytest.mark.parametrize(("setting", "allowed", "hint"), HINTS, ids=[setting for setting, *_ in HINTS])
def test_a_near_miss_names_what_may_have_been_meant(setting, allowed, hint):
    with pytest.raises(ConfigError) as error:
        recipe(CUTS, setting)
    assert allowed in str(error.value)
    assert str(error.value).endswith(hint)


def test_what_is_near_nothing_gets_no_hint():
    with pytest.raises(ConfigError) as error:
        recipe("wxyz=3")
    assert "did you mean" not in str(error.value)


BLAME = [
    (["model.order=0"], "--set 'model.order=0': model: order is 0, expected at least 1"),
    (["seed=1", "model.order=0", "label=x"], "--set 'model.order=0': model: order is 0, expected at least 1"),
    (["compression.tau=0.1"], "--set 'compression.tau=0.1': compression: compression has tau and rho, expected one of"),
    (
        ["compression.rho=null", "compression.tau=0.1", "compression.order=3"],
        "--set 'compression.tau=0.1' and --set 'compression.order=3': compression: compression has tau and order",
    ),
    (["model.order=0", "training.batch=x"], "; --set 'training.batch=x': training.batch is 'x'"),
    (["model.width=true"], "--set 'model.width=true': model.width is True: expected a number"),
    (["model.order=0", "model.order=0"], "--set 'model.order=0': model: order is 0"),
    (["seed=-1"], "--seed: seed is -1"),
]


@pytest.mark.parametrize(("settings", "said"), BLAME, ids=[" ".join(settings) for settings, _ in BLAME])
def test_a_setting_that_is_wrong_is_blamed_and_not_the_file(tmp_path, settings, said):
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(with_settings(RECIPE, [CUTS])))
    with pytest.raises(ConfigError) as error:
        read_recipe(path, settings, spoken={"seed=-1": "--seed"})
    assert said in str(error.value)
    assert "mine.yaml" not in str(error.value)


def test_what_is_wrong_in_the_file_is_said_of_the_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(with_settings(RECIPE, ["model.order=0"])))
    with pytest.raises(ConfigError) as error:
        read_recipe(path, ["training.steps=x", "label=mine"])
    assert str(error.value).startswith(f"{path}: model: order is 0, expected at least 1; --set 'training.steps=x': ")


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigError, match=r"^recipe: model\.colour .*; training\.steps is 'x'"):
        recipe("model.colour=red", "training.steps=x")


# Ten times ten times … as many values as were written.
LAUGHS = "a0: &a0 [1]\n" + "".join(f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 10)}]\n" for k in range(1, 12))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", r"holds \[1, 2\], expected the keys"),
        ("a: [", "is not YAML"),
        ("", "holds None"),
        ("1: 2", "holds {1: 2}"),
        ("name: a\nseed: 1\nname: b", "name is there twice, at line 1, column 1 and line 3, column 1"),
        (
            "model:\n  width: 3\n  order: 4\n  width: 5",
            "width is there twice, at line 2, column 3 and line 4, column 3",
        ),
        ("task: " + "{a: " * 3000 + "1" + "}" * 3000, "more than 20 levels at line 1, column 83"),
        ("\n".join(f"{' ' * depth}a:" for depth in range(3000)), "more than 20 levels at line 21"),
        ("task: &task {name: *task}", "more than 20 levels"),
        (LAUGHS, "more than 10000 values, with aliases written out"),
        ("seed: " + "9" * 5000, "is not YAML of a recipe: Exceeds the limit"),
        ("seed: 2020-99-99", "is not YAML of a recipe: month must be in"),
    ],
)
def test_a_file_that_is_no_recipe_is_named(tmp_path, text, said):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as error:
        read_recipe(path)
    assert str(path) in str(error.value)


def test_a_part_that_several_share_may_have_values_of_its_own(tmp_path):
    path = tmp_path / "shared.yaml"
    path.write_text("task: &task {name: digits, side: 4}\nmodel: {<<: *task, side: 8}\n")
    with pytest.raises(ConfigError, match=r"model\.name is not a key of a recipe"):
        read_recipe(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.yaml: No such file"):
        read_recipe(tmp_path / "gone.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match=r"bytes\.yaml is not YAML"):
        read_recipe(tmp_path / "bytes.yaml")


IDLE = [
    *("training.warmup=0.5", "training.lowest_rate=0.1", "compression.calibration_batches=9", "name=a/b", "label=a/b"),
    *("compression.at_least=12", "compression.round_to=16"),
]


@pytest.mark.parametrize("setting", IDLE)
def test_a_value_without_effect_is_refused_in_a_recipe_but_not_in_a_run_that_began_with_it(tmp_path, setting):
    contents = with_settings(RECIPE, [CUTS, "training.schedule=constant"])
    (tmp_path / "mine.yaml").write_text(json.dumps(contents))
    with pytest.raises(ConfigError, match=f"^--set '{setting}': .*{setting.partition('=')[0]} is "):
        read_recipe(tmp_path / "mine.yaml", [setting])
    assert make_recipe(with_settings(contents, [setting]))


def test_the_warm_up_of_cuts_has_an_effect_whatever_the_schedule(tmp_path):
    cuts = "compression={rho: 0.5, when: {warmup_cuts: 2}}"
    (tmp_path / "mine.yaml").write_text(json.dumps(with_settings(RECIPE, [cuts, "training.schedule=constant"])))
    assert read_recipe(tmp_path / "mine.yaml", ["training.warmup=0.5"]).training.warmup == 0.5


def rates(**options):
    config = TrainingConfig(batch=1, learning_rate=1e-3, **options)
    return [config.rate(step) for step in range(1, config.steps + 1)]


def test_a_constant_rate_is_the_same_at_every_step():
    assert set(rates(steps=50)) == {1e-3}


@pytest.mark.parametrize(("steps", "warmup"), [(100, 0.1), (1000, 0.29), (10, 0.0), (7, 0.1), (1, 0.1)])
def test_the_cosine_rate_is_the_closed_formula(steps, warmup):
    rise = round(1000 * warmup) * steps // 1000
    expected = [
        1e-7 + (1e-3 - 1e-7) * (k / rise if k <= rise else math.cos(math.pi / 2 * (k - rise) / (steps - rise)) ** 2)
        for k in range(1, steps + 1)
    ]
    assert rates(steps=steps, schedule="cosine", warmup=warmup) == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_the_cosine_rate_rises_to_its_highest_and_falls_to_its_lowest_without_a_jump():
    found = rates(steps=1000, schedule="cosine")
    assert found[0] == pytest.approx(1e-7 + (1e-3 - 1e-7) / 100)
    assert max(found) == found[99] == 1e-3
    assert found[-1] == pytest.approx(1e-7, rel=1e-9)
    assert max(abs(b - a) for a, b in pairwise(found)) < 1.01e-3 / 100
