"""Messages between the server and the process of a Python model: a JSON object, and tensors.

Tensors of together 64 KiB and more lie in shared memory (a memfd whose descriptor travels with the message): written
once, read where they lie, freed with the last array that views them. Smaller ones follow the JSON.
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

_HEAD = struct.Struct("<IQ?")           # bytes of the JSON, bytes of the tensors, whether those lie in shared memory
_SHARED_BYTES = 64 << 10
_ALIGNMENT = 64


class Typed(NamedTuple):
    """An array and the protocol's name of its elements' type."""
    datatype: str
    array: NDArray[Any]


Tensors = Mapping[str, Typed]


class Message(NamedTuple):
    head: dict[str, Any]
    tensors: list[dict[str, NDArray[Any]]]      # groups of tensors by name


class ClosedError(Exception):
    """The other side is gone."""


class Channel:
    """One end of a connection. send() from any thread; receive() by one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, head: Mapping[str, Any], groups: Iterable[Tensors] = ()) -> None:
        """Raises ClosedError; OSError, or what else keeps tensors from being written, where nothing was sent."""
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

    def receive(self) -> Message:
        """Blocks for the next message. Raises ClosedError."""
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
        return Message(message, [{entry[0]: _array(memory, *entry) for entry in group}
                                 for group in message.pop("tensors")])

    def close(self) -> None:
        """Ends receive() on both sides."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:                 # the other side was faster
            return

    def dispose(self) -> None:
        """Gives the descriptor back, once nobody receives any more."""
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
    """The descriptor of shared memory that holds tensors. Raises OSError: there is none left."""
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
    """The protocol's type of an array. Raises ValueError: it has none."""
    if array.dtype.kind in "OSU":
        return DATATYPES["BYTES"]
    for datatype in DATATYPES.values():
        if datatype.array == array.dtype.newbyteorder("<") and datatype.name != "BF16":
            return datatype
    raise ValueError(f"the protocol has no datatype for arrays of {array.dtype}")


def typed(array: NDArray[Any], datatype: str = "") -> Typed:
    """An array as it is sent; text becomes objects."""
    name = datatype or datatype_of(array).name
    return Typed(name, array.astype(np.object_) if array.dtype.kind in "SU" else array)
