"""FlashInfer's fused MoE implementations as providers, one object each: what it supports, its layout, how it is called.

In: ExpertsSpec and a device; for the call, routed tokens and native weights. Out: launchers. Whether a spec can run is
FlashInfer's own answer where it gives one before the call (its architecture lists, formats, activations and, on a
device, the runner's check); `limits` adds what it enforces only once called, with the place.
Invariants: a call never uses an untuned tactic: the first one of a token bucket runs FlashInfer's tuner, outside of any
CUDA graph (`_warm`), and where that can't be, aten serves the call. Routing is given: ids int32, weights fp32.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar

from ..hardware import Device
from ..operands import ExpertWeights
from ..spec import ExpertsSpec, torch_dtype
from ..verdict import OK, Reject, Verdict
from ..work import Library, Passed, Work
from . import flashinfer_api as fi
from .base import Launcher, Provider, Tactic, Unserved
from .stored import Stored, readable, stored_weights
from .triton_grouped import triton_version
from .triton_launch import on_device

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Limit = tuple[Callable[[ExpertsSpec], bool], str]


@dataclass
class Ready:
    """What a backend keeps for a spec on a device: FlashInfer's runner, constants on the device, tuned choices."""

    spec: ExpertsSpec
    device: torch.device
    act: Any
    runner: Any = None
    constants: dict[str, Any] = field(default_factory=dict)
    complete: bool = False
    picks: dict[int, Any] = field(default_factory=dict)
    compiled: set[tuple[int, Any]] = field(default_factory=set)
    lock: Any = field(default_factory=threading.RLock)


class FlashInfer(Provider):
    """One of FlashInfer's implementations. Tactics: the empty one, for which FlashInfer's tuner picks, or `PICK=`, its
    own number or tuple joined by "_"."""

    priced = False
    config: ClassVar[str]  # its configuration's class in flashinfer.fused_moe.api
    runner: ClassVar[str]  # its runner, module:class
    stored: ClassVar[Stored] = Stored()
    limits: ClassVar[tuple[Limit, ...]] = ()
    absent: ClassVar[int] = -1  # the id of a slot to leave out
    most_tokens: ClassVar[int] = fi.CEILING
    modules: ClassVar[tuple[str, ...]] = ("trtllm_utils",)
    remedy: ClassVar[str] = ""  # how to get what its runner's check finds missing
    packages: ClassVar[tuple[tuple[str, tuple[int, ...]], ...]] = ()
    any_size: ClassVar[bool] = False  # a tactic that was tuned for one token count serves every other
    fused: ClassVar[bool] = False  # the second linear sums experts itself: in the output's dtype, in no fixed order

    # Whether

    def available(self) -> Verdict:
        return fi.installed()

    def on_arch(self, spec: ExpertsSpec, arch: int) -> Verdict:
        """Whether it runs `spec` on compute capability arch / 10, as far as that can be told without such a device."""
        if not (verdict := fi.installed() and fi.importable()):
            return verdict
        if not self._config().supported(arch):
            return Reject("not on this architecture", f"FlashInfer has no {self.config} for sm_{arch}")
        if spec.x not in ("bf16", "f16"):
            return Reject("dtype", f"weights and hidden states in {spec.x}: FlashInfer takes bf16 and f16")
        if spec.out != spec.x:
            return Reject("output dtype", f"FlashInfer returns that of the hidden states, {spec.x}, not {spec.out}")
        if spec.weight == "input":
            return Reject("routing weights scale the input", "FlashInfer scales the experts' results")
        if spec.post != "none":
            return Reject("norm of each expert's result", f"FlashInfer has no post={spec.post}")
        act = fi.activation(spec)
        if isinstance(act, Reject):
            return act
        if not (verdict := self._class_says(spec, act)):
            return verdict
        for holds, text in self.limits:
            if not holds(spec):
                return Reject("outside its limits", text)
        return OK

    def supports(self, spec: ExpertsSpec, device: Device) -> Verdict:
        """On a device of this machine, also whether what its kernels need is built."""
        if device.type != "cuda":
            return Reject("not a CUDA device", device.name)
        major, minor = device.capability
        if not (verdict := self.on_arch(spec, 10 * major + minor)):
            return verdict
        here = fi.present(device)
        return OK if here is None else _on_device(self, spec, here)

    def _class_says(self, spec: ExpertsSpec, act: Any) -> Verdict:
        """The answers of the runner's class: formats and activations."""
        runner = self._runner_class()
        quant = fi.config(spec, act, self._config()).quant
        if not runner.supports_quant(quant):
            has = ", ".join(f"{w.name} x {a.name}" for w, a in runner.supported_quant_variants)
            return Reject("weight format", f"takes {has}; these are {quant.weight.name} x {quant.activation.name}")
        by_format = runner.supported_activation_classes_by_quant
        able = by_format[quant.pair] if by_format else runner.supported_activation_classes
        if not isinstance(act, able):
            return Reject("activation", f"{spec.act.name}; it has {', '.join(c.__name__ for c in able)}")
        return OK

    def on_device(self, spec: ExpertsSpec, device: torch.device) -> Verdict:
        """What only a device can tell: packages, compiled modules and the runner's own check."""
        arch = _arch(device)
        for package, least in self.packages:
            if not (verdict := fi.package_needed(package, least)):
                return verdict
        for name in self.modules:
            if not (verdict := fi.built(name, arch)):
                return verdict
        try:
            self._make_runner(spec, device)
        except (NotImplementedError, ValueError, RuntimeError, ImportError, OSError) as error:
            return Reject("FlashInfer refuses", "; ".join(filter(None, (str(error), self.remedy))))
        return OK

    def reads_any(self, spec: ExpertsSpec) -> bool:
        return False

    def copies(self, spec: ExpertsSpec) -> dict[object, int]:
        return self.stored.bytes_of(spec)

    def version(self) -> str:
        return f"flashinfer-{version('flashinfer-python')}+{triton_version()}"

    # How much

    def tactics(self, spec: ExpertsSpec, device: Device, T: int) -> list[tuple[Tactic, Work]]:
        return [] if T > self.most_tokens else [(Tactic(), self.work(Tactic(), spec, device))]

    def work(self, tactic: Tactic, spec: ExpertsSpec, device: Device) -> Work:
        """Two grouped linears in tiles that only FlashInfer knows, between a sort and a finalize."""
        self.pick(tactic)
        size = torch_dtype(spec.x).itemsize
        linears = tuple(
            Library(
                name=name, columns=columns, depth=depth, matrices=matrices, dtype=spec.x, x_bytes=size,
                weight_bytes=size, out_bytes=size,
            )
            for name, columns, depth, matrices in (
                ("fc1", spec.I, spec.H, spec.G // spec.I), ("fc2", spec.H, spec.I, 1),
            )
        )  # fmt: skip
        rest = Passed(name="rest", kernels=5, route_bytes=2 * size * spec.H, token_bytes=2 * size * spec.H)
        return Work(steps=(*linears, rest))

    # Run

    def build(self, tactic: Tactic, spec: ExpertsSpec, device: torch.device) -> Launcher:
        fixed = self.pick(tactic)
        ready = _ready(self, spec, device)
        out_dtype = torch_dtype(spec.out)

        def run(x_TH: Tensor, ids_TK: Tensor, w_TK: Tensor | None, packed: ExpertWeights) -> Tensor:
            T = x_TH.shape[0]
            if T == 0:
                return x_TH.new_empty((0, spec.H), dtype=out_dtype)
            if T > self.most_tokens:
                raise Unserved(Reject("too many tokens", f"{T} are over {self.most_tokens}"))
            verdict = readable(self.stored, spec, packed)
            if isinstance(verdict, Reject):
                raise Unserved(verdict)
            x = x_TH.contiguous()
            x = x if x.data_ptr() % 16 == 0 else x.clone()
            pick = fixed if fixed is not None else ready.picks.get(self.bucket(T))
            if pick is None or (self.compiles(T), pick) not in ready.compiled:
                pick = self._warm(ready, fixed, x, ids_TK, w_TK, packed)
            weights = self._weights(ready, packed)
            ids, w = self._routes(spec, ids_TK, w_TK)
            return self._call(ready, x, ids, w, weights, pick)

        return on_device(run, device)

    def settled(self, tactic: Tactic, spec: ExpertsSpec, device: torch.device, T: int) -> Tactic:
        if tactic.knobs or not self.any_size:
            return tactic
        pick = _ready(self, spec, device).picks.get(self.bucket(T))
        return tactic if pick is None else Tactic.of(PICK=pick_text(pick))

    def _warm(self, ready: Ready, fixed: Any, x: Tensor, ids: Tensor, w: Tensor | None, packed: ExpertWeights) -> Any:
        """Lay out weights, compile, and where no tactic is named run FlashInfer's tuner on these tokens: the tactic."""
        if fi.capturing():
            what = "run the model once at this size before the graph is captured"
            raise Unserved(Reject("FlashInfer isn't tuned for these sizes inside a CUDA graph", what))
        T, spec = x.shape[0], ready.spec
        weights = self._weights(ready, packed)

        def work() -> Any:
            if ready.runner is None:
                ready.runner = self._make_runner(spec, ready.device)
            if not ready.complete:
                ready.constants, ready.complete = self._constants(ready), True
            routes = self._routes(spec, ids, w)
            pick = fixed if fixed is not None else ready.picks.get(self.bucket(T))
            if pick is None:
                pick = self._tune(ready, x, *routes, weights)
                ready.picks[self.bucket(T)] = pick
            self._call(ready, x, *routes, weights, pick)  # compiles, allocates what it keeps
            ready.compiled.add((self.compiles(T), pick))
            return pick

        with ready.lock:
            return fi.aside(work, ready.device)

    def _routes(self, spec: ExpertsSpec, ids: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
        from ..kernels.merge import merge_routes

        return merge_routes(ids, w if spec.weight == "output" else None, spec.E, self.absent)

    def _weights(self, ready: Ready, packed: ExpertWeights) -> ExpertWeights:
        def aside(fill: Callable[[], Tensor]) -> Tensor:
            if fi.capturing():
                raise Unserved(Reject("weights aren't laid out yet inside a CUDA graph", "run the model once before"))
            return fi.aside(fill, ready.device)

        return stored_weights(self.stored, ready.spec, packed, aside)

    def bucket(self, T: int) -> int:
        """The token count that T's tactic is tuned for: FlashInfer's hybrid buckets, which round up."""
        return int(fi.module("fused_moe.utils").map_to_hybrid_bucket_uncapped(T))

    def compiles(self, T: int) -> int:
        """What a compilation is for, of a tactic: 0 where one serves every T."""
        return 0

    def pick(self, tactic: Tactic) -> Any:
        """FlashInfer's tactic that ours names; None where its tuner is to pick. ValueError for unknown knobs."""
        knobs = dict(tactic.knobs)
        if set(knobs) - {"PICK"}:
            raise ValueError(f"{self.name}: the only knob is PICK; got {tactic}")
        return self.pick_of(tuple(_number(p) for p in str(knobs["PICK"]).split("_"))) if knobs else None

    def pick_of(self, parts: tuple[Any, ...]) -> Any:
        """The library's tactic of its flattened parts."""
        return parts

    def _config(self) -> Any:
        return getattr(fi.module("fused_moe.api"), self.config)()

    def _runner_class(self) -> Any:
        place, name = self.runner.split(":")
        return getattr(fi.module(place), name)

    def _make_runner(self, spec: ExpertsSpec, device: torch.device) -> Any:
        """FlashInfer's runner, checked and built. Raises what FlashInfer raises."""
        runner = self._runner_class()(fi.config(spec, fi.activation(spec), self._config()), device=device)
        runner.check_support()
        runner.build()
        return runner

    def _constants(self, ready: Ready) -> dict[str, Any]:
        """Tensors that calls read besides the weights."""
        return {}

    def _packs(self, ready: Ready, x: Tensor, ids: Tensor, w: Tensor, weights: ExpertWeights) -> tuple[Any, Any]:
        """FlashInfer's packs of one call: routing as separate tensors, for packing rounds the weights to bf16."""
        api = fi.module("fused_moe.api")
        modes = self._runner_class().supported_routing_modes
        separate = api.RoutingInputMode.UnpackedPrecomputed
        mode = separate if separate in modes else api.RoutingInputMode.PackedPrecomputed
        pack = api.MoEWeightPack()
        pack.prepare_for(ready.runner.backend_key, self._view(ready, weights))
        return api.MoEActivationPack(x, None, ids, w, routing_input_mode=mode), pack

    def _view(self, ready: Ready, weights: ExpertWeights) -> dict[str, Tensor]:
        """The weights by the runner's names."""
        return {"fc1_expert_weights": weights.gate_up[0], "fc2_expert_weights": weights.down}

    def _tune(self, ready: Ready, x: Tensor, ids: Tensor, w: Tensor, weights: ExpertWeights) -> Any:
        """FlashInfer's tuner on these tensors; the tactic that it measured as the fastest."""
        runner = ready.runner
        inputs = runner.pack_inputs(*self._packs(ready, x, ids, w, weights))
        return _choose(
            f"moe_{runner.backend_key}", runner, runner.tuning_config_for(inputs), inputs,
            **runner.launch_kwargs_for(inputs),
        )  # fmt: skip

    @abstractmethod
    def _call(self, ready: Ready, x: Tensor, ids: Tensor, w: Tensor, weights: ExpertWeights, pick: Any) -> Tensor:
        """out_TH of one call; nothing of it outlives the call but the result."""


def pick_text(pick: Any) -> str:
    """A FlashInfer tactic as one word: its parts, flattened, joined by "_"."""
    parts: list[str] = []

    def flatten(value: Any) -> None:
        if isinstance(value, tuple | list):
            for v in value:
                flatten(v)
        else:
            parts.append(str(int(value)) if isinstance(value, bool) else str(value))

    flatten(pick)
    return "_".join(parts)


def _number(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text


def _choose(op: str, runner: Any, tuning: Any, inputs: Any, **launch: Any) -> Any:
    tuner = fi.module("autotuner")
    log = logging.getLogger("flashinfer.jit")
    level = log.level
    log.setLevel(max(level, logging.WARNING))  # it announces each start and end
    try:
        with tuner.autotune(True, cache=fi.tuning_file()):
            _, tactic = tuner.AutoTuner.get().choose_one(
                custom_op=op, runners=[runner], tuning_config=tuning, inputs=inputs, **launch
            )
    finally:
        log.setLevel(level)
    if tactic == -1:  # all were skipped: a kernel failed, or the delay kernel
        raise Unserved(Reject("FlashInfer's tuner measured no tactic", op))
    return _tuples(tactic)


def _tuples(tactic: Any) -> Any:
    """Lists, which a cache file has instead of tuples, as tuples."""
    return tuple(map(_tuples, tactic)) if isinstance(tactic, tuple | list) else tactic


def _arch(device: torch.device) -> int:
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@lru_cache(1024)
def _on_device(provider: FlashInfer, spec: ExpertsSpec, device: torch.device) -> Verdict:
    return provider.on_device(spec, device)


@lru_cache(1024)
def _ready(provider: FlashInfer, spec: ExpertsSpec, device: torch.device) -> Ready:
    return Ready(spec=spec, device=device, act=fi.activation(spec))
