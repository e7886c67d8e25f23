import importlib.util

import pytest

from compressm_lab.runs.directory import Status
from compressm_lab.training import ConfigError, train
from compressm_lab.training.loggers import TensorBoard
from tests.lab.training.tiny import CUTS, recipe, tokens

HERE = importlib.util.find_spec("tensorboard") is not None


@pytest.mark.skipif(not HERE, reason="the package tensorboard is not installed")
def test_events_hold_the_same_figures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(recipe(CUTS), tokens(), tmp_path / "run", logger=TensorBoard(tmp_path / "run" / "tensorboard"))
    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss/validation")] == [4, 8, 12, 16]
    assert [event.value for event in events.Scalars("order/blocks.0.ssm")] == [4, 3]


@pytest.mark.skipif(HERE, reason="the package tensorboard is installed")
def test_without_the_package_it_says_how_to_install_it(tmp_path):
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        TensorBoard(tmp_path)


class Writer:
    """Stands for torch's."""

    def __init__(self, folder, purge_step=None):
        self.purged, self.values, self.flushed = purge_step, [], 0

    def add_text(self, tag, text, step):
        self.values.append((tag, text, step))

    def add_scalar(self, tag, value, step):
        assert isinstance(value, int | float)
        self.values.append((tag, value, step))

    def flush(self):
        self.flushed = len(self.values)


@pytest.fixture
def events(monkeypatch, tmp_path):
    """A logger whose writer is at hand."""
    made = TensorBoard.__new__(TensorBoard)
    made._open, made._folder, made._writer = Writer, tmp_path, None
    return made


def test_every_evaluation_and_every_order_is_written_at_its_step(events, tmp_path):
    run = train(recipe(CUTS), tokens(), tmp_path / "run", logger=events)
    writer = events._writer
    assert [(v, s) for tag, v, s in writer.values if tag == "order/blocks.0.ssm"] == [(4, 5), (3, 11)]
    for split in ("train", "validation", "test"):
        assert [s for tag, _, s in writer.values if tag == f"loss/{split}"] == [4, 8, 12, 16]
        assert [s for tag, _, s in writer.values if tag == f"accuracy/{split}"] == [4, 8, 12, 16]
    assert writer.flushed == len(writer.values)
    assert writer.purged is None
    run.write_status(Status("interrupted", 16, 16))
    train(recipe(CUTS), tokens(), run.path, resume=True, logger=events)
    assert events._writer.purged == 17  # what was written beyond the checkpoint comes again
