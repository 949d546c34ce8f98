"""Where models are: folders of this machine, or places elsewhere of which there are copies here."""
from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from infer_server.config.paths import is_name
from infer_server.errors import RepositoryError, UnknownModelError

AMBIGUOUS = "model appears in two or more repositories"         # Triton's word for it


class Place(ABC):
    """Folders <model>/<version>/<file>. Its methods block, and are called on any thread."""
    path: Path                          # what is read: the folder itself, or that of the copies
    outlines_models: bool               # outline() has the models themselves, not only the names of their files

    @abstractmethod
    def names(self) -> list[str]:
        """The models that are there. Raises RepositoryError: the place cannot be read."""

    def has(self, name: str) -> bool:
        """Whether a model is there, and named as one can be. Raises RepositoryError: the place cannot be read."""
        return name in self.names()

    @abstractmethod
    def fetch(self, name: str) -> None:
        """Brings path/<name> up to date, until release(). Raises RepositoryError; FetchError: it may go better the
        next time."""

    @abstractmethod
    def release(self, name: str) -> None:
        """A model is unloaded: its files are not needed. Returns at once."""

    @abstractmethod
    def outline(self, name: str) -> AbstractContextManager[Path]:
        """Where <name> has the model's configuration and what it names, and of its versions at least the names of their
        files. Raises RepositoryError."""

    @abstractmethod
    def fingerprint(self, name: str) -> Hashable:
        """What differs when a file of the model is another. Raises RepositoryError."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what it holds: its copies may be another server's from now on. It is not used again."""


class LocalFolder(Place):
    """A folder of this machine."""
    outlines_models = True

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        try:
            return sorted(path.name for path in self.path.iterdir()
                          if path.is_dir() and not path.name.startswith("."))
        except OSError as error:
            raise RepositoryError(f"model repository {self.path}: {error.strerror}") from error

    def has(self, name: str) -> bool:
        # Where it is, without a look at all others for each of them; where it is not, the look says whether one can.
        return is_name(name) and os.path.isdir(self.path / name) or name in self.names()

    def fetch(self, name: str) -> None:
        """It is here."""

    def release(self, name: str) -> None:
        """It stays here."""

    def outline(self, name: str) -> AbstractContextManager[Path]:
        return nullcontext(self.path)

    def fingerprint(self, name: str) -> Hashable:
        found = []
        for folder, _, files in os.walk(self.path / name, followlinks=True):
            for file in files:
                path = os.path.join(folder, file)
                try:
                    status = os.stat(path)
                except OSError:                     # it is gone meanwhile, or a link to nothing
                    continue
                found.append((path, status.st_size, status.st_mtime_ns, status.st_ino))
        return tuple(sorted(found))

    def close(self) -> None:
        """It holds nothing."""


def names_in(places: Iterable[Place]) -> list[str]:
    """The models of several places, as often as there is a place that has them. Raises RepositoryError if one cannot
    be read."""
    return [name for place in places for name in place.names()]


def place_of(places: Sequence[Place], name: str) -> Place:
    """The place that has a model. Raises UnknownModelError; RepositoryError if more than one has it."""
    found = [place for place in places if place.has(name)]              # keeps "../x" inside
    if not found:
        raise UnknownModelError(f"model '{name}' is not in the repository: there is no folder {name} in "
                                f"{', '.join(map(str, places))}")
    if len(found) > 1:
        raise RepositoryError(f"{AMBIGUOUS}: '{name}' is in {' and in '.join(map(str, found))}; rename one of them")
    return found[0]
