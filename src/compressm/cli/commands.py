"""Commands by name, each loaded when it is called: a list of them takes no torch.

The laboratory and other packages add theirs by an entry point of the group `compressm.commands` that names a list of
`Command`s.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, final

import typer
from typer.core import TyperCommand, TyperGroup

LABORATORY = "lab"  # the name of its entry points


@final
@dataclass(frozen=True)
class Command:
    """`place` is "package.module:name" of a function or a `typer.Typer`; `help` is the first paragraph of its help."""

    name: str
    place: str
    help: str


OWN = (
    Command(
        "inspect",
        "compressm.cli.inspect:command",
        "Show the Hankel spectra of a model's SSM layers, the orders they suggest, and the error bounds of cuts.",
    ),
    Command(
        "compress",
        "compressm.cli.compress:command",
        "Cut a trained model once and save the smaller one; of a run with --measured, show its test accuracy beside"
        " it.",
    ),
)


def registered(group: str, otherwise: str) -> Iterator[Any]:
    """What the entry points of the group name.

    `otherwise` is the laboratory's, "module:name", for where it can be imported but is not installed.
    """
    found = entry_points(group=group)
    for entry in found:
        try:
            yield entry.load()
        except ImportError as error:
            print(f"compressm: {entry.name} cannot be loaded from {entry.value}: {error}", file=sys.stderr)
    if LABORATORY not in found.names and find_spec("compressm_lab") is not None:
        yield _named(otherwise)


@cache
def known_commands() -> dict[str, Command]:
    """Those of the library, and those that are registered."""
    found = [*OWN, *(one for many in registered("compressm.commands", "compressm_lab.cli:COMMANDS") for one in many)]
    return {command.name: command for command in found}


def _named(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _loaded(command: Command) -> Any:
    found, holder = _named(command.place), typer.Typer()
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=command.name)
    else:
        holder.command(command.name)(found)
    return typer.main.get_group(holder).commands[command.name]


class LazyCommands(Mapping[str, Any]):
    """Names are there at once; a command is loaded when it is taken out."""

    def __init__(self, known: Mapping[str, Command]) -> None:
        self._known, self._loaded = known, dict[str, Any]()

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = _loaded(self._known[name])
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class LazyGroup(TyperGroup):
    """Lists all commands that are known and loads the one that is called."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = LazyCommands(known_commands())  # type: ignore[assignment]

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command without its options, for lists in help and completion, which ask for every command."""
        known = known_commands().get(cmd_name)
        return None if known is None else TyperCommand(known.name, help=known.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is called, whole."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else self.commands[name], rest
