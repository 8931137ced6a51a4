"""Forms of HuggingFace modules that Dynamo can capture, for those whose own code it can't; `prepare` puts them there.

In: the module as `self`, and what its own forward takes. Out: what its own forward gives. They read the module's own
parameters as they are. Outside a compilation they call the module's own forward, so an eager run stays what it was.
A loop over the experts that `nonzero()` names becomes rows sorted by expert, or, where each expert is a module of its
own, a sum over all experts; recognition proves both. Ids outside [0, E) are routes to no expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Form:
    """`forward` replaces that of a class of transformers; `breaks`: what in the class' own code Dynamo can't capture.

    `reads`: the attributes that it relies on; a module that lacks one is left alone.
    """

    forward: Callable[..., Any]
    breaks: str
    reads: tuple[str, ...] = ()


# --- rows sorted by expert --------------------------------------------------------------------------------------------


def _sorted_rows(ids_TK: Tensor, E: int) -> tuple[Tensor, Tensor, Tensor]:
    """(the routes' order by expert, offsets [E], whether each sorted route goes to no expert [R, 1])."""
    sorted_ids, order = torch.sort(ids_TK.reshape(-1))
    # a CPU counts floats only, and a GPU counts integers deterministically
    counted = sorted_ids.float() if sorted_ids.device.type == "cpu" else sorted_ids.int()
    counts = torch.histc(counted, bins=E, min=0, max=E - 1)
    return order, torch.cumsum(counts, dim=0, dtype=torch.int32), (sorted_ids >= E).unsqueeze(-1)


def _product(rows: Tensor, weight: Tensor, offsets: Tensor, transposed: bool = False) -> Tensor:
    """Each expert's rows times its weights [E, out, in] (or [E, in, out]), as the library multiplies them."""
    from transformers.integrations.moe import _grouped_linear

    out: Tensor = _grouped_linear(rows, weight, offsets, is_transposed=transposed)
    return out


def _combined(y: Tensor, weights_TK: Tensor, order: Tensor) -> Tensor:
    """sum_k w * y of sorted rows y, in token order."""
    y = y * weights_TK.reshape(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return y[inverse].view(*weights_TK.shape, -1).sum(dim=1)


def _stacked(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: Callable[[Tensor, Tensor], Tensor],
    second: Callable[[Tensor, Tensor], Tensor],
    E: int,
) -> Tensor:
    """sum_k w * second(first(x)); both take sorted rows and offsets."""
    order, offsets, none = _sorted_rows(ids, E)
    rows = hidden[order // ids.shape[-1]].masked_fill(none, 0.0)
    inner = first(rows, offsets).masked_fill(none, 0.0)  # a product leaves those rows unwritten
    y = second(inner, offsets).masked_fill(none, 0.0)
    return _combined(y, weights, order).to(hidden.dtype)


def gate_up_down(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """gate_up_proj [E, 2I, H], down_proj [E, H, I]; the class' own gate."""
    if not torch.compiler.is_compiling():
        return _own(self, hidden_states, top_k_index, top_k_weights)

    def first(rows: Tensor, offsets: Tensor) -> Tensor:
        gated: Tensor = self._apply_gate(_product(rows, self.gate_up_proj, offsets))
        return gated

    def second(rows: Tensor, offsets: Tensor) -> Tensor:
        return _product(rows, self.down_proj, offsets)

    return _stacked(hidden_states, top_k_index, top_k_weights, first, second, self.num_experts)


def with_identities(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Routed experts, then ids of experts that give the hidden states back; gate_up_proj has rows for those too."""
    if not torch.compiler.is_compiling():
        return _own(self, hidden_states, top_k_index, top_k_weights)
    E = self.num_routed_experts

    def first(rows: Tensor, offsets: Tensor) -> Tensor:
        gate, up = _product(rows, self.gate_up_proj[:E], offsets).chunk(2, dim=-1)
        gated: Tensor = self.act_fn(gate) * up
        return gated

    def second(rows: Tensor, offsets: Tensor) -> Tensor:
        return _product(rows, self.down_proj, offsets)

    routed = _stacked(hidden_states, top_k_index, top_k_weights, first, second, E)
    kept = torch.where(top_k_index >= E, top_k_weights, 0.0).sum(dim=-1, keepdim=True)
    return routed + (hidden_states * kept).to(hidden_states.dtype)


def flat_rows(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """mlp.w1, v1 and w2: gate, up and down, each [E * I, H]."""
    if not torch.compiler.is_compiling():
        return _own(self, hidden_states, top_k_index, top_k_weights)
    E, I, H = self.num_experts, self.ffn_hidden_size, self.hidden_size

    def first(rows: Tensor, offsets: Tensor) -> Tensor:
        gate, up = (_product(rows, w.view(E, I, H), offsets) for w in (self.mlp.w1, self.mlp.v1))
        gated: Tensor = self.mlp.activation_fn(gate) * up
        return gated

    def second(rows: Tensor, offsets: Tensor) -> Tensor:
        return _product(rows, self.mlp.w2.view(E, I, H), offsets, transposed=True)

    out = _stacked(hidden_states.reshape(-1, H), top_k_index, top_k_weights, first, second, E)
    return out.view(hidden_states.shape[0], -1, H)


def gating_with_counts(self: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
    """(routes' order by expert, their tokens, their weights, counts, logits); the counts stay a tensor."""
    if not torch.compiler.is_compiling():
        return _own(self, hidden_states)
    logits = self.layer(hidden_states).float()
    chosen, ids = logits.topk(self.top_k, dim=1)
    weights = torch.softmax(chosen, dim=1).type_as(hidden_states)
    sorted_ids, order = torch.sort(ids.flatten())
    counted = sorted_ids.float() if sorted_ids.device.type == "cpu" else sorted_ids.int()
    counts = torch.histc(counted, bins=self.num_experts, min=0, max=self.num_experts - 1)
    return order, order // self.top_k, weights.flatten()[order], counts, logits


def rows_by_counts(self: Any, inputs: Tensor, expert_size: Any) -> Tensor:
    """Each expert's linear on its share of the rows; the shares as `gating_with_counts` gives them."""
    if not torch.compiler.is_compiling():
        return _own(self, inputs, expert_size)
    return _product(inputs, self.weight, torch.cumsum(expert_size, dim=0, dtype=torch.int32))


def rows_by_counts_transposed(self: Any, input: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """Each expert's linear, weight [E, in, out], on its share of the rows."""
    if not torch.compiler.is_compiling():
        return _own(self, input, tokens_per_expert)
    return _product(input, self.weight, torch.cumsum(tokens_per_expert, dim=0, dtype=torch.int32), transposed=True)


# --- a sum over all experts, each a module ----------------------------------------------------------------------------


def _drops(self: Any) -> bool:
    """Whether something inside is dropped at random, which keeps the block from being replaced: then computing all
    experts for all tokens would only cost. The class' own loop draws for each expert's rows."""
    return self.training and any(isinstance(m, nn.Dropout) and m.p > 0 for m in self.modules())


def _each(experts: Iterable[nn.Module], hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(hidden)
    for e, expert in enumerate(experts):
        weight = torch.where(ids == e, weights, 0.0).sum(dim=-1, keepdim=True)
        out = out + (expert(hidden) * weight).to(hidden.dtype)
    return out


def one_expert_or_none(self: Any, hidden_states: Tensor, selected_experts: Tensor, routing_weights: Tensor) -> Tensor:
    """selected_experts [T, 1, E]: at most a single 1 a token; a token beyond an expert's capacity has none."""
    if not torch.compiler.is_compiling() or _drops(self):
        return _own(self, hidden_states, selected_experts, routing_weights)
    ones, ids = selected_experts.reshape(-1, len(self)).topk(1, dim=-1)
    return _each(self.values(), hidden_states, ids, routing_weights.reshape(-1, 1) * ones)


def expert_of_each_slot(self: Any, hidden_states: Tensor, router_mask: Tensor, router_probs: Tensor) -> Tensor:
    """router_mask [T, E] of 0 and 1 names the expert of a slot, router_probs [T, E] weighs the slots.

    So the first two experts see every token, the second with the weights of the slots that are 1.
    """
    if not torch.compiler.is_compiling() or _drops(self):
        return _own(self, hidden_states, router_mask, router_probs)
    probs = router_probs * (1 - max(self.moe_token_dropout, 0.0))
    totals = torch.stack(((probs * (1 - router_mask)).sum(dim=-1), (probs * router_mask).sum(dim=-1)), dim=-1)
    weights, ids = totals.topk(2, dim=-1)
    return _each((self["expert_0"], self["expert_1"]), hidden_states, ids, weights)


# --- around the experts -----------------------------------------------------------------------------------------------


def both_modalities(
    self: Any, hidden_states: Tensor, moe_mm_token_type_ids: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Text experts for tokens of type 0, vision experts for the others; each set sees the other's tokens go nowhere."""
    if not torch.compiler.is_compiling() or moe_mm_token_type_ids is None:
        return _own(self, hidden_states, moe_mm_token_type_ids)
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    vision = moe_mm_token_type_ids.reshape(-1, 1) != 0
    outs, logits = [], []
    for moe, foreign in ((self.text_moe, vision), (self.vision_moe, ~vision)):
        router_logits, weights, ids = moe.gate(flat)
        ids = torch.where(foreign, moe.num_experts, ids)
        outs.append(_experts_with_strangers(moe.experts, flat, ids, weights))
        logits.append(router_logits)
    out = (outs[0] + outs[1]).view(hidden_states.shape)
    if self.shared_experts is not None:
        out = out + self.shared_experts(hidden_states)
    return out, torch.where(vision, logits[1], logits[0])


def _experts_with_strangers(experts: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """gate_up_proj and down_proj with ids that may be num_experts."""

    def first(rows: Tensor, offsets: Tensor) -> Tensor:
        gated: Tensor = experts._apply_gate(_product(rows, experts.gate_up_proj, offsets))
        return gated

    def second(rows: Tensor, offsets: Tensor) -> Tensor:
        return _product(rows, experts.down_proj, offsets)

    return _stacked(hidden, ids, weights, first, second, experts.num_experts)


def _own(self: Any, *args: Any) -> Any:
    return type(self).forward(self, *args)


_LOOP = "a loop over the experts that nonzero() names"
FORMS: dict[str, Form] = {
    "AriaGroupedExpertsGemm": Form(
        forward=rows_by_counts_transposed, breaks="rows sliced at counts that go to the host", reads=("weight",)
    ),
    "DbrxExperts": Form(
        forward=flat_rows, breaks=_LOOP, reads=("mlp", "num_experts", "ffn_hidden_size", "hidden_size")
    ),
    "Ernie4_5_VLMoeMoeBlock": Form(
        forward=both_modalities,
        breaks="a branch on any() and rows picked by a mask of modalities",
        reads=("text_moe", "vision_moe", "shared_experts"),
    ),
    "JetMoeParallelExperts": Form(forward=rows_by_counts, breaks="rows split by tolist()", reads=("weight",)),
    "JetMoeTopKGating": Form(
        forward=gating_with_counts, breaks="counts that go through tolist()", reads=("layer", "top_k", "num_experts")
    ),
    "LongcatFlashExperts": Form(
        forward=with_identities, breaks=_LOOP, reads=("num_routed_experts", "gate_up_proj", "down_proj", "act_fn")
    ),
    "NllbMoeExperts": Form(forward=expert_of_each_slot, breaks=_LOOP, reads=("moe_token_dropout",)),
    "Step3p7Experts": Form(
        forward=gate_up_down, breaks=_LOOP, reads=("gate_up_proj", "down_proj", "_apply_gate", "num_experts")
    ),
    "SwitchTransformersExperts": Form(forward=one_expert_or_none, breaks=_LOOP),
}
