"""The work of our Triton kernels' tactics: in, a spec and a tactic's knobs; out, the Work that the cost model prices.

One function a provider, each a transcription of what its `run` launches.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..kernels.sizes import ALONE_COUNTS, ALONE_ROUTES, HEIGHTS, PAIRED
from ..spec import ELEMENT_BYTES, ExpertsSpec
from ..work import Passed, Sorted, Streamed, Tiled, Work


def grouped_work(spec: ExpertsSpec, knobs: Mapping[str, int]) -> Work:
    """Sort, fc1, fc2, finalize."""
    size = ELEMENT_BYTES[spec.x]
    gate_up = spec.G // spec.I
    # as grouped.fc1: gate and up are one wide product wherever their rows can alternate without breaking contiguity
    deep = spec.gate_up.storage == "EGH" and not knobs["TMA1"]
    paired = spec.gate_up.halves.endswith("interleaved") or (spec.gate_up.halves != "separate" and deep)
    first, second = (
        Tiled(
            name=f"fc{i}", columns=columns, depth=depth, matrices=matrices, M=knobs["M"], N=knobs[f"N{i}"],
            K=knobs[f"K{i}"], warps=knobs[f"W{i}"], stages=knobs[f"S{i}"], products=1 if paired else matrices,
            swap=bool(knobs[f"SWAP{i}"]), tma=bool(knobs[f"TMA{i}"]), along="depth" if k_major else "columns",
            dtype=spec.x, x_bytes=size, weight_bytes=size, out_bytes=size,
        )
        for i, columns, depth, matrices, k_major in (
            (1, spec.I, spec.H, gate_up, spec.gate_up.storage == "EGH"),
            (2, spec.H, spec.I, 1, spec.down == "EHI"),
        )
    )  # fmt: skip
    return Work(steps=(_sort(spec), first, second, _finalize(spec)))


def decode_work(spec: ExpertsSpec, knobs: Mapping[str, int]) -> Work:
    """up for each route, down for each token over all its routes."""
    size = ELEMENT_BYTES[spec.x]
    up = Streamed(
        name="up", columns=spec.I, depth=spec.H, matrices=spec.G // spec.I, N=knobs["N1"], K=knobs["K1"],
        warps=knobs["W1"], along="depth" if spec.gate_up.storage == "EGH" else "columns", x_bytes=size,
        weight_bytes=size, out_bytes=size,
    )  # fmt: skip
    down = Streamed(
        name="down", columns=spec.H, depth=spec.I, matrices=1, N=knobs["N2"], K=knobs["K2"], warps=knobs["W2"],
        slots=1 << (spec.K - 1).bit_length(), along="depth" if spec.down == "EHI" else "columns", x_bytes=size,
        weight_bytes=size, out_bytes=ELEMENT_BYTES[spec.out],
    )  # fmt: skip
    return Work(steps=(up, down))


def hopper_work(spec: ExpertsSpec, knobs: Mapping[str, int]) -> Work:
    """Sort, x into sorted order unless fc1 gathers, fc1, fc2, finalize.

    Four warps gather. With tiles of 160 they have few registers and addresses bound them, so that these warps count;
    with others it is as if eight addressed.
    """
    size, M, height = ELEMENT_BYTES[spec.x], knobs["M"], HEIGHTS[knobs["M"]]
    tall = M == 192
    first, second = (
        Tiled(
            name=f"fc{i}", columns=columns, depth=depth, matrices=matrices, M=M, N=knobs[f"N{i}"], K=64,
            warps=(4 if M == 160 else 8) if gathers else 12 if tall else 8, stages=height.buffers,
            products=2 if tall else 1, part=height.part, paired=PAIRED, swap=height.as_columns, tma=not gathers,
            ahead=True, along="depth" if k_major else "columns", dtype=spec.x, x_bytes=size, weight_bytes=size,
            out_bytes=size,
        )
        for i, columns, depth, matrices, k_major, gathers in (
            (1, spec.I, spec.H, spec.G // spec.I, spec.gate_up.storage == "EGH", bool(knobs["GATHER"])),
            (2, spec.H, spec.I, 1, spec.down == "EHI", False),
        )
    )  # fmt: skip
    order = () if knobs["GATHER"] else (Passed(name="permute", route_bytes=2 * spec.H * size),)
    return Work(steps=(_sort(spec), *order, first, second, _finalize(spec)))


def _sort(spec: ExpertsSpec) -> Sorted:
    bins = max(32, 1 << (spec.E - 1).bit_length())
    return Sorted(alone=min(ALONE_ROUTES, ALONE_COUNTS // bins))


def _finalize(spec: ExpertsSpec) -> Passed:
    route, token = spec.H * ELEMENT_BYTES[spec.x], spec.H * ELEMENT_BYTES[spec.out]
    return Passed(name="finalize", route_bytes=route, token_bytes=token)
