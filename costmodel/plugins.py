"""Entry points: the doors by which integrations, the lab and other packages plug into the core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from costmodel.errors import InputError, reason_of

# The groups, and what an entry point of each is; decoder/extensions.py has drafters and policies.
COMMANDS = "rooftree.commands"  # a click command, `rooftree NAME`
SOURCES = "rooftree.sources"  # a click command, `rooftree calibrate NAME`
READERS = "rooftree.readers"  # a function that reads a file: of `times.NAME` or `acceptance.NAME`
SETTINGS = "rooftree.settings"  # a costmodel.planning.exports.SettingsWriter
# Published ones (costmodel.compose.tables.PublishedTables), or a function that reads a folder.
OPERATOR_TABLES = "rooftree.operator_tables"  # of `published.NAME` or `folder.NAME`


def plugin_names(group: str, kind: str = "") -> list[str]:
    """The names that installed packages give to entry points of a group, behind the word `kind`."""
    names = {entry.name for entry in entry_points(group=group)}
    return sorted(name.removeprefix(kind) for name in names if name.startswith(kind))


def load_plugins(group: str, kind: str = "") -> Iterator[tuple[str, Any]]:
    """The names and objects of a group's entry points. Raises InputError."""
    for name in plugin_names(group, kind):
        yield name, load_plugin(group, name, kind)


def load_plugin(group: str, name: str, kind: str = "", more: Sequence[str] = ()) -> Any:
    """The object of a name. Raises InputError, also where there is none; `more` names exist too."""
    for entry in entry_points(group=group, name=kind + name):
        return load_entry_point(entry)
    listed = ", ".join((*more, *plugin_names(group, kind)))
    raise InputError(f"no entry point of {group} is called '{name}'", hint=f"Use one of: {listed}")


def load_entry_point(entry: EntryPoint) -> Any:
    """What an entry point names. Raises InputError where it cannot be imported."""
    try:
        return entry.load()
    except Exception as error:
        raise InputError(
            f"the entry point '{entry.name}' ({entry.value}) cannot be loaded: {reason_of(error)}",
            hint=f"Mend or remove the package {entry.dist.name if entry.dist else 'behind it'}.",
        ) from error
