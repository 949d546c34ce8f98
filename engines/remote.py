"""Remote file systems behind fsspec (s3://, gs://, sftp://, ...), and time limits for calls to them."""
from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from infer_server.engines.errors import ConfigError

T = TypeVar("T")


def open_file_system(address: str, extra: str = "remote") -> tuple[Any, str]:
    """Return the fsspec file system of an address, and the path within it.

    Parameters
    ----------
    address : str
        Address with a scheme that fsspec supports, such as s3://bucket/folder.
    extra : str
        Extra of infer-server that installs fsspec, for the error.

    Raises
    ------
    ConfigError
        fsspec or the package for the scheme is not installed, or the scheme is unknown.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ConfigError(f"{shown(address)}: fsspec is not installed; install infer-server[{extra}], and what it "
                          "needs for such addresses (s3fs, gcsfs, adlfs, ...)") from error
    try:
        files, root = url_to_fs(address, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{shown(address)}: {error}") from error
    return files, root.rstrip("/")


def shown(address: str) -> str:
    """Return an address without a user name and a password, for messages."""
    return re.sub(r"//[^/@]*@", "//", address)


def within(secs: float, function: Callable[[], T]) -> T:
    """Return or raise what a function does, on a thread, in a limited time.

    File systems have time limits of their own, of minutes and with several tries; some have none.

    Raises
    ------
    TimeoutError
        The function did not return in time. It goes on in a daemon thread, which does not keep the process alive.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:          # raised for the caller
            outcome.set_exception(error)

    threading.Thread(target=run, name=f"remote {getattr(function, '__qualname__', '')}", daemon=True).start()
    try:
        return outcome.result(secs)
    except TimeoutError as error:
        if outcome.done():
            raise
        raise TimeoutError(f"no response within {secs:g} s") from error
