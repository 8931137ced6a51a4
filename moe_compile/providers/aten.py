"""Aten: the provider that runs any spec on any device with torch's own operators.

In: a spec, native weights, routes. Out: out_TH. It is what the operator falls back to, what others are tuned against.
Invariant: no intermediate is rounded more than the docstring of spec.py lets the original graph do: the first linear,
the activation, the second linear, the sum; the sum over k is kept in fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..activation import evaluate
from ..hardware import Device, facts
from ..operands import ExpertWeights, Listed, PerExpert, down_EHI, first_EGH, halves
from ..reference import accumulator
from ..spec import ExpertsSpec, torch_dtype
from ..verdict import OK, Verdict
from ..work import Library, Passed, Work
from .base import Launcher, Provider, Tactic
from .routes import Blocks, Grouped, Routes
from .routes_host import on_host

PATHS: dict[str, Callable[[Tensor, ExpertsSpec], Routes]] = {"hit": on_host, "grouped": Grouped, "blocks": Blocks}

# an upcast copy beyond this is fresh pages each time: 1.2 ms became 0.37 ms (2048 x 512 bf16, EPYC, 2026-11)
UPCAST_NUMEL = 1 << 18


def grouped_mm_fits(spec: ExpertsSpec, device: torch.device | Device) -> bool:
    """Whether torch._grouped_mm takes the spec's matrices: bf16, rows of whole 16 bytes, compute capability 8.0."""
    if spec.x != "bf16" or spec.H % 8 or spec.I % 8 or device.type not in ("cuda", "cpu"):
        return False
    return device.type == "cpu" or facts(device).capability >= (8, 0)


def _grouped_mm_reads(t: PerExpert) -> bool:
    """Whether t starts at and strides by whole 16 bytes, with one unit stride: a view of a parameter need not."""
    if isinstance(t, Listed):
        return True  # its stack does
    *_, row, column = (n * t.element_size() for n in t.stride())
    unit, other = min(row, column), max(row, column)
    whole = other % 16 == 0 and t.stride(0) * unit % 16 == 0 and t.data_ptr() % 16 == 0
    return bool(whole and unit == t.element_size())


def grouped_mm_reads(p: ExpertWeights) -> bool:
    return all(map(_grouped_mm_reads, (*p.gate_up, p.down)))


def path_of(spec: ExpertsSpec, device: torch.device | Device) -> str:
    """The best path there: "hit" needs counts on the host, which only a CPU has for free."""
    if device.type == "cpu":
        return "hit"
    return "grouped" if grouped_mm_fits(spec, device) else "blocks"


def first_linear(spec: ExpertsSpec, rows: Routes, x_SH: Tensor, p: ExpertWeights) -> Tensor:
    """gate_up[e] @ x + bias: [S, G] in native row order, two separate tensors side by side."""
    first = first_EGH(spec, p)
    if len(first) == 1:
        return rows.linear(x_SH, first[0], *p.gate_up_bias)
    biases = p.gate_up_bias or (None, None)
    sizes = (rows.S, spec.G)
    dtype = torch.float32 if p.gate_up_bias and isinstance(rows, Grouped) else x_SH.dtype
    gate_up_SG = x_SH.new_empty(sizes, dtype=dtype)
    for w, bias, out in zip(first, biases, gate_up_SG.chunk(2, dim=-1), strict=True):
        rows.linear(x_SH, w, bias, out)
    return gate_up_SG


def activate(spec: ExpertsSpec, gate_up_SG: Tensor) -> Tensor:
    """act(gate, up), evaluated in the accumulator's dtype and rounded once, to x's: [S, I]."""
    acc, x_dtype, expr = accumulator(spec), torch_dtype(spec.x), spec.act.expr
    if gate_up_SG.device.type != "cpu" or gate_up_SG.dtype == acc or gate_up_SG.numel() <= UPCAST_NUMEL:
        h_SI: Tensor = evaluate(expr, *halves(spec, gate_up_SG.to(acc)), reuse=True)
        return h_SI.to(x_dtype)
    a_SI = gate_up_SG.new_empty(len(gate_up_SG), spec.I, dtype=x_dtype)
    n = max(1, UPCAST_NUMEL // spec.G)
    for i in range(0, len(a_SI), n):
        a_SI[i : i + n] = evaluate(expr, *halves(spec, gate_up_SG[i : i + n].to(acc)), reuse=True)
    return a_SI


def normalized(spec: ExpertsSpec, y_SH: Tensor, scale_H: Tensor | None) -> tuple[Tensor, Tensor]:
    """(n, r) with z = y * scale (y if None), r = 1 / sqrt(mean_h(z^2) + eps) [S, 1], n = z * r; in the accumulator."""
    z_SH = y_SH.to(accumulator(spec))
    if scale_H is not None:
        z_SH = z_SH * scale_H.to(z_SH.dtype)
    r_S1 = torch.rsqrt(z_SH.square().mean(-1, keepdim=True) + spec.eps)
    return z_SH * r_S1, r_S1


def scale_rows(x_SH: Tensor, w_S: Tensor) -> Tensor:
    """w[s] * x[s], computed in w's dtype (the accumulator's) and rounded once, to x's."""
    return (x_SH * w_S[:, None]).to(x_SH.dtype)


def forward(spec: ExpertsSpec, rows: Routes, x_TH: Tensor, w_TK: Tensor | None, p: ExpertWeights) -> Tensor:
    """out_TH in spec.out, for grouped `rows`."""
    acc = accumulator(spec)
    # No intermediate has a name past its last use: on a CPU the next one then takes its memory, still in cache and
    # mapped. With names, 1024 routes of 256 channels faulted in 200 pages a call, 4 % of a small model's time.
    x_SH = rows.gather(x_TH)
    if spec.weight == "input":
        assert w_TK is not None
        x_SH, w_TK = scale_rows(x_SH, rows.of_route(w_TK).to(acc)), None
    gate_up_SG = first_linear(spec, rows, x_SH, p)
    del x_SH
    h_SI = activate(spec, gate_up_SG)
    del gate_up_SG
    y_SH = rows.linear(h_SI, down_EHI(spec, p), p.down_bias)
    del h_SI
    if spec.post != "none":
        y_SH, _ = normalized(spec, y_SH, p.post_scale)
    return rows.combine(y_SH, w_TK, acc).to(torch_dtype(spec.out))


class Aten(Provider):
    """torch.mm, torch._grouped_mm or torch.bmm. Tactics: the empty one (path_of the device), or `path=` of PATHS."""

    name = "aten"

    def available(self) -> Verdict:
        return OK

    def supports(self, spec: ExpertsSpec, device: Device) -> Verdict:
        return OK

    def tactics(self, spec: ExpertsSpec, device: Device, T: int) -> list[tuple[Tactic, Work]]:
        path = path_of(spec, device)
        return [(Tactic.of(path=path), _work(spec, path))]

    def work(self, tactic: Tactic, spec: ExpertsSpec, device: Device) -> Work:
        return _work(spec, self._path(tactic, spec, device))

    def reads_any(self, spec: ExpertsSpec) -> bool:
        return True

    def _path(self, tactic: Tactic, spec: ExpertsSpec, device: torch.device | Device) -> str:
        path = dict(tactic.knobs).get("path") or path_of(spec, device)
        if path not in PATHS or set(dict(tactic.knobs)) - {"path"}:
            raise ValueError(f"aten: tactic {tactic} is not path=hit, path=grouped or path=blocks")
        if path == "hit" and device.type != "cpu":
            raise ValueError(f"aten: path=hit reads counts on the host, so it can't run on {device}")
        if path == "grouped" and not grouped_mm_fits(spec, device):
            raise ValueError(
                f"aten: path=grouped needs bf16, H and I in eights, compute capability 8.0; not so: {spec}"
            )
        return str(path)

    def build(self, tactic: Tactic, spec: ExpertsSpec, device: torch.device) -> Launcher:
        path = self._path(tactic, spec, torch.device(device))
        routes, out_dtype = PATHS[path], torch_dtype(spec.out)

        def launch(x_TH: Tensor, ids_TK: Tensor, w_TK: Tensor | None, packed: ExpertWeights) -> Tensor:
            if not x_TH.shape[0]:
                return x_TH.new_empty(x_TH.shape, dtype=out_dtype)
            rows = Blocks if path == "grouped" and not grouped_mm_reads(packed) else routes
            return forward(spec, rows(ids_TK, spec), x_TH, w_TK, packed)

        return launch

    def version(self) -> str:
        return f"aten-1+torch-{torch.__version__}"


def _work(spec: ExpertsSpec, path: str) -> Work:
    """hit: one mm an expert and linear beside about 10 calls that group, activate and combine. grouped: two
    _grouped_mm beside about 14. blocks: as many again, and each expert's weights are read, written padded, read.
    Neither of these reads listed experts but from a copy of all of them, made in each call."""
    stacks = spec.tensors == "listed" and path != "hit"
    size = torch_dtype(spec.x).itemsize
    per_expert = (spec.G + spec.I) * spec.H * size
    linears = tuple(
        Library(
            name=name, columns=columns, depth=depth, matrices=matrices, dtype=spec.x, x_bytes=size,
            weight_bytes=size, out_bytes=size,
        )
        for name, columns, depth, matrices in (("fc1", spec.I, spec.H, spec.G // spec.I), ("fc2", spec.H, spec.I, 1))
    )  # fmt: skip
    # bytes a row: x read and gathered, gate_up written and read, h likewise, y written and combined
    rest = Passed(
        name="rest",
        kernels={"hit": 10, "grouped": 14, "blocks": 38}[path],
        route_bytes=size * (3 * spec.H + 2 * spec.G + 2 * spec.I + 2 * spec.H),
        token_bytes=size * spec.H,
        expert_bytes=2 * per_expert * (path == "blocks"),
        call_bytes=2 * per_expert * spec.E * stacks,
        expert_launches=2 if path == "hit" else 0,
    )
    return Work(steps=(*linears, rest))
