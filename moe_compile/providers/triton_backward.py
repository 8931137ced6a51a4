"""Training on our grouped Triton kernels: a forward that keeps gate_up_RG, and the gradients of the experts.

In: ExpertsSpec, the forward's operands, and the gradient of out_TH. Out: as aten_backward.backward. Of the forward only
gate_up_RG is kept, R x G in x's dtype; the activation is computed again. The formulas are aten_backward's:

    dv = down[e]^T dout      dw = dv . a + bias . dout      ddown[e] = sum dout (w a)^T
    dgate_up = w dv (act_gate, act_up)      dgate_up[e] = sum dgate_up x^T      dx[t] = sum_k gate_up[e]^T dgate_up

With weight=input, x is w x in the weights' gradients, dx is scaled by w, and dw = (gate_up[e]^T dgate_up) . x.
The backward comes in halves, of the second linear and of the first, so that gate_up_RG can go before gradients as large
as the weights come.
Invariants: bitwise repeatable (no atomics); no gradient of dropped routes; weights are read in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..activation import derivative
from ..hardware import Device, facts
from ..operands import ExpertWeights
from ..spec import ELEMENT_BYTES, ExpertsSpec, torch_dtype
from ..verdict import Reject, Verdict
from .triton_grouped import hopper, one_stride_pattern, shared_limit, triton_available, triton_supports

if TYPE_CHECKING:
    import torch

    from ..kernels.grouped import Tile
    from ..kernels.hopper import Persistent
    from ..kernels.sort import Schedule


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
    persistent: Persistent | None = None  # second and dx by kernels.hopper instead


def supports(spec: ExpertsSpec, device: Device) -> Verdict:
    """OK where these kernels train `spec` on such a device."""
    if spec.post != "none":
        return Reject("a norm of each expert's output", f"post={spec.post}")
    if spec.tensors == "listed":
        return Reject("experts in tensors of their own", "the backward's kernels address one tensor by expert number")
    return triton_available() and triton_supports(spec, device)


def reads(weights: ExpertWeights) -> Verdict:
    """OK where these very tensors can be read in place."""
    return one_stride_pattern(weights)


def tiles_of(spec: ExpertsSpec, T: int, device: Device) -> Tiles:
    """The tiles for T tokens: the same objects for the same kind of T, since kernels are bound by tile."""
    rows = T * spec.K / spec.E
    return _tiles(spec, rows > 48, rows > 512, device)


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
        persistent=_persistent(spec, device),
    )  # fmt: skip


def _persistent(spec: ExpertsSpec, device: Device) -> Persistent | None:
    """The tile of the second linear for kernels.hopper, where it runs; like the others', 128 rows high."""
    from .triton_hopper import TritonHopper

    provider = TritonHopper()
    if not (provider.available() and provider.supports(spec, device)):
        return None
    from ..kernels.hopper import Persistent

    return Persistent(N=256)


def forward(
    spec: ExpertsSpec, x_TH: torch.Tensor, ids_TK: torch.Tensor, w_TK: torch.Tensor | None, p: ExpertWeights,
    tiles: Tiles | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out_TH in spec.out, gate_up_RG in spec.x, by expert)."""
    from ..kernels.epilogue import epilogue
    from ..kernels.finalize import finalize
    from ..kernels.sort import sort_routes

    T, out = x_TH.shape[0], torch_dtype(spec.out)
    if not T:
        return x_TH.new_empty((0, spec.H), dtype=out), x_TH.new_empty((0, spec.G))
    tiles = tiles or tiles_of(spec, T, facts(x_TH.device))
    with _on(x_TH):
        schedule = sort_routes(ids_TK, spec.E, tiles.first.BLOCK_M)
        gate_up_RG, act_RI = _first(spec, x_TH, w_TK, p, schedule, epilogue(spec.act.expr), tiles.first)
        y_RH = _product(act_RI, p.down, p.down_bias, schedule, spec.down == "EHI", tiles.second, tiles)
        return finalize(y_RH, ids_TK, w_TK if spec.weight == "output" else None, spec.E, out), gate_up_RG


def _first(
    spec: ExpertsSpec, x_TH: torch.Tensor, w_TK: torch.Tensor | None, p: ExpertWeights, schedule: Schedule, act: object,
    tile: Tile,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    from ..kernels.kept import fc1_kept

    return fc1_kept(
        _rows(x_TH), p.gate_up, p.gate_up_bias, w_TK if spec.weight == "input" else None, schedule, act, choices=spec.K,
        sizes=(spec.H, spec.I), halves=spec.gate_up.halves, k_major=spec.gate_up.storage == "EGH", tile=tile,
    )  # fmt: skip


def _product(
    rows_RN: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, schedule: Schedule, k_major: bool, tile: Tile,
    tiles: Tiles,
) -> torch.Tensor:  # fmt: skip
    """Rows in sorted order times their expert's matrix, in route order: fc2 of either file."""
    from ..kernels import grouped

    if tiles.persistent is None or not grouped.tma_aligned(w):
        return grouped.fc2(rows_RN, w, bias, schedule, k_major=k_major, tile=tile)
    from ..kernels import hopper

    return hopper.fc2(rows_RN, w, bias, schedule, k_major=k_major, tile=tiles.persistent)


def _rows(x_TH: torch.Tensor) -> torch.Tensor:
    """x with contiguous rows."""
    return x_TH if x_TH.stride(1) == 1 else x_TH.contiguous()


def of_down(spec: ExpertsSpec, p: ExpertWeights) -> list[bool]:
    """Of (hidden, weights, *p.tensors()): whether backward_down makes its gradient, or backward_gate_up."""
    firsts, biases = [False] * len(p.gate_up), [False] * len(p.gate_up_bias)
    return [False, spec.weight == "output", *firsts, True, *biases, *([] if p.down_bias is None else [True])]


def backward(
    spec: ExpertsSpec, dout_TH: torch.Tensor, x_TH: torch.Tensor, ids_TK: torch.Tensor, w_TK: torch.Tensor | None,
    p: ExpertWeights, gate_up_RG: torch.Tensor | None, needs: Sequence[bool], tiles: Tiles | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """The gradients of (hidden, weights, *p.tensors()) that `needs` names, in that order: both halves together."""
    operands, down = (x_TH, ids_TK, w_TK, p), of_down(spec, p)
    dgate_up_RG, *first = backward_down(
        spec, dout_TH, *operands, gate_up_RG, [n and d for n, d in zip(needs, down, strict=True)], tiles
    )
    del gate_up_RG
    second = backward_gate_up(spec, dgate_up_RG, *operands, [n and not d for n, d in zip(needs, down)], tiles)
    return merged(first, second, needs, down)


def merged(first: Sequence[Any], second: Sequence[Any], needs: Sequence[bool], down: Sequence[bool]) -> list[Any]:
    """The gradients of both halves in the operands' order."""
    halves = iter(second), iter(first)
    return [next(halves[d]) for n, d in zip(needs, down, strict=True) if n]


def backward_down(
    spec: ExpertsSpec, dout_TH: torch.Tensor, x_TH: torch.Tensor, ids_TK: torch.Tensor, w_TK: torch.Tensor | None,
    p: ExpertWeights, gate_up_RG: torch.Tensor | None, needs: Sequence[bool], tiles: Tiles | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """[dgate_up_RG, then the gradients that `needs` names of those that are `of_down`].

    gate_up_RG: as `forward` returned it, or None to compute it again.
    """
    from ..kernels.backward import act_backward
    from ..kernels.epilogue import epilogue
    from ..kernels.outer import Rows, outer, route_dots, row_sum, spans
    from ..kernels.sort import sort_routes

    T, K, E, expr = x_TH.shape[0], spec.K, spec.E, spec.act.expr
    if not T:
        return [x_TH.new_empty((0, spec.G)), *_zeros(x_TH, w_TK, p, needs)]
    weights, (down, *rest) = needs[1], needs[2 + len(p.gate_up) :]
    tiles = tiles or tiles_of(spec, T, facts(x_TH.device))
    with _on(x_TH):
        schedule = sort_routes(ids_TK, E, tiles.first.BLOCK_M)
        ends = spans(schedule, E)
        dout_TH = _rows(dout_TH.to(x_TH.dtype))
        if gate_up_RG is None:
            gate_up_RG, _ = _first(spec, x_TH, w_TK, p, schedule, epilogue(expr), tiles.first)
        scale = w_TK if spec.weight == "output" else None
        acts = (epilogue(expr), epilogue(derivative(expr, "gate")), epilogue(derivative(expr, "up")))
        dgate_up_RG, s_act_RI, parts = act_backward(
            dout_TH, p.down, gate_up_RG, scale, schedule, acts, choices=K, halves=spec.gate_up.halves,
            k_major=spec.down == "EHI", parts=weights, tile=tiles.act,
        )  # fmt: skip
        found = [dgate_up_RG]
        if parts is not None:
            dots = (None, None) if p.down_bias is None else (p.down_bias, dout_TH)
            found.append(route_dots(parts, ids_TK, dots[0], dots[1], E, torch_dtype(spec.w), a_experts=True))
        if down:
            pair = Rows(of=dout_TH, tokens=True), Rows(of=s_act_RI)
            a, b = pair if spec.down == "EHI" else pair[::-1]
            found.append(outer(a, b, schedule, ends, choices=K, tile=tiles.ddown, whole=tiles.whole))
        if p.down_bias is not None and rest[-1]:
            found.append(row_sum(Rows(of=dout_TH, tokens=True, weights_TK=scale), schedule, ends, choices=K))
    return found


def backward_gate_up(
    spec: ExpertsSpec, dgate_up_RG: torch.Tensor, x_TH: torch.Tensor, ids_TK: torch.Tensor, w_TK: torch.Tensor | None,
    p: ExpertWeights, needs: Sequence[bool], tiles: Tiles | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """The gradients that `needs` names of those that are not `of_down`, from what backward_down returned first."""
    from ..kernels.backward import dx_routes
    from ..kernels.finalize import finalize
    from ..kernels.outer import Rows, outer, route_dots, row_sum, spans
    from ..kernels.sort import sort_routes

    T, E, K, n = x_TH.shape[0], spec.E, spec.K, len(p.gate_up)
    if not T:
        return _zeros(x_TH, w_TK, p, needs)
    (hidden, weights), firsts, biases = needs[:2], needs[2 : 2 + n], needs[3 + n : 3 + n + len(p.gate_up_bias)]
    tiles = tiles or tiles_of(spec, T, facts(x_TH.device))
    before, k_major, x_TH = w_TK if spec.weight == "input" else None, spec.gate_up.storage == "EGH", _rows(x_TH)
    found: list[torch.Tensor] = []
    with _on(x_TH):
        schedule = sort_routes(ids_TK, E, tiles.first.BLOCK_M)
        ends = spans(schedule, E)
        if hidden or weights:
            if n == 1:
                dx_RH = _product(dgate_up_RG, p.gate_up[0], None, schedule, not k_major, tiles.dx, tiles)
            else:
                dx_RH = dx_routes(dgate_up_RG, p.gate_up, schedule, k_major=k_major, tile=tiles.dx)
            if hidden:
                found.append(finalize(dx_RH, ids_TK, before, E, x_TH.dtype))
            if weights:
                found.append(route_dots(None, ids_TK, dx_RH, x_TH, E, torch_dtype(spec.w), a_experts=False))
            del dx_RH  # as large as the routes: gone before gradients as large as the weights come
        parts = dgate_up_RG.chunk(n, dim=1)
        for part, need in zip(parts, firsts, strict=True):
            if need:
                pair = Rows(of=part), Rows(of=x_TH, tokens=True, weights_TK=before)
                a, b = pair if k_major else pair[::-1]
                found.append(outer(a, b, schedule, ends, choices=K, tile=tiles.dgate_up, whole=tiles.whole))
        found += [row_sum(Rows(of=part), schedule, ends, choices=K) for part, need in zip(parts, biases) if need]
    return found


def _zeros(
    x_TH: torch.Tensor, w_TK: torch.Tensor | None, p: ExpertWeights, needs: Sequence[bool]
) -> list[torch.Tensor]:
    return [t.new_zeros(t.shape) for t, n in zip((x_TH, w_TK, *p.tensors()), needs) if n and t is not None]


def _on(x_TH: torch.Tensor) -> Any:
    """With x's device current: Triton launches on the current one, whatever its arguments say."""
    import torch

    return torch.cuda.device(x_TH.device) if x_TH.is_cuda else nullcontext()
