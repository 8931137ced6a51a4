"""Blocks that are right, in surroundings that are not: memory written under unusual names, strides that somebody knows,
transforms of functions, tensors that are not plain, gradients switched off. Refused for the reason, or exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import blocks
import graphs
import pytest
import torch
import torch.nn.functional as F
from blocks import E, GatheredBlock, H, K
from steps import GATHERED, GROUPED, T, inputs, program
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from moe_compile import journal
from moe_compile.backend import moe_backend
from moe_compile.recognize import recognize

CHANGED = "a tensor was changed after the block read it"


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(call: Callable[..., Any], x: Any, inner: str = "eager") -> tuple[Any, list[str]]:
    """What the call gives behind the backend, and why its block was refused; nothing where it was replaced."""
    options = {"moe.inner": inner, "moe.strict": True, "moe.route": "op"}
    with journal.capture() as events:
        got = torch.compile(call, backend=lambda gm, given: moe_backend(gm, given, options=options))(x)
    found = [e for e in events if isinstance(e, (journal.RegionFound, journal.RegionRejected))]
    assert len(found) == 1
    return got, [e.reason for e in found if isinstance(e, journal.RegionRejected)]


def written(write: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """A block whose hidden states or ids are written after its first linear read them."""
    m = GatheredBlock()

    def block(x: Tensor) -> Tensor:
        x = x * 1
        w, ids = torch.topk(F.softmax(F.linear(x, m.gate), dim=-1), K, dim=-1)
        g, u = torch.bmm(m.gate_up[ids.reshape(-1)], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        write(x, ids)
        y = torch.bmm(m.down[ids.reshape(-1)], (F.silu(g) * u).unsqueeze(-1)).squeeze(-1)
        return (y * w.reshape(-1, 1)).view(-1, K, H).sum(1)

    return block


def _xor(x: Tensor, ids: Tensor) -> None:
    ids ^= 1


WRITES: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "a method of an operator": (lambda x, ids: x.__iadd__(1.0), CHANGED),
    "another": (lambda x, ids: x.__setitem__(0, 1.0), CHANGED),
    "an operator that no table names": (_xor, "expert ids that may be negative"),
    "inplace by position": (lambda x, ids: F.elu(x, 1.0, True), CHANGED),
    "statistics of a norm": (lambda x, ids: F.batch_norm(torch.ones(3, H), x[0], x[1], training=True), CHANGED),
    "rows scaled to a norm": (lambda x, ids: F.embedding(torch.tensor([0]), x, max_norm=0.01), CHANGED),
    "inplace by name": (lambda x, ids: F.hardtanh(input=x, inplace=True), CHANGED),
}


@pytest.mark.parametrize("name", list(WRITES))
def test_memory_written_under_an_unusual_name(name: str) -> None:
    write, reason = WRITES[name]
    block, x = written(write), torch.randn(T, H)
    with torch.no_grad():
        got, why = compiled(block, x)
        torch.testing.assert_close(got, block(x))
    assert why == [reason]


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("write", [lambda x, scores, w: x.add_(1), lambda x, scores, w: scores.zero_(),
                                   lambda x, scores, w: w.mul_(2)], ids=["hidden", "logits", "weights"])  # fmt: skip
def test_what_is_written_after_the_block_has_its_gradients(write: Callable[..., Any], inner: str) -> None:
    """The block keeps rows and weights of routes for its backward, and so may write what they are of."""
    m = GatheredBlock().double()

    def block(x: Tensor) -> Tensor:
        x, gate = x * 1, m.gate.detach()  # whose gradient would need x
        scores = F.linear(x, gate)
        w, ids = torch.topk(F.softmax(scores, dim=-1), K, dim=-1)
        _, perm, offsets = blocks.sorted_rows(ids.reshape(-1))
        g, u = blocks.grouped(x[perm // K], m.gate_up.transpose(1, 2), offsets).chunk(2, dim=-1)
        y = blocks.grouped(F.silu(g) * u, m.down.transpose(1, 2), offsets) * w.reshape(-1)[perm].unsqueeze(-1)
        out = torch.zeros_like(x).index_add_(0, perm // K, y)
        write(x, scores, w)
        return out + x + scores.sum() + w.sum()

    x, grads = torch.randn(T, H, dtype=torch.float64), []
    for run in (block, lambda x: compiled(block, x, inner)[0]):
        leaf = x.clone().requires_grad_()
        run(leaf).square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


def in_columns(read: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A block whose result lies in memory column by column, as its hidden states do; and a reader who knows."""
    m = GatheredBlock()

    def block(x: Tensor) -> Tensor:
        x = x.t().contiguous().t()
        w, ids = torch.topk(F.softmax(F.linear(x, m.gate), dim=-1), K, dim=-1)
        _, perm, offsets = blocks.sorted_rows(ids.reshape(-1))
        g, u = blocks.grouped(x[perm // K], m.gate_up.transpose(1, 2), offsets).chunk(2, dim=-1)
        y = blocks.grouped(F.silu(g) * u, m.down.transpose(1, 2), offsets) * w.reshape(-1)[perm].unsqueeze(-1)
        return read(torch.zeros_like(x).index_add_(0, perm // K, y))

    return block


@pytest.mark.parametrize("read", [lambda y: y.t().view(-1), lambda y: y.as_strided((H, T), (T, 1))])
def test_a_result_has_the_strides_that_it_had(read: Callable[[Tensor], Tensor]) -> None:
    block, x = in_columns(read), torch.randn(T, H)
    with torch.no_grad():
        got, why = compiled(block, x)
        torch.testing.assert_close(got, block(x))
    assert not why


def test_a_result_that_is_a_part_of_its_memory() -> None:
    """index_add_ into half of a tensor: whoever reads the memory around it can't read the operator's."""

    def out(s: Any) -> Any:
        return torch.zeros((T, 2 * H), dtype=s.x.dtype)[:, :H].index_add_(0, s.perm // K, s.weighed)

    changes = {"inverse": lambda s: None, "routes": lambda s: None, "out": out}
    found = recognize(graphs.trace(program(GROUPED, changes), inputs()))
    assert [r.verdict.reason for r in found.rejections] == ["the combined value lives in a part of its memory"]


TRANSFORMS: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "vmap": lambda m: lambda x: torch.func.vmap(m)(x.view(2, -1, H)),
    "grad": lambda m: torch.func.grad(lambda x: m(x).square().sum()),
    "jvp": lambda m: lambda x: torch.func.jvp(m, (x,), (x,))[1],
}


@pytest.mark.parametrize("name", list(TRANSFORMS))
def test_a_transform_of_functions_keeps_its_nodes(name: str) -> None:
    call, x = TRANSFORMS[name](GatheredBlock()), torch.randn(T, H)
    with torch.no_grad():
        got, why = compiled(call, x, "aot_eager")
        torch.testing.assert_close(got, call(x))
    assert why == ["the block is inside of a transform of functions (vmap, grad, jvp)"]


def test_tensors_that_wrap_others() -> None:
    """A DTensor's product is not that of its parts; a quantized tensor has no elements to read."""
    m = GatheredBlock()
    for name, p in list(m.named_parameters()):
        setattr(m, name, nn.Parameter(TwoTensor(p.detach(), p.detach())))
    x = TwoTensor(torch.randn(T, H), torch.randn(T, H))
    with torch.no_grad():
        got, why = compiled(m, x)
        assert torch.equal(got.b, m(x).b)
    assert why == ["an operand is not a plain tensor"]


def test_operands_on_several_devices() -> None:
    """torch indexes with ids on another device, a kernel can't; with their copy on the weights' device it can."""
    on_meta = [t if n == 6 else t.to("meta") for n, t in enumerate(inputs())]  # "other", from which ids come, stays

    def step(device: str) -> Any:
        ids = {"choice": lambda s: torch.topk(s.other[:, :E], K, dim=-1), "ids": lambda s: s.choice[1].to(device)}
        return program(GATHERED, {**ids, "weighed": lambda s: s.second})

    apart, together = (recognize(graphs.trace(step(device), on_meta)) for device in ("cpu", "meta"))
    assert [r.verdict.reason for r in apart.rejections] == ["the operands are on several devices"]
    (region,) = together.regions
    assert region.match.ids.meta["example_value"].device.type == "meta"


class NotAsAWhole(GatheredBlock):
    """A block of which something is computed without gradients: its input, where no_grad stands within no_grad; all
    but the last cast; the last cast alone, which changes nothing and so keeps its gradient."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        if self.part == "input":
            with torch.no_grad():
                x = x.view(-1, H)
                with torch.no_grad():
                    x.sum()
            return super().forward(x)
        if self.part == "all but a cast":
            with torch.no_grad():
                y = super().forward(x)
            return y.double()
        y = super().forward(x)
        with torch.no_grad():
            return y.float()


@pytest.mark.parametrize(
    ("part", "result", "x_has_none"),
    [("input", True, True), ("all but a cast", False, True), ("a cast", True, False)],
)
def test_what_has_no_gradient_gets_none(part: str, result: bool, x_has_none: bool) -> None:
    m = NotAsAWhole(part)
    found = []
    for call in (m, lambda x: compiled(m, x)[0]):
        x = torch.randn(T, H, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = call(x)
        if y.requires_grad:
            y.square().sum().backward()
        found.append((y.detach(), y.requires_grad, x.grad is None))
    assert found[0][1:] == found[1][1:] == (result, x_has_none)
    torch.testing.assert_close(found[1][0].float(), found[0][0].float())
