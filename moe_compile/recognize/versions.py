"""How often each memory was written, in program order: facts hold for a version, not for a node."""

from __future__ import annotations

import torch
import torch.fx

from ..nodes import fake, memory, storage


class Versions:
    """Counts writes per storage."""

    def __init__(self) -> None:
        self._writes: dict[int | None, int] = {}
        self._memory: dict[torch.fx.Node, int] = {}

    def of(self, node: torch.fx.Node) -> int:
        """Writes so far to the memory of `node`; of several results, to that of any."""
        if not self._writes:
            return 0
        key = self._memory.get(node)
        if key is not None:
            return self._writes.get(key, 0)
        value = fake(node)
        if isinstance(value, (tuple, list)):
            memories = {memory(v) for v in value if isinstance(v, torch.Tensor)}
            return sum(self._writes[m] for m in memories if m in self._writes)
        key = self._memory[node] = storage(node)
        return self._writes.get(key, 0)

    def write(self, node: torch.fx.Node) -> None:
        key = storage(node)
        self._writes[key] = self._writes.get(key, 0) + 1
