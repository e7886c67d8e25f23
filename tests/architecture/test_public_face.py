"""Public names and command-line options: changing one is a decision, not an accident."""

import inspect

import pytest
import typer

import compressm
from compressm import adapters, compression, control, deploy, exporting, running
from compressm.cli.app import app

# Of `compressm.compression`, without its name in front.
SHORT_NAMES = {
    "PAPER",
    "Automatic",
    "Baked",
    "Compressor",
    "Fitted",
    "Folded",
    "HankelTracker",
    "Mapped",
    "Selected",
    "Measured",
    "Modal",
    "PerChannel",
    "Restart",
    "Rollback",
    "SharedIndex",
    "Slice",
    "Transport",
    "WhiteNoise",
    "compare_forms",
    "compress_",
    "inspect",
    "Budget",
    "Cut",
    "Decision",
    "LossTolerance",
    "Schedule",
    "TryingPolicy",
    "EnergyTolerance",
    "ErrorBound",
    "KeepFraction",
    "Largest",
    "Random",
    "Restored",
    "Smallest",
    "TargetOrder",
    "during_warmup",
    "every",
    "load_model",
    "pad_orders_",
    "powers_of_two",
    "rewrap_",
    "save_model",
}

RUNNING_NAMES = {"CapturedStep", "Stream"}
EXPORTING_NAMES = {
    *(
        "ONNX",
        "AOTInductor",
        "ExecuTorch",
        "ExportError",
        "Exported",
        "Format",
        "Loaded",
        "TorchExport",
        "export",
        "flat",
    )
}
NAMES = {"__version__", "adapters", "compression", "control", "deploy", "export", "layers", "models"}
NAMES |= SHORT_NAMES | RUNNING_NAMES

CONTROL_NAMES = {
    "ControlError",
    "DefectiveSystemError",
    "DenseSystem",
    "DeviceError",
    "DiagonalSystem",
    "HankelChange",
    "IndefiniteGramianError",
    "LinearSystem",
    "NonFiniteError",
    "OrderChangedError",
    "OrderError",
    "PrecisionError",
    "Projection",
    "RealTruncation",
    "ShapeError",
    "StateCovariance",
    "Trajectories",
    "Truncation",
    "UnstableSystemError",
    "balanced_truncation",
    "bottom_shares",
    "conjugate_pairs",
    "controllability_gramian",
    "diagonalise",
    "error_bounds",
    "fold",
    "galerkin_projection",
    "h2_error",
    "h2_norm",
    "h_infinity_error",
    "h_infinity_norm",
    "hankel_change",
    "hankel_hermitian",
    "hankel_nuclear_norm",
    "hankel_nuclear_norm_majoriser",
    "hankel_singular_values",
    "input_output_ratio",
    "mean_dynamics",
    "mean_selective_system",
    "measured_gramian",
    "numerical_rank",
    "observability_gramian",
    "real_balanced_truncation",
    "real_form",
    "second_moment_gramians",
    "second_moment_system",
    "shared_projection",
    "solve_lyapunov",
    "trajectories",
}

ADAPTER_NAMES = {
    "Adapter",
    "AdapterError",
    "Basis",
    "ConformanceError",
    "Finding",
    "LRUAdapter",
    "LinOSSAdapter",
    "MambaAdapter",
    "Mamba2MixerAdapter",
    "MambaMixerAdapter",
    "MemoryAdapter",
    "S4Adapter",
    "S4DAdapter",
    "DenseAdapter",
    "S5Adapter",
    "SSMAdapter",
    "SelectiveAdapter",
    "adapter_for",
    "adapts",
    "check_adapter",
    "continuous_poles",
    "find",
    "state_axes",
    "write",
}

COMPRESSION_NAMES = SHORT_NAMES | {
    "AllowedOrders",
    "Answer",
    "Look",
    "Trials",
    "Try",
    "Form",
    "FormComparison",
    "Gramian",
    "Moments",
    "Checkpoint",
    "CompressionError",
    "Inspection",
    "LayerPolicy",
    "LostProcessError",
    "SavingError",
    "Selection",
    "SelectiveMethod",
    "StaleWrapperError",
    "accept_orders_",
    "as_schedule",
    "choose_orders",
    "load_checkpoint",
    "plan_text",
    "savable",
    "save_checkpoint",
    "take_stored_orders_",
}

DEPLOY_NAMES = {
    *("CANDLE", "FLA", "LLAMA_CPP_CPU", "LLAMA_CPP_CUDA", "LLAMA_CPP_METAL", "LLAMA_CPP_VULKAN", "MAMBA_SSM", "MLX"),
    *("RUNTIMES", "SGLANG", "TRANSFORMERS", "VLLM", "Check", "LayerVerdict", "Rule", "Runtime", "Verdict"),
    *("check", "named_orders", "step_times", "table"),
}

OPTIONS = {
    "": {"--version", "--install-completion", "--show-completion"},
    "train": {
        *("recipe", "--list", "--set", "--seed", "--order", "--baseline", "--auto", "--out", "--resume"),
        "--take-over",
        *("--device", "--threads", "--data", "--offline", "--tensorboard"),
    },
    "inspect": {"path", "--measured", "--loss", "--data", "--offline"},
    "compress": {
        *("path", "--out", "--tau", "--rho", "--order", "--bound", "--total-states", "--state-bytes", "--parameters"),
        *("--round-to", "--uniform"),
        *("--measured", "--fold", "--no-fold", "--data", "--offline"),
    },
    "export": {"model", "path", "--what", "--aot", "--opset", "--backend", "--batch", "--check"},
    "data": {"name", "file", "--offline", "--data", "--root", "--set"},
    "reproduce": {
        *("name", "--only", "--seeds", "--quick", "--processes", "--executor", "--partition", "--hours", "--gpus"),
        *("--dry-run", "--only-report", "--data", "--out"),
    },
    "report": {"runs", "--out", "--title", "--formats", "--open", "--no-open"},
    "init": {"folder"},
    "demo": {"--seeds", "--out", "--processes", "--set"},
    "bench": set(),
    "bench reduction": {"--device", "--order", "--width", "--repeats", "--compare", "--no-compare", "--out"},
    "bench cut": {"--device", "--task", "--rank", "--precision", "--repeats", "--out"},
    "bench draw": {"result", "--picture"},
    "bench export": {"--repeats", "--out"},
    "bench growth": {"--device", "--axis", "--precision", "--compile", "--no-compile", "--repeats", "--out"},
    "bench peers": {"--device", "--repeats", "--out"},
    "bench regulariser": {"--device", "--order", "--repeats", "--out"},
    "bench scan": {"--device", "--repeats", "--out"},
    "bench selective": {"--device", "--repeats", "--out"},
    "bench speedup": {
        *("recipe", "--set", "--order", "--schedule", "--check", "--no-check"),
        *("--device", "--repeats", "--data", "--offline", "--out"),
    },
    "bench loop": {"--device", "--way", "--model", "--repeats", "--out"},
    "bench step": {"--device", "--task", "--order", "--precision", "--compile", "--no-compile", "--repeats", "--out"},
    "bench stream": {"--device", "--repeats", "--out"},
    "bench table": {"result"},
}


def test_the_package_has_these_names():
    assert set(compressm.__all__) == NAMES


def test_the_control_core_has_these_names():
    assert set(control.__all__) == CONTROL_NAMES
    assert list(control.__all__) == sorted(control.__all__)


def test_the_adapters_have_these_names():
    assert set(adapters.__all__) == ADAPTER_NAMES
    assert list(adapters.__all__) == sorted(adapters.__all__)


def test_compression_has_these_names():
    assert set(compression.__all__) == COMPRESSION_NAMES
    assert len(compression.__all__) == len(COMPRESSION_NAMES)


def test_what_is_known_of_runtimes_has_these_names():
    assert set(deploy.__all__) == DEPLOY_NAMES
    assert all(inspect.getdoc(getattr(deploy, name)) for name in DEPLOY_NAMES)


@pytest.mark.parametrize("name", sorted(SHORT_NAMES))
def test_a_short_name_is_that_of_compression(name):
    assert getattr(compressm, name) is getattr(compression, name)
    assert name in dir(compressm)


@pytest.mark.parametrize("name", sorted(RUNNING_NAMES))
def test_what_runs_models_has_a_short_name(name):
    assert getattr(compressm, name) is getattr(running, name)
    assert inspect.getdoc(getattr(running, name))


def test_exporting_has_these_names():
    assert set(exporting.__all__) == EXPORTING_NAMES
    assert compressm.export is exporting.export


@pytest.mark.parametrize("name", sorted(CONTROL_NAMES | ADAPTER_NAMES | COMPRESSION_NAMES | EXPORTING_NAMES))
def test_every_public_name_is_documented(name):
    package = next(package for package in (control, adapters, compression, exporting) if name in package.__all__)
    assert inspect.getdoc(getattr(package, name))


def commands(command, path=()):
    yield " ".join(path), command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


def test_the_command_line_has_these_commands_and_options():
    found = {}
    for path, command in commands(typer.main.get_command(app)):
        names = [name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)]
        found[path] = set(names) - {"--help", "-h"}
    assert found == OPTIONS


def test_every_command_and_option_explains_itself():
    for path, command in commands(typer.main.get_command(app)):
        assert command.help, path
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{path} {parameter.name}"
