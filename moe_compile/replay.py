"""Runs the graph that Dynamo captured, before anything is changed in it, to see the values of some nodes.

In: the graph, its example inputs, nodes. Out: those nodes' values, up to the last of which the graph is run. Looking
changes nothing: memory that the graph writes is replaced by copies for the run (nobody else's tensor is written, so
there is nothing to restore, and a static buffer keeps its address), random number generators are put back, no gradient
is recorded, and autocast and the like that the graph enters are left again. A write that was not foreseen is refused
before it happens.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from .nodes import fake, storage
from .verdict import Unproved
from .writes import Writes

Node = torch.fx.Node
# What a graph that is somebody else's may raise when it is run outside of its usual place.
FAULTS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError)
_MODES = {
    torch.amp.autocast_mode._enter_autocast: torch.amp.autocast_mode._exit_autocast,
    torch.autograd.grad_mode._enter_inference_mode: torch.autograd.grad_mode._exit_inference_mode,
}


class Replay:
    """A graph and concrete inputs for it. Unproved where there is nothing to run on: fake tensors, unknown sizes."""

    def __init__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.gm = gm
        self.placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        if len(self.placeholders) != len(inputs):
            raise Unproved("the graph's inputs are not at hand", f"{len(inputs)} of {len(self.placeholders)}")
        self.inputs = {n: _concrete(n, value) for n, value in zip(self.placeholders, inputs)}
        for name, t in (*gm.named_parameters(), *gm.named_buffers()):
            _concrete(name, t)
        self.writes = Writes(gm.graph)

    def run(
        self,
        wanted: Collection[Node],
        changed: Mapping[Node, torch.Tensor] | None = None,
        *,
        copied: Collection[Node] = (),
        alone: bool = False,
    ) -> dict[Node, Any]:
        """The values of `wanted`, those in `copied` as they were before later writes into their memory.

        changed: inputs in the place of the example's. alone: only what `wanted` needs is run, instead of the whole
        graph up to the last of them. Unproved where the graph can't be run.
        """
        inputs = {**self.inputs, **(changed or {})}
        # What a higher-order operator is given it may write as far as one can tell; copying all that goes through a
        # checkpoint, weights among it, is no way, so there the guard alone decides.
        written = {
            memory
            for n, memories in self.writes.of.items()
            if not isinstance(n.target, torch._ops.HigherOrderOperator)
            for memory in memories
        }
        for n in self.gm.graph.nodes:
            if n.op == "get_attr" and storage(n) in written:
                raise Unproved("the graph writes into an attribute of its own", n.name)
        copies: dict[int, torch.UntypedStorage] = {}
        kept = {_memory(t) for t in (*self.gm.parameters(), *self.gm.buffers())}
        needed = {n for w in wanted for n in self.writes.interior(w, ())} if alone else set(self.writes.position)
        runner = _Runner(self.gm, set(wanted), set(copied), needed, self.writes.position)
        try:
            for n, t in inputs.items():
                if isinstance(t, torch.Tensor) and storage(n) in written and not needed.isdisjoint(n.users):
                    inputs[n] = _elsewhere(t, copies)
                elif isinstance(t, torch.Tensor):
                    kept.add(_memory(t))
            with _untouched(inputs.values()), _Guard(kept):
                runner.run(*inputs.values())
        except _Enough:
            pass
        except FAULTS as error:
            text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            raise Unproved("the captured graph can't be run on its own", text) from error
        finally:
            runner.leave()
        return runner.seen

    # a region's own nodes, as a function of what it reads

    def reads(self, region: Any) -> list[Node]:
        """The nodes outside of a region (recognize.Found) that its nodes read, without its router."""
        inside = self._inside(region)
        return self.writes.ordered({m for n in inside for m in n.all_input_nodes} - set(inside))

    def original(self, region: Any, seen: Mapping[Node, Any]) -> Callable[[], Any]:
        """Runs the region's own nodes on the values `seen` of what it `reads`."""
        graph, new = torch.fx.Graph(), {}
        reads = self.reads(region)
        for n in reads:
            new[n] = graph.placeholder(n.name)
        for n in self._inside(region):
            new[n] = graph.node_copy(n, new.__getitem__)
        graph.output(new[region.root])
        call = torch.fx.GraphModule(self.gm, graph)
        values = [seen[n] for n in reads]
        return lambda: call(*values)

    def _inside(self, region: Any) -> list[Node]:
        return _inside(self.writes, region)


def _inside(writes: Writes, region: Any) -> list[Node]:
    """A region's nodes, without writes into memory that it reads: those were done before its values were seen."""
    leaves = {leaf.attr.node for leaf in region.match.leaves}
    theirs = {storage(n) for n in leaves}
    inside = writes.interior(region.root, leaves)
    return [n for n in inside if n is region.root or theirs.isdisjoint(writes.of.get(n, ()))]


def fingerprint(gm: torch.fx.GraphModule, region: Any) -> str:
    """The same for two regions whose nodes are the same operations on the same numbers and shapes."""
    nodes = _inside(Writes(gm.graph), region)
    number: dict[Node, str] = {}

    def name(n: Node) -> str:
        return number.setdefault(n, f"%{len(number)}")

    lines = []
    for n in nodes:
        arguments = torch.fx.map_arg((n.args, n.kwargs), lambda m: name(m))
        target = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", str(n.target))
        shape = getattr(fake(n), "shape", ())
        static = tuple(d if isinstance(d, int) else "*" for d in shape)
        lines.append(f"{name(n)} = {target}{arguments} {static}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Original:
    """A block's own nodes on some rows (`call`), and the operator's arguments for the same rows."""

    call: Callable[[], Any]
    arguments: tuple[Any, ...]


class _Enough(BaseException):
    """Every wanted value was seen."""


class _Runner(torch.fx.Interpreter):
    def __init__(
        self, gm: torch.fx.GraphModule, wanted: set[Node], copied: set[Node], needed: set[Node], order: dict[Node, int]
    ) -> None:
        super().__init__(gm)
        self.wanted, self.copied, self.needed = wanted, copied, needed
        self.last = max(wanted, key=order.__getitem__)
        self.seen: dict[Node, Any] = {}
        self.entered: list[tuple[Any, Any]] = []
        self.extra_traceback = False

    def run_node(self, n: Node) -> Any:
        if n.target is torch._C._set_grad_enabled or not (n.op == "placeholder" or n in self.needed):
            return None
        value = super().run_node(n)
        if n.op == "call_function" and n.target in _MODES:
            self.entered.append((_MODES[n.target], value))
        elif n.op == "call_function" and n.target in _MODES.values():
            self.entered.pop()
        if n in self.wanted:
            self.seen[n] = value.detach().clone() if n in self.copied else value
        if n is self.last:
            raise _Enough
        return value

    def leave(self) -> None:
        while self.entered:
            leave, value = self.entered.pop()
            leave(value)


class _Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that would write the memories `kept`."""

    supports_higher_order_operators = True

    def __init__(self, kept: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            if "mutation" in str(func):  # a user's Triton kernel, which names what it writes in its own way
                raise RuntimeError(f"{func} may write into an input of the graph")
            return func(*args, **kwargs)
        schema = func._schema
        if schema.is_mutable:
            for position, argument in enumerate(schema.arguments):
                if argument.alias_info is None or not argument.alias_info.is_write:
                    continue
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                for t in value if isinstance(value, (tuple, list)) else (value,):
                    if isinstance(t, torch.Tensor) and _memory(t) in self.kept:
                        raise RuntimeError(f"{func} writes into an input of the graph")
        return func(*args, **kwargs)


@contextlib.contextmanager
def _untouched(inputs: Any) -> Iterator[None]:
    """Random number generators as before, no gradients."""
    devices = {t.device.index for t in inputs if isinstance(t, torch.Tensor) and t.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)), torch.no_grad():
        yield


def _concrete(what: Any, value: Any) -> Any:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        hint = value.node.hint
        if hint is None:
            raise Unproved("a size has no example value", str(what))
        return hint
    if isinstance(value, torch.Tensor) and (isinstance(value, FakeTensor) or value.is_meta):
        raise Unproved("the graph's inputs are not real tensors", str(what))
    return value


def _memory(t: torch.Tensor) -> int:
    try:
        return t.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # no storage of its own (sparse, a subclass)
        return -id(t)


def _elsewhere(t: torch.Tensor, copies: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """`t` in a copy of its memory, which others with that memory share."""
    memory = _memory(t)
    if memory not in copies:
        copies[memory] = t.untyped_storage().clone()  # type: ignore[no-untyped-call]
    made = torch.empty(0, dtype=t.dtype, device=t.device)
    return made.set_(copies[memory], t.storage_offset(), t.size(), t.stride())
