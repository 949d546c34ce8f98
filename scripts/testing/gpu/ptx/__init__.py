"""Interpreter of PTX on the CPU with strict checks, for tests of GPU kernels on machines without a GPU.

It executes the PTX text that the assembler or the driver compiles to machine code. A register is a NumPy array with
an element for each thread of the blocks that run together (up to LANES threads); an instruction is one NumPy operation.
Divergent threads form groups; the group with the lowest instruction address runs first, so that they converge again.

It raises Fault for errors that a GPU may not detect: an access outside of an allocation, or not aligned; a read of
shared memory that was not written, or whose asynchronous copy is pending; two threads at one word of shared memory
without a barrier between them, unless both only read; two threads of a launch at one byte of global memory, unless both
only read; a barrier, or a warp's instruction, that not all of its threads reach; an unknown instruction or modifier.
Asynchronous copies (cp.async) complete as late as possible: at the instruction that waits for them.

Only instructions of our kernels are implemented, after the PTX ISA. Products of halves are summed in float64 and
rounded once; tensor cores round differently, so floats are compared with a tolerance, integers bit for bit.
"""
