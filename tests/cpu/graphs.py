"""FX graphs as Dynamo would hand them over, made in milliseconds: traced symbolically, then run once on fake tensors.

A graph here has the node kinds, the metadata (`example_value`) and the shared storages that recognition reads, so a
test can afford hundreds of them. tests/cpu/test_recognize.py and tests/models check the same code behind Dynamo itself.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode

from moe_compile.backend import moe_backend


class _Proxy(torch.fx.Proxy):
    """With the in-place operators of tensors, which fx leaves out and Dynamo records."""

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


for _name in ("iadd", "isub", "imul", "itruediv"):
    _inplace = getattr(operator, _name)
    setattr(_Proxy, f"__{_name}__", lambda a, b, f=_inplace: a.tracer.create_proxy("call_function", f, (a, b), {}))


class _Tracer(torch.fx.Tracer):
    def proxy(self, node: torch.fx.Node) -> torch.fx.Proxy:
        return _Proxy(node, self)


class _Created(TorchFunctionMode):
    """Tensors that a program makes from nothing are nodes too, not constants of the trace."""

    def __init__(self, tracer: torch.fx.Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.zeros, torch.ones, torch.full, torch.arange, torch.empty):
            return self.tracer.create_proxy("call_function", function, args, kwargs or {})
        return function(*args, **(kwargs or {}))


def trace(
    program: Callable[..., Any], inputs: Sequence[torch.Tensor], dynamic: Sequence[int] = ()
) -> torch.fx.GraphModule:
    """The graph of a module or function; the first dim of the inputs numbered in `dynamic` is symbolic."""
    tracer = _Tracer()
    with _Created(tracer):
        graph = tracer.trace(program)
    gm = torch.fx.GraphModule(tracer.root, graph)
    propagate(gm, inputs, dynamic)
    return gm


def propagate(gm: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], dynamic: Sequence[int] = ()) -> None:
    """Give every node the fake value it has when the graph runs on `inputs`; an exception where it can't run."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=not dynamic)

    def fake(n: int, x: torch.Tensor) -> torch.Tensor:
        if n not in dynamic:
            return mode.from_tensor(x, static_shapes=True)
        sizes = [DimDynamic.DYNAMIC if d == 0 else DimDynamic.STATIC for d in range(x.dim())]
        return mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    held: dict[str, torch.Tensor] = {}  # two nodes that read one parameter read one memory

    class Propagate(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            value = super().run_node(n)
            n.meta["example_value"] = value
            return value

        def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target not in held:
                held[target] = mode.from_tensor(super().get_attr(target, args, kwargs), static_shapes=True)
            return held[target]

    with mode, torch.no_grad():
        Propagate(gm).run(*[fake(n, x) for n, x in enumerate(inputs)])


def clone(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph of its own over the same parameters and fake values."""
    graph = torch.fx.Graph()
    nodes: dict[torch.fx.Node, torch.fx.Node] = {}
    out = graph.graph_copy(gm.graph, nodes, return_output_node=True)
    assert isinstance(out, tuple)
    graph.output(out[0])
    for old, new in nodes.items():
        new.meta = copy.copy(old.meta)
    return torch.fx.GraphModule(gm, graph)


def replaced(gm: torch.fx.GraphModule, **options: Any) -> Callable[..., Any]:
    """A copy of the graph with its blocks replaced, through the whole backend."""
    settings = {"moe.inner": "eager", "moe.strict": True, "moe.route": "op"}
    return moe_backend(clone(gm), [], options={**settings, **{f"moe.{k}": v for k, v in options.items()}})


def run(call: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The outputs on copies of the inputs, and the inputs afterwards: an in-place write is a result too."""
    mine = [x.clone() for x in inputs]
    with torch.no_grad():
        out = call(*mine)
    return (*(out if isinstance(out, (tuple, list)) else (out,)), *mine)


def differs(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], tolerance: float = 1e-5) -> str:
    """What is different beyond rounding, or nothing; tolerance is relative to a tensor's largest value."""
    for n, (x, y) in enumerate(zip(a, b, strict=True)):
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"result {n} is {y.dtype} {list(y.shape)}, not {x.dtype} {list(x.shape)}"
        x, y = x.double(), y.double()
        scale = x[x.isfinite()].abs().max().item() if x.isfinite().any() else 1.0
        if not torch.allclose(x, y, rtol=tolerance, atol=tolerance * max(scale, 1e-3), equal_nan=True):
            return f"result {n} differs by {(x - y).abs().max().item()}, its largest value is {scale}"
    return ""
