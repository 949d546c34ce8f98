"""Emulation of the functions of libcuda that the runtime calls, on the PTX machine: as strict and lazy as allowed.

Strict: an argument has the very type of the API's prototype (a number too narrow is garbage on a real stack); a call
needs its context on the calling thread; handles are known ones; grids, blocks and shared memory keep within the limits;
calls that a capture forbids end it. Lazy: the work of a stream runs when it is waited for. So do a memset and the
second half of a copy from pageable memory, in the legacy stream, for which other streams do not wait: NVIDIA's "API
synchronization behavior" allows all of it.
"""
from scripts.testing.gpu.libcuda import devices, execution, memory  # noqa: F401  (fill CALLS)
