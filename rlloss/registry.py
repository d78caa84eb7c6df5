"""A named table that refuses silent replacement and knows the nearest name."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from rlloss.errors import ConfigError, UnknownNameError, nearest

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names and aliases to entries.

    Args:
        kind: What an entry is, for error messages ("policy loss").
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}
        self._aliases: dict[str, str] = {}

    def add(self, name: str, entry: T, aliases: tuple[str, ...] = ()) -> None:
        """Adds an entry under its name and aliases.

        Raises:
            ConfigError: A name is taken already.
        """
        for candidate in (name, *aliases):
            if candidate in self:
                raise ConfigError(
                    f"{self.kind} {candidate!r} is registered already. Choose another name, or remove the first "
                    f"registration with `unregister({candidate!r})`."
                )
        self._entries[name] = entry
        self._aliases.update(dict.fromkeys(aliases, name))

    def remove(self, name: str) -> None:
        """Removes an entry and its aliases; an unknown name is an error."""
        name = self.resolve(name)
        del self._entries[name]
        self._aliases = {alias: target for alias, target in self._aliases.items() if target != name}

    def resolve(self, name: str) -> str:
        """Returns the canonical name of `name`.

        Raises:
            UnknownNameError: `name` is neither a name nor an alias.
        """
        if isinstance(name, str) and name in self:
            return self._aliases.get(name, name)
        raise UnknownNameError(
            f"unknown {self.kind} {name!r}.{nearest(str(name), [*self._entries, *self._aliases])} "
            f"Known: {', '.join(sorted(self._entries))}."
        )

    def get(self, name: str) -> T:
        """Returns the entry of a name or alias."""
        return self._entries[self.resolve(name)]

    def aliases_of(self, name: str) -> tuple[str, ...]:
        """Returns the other names of an entry."""
        return tuple(alias for alias, target in self._aliases.items() if target == name)

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)
