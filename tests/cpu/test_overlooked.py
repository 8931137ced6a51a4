"""explain speaks of every module that counts experts: replaced, refused, or why nothing in its graph is a block."""

from __future__ import annotations

from traceback import FrameSummary

import pytest
import torch
import torch.nn.functional as F
from blocks import E, H, I, K
from torch import nn

from moe_compile.breaks import Ending
from moe_compile.explain import explain
from moe_compile.nodes import clean_path
from moe_compile.overlooked import Evidence, overlooked

T = 12


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(H, I), nn.Linear(H, I), nn.Linear(I, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Counting(nn.Module):
    """What all of these blocks have; those below choose and compute."""

    def __init__(self, experts: nn.Module | None = None) -> None:
        super().__init__()
        self.num_experts = E
        self.router = nn.Linear(H, E)
        self.experts = experts or nn.ModuleList(Expert() for _ in range(E))

    def choice(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.topk(F.softmax(self.router(x), dim=-1), K, dim=-1)


class RowsOfWhere(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.choice(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):  # type: ignore[arg-type]
            token, slot = torch.where(ids == e)
            out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class RowsOfEmbeddings(Counting):
    def __init__(self) -> None:
        super().__init__(nn.ModuleList([nn.Embedding(E, H), nn.Embedding(E, H)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.choice(x)
        down, up = (table(ids) for table in self.experts)  # type: ignore[union-attr]
        return ((x.unsqueeze(1) * down).sum(-1).relu() * weights).unsqueeze(1).matmul(up).squeeze(1)


class Averaged(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(expert(x) for expert in self.experts) / E  # type: ignore[union-attr, return-value, operator]


class Chained(Counting):
    """A true choice, and experts that feed each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, _ = self.choice(x)
        for expert in self.experts:  # type: ignore[union-attr]
            x = expert(x)
        return x * weights.sum(-1, keepdim=True)


class Unused(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.inside = nn.Linear(H, H)
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inside(x)
        for block in self.layers:
            x = x + block(x)
        return x


WHY = {
    RowsOfEmbeddings: "its experts are rows of embeddings (2 embeddings), no linears that expert ids choose",
    Averaged: f"nothing around it chooses experts by a top-k or a sort ({3 * E} linears in it)",
    Chained: "its graph has no sum over the chosen experts of one linear behind another",
    Unused: "no captured graph names it: it did not run, or not as a part of this model's graph",
}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", list(WHY), ids=lambda k: k.__name__)
def test_a_module_that_counts_experts_stays_for_a_reason(kind: type[Counting]) -> None:
    with torch.no_grad():
        report = explain(Model(kind()), torch.randn(T, H))
    assert not report.regions
    (stays,) = report.overlooked
    assert (stays.module, stays.looks, stays.why, stays.remedy) == ("layers.0", f"num_experts={E}", WHY[kind], "")
    assert f"layers.0: num_experts={E}, but no MoE block was found" in str(report)
    assert report.as_dict()["overlooked"][0]["why"] == WHY[kind]


def test_a_block_by_itself_is_named_too() -> None:
    with torch.no_grad():
        report = explain(Averaged(), torch.randn(T, H))
    assert [(o.module, o.why) for o in report.overlooked] == [("", WHY[Averaged])]
    assert f"(the model itself): num_experts={E}" in str(report)


def test_a_break_inside_of_one_names_the_flag_that_helps() -> None:
    model, x = Model(RowsOfWhere()), torch.randn(T, H)
    with torch.no_grad():
        broken = explain(model, x)
        (flag,) = {o.remedy.split(" = ")[0].removeprefix("torch._dynamo.config.") for o in broken.overlooked}
        torch._dynamo.reset()
        with torch._dynamo.config.patch({flag: True}):
            whole = explain(model, x)
    (stays,) = broken.overlooked
    assert stays.module == "layers.0"
    assert stays.why.startswith("Dynamo ends the graph in it, at test_overlooked.py:")
    assert "Operator `aten.nonzero.default`'s output shape depends on input Tensor data" in stays.why
    assert ["torch.where(ids == e)" in b.where.code for b in broken.breaks] == [True]
    assert "remedy      torch._dynamo.config.capture_dynamic_output_shape_ops = True" in str(broken)
    assert [r.where.module for r in whole.regions if r.replaced] == ["layers.0"]
    assert not whole.overlooked


def test_a_replaced_block_is_not_overlooked_and_its_neighbor_is() -> None:
    class Masked(Counting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, ids = self.choice(x)
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.experts):  # type: ignore[arg-type]
                out = out + expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
            return out

    with torch.no_grad():
        report = explain(Model(Masked(), Averaged(), Masked()), torch.randn(T, H))
    assert [r.where.module for r in report.regions] == ["layers.0", "layers.2"]
    assert [o.module for o in report.overlooked] == ["layers.1"]


class Part(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def counting(name: str = "num_experts", **parts: nn.Module) -> Part:
    part = Part(**parts)
    setattr(part, name, E)
    return part


def found(model: nn.Module, *told: str) -> list[str]:
    return [o.module for o in overlooked(model, Evidence(), told, ())]


def test_what_counts_experts_is_one_block_with_its_parts() -> None:
    layer = Part(mlp=Part(gate=counting(), experts=counting("n_routed_experts")), attention=Part())
    model = counting(layers=nn.ModuleList([layer, layer]), head=Part())
    model.layers[1] = Part(mlp=counting(experts=Part()), attention=Part(experts=counting("num_local_experts")))
    assert found(model) == ["layers.0.mlp", "layers.1.mlp", "layers.1.attention.experts"]
    # what is told of a part is told of its block, also by a name that starts at the block
    assert found(model, "layers.0.mlp.experts") == ["layers.1.mlp", "layers.1.attention.experts"]
    assert found(model, "layers.1.mlp.experts") == ["layers.0.mlp", "layers.1.attention.experts"]
    assert found(model, "mlp.experts") == ["layers.1.attention.experts"]
    assert found(counting("n_shared_experts")) == []


def test_a_break_elsewhere_is_not_blamed_on_the_block() -> None:
    elsewhere = Ending.read("A break\n  Explanation: of another place", [FrameSummary("/elsewhere.py", 3, "forward")])
    (stays,) = overlooked(Model(Averaged()), Evidence(), (), (elsewhere,))
    assert stays.why == WHY[Unused]
    assert (elsewhere.title, elsewhere.why, elsewhere.flags) == ("A break", "of another place", ())
    assert Ending.read("A title alone", ()).why == ""


def test_a_forward_that_was_set_on_an_instance_is_no_part_of_a_path() -> None:
    assert clean_path("L['self'].layers.0.mlp.forward.__self__.experts") == "layers.0.mlp.experts"
    assert clean_path("L['self'].forward.__self__.experts") == "experts"
    assert clean_path("L['self'].forward_experts") == "forward_experts"
