"""Memory that other processes read in place, gathered into huge pages: the kernel then reads it about twice as fast.

Where in the flow: engine (a job's buffer) -> **pages** -> kernel; only where peers share the host.

``process_vm_readv`` looks every page up on its own.  Measured with 25 MB: 4.2 ms from pages of 4 KB, 2.2 ms from pages of 2 MB.
The kernel gathers them when asked to (``MADV_COLLAPSE``, Linux 6.1), at about the price of one copy.

Invariants: contents don't change, and neither does the memory in use (only whole huge pages inside the buffer are asked for,
and a buffer's pages are all there); memory that is used once is left alone; whatever the kernel refuses stays as it was.
"""

from __future__ import annotations

import ctypes

_HUGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25
_MOST_BUFFERS = 1024

_libc = ctypes.CDLL(None, use_errno=True)


class HugePages:
    """Which buffers were seen, and which are gathered already."""

    def __init__(self) -> None:
        self._gathered: dict[tuple[int, int], bool] = {}

    def used(self, address: int, nbytes: int) -> bool:
        """A buffer is about to be read by others.

        Returns
        -------
        bool
            Whether it was gathered now: at its second use, so that memory that comes and goes isn't moved.
        """
        key = (address, nbytes)
        gathered = self._gathered.get(key)
        if gathered is None:
            if len(self._gathered) >= _MOST_BUFFERS:
                self._gathered.clear()
            self._gathered[key] = False
            return False
        if gathered:
            return False
        self._gathered[key] = True
        return gather(address, nbytes)


def gather(address: int, nbytes: int) -> bool:
    """Ask the kernel for huge pages where a whole one fits; False: none fits, or the kernel doesn't do it."""
    first = -(-address // _HUGE_BYTES) * _HUGE_BYTES
    last = (address + nbytes) // _HUGE_BYTES * _HUGE_BYTES
    if last <= first:
        return False
    done: int = _libc.madvise(
        ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(_MADV_COLLAPSE)
    )
    return done == 0
