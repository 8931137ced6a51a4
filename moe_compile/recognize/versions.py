"""How often each memory was written, in program order: facts hold for a version, not for a node."""

from __future__ import annotations

import torch.fx

from ..nodes import storage


class Versions:
    """Counts writes per storage."""

    def __init__(self) -> None:
        self._writes: dict[int, int] = {}

    def of(self, node: torch.fx.Node) -> int:
        """Writes so far to the memory of `node`."""
        return self._writes.get(storage(node), 0) if self._writes else 0

    def write(self, node: torch.fx.Node) -> None:
        key = storage(node)
        self._writes[key] = self._writes.get(key, 0) + 1
