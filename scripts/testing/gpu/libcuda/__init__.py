"""libcuda, as far as the runtime calls it, for a GPU that the PTX machine plays: as strict and as lazy as one may be.

Strict: an argument has the very type of the API's prototype (a number too narrow is garbage on a real stack); a call
needs its context on the calling thread; handles are known ones; grids, blocks and shared memory keep within the limits;
what a capture forbids ends it. Lazy: what is put into a stream runs when somebody waits for that stream. So do a memset
and the last way of a copy from memory that is not pinned, in the legacy stream, for which the others do not wait:
NVIDIA's "API synchronization behavior" allows all of it.
"""
from scripts.testing.gpu.libcuda import devices, execution, memory  # noqa: F401  (fill CALLS)
