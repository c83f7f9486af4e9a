"""Weights in huge pages, where the system has them: a step reads every weight, mostly once, and pages of 4 KiB take
longer by the look-ups of their addresses (3 to 9 % of a step, bench/LOG.md).

Memory of our own is advised before it is written to. A mapped file is in huge pages where these read it from disk: on
ext4 since Linux 6.16, on XFS since 5.18; they are shared by all who map it. What a file's writer left in memory may be
in small ones.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from contextlib import suppress

from torch import Tensor

_SIZE = 2 << 20
#: Linux's flag of mappings that no memory is set aside for, though they may be written to.
_NO_RESERVE = 0x4000
#: Linux's advice to use huge pages, and not to.
_HUGEPAGE, _SMALL, _madvise = 14, 15, getattr(ctypes.CDLL(None), "madvise", None)


def advise(memory: Tensor) -> None:
    """Ask for huge pages for the whole ones within memory on a CPU that nothing was written to yet."""
    begin = -(-memory.data_ptr() // _SIZE) * _SIZE
    size = (memory.data_ptr() + memory.nbytes - begin) // _SIZE * _SIZE
    if size > 0 and _madvise is not None:
        _madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), _HUGEPAGE)  # refused where there are none


def advise_rows(table: Tensor) -> None:
    """Ask for small pages for a mapped table of which some rows are read: of huge ones the disk would read 2 MiB for
    each row."""
    begin = table.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and _madvise is not None:
        _madvise(ctypes.c_void_p(begin), ctypes.c_size_t(table.data_ptr() + table.nbytes - begin), _SMALL)


def mapped(file: int) -> mmap.mmap:
    """A private mapping of an open file, which may be larger than the memory, for which huge pages are requested.
    Writes stay in this process. Raises ValueError if it is empty."""
    flags = mmap.MAP_PRIVATE | (_NO_RESERVE if sys.platform == "linux" else 0)
    memory = mmap.mmap(file, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the system has none
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def remap(file: int) -> None:
    """Flush an open file to disk and drop it from memory, so that the next mapping reads it in huge pages."""
    os.fsync(file)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
