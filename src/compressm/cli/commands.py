"""Commands by name, each loaded when it is called, so that a list of them does not import torch.

The laboratory and other packages add commands by an entry point of the group `compressm.commands`, which names a list
of `Command`s.
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
    """A command: `place` is "package.module:name" of a function or a `typer.Typer`, `help` one paragraph of help."""

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
        "Cut a trained model once and save the smaller one; of a run, show its test accuracy before and after.",
    ),
    Command(
        "export",
        "compressm.cli.export:command",
        "Write a model for onnxruntime, torch.export, AOTInductor or ExecuTorch, and check it there against the model.",
    ),
)


def registered(group: str, otherwise: str) -> Iterator[Any]:
    """The objects that the entry points of a group name.

    `otherwise` is the laboratory's object, "module:name", if it can be imported but is not installed.
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
    """The library's own commands and the registered ones."""
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
    """Commands by name; a command is loaded when it is looked up."""

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
    """A group that lists all known commands and loads only the called one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = LazyCommands(known_commands())  # type: ignore[assignment]

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command without its options, for help and completion, which list every command."""
        known = known_commands().get(cmd_name)
        return None if known is None else TyperCommand(known.name, help=known.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The called command, with its options."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else self.commands[name], rest
