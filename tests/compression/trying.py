"""Cases of processes that try cuts together."""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import compressm as cs
from tests.compression.processes import CASES, Training, case, main, outcome, refused

__all__ = ["CASES", "main"]


def own_loss(run, asked=None):
    """A loss on data that each process has for itself."""
    x, target = run.batch()

    def loss(model):
        if asked is not None:
            asked.append(1)
        return cross_entropy(model(x), target)

    return loss


@case
def cuts_that_are_tried(rank, path):
    run, asked = Training(rank), []
    run.train(3)
    keep = cs.LossTolerance(0.02, loss=own_loss(run, asked))
    compressor = cs.Compressor(run.model, run.optimizer, when=[1, 3], keep=keep)
    preview = [str(cut) for cut in compressor.preview()]
    events = run.train(4, compressor)
    calls = [0] * dist.get_world_size()
    dist.all_gather_object(calls, len(asked))
    return outcome(run, events=events, preview=preview, calls=calls)


@case
def cuts_that_are_found_automatically(rank, path):
    run = Training(rank)
    run.train(3)
    own = own_loss(run)

    def loss(model):  # states matter, whatever the data
        return own(model) + 0.02 * sum(12 - block.ssm.order for block in model.blocks)

    keep, when, x = cs.LossTolerance(0.05, loss=loss), cs.Automatic(24, every=2), run.batch()[0]
    compressor = cs.Compressor(run.model, run.optimizer, when=when, keep=keep, calibrate=lambda model: model(x))
    return outcome(run, events=run.train(20, compressor))


@case
def a_loss_that_fails_in_one_process(rank, path):
    run, calls = Training(rank), []
    good = own_loss(run)

    def loss(model):
        calls.append(1)
        if rank == dist.get_world_size() - 1 and len(calls) == 3:
            raise OSError("no data")
        return good(model)

    compressor = cs.Compressor(run.model, run.optimizer, when=[1], keep=cs.LossTolerance(0.5, loss=loss))
    before = run.flat()
    error = refused(compressor.step, 1)
    untouched = torch.equal(before, run.flat())
    return outcome(run, error=error, untouched=untouched, events=[str(event) for event in compressor.step(1)])


@case
def a_policy_that_fails_in_the_first_process(rank, path):
    run = Training(rank)

    class Failing(cs.TryingPolicy):
        loss = staticmethod(own_loss(run))

        def choose(self, spectra, trials):
            trials(dict.fromkeys(spectra, 4))
            raise OSError("no choice")

    before = run.flat()
    error = refused(cs.Compressor(run.model, run.optimizer, when=[1], keep=Failing()).step, 1)
    return outcome(run, error=error, untouched=torch.equal(before, run.flat()))


def run_count():
    return dist.get_world_size()
