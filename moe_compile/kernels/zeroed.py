"""Words of device memory that are zero between launches, for kernels whose programs count what the others have done.

In: a device. Out: eight int32 words, aligned to 16 bytes, for one launch on the current stream, which leaves them zero.
Invariant: launches that may run side by side have different words. Those of a stream wait for each other (launch.py)
and share them. A captured launch keeps words of its own: its graph may be replayed on any stream, though not beside
itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import lru_cache

import torch

from .lasting import lasting

WORDS = 8
_LAUNCHES = 1 << 15  # whose words are made together: 1 MiB
_PER_THREAD = 2  # the raw stream that is another one in every thread


class Zeroed:
    """The words of a device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        self.made: list[torch.Tensor] = []  # [_LAUNCHES, WORDS] each
        self.spare: Iterator[torch.Tensor] = iter(())
        self.of_stream: dict[tuple[int, int], torch.Tensor] = {}
        self.lock = threading.Lock()

    def __call__(self, stream: int | None = None) -> torch.Tensor:
        """int32 [WORDS]. stream: the current one, if the caller knows it."""
        if not self.cuda:
            key = (0, threading.get_ident())
        elif torch._C._cuda_isCurrentStreamCapturing():
            return self._next(grow=False)
        else:
            stream = torch._C._cuda_getCurrentRawStream(self.device.index) if stream is None else stream
            key = (stream, threading.get_ident() if stream == _PER_THREAD else 0)
        found = self.of_stream.get(key)
        if found is None:
            found = self.of_stream[key] = self._next(grow=True)
        return found

    def _next(self, grow: bool) -> torch.Tensor:
        with self.lock:
            found = next(self.spare, None)
            if found is None and grow:
                shape = _LAUNCHES, WORDS
                memory = lasting(lambda: torch.zeros(shape, dtype=torch.int32, device=self.device), self.device)
                self.made.append(memory)
                self.spare = (memory[i] for i in range(_LAUNCHES))
                found = next(self.spare)
        # a captured launch for which none are left: zeroed at each replay
        return torch.zeros(WORDS, dtype=torch.int32, device=self.device) if found is None else found

    def owns(self, t: torch.Tensor) -> bool:
        """Whether `t` has words from here."""
        return any(m.data_ptr() <= t.data_ptr() < m.data_ptr() + m.nbytes for m in self.made)


zeroed = lru_cache(None)(Zeroed)
