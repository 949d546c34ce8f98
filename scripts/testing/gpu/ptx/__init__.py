"""Runs PTX on the CPU, exactly and suspiciously: how GPU kernels are tested where no GPU is.

What is executed is the text that an assembler, or the driver, makes machine code of. A register is a NumPy array with
an element for each thread of the grid (of as many blocks as fit LANES); an instruction is one NumPy operation. Threads
that diverge form groups; the group that is furthest behind runs first, so that they meet again.

Suspiciously: it refuses what a GPU may let pass. An access outside what was allocated, or not aligned; a read of shared
memory that nothing wrote, or that is still on its way; two threads at one word of shared memory without a barrier
between them, unless both only read; two threads of a launch at one byte of global memory, unless both only read; a
barrier, or an instruction of a whole warp, that not all of its threads reach; an instruction, or a modifier of one,
that is not known here. Copies (cp.async) land as late as the program allows: at the wait that asks for them.

Only what our kernels use is here. Meanings: the PTX ISA. Products of halves are summed in float64 and rounded once;
tensor cores round otherwise, so floats are compared with a tolerance, integers bit for bit.
"""
