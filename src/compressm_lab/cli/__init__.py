"""The laboratory's commands; the list is read by every `compressm --help`, so it imports none of them."""

from compressm.cli.commands import Command

# The help of each is the first paragraph of the command's own help, word for word: a test compares them.
COMMANDS = (
    Command(
        "train",
        "compressm_lab.cli.train:command",
        "Train a recipe: everything it does is written into the folder of the run, for `compressm report`.",
    ),
    Command(
        "reproduce",
        "compressm_lab.cli.reproduce:command",
        "Train what a table or figure of the paper needs and show it beside the paper's numbers.",
    ),
    Command(
        "report",
        "compressm_lab.cli.report:report",
        "Show runs on one HTML page that needs no network: results, Hankel values, orders and time; figures as files.",
    ),
    Command(
        "data",
        "compressm_lab.cli.data:data",
        "List all tasks, fetch one and show its splits, or `inspect FILE`: show what training would read from a file.",
    ),
    Command(
        "init",
        "compressm_lab.cli.init:command",
        "Write a commented recipe, a small data set and a task in code into DIR; they train at once.",
    ),
    Command(
        "demo",
        "compressm_lab.cli.demo:command",
        "Train digits by a large model, a small one, and large ones that shrink while they train; about two minutes.",
    ),
    Command(
        "bench",
        "compressm_lab.cli.bench:bench",
        "Measure speed on this machine; results are JSON files with a picture.",
    ),
)
