"""The operators that stand in the graph: experts and route, each with a fake, autograd and a backward operator.

In: tensors, and the spec and plan as their one-line text. Out: fresh tensors; inputs are only read. They are right on
any device at every stage (eager, fake, functionalized, inference_mode, autocast, CUDA graphs): the spec alone decides
dtypes, so autocast is off inside. The plan picks a kernel by the real token count. Gradients of gradients raise.

Where a gradient is wanted, `experts` is `experts_training`, which also returns what the backward reads beside the
inputs: of gate_up_RG (T*K x G in spec.x) what the plan keeps, and the routes' order, where its Triton kernels train the
spec, whose backward is two operators (triton_backward.py has why); else nothing, and `experts_backward` (aten's)
computes all of it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from .hardware import facts
from .operands import ExpertWeights, checker
from .providers import Candidate, Launcher, Plan, bypassing, launcher, triton_backward, triton_route
from .providers.aten_backward import backward as _aten_backward
from .providers.aten_route import backward as _aten_route_backward
from .providers.trainer import Trainer
from .spec import ExpertsSpec, RouterSpec, torch_dtype

_LIB: Any = torch.library.Library("moe_compile", "FRAGMENT")  # type: ignore[no-untyped-call]
_BELOW = torch._C._after_autograd_keyset.remove(torch._C.DispatchKey.ADInplaceOrView).raw_repr()
_PLAIN = [torch._C.DispatchKeySet(key).raw_repr() for key in (torch._C.DispatchKey.CUDA, torch._C.DispatchKey.CPU)]
_MOST = 2048  # shapes of hidden, of which a call keeps what it replays
_OPERANDS = (
    "Tensor hidden, Tensor ids, Tensor? weights, Tensor[] gate_up, Tensor[] down, Tensor[] gate_up_bias, "
    "Tensor[] down_bias, Tensor? post_scale, str spec"
)
for _schema in (
    f"experts({_OPERANDS}, str plan) -> Tensor",
    f"experts_training({_OPERANDS}, str plan) -> (Tensor, Tensor, Tensor)",
    f"experts_backward(Tensor grad, {_OPERANDS}, bool[] needs) -> Tensor[]",
    f"experts_backward_down(Tensor grad, {_OPERANDS}, str plan, Tensor? kept, Tensor? order, bool[] needs) -> Tensor[]",
    f"experts_backward_gate_up(Tensor dgate_up, {_OPERANDS}, str plan, Tensor? order, bool[] needs) -> Tensor[]",
    "route(Tensor logits, Tensor? bias, Tensor? expert_scale, str spec) -> (Tensor, Tensor)",
    "route_backward(Tensor grad, Tensor logits, Tensor ids, Tensor? expert_scale, str spec, bool[] needs) -> Tensor[]",
):
    _LIB.define(_schema, tags=torch.Tag.pt2_compliant_tag)


class _Call:
    """What can be decided once for a (spec, plan, device): the check, and the launcher of each token count's bucket."""

    def __init__(self, spec: str, plan: str, device: torch.device) -> None:
        self.spec, self.plan, self.device = ExpertsSpec.parse(spec), Plan.parse(plan), device
        self.check = checker(self.spec)
        self.launchers: dict[Candidate, Launcher] = {}
        self.only = self.launcher(0) if len(self.plan.buckets) == 1 else None
        self.again: dict[Any, Callable[..., Any]] = {}  # what replays calls of a shape of hidden

    def keep(self, key: Any, launch: Launcher, operands: tuple[Any, ...]) -> None:
        """Notes how calls like this one are replayed, where its launcher says so (kernels/again.py)."""
        found = launch.again(*operands) if self.spec.tensors == "stacked" and hasattr(launch, "again") else None
        if found is not None:
            if len(self.again) >= _MOST:
                self.again.clear()
            self.again[key] = found

    def launcher(self, T: int) -> Launcher:
        candidate = self.plan.at(T)
        if candidate not in self.launchers:
            self.launchers[candidate] = launcher(candidate, self.spec, self.device)
        return self.launchers[candidate]

    @cached_property
    def trainable(self) -> bool:
        """Whether the plan's kernels have a backward of their own for the spec."""
        return bool(triton_backward.trains(self.spec, facts(self.device), self.plan))

    @cached_property
    def trainer(self) -> Trainer:
        return Trainer(self.spec, self.plan, self.device)

    def trains(self, packed: ExpertWeights) -> bool:
        """Whether that backward can read these very tensors; the same for fake ones."""
        return self.trainable and bool(triton_backward.reads(packed))


_call = lru_cache(4096)(_Call)
_spec_check = lru_cache(4096)(lambda spec: checker(ExpertsSpec.parse(spec)))


def _experts(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor | None,
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    gate_up_bias: Sequence[Tensor],
    down_bias: Sequence[Tensor],
    post_scale: Tensor | None,
    spec: str,
    plan: str,
) -> Tensor:
    """out_TH in spec.out, contiguous, of hidden [T, H], ids [T, K] int64 or int32 and weights [T, K] in spec.w.

    The experts' operands are as ExpertWeights.of takes them, in the native layout (operands.py). ValueError names an
    operand that the spec contradicts.
    """
    call = _call(spec, plan, hidden.device)
    operands = (hidden, ids, weights, gate_up, down, gate_up_bias, down_bias, post_scale)
    key = (hidden.shape, torch.is_inference_mode_enabled())
    again = call.again.get(key)
    if again is not None and (out := again(*operands)) is not None:
        return out
    call.check(*operands)
    launch = call.only or call.launcher(hidden.shape[0])
    out = launch(hidden, ids, weights, ExpertWeights.of(call.spec, *operands[3:]))
    if again is None:
        call.keep(key, launch, operands)
    return out


def _experts_fake(hidden: Tensor, ids: Tensor, *operands: Any) -> Tensor:
    *tensors, spec, plan = operands
    _spec_check(spec)(hidden, ids, *tensors)
    Plan.parse(plan)
    parsed = ExpertsSpec.parse(spec)
    return hidden.new_empty((hidden.shape[0], parsed.H), dtype=torch_dtype(parsed.out))


def _experts_training(hidden: Tensor, ids: Tensor, weights: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(what `experts` returns, what is kept of gate_up_RG, the routes' order): triton_backward.forward's, or of the
    last two no rows."""
    *operands, spec, plan = rest
    call = _call(spec, plan, hidden.device)
    call.check(hidden, ids, weights, *operands)
    with bypassing():
        packed = ExpertWeights.of(call.spec, *operands)
        if call.trains(packed):
            out, kept, order = call.trainer.forward(hidden, ids, weights, packed)
            return out, kept, order
        out = (call.only or call.launcher(hidden.shape[0]))(hidden, ids, weights, packed)
        return out, *_nothing_kept(call.spec, hidden)


def _nothing_kept(spec: ExpertsSpec, hidden: Tensor) -> tuple[Tensor, Tensor]:
    return hidden.new_empty((0, spec.G)), hidden.new_empty(0, dtype=torch.int32)


def _experts_training_fake(hidden: Tensor, ids: Tensor, *operands: Any) -> tuple[Tensor, Tensor, Tensor]:
    weights, *tensors, spec, plan = operands
    call = _call(spec, plan, hidden.device)
    out = _experts_fake(hidden, ids, weights, *tensors, spec, plan)
    if not call.trains(ExpertWeights.of(call.spec, *tensors)):
        return out, *_nothing_kept(call.spec, hidden)
    return out, *triton_backward.empty_kept(call.spec, hidden, call.plan.keep)


def _experts_by_grad(keys: Any, *operands: Any) -> Tensor:
    """`experts` under autograd: experts_training where a gradient is wanted."""
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*operands):
        return _training_by_grad(keys, *operands)[0]
    found: Tensor = _below_autograd(keys, _experts, "experts", operands)
    return found


def _training_by_grad(keys: Any, *operands: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`experts_training` under autograd."""
    hidden, ids, weights, *lists, post_scale, spec, plan = operands
    lengths = list(map(len, lists))
    found: tuple[Tensor, Tensor, Tensor] = _Training.apply(  # type: ignore[no-untyped-call]
        keys, spec, plan, lengths, hidden, ids, weights, post_scale, *(t for several in lists for t in several)
    )
    return found


def _below_autograd(keys: Any, function: Any, name: str, operands: tuple[Any, ...]) -> Any:
    """The operator of that name, whose kernel for any device is `function`."""
    if keys.raw_repr() & _BELOW in _PLAIN:  # tensors of a device, no mode: a second pass through the dispatcher is 5 us
        return function(*operands)
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.moe_compile, name).default.redispatch(
            keys & torch._C._after_autograd_keyset, *operands
        )


class _Training(torch.autograd.Function):
    """`experts_training` and its gradients, of tensors one by one. (What torch.library makes of functions takes lists
    apart and together at each call: a step costs the host 193 us, 101 so; torch 2.13, kernels and launches apart.)"""

    @staticmethod
    def forward(ctx: Any, keys: Any, spec: str, plan: str, lengths: list[int], *tensors: Any) -> Any:
        hidden, ids, weights, post_scale, *rest = tensors
        operands: tuple[Any, ...] = (hidden, ids, weights, *_split(rest, lengths), post_scale, spec, plan)
        out, kept, order = _below_autograd(keys, _experts_training, "experts_training", operands)
        ctx.spec, ctx.plan, ctx.lengths = spec, plan, lengths
        ctx.mark_non_differentiable(kept, order)
        ctx.set_materialize_grads(False)
        held = (kept, order) if order.numel() else (None, None)  # the order of no route has numbers, too
        ctx.save_for_backward(hidden, ids, weights, post_scale, *held, *rest)
        return out, kept, order

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        hidden, ids, weights, post_scale, kept, order, *rest = ctx.saved_tensors
        of_hidden, _, of_weights, of_scale, *of_rest = ctx.needs_input_grad[4:]
        needs = [of_hidden, of_weights, *of_rest, *([] if post_scale is None else [of_scale])]
        operands = (hidden, ids, weights, *_split(rest, ctx.lengths), post_scale, ctx.spec)
        namespace = torch.ops.moe_compile
        if kept is None:
            found = namespace.experts_backward(grad, *operands, needs)
        else:
            down = triton_backward.of_down(*_packed(operands[3:]))
            here = [n and d for n, d in zip(needs, down, strict=True)]
            dgate_up, *first = namespace.experts_backward_down(grad, *operands, ctx.plan, kept, order, here)
            del kept  # and autograd's hold of it, unless the graph is retained
            ctx.maybe_clear_saved_tensors()
            here = [n and not d for n, d in zip(needs, down)]
            second = namespace.experts_backward_gate_up(dgate_up, *operands, ctx.plan, order, here)
            found = triton_backward.merged(first, second, needs, down)
        grads = iter(found)
        d_hidden, d_weights, *each = (next(grads) if n else None for n in needs)
        d_scale = None if post_scale is None else each.pop()
        return *(None,) * 4, d_hidden, None, d_weights, d_scale, *each


def _split(several: Sequence[Any], lengths: Sequence[int]) -> list[list[Any]]:
    found = iter(several)
    return [[next(found) for _ in range(n)] for n in lengths]


def _packed(operands: Sequence[Any]) -> tuple[ExpertsSpec, ExpertWeights]:
    """(spec, weights) of an operator's arguments from gate_up to spec."""
    *tensors, text = operands
    spec = ExpertsSpec.parse(text)
    return spec, ExpertWeights.of(spec, *tensors)


def _experts_backward(grad: Tensor, hidden: Tensor, ids: Tensor, weights: Tensor | None, *rest: Any) -> list[Tensor]:
    """The gradients of [hidden, weights, *gate_up, *down, *gate_up_bias, *down_bias, post_scale if there] that `needs`
    names."""
    *operands, needs = rest
    with bypassing():
        spec, packed = _packed(operands)
        return _aten_backward(spec, grad, hidden, ids, weights, packed, needs)


def _experts_backward_fake(
    grad: Tensor, hidden: Tensor, ids: Tensor, weights: Tensor | None, *rest: Any
) -> list[Tensor]:
    *operands, needs = rest
    each = (hidden, weights, *_packed(operands)[1].tensors())
    return [t.new_empty(t.shape) for t, need in zip(each, needs, strict=True) if need and t is not None]


def _experts_backward_down(
    grad: Tensor, hidden: Tensor, ids: Tensor, weights: Tensor | None, *rest: Any
) -> list[Tensor]:
    """[dgate_up_RG, and the gradients that `needs` names of those that are triton_backward.of_down].

    kept, order: as experts_training returned them; without, they are computed again.
    """
    *operands, spec, plan, kept, order, needs = rest
    call = _call(spec, plan, hidden.device)
    with bypassing():
        packed = ExpertWeights.of(call.spec, *operands)
        return call.trainer.backward_down(grad, hidden, ids, weights, packed, kept, order, needs)


def _experts_backward_down_fake(
    grad: Tensor, hidden: Tensor, ids: Tensor, weights: Tensor | None, *rest: Any
) -> list[Tensor]:
    *operands, _, _, _, needs = rest
    spec, _ = _packed(operands)
    dgate_up = hidden.new_empty((hidden.shape[0] * spec.K, spec.G))
    return [dgate_up, *_experts_backward_fake(grad, hidden, ids, weights, *operands, needs)]


def _experts_backward_gate_up(
    dgate_up: Tensor, hidden: Tensor, ids: Tensor, weights: Tensor | None, *rest: Any
) -> list[Tensor]:
    """The other gradients that `needs` names, of what experts_backward_down returned first."""
    *operands, spec, plan, order, needs = rest
    call = _call(spec, plan, hidden.device)
    with bypassing():
        packed = ExpertWeights.of(call.spec, *operands)
        return call.trainer.backward_gate_up(dgate_up, hidden, ids, weights, packed, order, needs)


def _experts_backward_gate_up_fake(dgate_up: Tensor, *rest: Any) -> list[Tensor]:
    *operands, _, _, needs = rest
    return _experts_backward_fake(dgate_up, *operands, needs)


def _route(logits: Tensor, bias: Tensor | None, expert_scale: Tensor | None, spec: str) -> tuple[Tensor, Tensor]:
    """(weights_TK in spec.out, ids_TK int64) of logits [T, E], the selection bias [E] and the experts' scales [E].

    See reference.route.
    """
    parsed = RouterSpec.parse(spec)
    _check_route(parsed, logits, bias, expert_scale)
    with bypassing():
        return triton_route.route(parsed, logits, bias, expert_scale)


def _check_route(spec: RouterSpec, logits: Tensor, bias: Tensor | None, expert_scale: Tensor | None) -> None:
    if logits.dim() != 2 or logits.shape[1] != spec.E or logits.dtype != torch_dtype(spec.logits):
        got, expected = f"{logits.dtype} {list(logits.shape)}", f"{torch_dtype(spec.logits)} [T, {spec.E}]"
        raise ValueError(f"moe_compile::route: logits is {got}, expected {expected} for {spec}")
    for name, operand, wanted in (("bias", bias, spec.bias), ("expert_scale", expert_scale, spec.expert_scale)):
        if (operand is not None) != wanted or (operand is not None and operand.shape != (spec.E,)):
            shapes = None if operand is None else list(operand.shape), [spec.E] if wanted else None
            raise ValueError(f"moe_compile::route: {name} is {shapes[0]}, expected {shapes[1]} for {spec}")


def _route_fake(logits: Tensor, bias: Tensor | None, expert_scale: Tensor | None, spec: str) -> tuple[Tensor, Tensor]:
    parsed = RouterSpec.parse(spec)
    _check_route(parsed, logits, bias, expert_scale)
    shape = (logits.shape[0], parsed.K)
    return logits.new_empty(shape, dtype=torch_dtype(parsed.out)), logits.new_empty(shape, dtype=torch.int64)


def _route_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, expert_scale, ctx.spec = inputs
    ctx.save_for_backward(logits, output[1], expert_scale)


def _route_grads(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    logits, ids, expert_scale = ctx.saved_tensors
    needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
    grads = iter(torch.ops.moe_compile.route_backward(grad, logits, ids, expert_scale, ctx.spec, needs))
    d_logits, d_scale = (next(grads) if n else None for n in needs)
    return d_logits, None, d_scale, None


def _route_backward(
    grad: Tensor, logits: Tensor, ids: Tensor, expert_scale: Tensor | None, spec: str, needs: Sequence[bool]
) -> list[Tensor]:
    """The gradients of [logits, expert_scale] that `needs` names, of d weights [T, K], the ids held fixed."""
    parsed = RouterSpec.parse(spec)
    with bypassing():
        if triton_route.backward_supports(parsed, facts(logits.device)):
            return [triton_route.backward(parsed, grad, logits, ids)] if needs[0] else []
        return _aten_route_backward(parsed, grad, logits, ids, expert_scale, needs)


def _route_backward_fake(
    grad: Tensor, logits: Tensor, ids: Tensor, expert_scale: Tensor | None, spec: str, needs: Sequence[bool]
) -> list[Tensor]:
    each = (logits, expert_scale)
    return [t.new_empty(t.shape) for t, need in zip(each, needs, strict=True) if need and t is not None]


def _once(op: str) -> Any:
    def raises(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(f"moe_compile::{op} has no gradient of its gradient: double backward is not supported")

    return raises


for _name, _impl, _fake in (
    ("experts", _experts, _experts_fake),
    ("experts_training", _experts_training, _experts_training_fake),
    ("experts_backward", _experts_backward, _experts_backward_fake),
    ("experts_backward_down", _experts_backward_down, _experts_backward_down_fake),
    ("experts_backward_gate_up", _experts_backward_gate_up, _experts_backward_gate_up_fake),
    ("route", _route, _route_fake),
    ("route_backward", _route_backward, _route_backward_fake),
):
    _LIB.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"moe_compile::{_name}", _fake, lib=_LIB)
_LIB.impl("experts", _experts_by_grad, "Autograd", with_keyset=True)
_LIB.impl("experts_training", _training_by_grad, "Autograd", with_keyset=True)
torch.library.register_autograd("moe_compile::route", _route_grads, setup_context=_route_save, lib=_LIB)
for _name in ("experts_backward", "experts_backward_down", "experts_backward_gate_up", "route_backward"):
    torch.library.register_autograd(f"moe_compile::{_name}", _once(_name.split("_")[0]), lib=_LIB)
