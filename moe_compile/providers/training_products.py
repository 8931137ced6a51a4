"""The products that training is made of, and which kernels make them: `Products` any device's, `HopperProducts` those
for compute capability 9.0 where they read the operands.

In: ExpertsSpec, the weights, the routes of a call, and the tiles. Out: each product as its kernel's file says; what is
kept of the first linear is R x G (`keep=all`), its last I columns (`half`) or nothing (`none`).
Invariants: both make the same rows in the same order; they may differ in rounding. Rows past the last route's are
zeros where Products reads them (outer.py), and anything where HopperProducts does: a call uses one of them throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from ..activation import Activation, derivative
from ..hardware import Device
from ..operands import ExpertWeights
from ..spec import ELEMENT_BYTES, ExpertsSpec
from .triton_grouped import hopper, shared_limit
from .triton_hopper import FEWEST_ROWS, TritonHopper, gathers

if TYPE_CHECKING:
    import torch

    from ..kernels.beside import Beside
    from ..kernels.grouped import Tile
    from ..kernels.hopper import Persistent
    from ..kernels.outer import Rows


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """The tiles of each product: of the forward, and of the gradients by the activation, tokens and weights."""

    first: Tile
    second: Tile
    act: Tile
    dx: Tile
    ddown: Tile
    dgate_up: Tile
    whole: bool = False  # as of outer
    hopper: bool = False  # HopperProducts make them, where they can


def tiles_of(spec: ExpertsSpec, T: int, device: Device, train: str = "auto") -> Tiles:
    """The tiles for T tokens: the same objects for the same kind of T, since kernels are bound by tile. train: as of
    `moe.train`."""
    rows = T * spec.K / spec.E
    tiles = _tiles(spec, rows > FEWEST_ROWS, rows > 512, device)
    return replace(tiles, hopper=False) if train == "grouped" else tiles


@lru_cache(1024)
def _tiles(spec: ExpertsSpec, tall: bool, whole: bool, device: Device) -> Tiles:
    """Of 128 rows where `tall`, else 64; whole as of outer."""
    from ..kernels.grouped import Tile

    if spec.x == "f32":  # FMA dots: small tiles, the accumulators are the registers
        small = Tile(BLOCK_M=32, BLOCK_N=32, BLOCK_K=32, warps=4, stages=2)
        return Tiles(first=small, second=small, act=small, dx=small, ddown=small, dgate_up=small)
    tma, most = int(hopper(device)), shared_limit(device)

    def tile(m: int, n: int, warps: int, stages: int, swap: int = 0, width: int = 1) -> Tile:
        stages = min(stages, max(2, most // (64 * (m + width * n) * ELEMENT_BYTES[spec.x])))
        return Tile(BLOCK_M=m, BLOCK_N=n, BLOCK_K=64, warps=warps, stages=stages, SWAP=swap, TMA=tma)

    def sums(n: int, k: int, warps: int, buffers: int, whole: bool) -> Tile:
        buffers = min(buffers, max(2, most // (k * (128 + n) * ELEMENT_BYTES[spec.x])))
        stages = 2 * buffers - 1 if whole else buffers
        return Tile(BLOCK_M=128, BLOCK_N=n, BLOCK_K=k, warps=warps, stages=stages, TMA=tma)

    # Few routes an expert (qwen3_30b T=4096, 256): many small programs (ddown 306 us; 128 x 256: 351). Many (mixtral
    # T=16384, 4096): wide ones, whose steps ask for no end (ddown 6087 us, asking 6663; H200, 2026-11-30).
    ddown = sums(256, 64, 8, 4, True) if whole else sums(128, 64, 4, 2, False)
    dgate_up = ddown if whole else sums(128, 32, 4, 4, False)
    if not tall:
        narrow = tile(64, 128, 4, 3)
        first = tile(64, 64, 4, 3, width=spec.G // spec.I)
        return Tiles(first=first, second=narrow, act=narrow, dx=narrow, ddown=ddown, dgate_up=dgate_up)
    wide = tile(128, 256, 8, 4)
    first = tile(128, 128, 8, 4, swap=int(spec.gate_up.storage == "EGH"), width=spec.G // spec.I)
    # two programs a processor overlap the activation's arithmetic (T=16384: 1068 us; 128 x 256: 1140)
    act = tile(128, 128, 4, 3, swap=1)
    return Tiles(
        first=first, second=wide, act=act, dx=wide, ddown=ddown, dgate_up=dgate_up, whole=whole,
        hopper=bool(TritonHopper().available() and TritonHopper().supports(spec, device)),
    )  # fmt: skip


def kept_columns(spec: ExpertsSpec, keep: str) -> int:
    """How many columns are kept: `half` has a meaning where the halves lie in blocks."""
    blocks = spec.gated and not spec.gate_up.halves.endswith("interleaved")
    return {"all": spec.G, "half": spec.I if blocks else spec.G, "none": 0}[keep]


def products(
    spec: ExpertsSpec, x_TH: torch.Tensor, ids_TK: torch.Tensor, w_TK: torch.Tensor | None, p: ExpertWeights,
    tiles: Tiles, order: torch.Tensor | None = None,
) -> Products:  # fmt: skip
    """Those of `tiles` where they can read these very weights. order: the schedule's plan, where it is known."""
    able = tiles.hopper and TritonHopper().reads(p)
    return (HopperProducts if able else Products)(spec, x_TH, ids_TK, w_TK, p, tiles, order)


class Products:
    """The products of one call, by kernels.kept, grouped, backward and outer."""

    def __init__(
        self, spec: ExpertsSpec, x_TH: torch.Tensor, ids_TK: torch.Tensor, w_TK: torch.Tensor | None, p: ExpertWeights,
        tiles: Tiles, order: torch.Tensor | None,
    ) -> None:  # fmt: skip
        from ..kernels.sort import Schedule, sort_routes, tile_bound

        self.spec, self.p, self.tiles, self.ids_TK = spec, p, tiles, ids_TK
        self.x_TH = x_TH if x_TH.stride(1) == 1 else x_TH.contiguous()
        self.before = w_TK if spec.weight == "input" else None
        self.after = w_TK if spec.weight == "output" else None
        self.k_major, self.down_k_major = spec.gate_up.storage == "EGH", spec.down == "EHI"
        rows, R = tiles.first.BLOCK_M, ids_TK.numel()
        if order is None:
            self.schedule = sort_routes(ids_TK, spec.E, rows, inverse=True)
        else:
            self.schedule = Schedule(order, tile_bound(R, spec.E, rows), R)
        self.ends = self.schedule.ends(spec.E)

    @cached_property
    def acts(self) -> tuple[Any, Any, Any]:
        """The activation and its derivatives by gate and up, for kernels."""
        from ..kernels.epilogue import epilogue

        expr = self.spec.act.expr
        return epilogue(expr), epilogue(derivative(expr, "gate")), epilogue(derivative(expr, "up"))

    def first(self, keep: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(what `keep` keeps of gate_up_RG, act_RI)."""
        from ..kernels.kept import fc1_kept

        p, columns, tile = self.p, kept_columns(self.spec, keep), self.tiles.first
        kept, act_RI = fc1_kept(
            self.x_TH, p.gate_up, p.gate_up_bias, self.before, self.schedule, self.acts[0], tile=tile, **self._first
        )
        if columns < kept.shape[1]:
            kept = kept[:, -columns:].contiguous() if columns else kept.new_empty((kept.shape[0], 0))
        return kept, act_RI

    @property
    def _first(self) -> dict[str, Any]:
        spec = self.spec
        sizes, halves = (spec.H, spec.I), spec.gate_up.halves
        return {"choices": spec.K, "sizes": sizes, "halves": halves, "k_major": self.k_major}

    def halves(self, kept: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """gate_up_RG as `act` takes it, from what was kept of it: itself, or computed again."""
        return (self.first("all")[0] if kept is None or kept.shape[1] < self.spec.G else kept,)

    def second(self, act_RI: torch.Tensor) -> torch.Tensor:
        """y_RH = down[e] act (+ bias), in route order."""
        from ..kernels.grouped import fc2

        p = self.p
        return fc2(act_RI, p.down, p.down_bias, self.schedule, k_major=self.down_k_major, tile=self.tiles.second)

    def act(
        self, dout_TH: torch.Tensor, halves: tuple[torch.Tensor, ...], parts: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(dgate_up_RG, s_act_RI, parts of each route's dv . act) as of kernels.backward."""
        from ..kernels.backward import act_backward

        return act_backward(
            dout_TH, self.p.down, halves[0], self.after, self.schedule, self.acts, choices=self.spec.K,
            halves=self.spec.gate_up.halves, k_major=self.down_k_major, parts=parts, tile=self.tiles.act,
        )  # fmt: skip

    def dx(self, dgate_up_RG: torch.Tensor, sums: bool) -> torch.Tensor:
        """dx_RH = gate_up[e]^T dgate_up, in route order. sums: `dgate_up` is asked for next."""
        from ..kernels.backward import dx_routes
        from ..kernels.grouped import fc2

        first, schedule, tile = self.p.gate_up, self.schedule, self.tiles.dx
        if len(first) == 1:
            return fc2(dgate_up_RG, first[0], None, schedule, k_major=not self.k_major, tile=tile)
        return dx_routes(dgate_up_RG, first, schedule, k_major=self.k_major, tile=tile)

    def ddown(self, dout_TH: torch.Tensor, s_act_RI: torch.Tensor) -> torch.Tensor:
        """The gradient of down."""
        return self._sum(self._rows(dout_TH), s_act_RI, self.down_k_major, self.tiles.ddown)

    def tokens(self, dx_RH: torch.Tensor, sums: bool) -> tuple[torch.Tensor, Beside | None]:
        """(The tokens' gradient, and what of it is left to `dgate_up` where that is asked for next.)"""
        from ..kernels.finalize import finalize

        return finalize(dx_RH, self.ids_TK, self.before, self.spec.E, self.x_TH.dtype), None

    def dgate_up(self, parts: Sequence[torch.Tensor], left: Beside | None) -> list[torch.Tensor]:
        """The gradients of the first linear's tensors, of those whose part of dgate_up_RG is given."""
        assert left is None
        x = self._rows(self.x_TH, self.before)
        return [self._sum(x, part, not self.k_major, self.tiles.dgate_up) for part in parts]

    def _rows(self, by_token: torch.Tensor, weights_TK: torch.Tensor | None = None) -> Rows:
        """Rows of tokens as operands of the sums over routes."""
        from ..kernels.outer import Rows

        return Rows(of=by_token, tokens=True, weights_TK=weights_TK)

    def _sum(self, tokens: Rows, by_position: torch.Tensor, tokens_first: bool, tile: Tile) -> torch.Tensor:
        from ..kernels.outer import Rows, outer

        a, b = tokens, Rows(of=by_position)
        a, b = (a, b) if tokens_first else (b, a)
        return outer(a, b, self.schedule, self.ends, choices=self.spec.K, tile=tile, whole=self.tiles.whole)


@lru_cache(None)
def _tile(n: int, gather: int = 0) -> Persistent:
    """Of n columns; the same object for the same ones, since kernels are bound by tile."""
    from ..kernels.hopper import Persistent

    return Persistent(N=n, GATHER=gather)


class HopperProducts(Products):
    """The same by kernels.hopper, hopper_act and hopper_outer, mostly from rows in sorted order."""

    _copied: tuple[torch.Tensor, torch.Tensor] | None = None

    def _x(self) -> tuple[torch.Tensor, int]:
        """(x for the first linear, whether it is gathered there): as triton_hopper has it."""
        x, gather = self.x_TH, gathers(self.spec)[0]
        if not gather:
            return self._rows(x).of, gather
        return (x.new_empty(x.shape).copy_(x) if x.stride(0) % 16 or x.data_ptr() % 16 else x), gather

    def first(self, keep: str) -> tuple[torch.Tensor, torch.Tensor]:
        from ..kernels.hopper import fc1

        spec, p, columns, (x, gather) = self.spec, self.p, kept_columns(self.spec, keep), self._x()
        kept = x.new_empty((self.schedule.R, columns))
        act_RI = fc1(
            x, p.gate_up, p.gate_up_bias, self.before, self.schedule, self.acts[0], gated=spec.gated,
            tile=_tile(128, gather), kept=kept if columns else None, **self._first,
        )  # fmt: skip
        return kept, act_RI

    def halves(self, kept: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        from ..kernels.epilogue import epilogue
        from ..kernels.hopper import fc1

        spec, p, I = self.spec, self.p, self.spec.I
        if kept is None or not kept.shape[1]:
            kept, _ = self.first("all")
        if kept.shape[1] == spec.G:
            return tuple(kept.split(kept_columns(spec, "half"), 1))  # type: ignore[no-untyped-call]
        x, gather = self._x()
        first = fc1(
            x, (p.gate_up[0][:, :I],), tuple(b[:, :I] for b in p.gate_up_bias[:1]), self.before, self.schedule,
            epilogue(Activation.parse("identity").expr), gated=False, tile=_tile(256, gather),
            **{**self._first, "halves": "up"},
        )  # fmt: skip
        return first, kept

    def second(self, act_RI: torch.Tensor) -> torch.Tensor:
        from ..kernels.hopper import fc2

        p = self.p
        return fc2(act_RI, p.down, p.down_bias, self.schedule, k_major=self.down_k_major, tile=_tile(256))

    def act(
        self, dout_TH: torch.Tensor, halves: tuple[torch.Tensor, ...], parts: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        from ..kernels.hopper_act import act_backward

        return act_backward(
            self._rows(dout_TH).of, self.p.down, halves, self.after, self.schedule, self.acts,
            halves=self.spec.gate_up.halves, k_major=self.down_k_major, parts=parts,
        )  # fmt: skip

    def dx(self, dgate_up_RG: torch.Tensor, sums: bool) -> torch.Tensor:
        from ..kernels import beside
        from ..kernels.hopper import fc2

        first, x = self.p.gate_up, self.x_TH
        if len(first) > 1:
            return super().dx(dgate_up_RG, sums)
        also = beside.spread(x, self.ids_TK, self.schedule, self.spec.E) if sums else None
        if also:
            self._copied = x, also.result
        return fc2(
            dgate_up_RG, first[0], None, self.schedule, k_major=not self.k_major, tile=_tile(256), beside=also
        )  # fmt: skip

    def tokens(self, dx_RH: torch.Tensor, sums: bool) -> tuple[torch.Tensor, Beside | None]:
        from ..kernels import beside

        if not sums:
            return super().tokens(dx_RH, sums)
        left = beside.finalize(dx_RH, self.ids_TK, self.before, self.spec.E, self.x_TH.dtype)
        return left.result, left

    def dgate_up(self, parts: Sequence[torch.Tensor], left: Beside | None) -> list[torch.Tensor]:
        from ..kernels.hopper_outer import outer

        x = self._rows(self.x_TH, self.before).of
        pairs = [(part, x) if self.k_major else (x, part) for part in parts]
        return [outer(*pair, self.ends, beside=None if n else left) for n, pair in enumerate(pairs)]

    @cached_property
    def acts(self) -> tuple[Any, Any, Any]:
        from ..kernels.epilogue import epilogue

        expr = self.spec.act.expr
        by_gate, by_up = derivative(expr, "gate"), derivative(expr, "up")
        return epilogue(expr, fast=True), epilogue(by_gate, fast=True), epilogue(by_up, fast=True)

    def _rows(self, by_token: torch.Tensor, weights_TK: torch.Tensor | None = None) -> Rows:
        """Copied into sorted order; of the last tensor the copy is at hand."""
        from ..kernels.outer import Rows
        from ..kernels.spread import spread

        if self._copied is None or self._copied[0] is not by_token:
            self._copied = by_token, spread(by_token, self.ids_TK, self.schedule, self.spec.E)
        rows = self._copied[1]
        if weights_TK is not None:  # positions past the last route's hold anything
            routes = self.schedule.routes().clamp(0, weights_TK.numel() - 1)
            rows = (rows.float() * weights_TK.flatten()[routes, None].float()).to(rows.dtype)
        return Rows(of=rows)

    def _sum(self, tokens: Rows, by_position: torch.Tensor, tokens_first: bool, tile: Tile) -> torch.Tensor:
        from ..kernels.hopper_outer import outer

        a, b = tokens.of, by_position
        return outer(*((a, b) if tokens_first else (b, a)), self.ends)
