"""What a call does, step by step, as providers state it and the cost model prices it.

A `Work` is the launches of one tactic, in order, free of T: the same Work is priced at any token count, so two of them
can be solved for the T where they cost the same. Sizes are of the spec, tiles of the tactic; nothing here is measured.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tiled:
    """A grouped linear on tensor cores: a program computes M routes of one expert x N columns, walking K of the depth.

    columns, depth: of y[r, columns] = x[r, depth] @ W[e]^T. matrices: weight matrices read side by side for a column (2
    with a gate), in so many separate `products`. weight_bytes: of one weight element (17/32 for MXFP4). dtype: of the
    operands of the product. part: rows of a product; those parts of a tile that have no rows are not multiplied (0: all
    M are). paired: rows of a tile up to which two steps of K are read at once. swap: the weights are the tall operand
    of the tensor cores, and M the narrow one. along: "depth" or "columns", the axis on which weights are contiguous.
    out_bytes: stored for each element of y. ahead: a program takes tile after tile, and fetches for the next one before
    it has stored the last.
    """

    name: str
    columns: int
    depth: int
    matrices: int
    M: int
    N: int
    K: int
    warps: int
    stages: int
    products: int = 1
    part: int = 0
    paired: int = 0
    swap: bool = False
    tma: bool = False
    ahead: bool = False
    along: str = "depth"
    dtype: str = "bf16"
    x_bytes: float = 2
    weight_bytes: float = 2
    out_bytes: float = 2


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """A linear by FMAs, weights streamed for each route or token: a program holds N weight rows x K columns at a time.

    slots: 0 where a program serves one route; else it serves a token and holds the rows of `slots` routes at once.
    Other fields as in Tiled. An expert that two routes share is read for each.
    """

    name: str
    columns: int
    depth: int
    matrices: int
    N: int
    K: int
    warps: int
    slots: int = 0
    along: str = "depth"
    x_bytes: float = 2
    weight_bytes: float = 2
    out_bytes: float = 2


@dataclass(frozen=True, kw_only=True)
class Library:
    """A grouped linear in a library whose tiles aren't known: bytes and FLOP alone price it. Fields as in Tiled."""

    name: str
    columns: int
    depth: int
    matrices: int
    dtype: str = "bf16"
    x_bytes: float = 2
    weight_bytes: float = 2
    out_bytes: float = 2


@dataclass(frozen=True, kw_only=True)
class Sorted:
    """Routes into expert order, in one launch: up to `alone` routes each program counts all, beyond they share that."""

    name: str = "sort"
    alone: int


@dataclass(frozen=True, kw_only=True)
class Passed:
    """Launches that move bytes: `kernels` and more an active expert; bytes a token, route, active expert, call."""

    name: str
    kernels: int = 1
    token_bytes: float = 0
    route_bytes: float = 0
    expert_bytes: float = 0
    call_bytes: float = 0
    expert_launches: float = 0


Step = Tiled | Streamed | Library | Sorted | Passed


@dataclass(frozen=True, kw_only=True)
class Work:
    """The steps of a tactic."""

    steps: tuple[Step, ...]
