"""One name for each operation: torch functions, methods, operators and ATen overloads -> `Call(op, args)`.

In: an fx node. Out: its canonical name with arguments bound by name, whether it mutates an argument and which, or None
where the table doesn't know it. The table only names; what an operation means is said by the rules.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F


@dataclass(frozen=True)
class Call:
    """`op` with its arguments by name (those left out are absent). `mutates`: the argument written."""

    op: str
    args: dict[str, Any] = field(hash=False)
    mutates: str | None = None

    def get(self, name: str, default: Any = None) -> Any:
        return self.args.get(name, default)


# op: (parameters, spellings). A parameter "*shape" takes the rest of the positional arguments, or one tuple.
# A spelling "name" means Tensor.name, torch.name, torch.nn.functional.name and aten.name, as far as they exist.
_TABLE: dict[str, tuple[str, str]] = {
    # views and copies
    "reshape": ("input *shape", "reshape view _unsafe_view view_copy"),
    "flatten": ("input start_dim end_dim", "flatten"),
    "unflatten": ("input dim sizes", "unflatten"),
    "squeeze": ("input *dim", "squeeze"),
    "unsqueeze": ("input dim", "unsqueeze"),
    "permute": ("input *dims", "permute"),
    "transpose": ("input dim0 dim1", "transpose swapaxes swapdims"),
    "t": ("input", "t"),
    "expand": ("input *sizes", "expand broadcast_to"),
    "expand_as": ("input other", "expand_as"),
    "repeat": ("input *sizes", "repeat tile"),
    "repeat_interleave": ("input repeats dim output_size", "repeat_interleave"),
    "identity": ("input", "contiguous clone alias lift_fresh_copy requires_grad_"),
    "detach": ("input", "detach"),
    "chunk": ("input chunks dim", "chunk"),
    "split": ("input split_size dim", "split split_with_sizes"),
    "unbind": ("input dim", "unbind"),
    "narrow": ("input dim start length", "narrow"),
    "select": ("input dim index", "select"),
    "slice": ("input dim start end step", "slice"),
    "cat": ("tensors dim", "cat concat concatenate"),
    # dtype
    "to": ("input *args", "to _to_copy"),
    "type": ("input dtype", "type"),
    "type_as": ("input other", "type_as"),
    "convert": ("input dtype", "convert_element_type"),
    # creation
    "empty_like": ("input dtype", "empty_like"),
    "zeros_like": ("input dtype", "zeros_like"),
    "ones_like": ("input dtype", "ones_like"),
    "full_like": ("input fill_value dtype", "full_like"),
    "arange": ("*bounds", "arange"),
    "zeros": ("*sizes", "zeros"),
    "ones": ("*sizes", "ones"),
    "empty": ("*sizes", "empty"),
    "full": ("sizes fill_value", "full"),
    "new_zeros": ("input *sizes", "new_zeros"),
    "new_ones": ("input *sizes", "new_ones"),
    "new_empty": ("input *sizes", "new_empty"),
    "new_full": ("input sizes fill_value", "new_full"),
    # indexing
    "index_select": ("input dim index", "index_select"),
    "gather": ("input dim index", "gather"),
    "index": ("input indices", "index"),
    "index_put": ("input indices values accumulate", "index_put"),
    "index_add": ("input dim index source alpha", "index_add"),
    "index_copy": ("input dim index source", "index_copy"),
    "scatter": ("input dim index src reduce", "scatter"),
    "scatter_add": ("input dim index src", "scatter_add"),
    "masked_fill": ("input mask value", "masked_fill"),
    "where": ("condition input other", "where"),
    # order and counting
    "sort": ("input dim descending stable", "sort"),
    "argsort": ("input dim descending stable", "argsort"),
    "topk": ("input k dim largest sorted", "topk"),
    "argmax": ("input dim keepdim", "argmax"),
    "histc": ("input bins min max", "histc"),
    "bincount": ("input weights minlength", "bincount"),
    "cumsum": ("input dim dtype", "cumsum"),
    "one_hot": ("input num_classes", "one_hot"),
    "searchsorted": ("sorted_sequence input out_int32 right side sorter", "searchsorted"),
    "nonzero": ("input as_tuple", "nonzero"),
    "any": ("input dim keepdim", "any"),
    # products and reductions
    "linear": ("input weight bias", "linear"),
    "matmul": ("input other", "matmul mm bmm"),
    "einsum": ("equation *operands", "einsum"),
    "grouped_mm": ("input weight offs bias out_dtype", "_grouped_mm grouped_mm"),
    "baddbmm": ("input batch1 batch2 beta alpha", "baddbmm"),
    "addmm": ("input mat1 mat2 beta alpha", "addmm"),
    "sum": ("input dim keepdim dtype", "sum"),
    "mean": ("input dim keepdim dtype", "mean"),
    "softmax": ("input dim dtype", "softmax _softmax"),
    "amax": ("input dim keepdim", "amax max"),
    "norm": ("input p dim keepdim dtype", "norm"),
    # shapes
    "size": ("input dim", "size sym_size"),
    "item": ("input", "item"),
    # pointwise: the parameters after the tensors are part of the function
    "add": ("input other alpha", "add"),
    "sub": ("input other alpha", "sub subtract"),
    "mul": ("input other", "mul multiply"),
    "div": ("input other rounding_mode", "div divide true_divide"),
    "floordiv": ("input other", "floor_divide"),
    "remainder": ("input other", "remainder"),
    "fmod": ("input other", "fmod"),
    "pow": ("input exponent", "pow"),
    "neg": ("input", "neg negative"),
    "clamp": ("input min max", "clamp clip"),
    "clamp_min": ("input min", "clamp_min"),
    "clamp_max": ("input max", "clamp_max"),
    "minimum": ("input other", "minimum"),
    "maximum": ("input other", "maximum"),
    "gelu": ("input approximate", "gelu"),
    "silu": ("input inplace", "silu"),
    "relu": ("input inplace", "relu"),
    "softplus": ("input beta threshold", "softplus"),
    "leaky_relu": ("input negative_slope inplace", "leaky_relu"),
    "dropout": ("input p training inplace", "dropout"),
    "invert": ("input", "bitwise_not logical_not"),
    **{name: ("input", name) for name in ("sigmoid", "tanh", "exp", "log", "log1p", "sqrt", "rsqrt", "abs", "erf",
                                          "square", "reciprocal", "sin", "cos", "relu6", "isnan", "isfinite")},
    **{name: ("input other", f"{name} {long}") for name, long in (
        ("eq", "equal_"), ("ne", "not_equal"), ("lt", "less"), ("le", "less_equal"), ("gt", "greater"),
        ("ge", "greater_equal"), ("bitwise_and", "logical_and"), ("bitwise_or", "logical_or"))},
}  # fmt: skip

_OPERATORS = {
    operator.add: "add", operator.sub: "sub", operator.mul: "mul", operator.truediv: "div", operator.neg: "neg",
    operator.floordiv: "floordiv", operator.mod: "remainder", operator.pow: "pow", operator.invert: "invert",
    operator.eq: "eq", operator.ne: "ne", operator.lt: "lt", operator.le: "le", operator.gt: "gt", operator.ge: "ge",
    operator.and_: "bitwise_and", operator.or_: "bitwise_or", operator.matmul: "matmul", operator.abs: "abs",
}  # fmt: skip
_INPLACE_OPERATORS = {
    operator.iadd: "add", operator.isub: "sub", operator.imul: "mul", operator.itruediv: "div",
    operator.ifloordiv: "floordiv", operator.imod: "remainder", operator.ipow: "pow", operator.imatmul: "matmul",
    operator.iand: "bitwise_and", operator.ior: "bitwise_or",
}  # fmt: skip
_CASTS = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16,
    "int": torch.int32, "long": torch.int64, "bool": torch.bool,
}  # fmt: skip
_SAME = {"dim": ("dim", "axis"), "keepdim": ("keepdim", "keepdims")}


@dataclass(frozen=True)
class _Spelling:
    op: str
    params: tuple[str, ...]
    fixed: tuple[tuple[str, Any], ...] = ()
    inplace: bool = False


@lru_cache(None)
def _spellings() -> tuple[dict[Any, _Spelling], dict[str, _Spelling]]:
    functions: dict[Any, _Spelling] = {}
    methods: dict[str, _Spelling] = {}

    def add(op: str, params: tuple[str, ...], name: str, inplace: bool = False) -> None:
        spelling = _Spelling(op, params, (), inplace)
        methods[name] = spelling
        for namespace in (torch, F, torch.Tensor, torch.special):
            f = getattr(namespace, name, None)
            if callable(f):
                functions[f] = spelling
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            functions[packet] = spelling

    for op, (params, names) in _TABLE.items():
        for name in names.split():
            add(op, tuple(params.split()), name)
            if not name.endswith("_"):
                add(op, tuple(params.split()), name + "_", inplace=True)
    for name, dtype in _CASTS.items():
        methods[name] = _Spelling("type", ("input",), (("dtype", dtype),))
        functions[getattr(torch.Tensor, name)] = methods[name]
    # F.softmax has a parameter of its own between dim and dtype
    functions[F.softmax] = _Spelling("softmax", ("input", "dim", "_stacklevel", "dtype"))
    functions[torch.ops.aten._softmax] = _Spelling("softmax", ("input", "dim", "half_to_float"))
    functions[F.gelu] = _Spelling("gelu", ("input", "approximate"))
    functions[torch.square] = _Spelling("square", ("input",))
    for inplace, table in ((False, _OPERATORS), (True, _INPLACE_OPERATORS)):
        for target, op in table.items():
            spelling = _Spelling(op, tuple(_TABLE[op][0].split()), inplace=inplace)
            functions[target] = methods[dunder(target)] = spelling
    functions[operator.getitem] = methods["__getitem__"] = _Spelling("getitem", ("input", "index"))
    functions[operator.setitem] = methods["__setitem__"] = _Spelling("setitem", ("input", "index", "value"), (), True)
    functions[torch._grouped_mm] = _Spelling("grouped_mm", ("input", "weight", "offs", "bias", "out_dtype"))
    functions[torch.ops.aten.slice] = _Spelling("slice", ("input", "dim", "start", "end", "step"))
    functions[getattr] = _Spelling("getattr", ("input", "name"))  # w.T, w.mT; operators from torch 2.15 on
    for name, packet in (("T", torch.ops.aten.numpy_T), ("mT", torch.ops.aten.mT)):
        functions[packet] = _Spelling("getattr", ("input",), (("name", name),))
    functions[torch.ops.aten.sym_size] = _Spelling("size", ("input", "dim"))
    functions[torch.ops.aten.copy_] = functions[torch.Tensor.copy_] = _Spelling("copy", ("input", "src"), inplace=True)
    methods["copy_"] = functions[torch.Tensor.copy_]
    methods["where"] = _Spelling("where", ("input", "condition", "other"))  # the method's self is the second argument
    return functions, methods


def dunder(target: Any) -> str:
    """The method that an operator calls: __iadd__ of operator.iadd."""
    return f"__{target.__name__.strip('_')}__"


_BY_QUALIFIED_NAME = {"transformers::grouped_mm_fallback": _Spelling("grouped_mm", ("input", "weight", "offs"))}


def canonical(node: torch.fx.Node) -> Call | None:
    """The call that `node` makes, or None: not an operation, unknown, or spelled with arguments we don't know."""
    if node.op not in ("call_function", "call_method"):
        return None
    functions, methods = _spellings()
    target: Any = node.target
    spelling: _Spelling | None
    if node.op == "call_method":
        spelling = methods.get(target)
    else:
        spelling = _lookup(functions, target)
    if spelling is None:
        return None
    args = _bind(spelling, node.args, node.kwargs)
    if args is None:
        return None
    inplace = spelling.inplace or args.pop("inplace", False) is True
    if args.pop("out", None) is not None:
        return None
    return Call(spelling.op, args, "input" if inplace else None)


def _lookup(functions: dict[Any, _Spelling], target: Any) -> _Spelling | None:
    try:
        found = functions.get(target)
    except TypeError:  # an unhashable callable
        return None
    if found is not None:
        return found
    if isinstance(target, torch._ops.OpOverload):
        packet = target.overloadpacket
        return functions.get(packet) or _BY_QUALIFIED_NAME.get(target._schema.name)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return _BY_QUALIFIED_NAME.get(target._qualified_op_name)
    # torch.library.custom_op objects
    return _BY_QUALIFIED_NAME.get(getattr(target, "_qualname", None) or "")


def _bind(spelling: _Spelling, args: Iterable[Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    bound: dict[str, Any] = dict(spelling.fixed)
    positional = list(args)
    for name in spelling.params:
        if name.startswith("*"):
            name, rest = name[1:], positional
            positional = []
            if name in kwargs or not rest:
                continue
            bound[name] = (
                tuple(rest[0]) if len(rest) == 1 and isinstance(rest[0], (tuple, list, torch.Size)) else (tuple(rest))
            )
            continue
        if positional:
            bound[name] = positional.pop(0)
    if positional:
        return None
    if not kwargs:
        return bound
    names = {alias: n for n in (p.lstrip("*") for p in spelling.params) for alias in _SAME.get(n, (n,))}
    for key, value in kwargs.items():
        name = names.get(key, key)
        if name in bound and name not in dict(spelling.fixed):
            return None
        bound[name] = value
    return bound
