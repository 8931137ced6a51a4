"""What the kernels' prices need to know of them. Of this folder it alone is imported without triton."""

from __future__ import annotations

from dataclasses import dataclass

# sort.py: most R, and most R times bins, for which every program counts all ids.
ALONE_ROUTES, ALONE_COUNTS = 2048, 1 << 18

# hopper.py, of a tile's rows: those that four warps multiply; a unit of those that are a product's columns.
PART, UNIT = 64, 32
# Rows of a tile up to which reading the weights is its time: they then come 256 bytes of each row at once, not 128.
PAIRED = 80


@dataclass(frozen=True, kw_only=True)
class Height:
    """Of hopper.py's tiles with so many rows at most. part: rows of those that may be missing. buffers: as many as fit.
    registers: of a thread that multiplies. gathering: of one that multiplies, and of one that gathers, where rows are
    gathered."""

    part: int
    buffers: int
    registers: int
    gathering: tuple[int, int]

    @property
    def as_columns(self) -> bool:
        """Whether the rows are the products' columns (hopper_swapped.py)."""
        return self.part == UNIT


HEIGHTS = {
    64: Height(part=UNIT, buffers=5, registers=232, gathering=(216, 56)),
    128: Height(part=PART, buffers=4, registers=232, gathering=(216, 56)),
    160: Height(part=UNIT, buffers=4, registers=240, gathering=(232, 40)),
    192: Height(part=PART, buffers=3, registers=160, gathering=(160, 32)),
}
