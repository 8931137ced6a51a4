"""Expert weights re-laid in place: [gate; up] rows become [up; gate], which FlashInfer's kernels read without a copy.

In: a model with HuggingFace's fused experts. Out: the same modules and parameters, their halves exchanged, and the code
between the two linears exchanged with them, so that the module computes what it did: in eager mode, under any backend,
and under ours, whose recognition reads the order off the graph. Its state_dict is as before the exchange (a copy of one
parameter at a time), and so is what it loads. Invariants: twice is once; `restore` gives back every bit; a path of the
module that reads the rows itself, the loop over experts, raises instead of giving wrong numbers. No memory beyond one
piece of PIECE bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

PIECE = 64 << 20
_HANDLES = "_moe_compile_swapped"  # on a module whose halves are exchanged: its hooks' handles
_HALVED = ("gate_up_proj", "gate_up_proj_bias")


class Unpicklable:
    """In a module whose code was replaced on the instance: that can be copied, but nobody could load its pickle."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "moe_compile: a prepared model can't be pickled; moe_compile.restore(model) first, or save its state_dict"
        )

    def __deepcopy__(self, memo: Any) -> Unpicklable:
        return self


def swap(model: nn.Module) -> tuple[str, ...]:
    """Exchange the halves of every module that `why_not` doesn't refuse; the paths of those that were exchanged now.

    Modules that share a parameter are left alone.
    """
    done = []
    owners = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    for path, module in model.named_modules():
        if swapped(module) or why_not(module) or any(owners[id(p)] > 1 for p in _halved(module)):
            continue
        for parameter in _halved(module):
            _exchange(parameter)
        module._apply_gate = MethodType(_up_gate, module)
        module.forward = MethodType(_forward, module)
        handles = (
            module.register_state_dict_post_hook(_save),
            module.register_load_state_dict_pre_hook(_load),
            Unpicklable(),
        )
        setattr(module, _HANDLES, handles)
        done.append(path)
    return tuple(done)


def restore(model: nn.Module) -> tuple[str, ...]:
    """Undo `swap`; the paths of the modules that were exchanged."""
    undone = []
    for path, module in model.named_modules():
        if not swapped(module):
            continue
        *handles, _ = vars(module)[_HANDLES]
        for handle in handles:
            handle.remove()
        del module.forward, module._apply_gate
        delattr(module, _HANDLES)
        for parameter in _halved(module):
            _exchange(parameter)
        undone.append(path)
    return tuple(undone)


def swapped(module: nn.Module) -> bool:
    return _HANDLES in vars(module)


def why_not(module: nn.Module) -> str:
    """Why a module's halves stay as they are; "" where they can be exchanged."""
    from_library = type(module).__module__.startswith("transformers.")
    if not (from_library and isinstance(getattr(module, "gate_up_proj", None), nn.Parameter)):
        return "not fused experts of transformers"
    m: Any = module
    if not (getattr(m, "has_gate", False) and getattr(m, "is_concatenated", False)):
        return "its rows are not two halves"
    if getattr(m, "is_transposed", True):
        return "its rows are not an axis before the hidden one"
    if getattr(type(m), "_apply_gate", None) is not _default_gate():
        return "a gate of its own"
    if {"forward", "_apply_gate"} & vars(m).keys():
        return "its code was replaced by somebody else"
    if any(type(p) is not nn.Parameter or type(p.data) is not Tensor for p in _halved(m)):
        return "its parameters are not plain tensors"
    return "it is being trained" if any(p.grad is not None for p in _halved(m)) else ""


def _default_gate() -> Any:
    from transformers.integrations import moe

    return moe._default_apply_gate


def _up_gate(self: Any, out_S2I: Tensor) -> Tensor:
    """transformers' default gate, for rows in the order [up; gate]."""
    up, gate = out_S2I.chunk(2, dim=-1)
    activated: Tensor = self.act_fn(gate)
    return activated * up


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The class's own forward, but for the loop over experts, which splits the rows itself."""
    if self.config._experts_implementation in ("eager", None):
        raise RuntimeError(
            "moe_compile: this module's gate and up rows are exchanged, which experts_implementation='eager' can't "
            "read; choose another, or moe_compile.restore(model) first"
        )
    return type(self).forward(self, *args, **kwargs)


def _halved(module: Any) -> Iterator[Tensor]:
    for name in _HALVED:
        tensor = getattr(module, name, None)
        if tensor is not None:
            yield tensor


def _exchange(w_EG: Tensor) -> None:
    """Exchange the halves of axis 1 in place, some experts at a time. The tensor's version tells who holds copies."""
    half = w_EG.shape[1] // 2
    bytes_each = w_EG[0].numel() * w_EG.itemsize // 2
    step = max(1, PIECE // max(1, bytes_each))
    with torch.no_grad():
        for e in range(0, w_EG.shape[0], step):
            first, second = w_EG[e : e + step, :half], w_EG[e : e + step, half:]
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)


def _exchanged(w_EG: Tensor) -> Tensor:
    first, second = w_EG.chunk(2, dim=1)
    return torch.cat((second, first), dim=1)


def _save(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in _HALVED:
        if prefix + name in state:
            state[prefix + name] = _exchanged(state[prefix + name])


def _load(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    for name in _HALVED:
        if prefix + name in state:
            state[prefix + name] = _exchanged(state[prefix + name])
