"""Kernels for CPUs, compiled by LLVM when they are first needed: no compiler has to be installed.

::

    jit      this machine's processor; compiles LLVM IR to the address of a function
    kept     compiled code on disk from an earlier start
    asm      writes the IR: loops, loads and stores, over values (with types and operators) and arithmetic
    language    Triton's, on top of asm and blocks: kernels shared with GPUs (rows, rotate, trees)
    choice   masks of tokens, noise, lists of the largest: the parts of kernels that choose tokens
    walk     the code that walks a list of (kernel, arguments), with a barrier after each entry
    threads  the threads that walk it, and how many are used
    launch   runs one entry now, or adds it to the current recording
    ...      one file for each op of verifier/ops that has its own kernel here; attention also has units and spans

The order of every sum of a row depends only on its own positions, not on other rows (docs/same-tokens.md).
"""
