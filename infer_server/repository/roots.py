"""Locations of model repositories: local folders, and remote stores with local copies."""
from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from infer_server.config.paths import is_name
from infer_server.errors import RepositoryError, UnknownModelError

AMBIGUOUS = "model appears in two or more repositories"         # Triton's message


class Durations:
    """Number and sum of the durations of something that is done on several threads."""

    def __init__(self) -> None:
        self.count, self.secs = 0, 0.0
        self._lock = threading.Lock()

    def add(self, secs: float) -> None:
        with self._lock:
            self.count, self.secs = self.count + 1, self.secs + secs


class RepositoryRoot(ABC):
    """Repository with folders <model>/<version>/<file>. Its methods block and may be called on any thread."""
    path: Path                          # local folder to read models from: the repository itself, or the copies
    outlines_models: bool               # True if outline() includes the contents of model files
    is_remote = False                   # True if models are copied
    is_reachable = True                 # False if the last call to remote storage failed

    def __init__(self) -> None:
        self.fetched = Durations()      # of models that were copied

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of the models. Raises RepositoryError if the repository cannot be read."""

    def known(self) -> list[str]:
        """Return names(), or the models with local copies while remote storage is unreachable.

        Raises RepositoryError if there are none.
        """
        return self.names()

    def has(self, name: str) -> bool:
        """Return True if a model of this name exists. Raises RepositoryError if the repository cannot be read."""
        return name in self.names()

    @abstractmethod
    def fetch(self, name: str) -> None:
        """Update the local copy path/<name> and keep it until `release`.

        Raises
        ------
        RepositoryError
            The model cannot be copied.
        FetchError
            The model cannot be copied now; a retry may succeed.
        """

    @abstractmethod
    def release(self, name: str) -> None:
        """Allow the local copy of an unloaded model to be evicted. Does not block."""

    @abstractmethod
    def outline(self, name: str) -> AbstractContextManager[Path]:
        """Return a folder with <name>: its configuration, the files that this refers to, and model files.

        Model files may have no contents; see `outlines_models`.

        Raises
        ------
        RepositoryError
            The repository cannot be read.
        """

    @abstractmethod
    def fingerprint(self, name: str) -> Hashable:
        """Return a value that changes when a file of the model changes. Raises RepositoryError."""

    @abstractmethod
    def close(self) -> None:
        """Release the lock on the local copies. The object is not used again."""


class LocalFolder(RepositoryRoot):
    """Model repository in a local folder."""
    outlines_models = True

    def __init__(self, path: Path) -> None:
        super().__init__()
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
        # Check for the folder first; names() lists the whole repository, and raises if it cannot be read.
        return is_name(name) and os.path.isdir(self.path / name) or name in self.names()

    def fetch(self, name: str) -> None:
        """Do nothing: the files are local."""

    def release(self, name: str) -> None:
        """Do nothing: there is no copy."""

    def outline(self, name: str) -> AbstractContextManager[Path]:
        return nullcontext(self.path)

    def fingerprint(self, name: str) -> Hashable:
        entries = []
        for folder, _, files in os.walk(self.path / name, followlinks=True):
            for file in files:
                path = os.path.join(folder, file)
                try:
                    status = os.stat(path)
                except OSError:                     # removed in the meantime, or a broken link
                    continue
                entries.append((path, status.st_size, status.st_mtime_ns, status.st_ino))
        return tuple(sorted(entries))

    def close(self) -> None:
        """Do nothing: there is no lock."""


def model_names(roots: Iterable[RepositoryRoot]) -> list[str]:
    """Return the model names of all repositories, with duplicates. Raises RepositoryError if one cannot be read."""
    return [name for root in roots for name in root.known()]


def root_of(roots: Sequence[RepositoryRoot], name: str) -> RepositoryRoot:
    """Return the repository that contains a model.

    Raises
    ------
    UnknownModelError
        No repository contains it.
    RepositoryError
        Several repositories contain it, or one cannot be read.
    """
    matching = [root for root in roots if root.has(name)]           # False for names such as "../x"
    if not matching:
        raise UnknownModelError(f"model '{name}' is not in the repository: there is no folder {name} in "
                                f"{', '.join(map(str, roots))}")
    if len(matching) > 1:
        raise RepositoryError(f"{AMBIGUOUS}: '{name}' is in {' and in '.join(map(str, matching))}; rename one of them")
    return matching[0]
