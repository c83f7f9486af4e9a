"""Kernels for processors, made by LLVM when they are first needed: no compiler is needed.

::

    jit      the processor of this machine; text of LLVM's language becomes the address of a function
    kept     finds that on disk, where an earlier start made it
    asm      writes that text: loops, loads and stores, over values (with types and operators) and arithmetic
    language    Triton's, written with asm and blocks: kernels whose body a GPU has too (rows, rotate, trees)
    choice   masks of tokens, noise, lists of the largest: what kernels that choose tokens are made of
    walk     the code that walks a list of (kernel, arguments), a barrier behind each entry
    threads  the threads that do, and who may use them
    launch   runs one entry now, or adds it to the recording that is being made
    ...      one file for each op of verifier/ops that has a kernel of its own here; attention has units and spans
             beside it

Every sum of a row runs in an order that its own positions decide, whatever stands beside it (docs/same-tokens.md).
"""
