"""Files of calibration data that cannot be read: named, counted, and left out if the user allows it."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeVar

from infer_server.engines.errors import CalibrationError

SHOWN = 5           # files named in a message
T = TypeVar("T")


@dataclass
class CorruptFiles:
    """Corrupt files of a source.

    Attributes
    ----------
    allowed : bool
        True: corrupt files are left out and counted. False: they are an error.
    reasons : dict of Path to str
        Files that were left out, each with the error that reading it raised.
    """
    allowed: bool = False
    reasons: dict[Path, str] = field(default_factory=dict)

    def readable(self, files: Sequence[Path], read: Callable[[Path], T]) -> Iterator[tuple[Path, T]]:
        """Yield each file that can be read, with its content.

        If corrupt files are not allowed, the first one raises CalibrationError, after the files behind it were read to
        count all that are corrupt.
        """
        remaining = iter(files)
        for file in remaining:
            try:
                content = read(file)
            except CalibrationError as error:
                self.reasons[file] = str(error)
                if not self.allowed:
                    raise self._error(remaining, read, len(files)) from error
                continue
            yield file, content

    @property
    def note(self) -> str:
        """Warning about the files that were left out; "" if there are none."""
        return f"{self._named()} and left out" if self.reasons else ""

    def _error(self, remaining: Iterator[Path], read: Callable[[Path], T], count: int) -> CalibrationError:
        for file in remaining:
            try:
                read(file)
            except CalibrationError as error:
                self.reasons[file] = str(error)
        reasons, self.reasons = self.reasons, {}
        lines = "\n".join(f"  {reason}" for reason in islice(reasons.values(), SHOWN))
        more = f"\n  and {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
        return CalibrationError(f"{len(reasons)} of {count} files of the calibration data cannot be read; repair or "
                                f"remove them, or leave them out with --allow-corrupt:\n{lines}{more}")

    def _named(self) -> str:
        names = ", ".join(file.name for file in islice(self.reasons, SHOWN)) + ", ..." * (len(self.reasons) > SHOWN)
        return f"{len(self.reasons)} files of the calibration data could not be read ({names})"
