"""Exchange messages between the server and the process of a Python model: a JSON object and tensors.

Tensors of 64 KiB or more in total are sent in shared memory (a memfd whose descriptor is part of the message): they are
written once, read in place, and freed with the last array that views them. Smaller ones follow the JSON.
"""
from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from infer_server.protocol.codec import DATATYPES, Datatype, InputTensor, encode_raw, from_raw

_HEAD = struct.Struct("<IQ?")           # size of the JSON, size of the tensors, True if they are in shared memory
_SHARED_BYTES = 64 << 10
_ALIGNMENT = 64


class Typed(NamedTuple):
    """Array and the protocol's name of its datatype."""
    datatype: str
    array: NDArray[Any]


Tensors = Mapping[str, Typed]


class ChannelMessage(NamedTuple):
    """Received message: its JSON object and its groups of tensors by name."""
    head: dict[str, Any]
    tensors: list[dict[str, NDArray[Any]]]


class ClosedError(Exception):
    """Raised when the other side has closed the connection."""


class MessageChannel:
    """One end of a connection. send() may be called from any thread, receive() from one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, head: Mapping[str, Any], groups: Iterable[Tensors] = ()) -> None:
        """Send a message.

        Raises
        ------
        ClosedError
            The other process has ended.
        OSError, ValueError
            The tensors cannot be encoded, or there is no shared memory left; nothing was sent.
        """
        raw: list[memoryview] = []
        described, size = [], 0
        for tensors in groups:
            entries = []
            for name, (datatype, array) in tensors.items():
                raw.append(encode_raw(array, DATATYPES[datatype]))
                entries.append([name, datatype, list(array.shape), size, raw[-1].nbytes])
                size += -(-raw[-1].nbytes // _ALIGNMENT) * _ALIGNMENT
            described.append(entries)
        text = json.dumps({**head, "tensors": described}).encode()
        shared = _shared(raw, size) if size >= _SHARED_BYTES else None
        try:
            with self._sending:
                if shared is not None:
                    socket.send_fds(self._connection, [_HEAD.pack(len(text), size, True)], [shared])
                    self._connection.sendall(text)
                else:
                    parts: list[bytes | memoryview] = [_HEAD.pack(len(text), size, False), text]
                    for piece in raw:
                        parts += [piece, bytes(-piece.nbytes % _ALIGNMENT)]
                    self._connection.sendall(b"".join(parts))
        except OSError as error:
            raise ClosedError(str(error)) from error
        finally:
            if shared is not None:
                os.close(shared)

    def receive(self) -> ChannelMessage:
        """Block until the next message arrives. Raises ClosedError."""
        try:
            head, descriptors, _, _ = socket.recv_fds(self._connection, _HEAD.size, 1)
        except OSError as error:
            raise ClosedError(str(error)) from error
        head += bytes(self._read(_HEAD.size - len(head))) if head else b""
        if not head:
            raise ClosedError("the connection was closed")
        length, size, shared = _HEAD.unpack(head)
        message = json.loads(bytes(self._read(length)))
        if shared:
            memory = memoryview(mmap.mmap(descriptors[0], size))
            os.close(descriptors[0])
        else:
            memory = self._read(size)
        return ChannelMessage(message, [{entry[0]: _array(memory, *entry) for entry in group}
                                 for group in message.pop("tensors")])

    def close(self) -> None:
        """Shut down the connection, which ends receive() on both sides."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:                 # the other side has already closed it
            return

    def dispose(self) -> None:
        """Close the socket. Call this once receive() is no longer used."""
        with self._sending:
            self._connection.close()

    def _read(self, size: int) -> memoryview:
        buffer = memoryview(bytearray(size))
        at = 0
        while at < size:
            try:
                count = self._connection.recv_into(buffer[at:])
            except OSError as error:
                raise ClosedError(str(error)) from error
            if not count:
                raise ClosedError("the connection was closed within a message")
            at += count
        return buffer


def _shared(raw: Iterable[memoryview], size: int) -> int:
    """Write tensors to new shared memory and return its descriptor. Raises OSError if there is none left."""
    descriptor = os.memfd_create("tensors", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        with mmap.mmap(descriptor, size) as memory:
            at = 0
            for piece in raw:
                memory[at:at + piece.nbytes] = piece
                at += -(-piece.nbytes // _ALIGNMENT) * _ALIGNMENT
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _array(memory: memoryview, name: str, datatype: str, shape: list[int], at: int, size: int) -> NDArray[Any]:
    return from_raw(InputTensor(name, DATATYPES[datatype], tuple(shape)), memory[at:at + size])


def datatype_of(array: NDArray[Any]) -> Datatype:
    """Return the protocol's datatype of an array. Raises ValueError if there is none."""
    if array.dtype.kind in "OSU":
        return DATATYPES["BYTES"]
    for datatype in DATATYPES.values():
        if datatype.array == array.dtype.newbyteorder("<") and datatype.name != "BF16":
            return datatype
    raise ValueError(f"the protocol has no datatype for arrays of {array.dtype}")


def typed(array: NDArray[Any], datatype: str = "") -> Typed:
    """Return an array with its datatype as it is sent; arrays of str and bytes become object arrays."""
    name = datatype or datatype_of(array).name
    return Typed(name, array.astype(np.object_) if array.dtype.kind in "SU" else array)
