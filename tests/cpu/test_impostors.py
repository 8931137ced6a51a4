"""Impostors: blocks that are wrong in one detail. None is replaced, and each gets the reason that fits.

A table: a function replaces one step of a true block (steps.py), its name says what is wrong, its decorator what the
recognition says. The true blocks and lawful edits beside them show that it is the detail that is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import graphs
import pytest
import torch
import torch.nn.functional as F
from blocks import E, H, I, K
from steps import GATHERED, GROUPED, SEPARATE, Step, T, Table, inputs, program

from moe_compile.recognize import recognize

IMPOSTORS: dict[str, tuple[Table, Table, str]] = {}
S = SimpleNamespace


def impostor(table: Table, step: str, reason: str, **others: Step) -> Callable[[Step], Step]:
    """Registers a function in the place of `step` (others: of further steps); reason: a part of what must be said."""

    def register(f: Step) -> Step:
        kind = {id(GROUPED): "grouped", id(GATHERED): "gathered", id(SEPARATE): "separate"}[id(table)]
        name = f"{kind}: {f.__name__.replace('_', ' ').strip()}"
        assert name not in IMPOSTORS
        IMPOSTORS[name] = (table, {step: f, **others}, reason)
        return f

    return register


def by_route(s: S, values: Any) -> Any:
    """[T, K] values in the order of the sorted rows, as a column."""
    return values.reshape(-1)[s.perm].unsqueeze(-1)


# The expert ids

OTHER_IDS = "the expert ids differ between the linears"
OTHER_SORT = "rows are sorted by other ids than the offsets count"
NEGATIVE = "expert ids that may be negative"


@impostor(GATHERED, "second_flat", OTHER_IDS)
def ids_of_the_second_linear_shifted(s: S) -> Any:
    return (s.flat + 1) % E


@impostor(GROUPED, "second_offsets", OTHER_SORT)
def offsets_of_the_second_linear_count_shifted_ids(s: S) -> Any:
    return torch.cumsum(torch.histc(((s.flat + 1) % E).float(), bins=E, min=0, max=E - 1), 0, dtype=torch.int32)


@impostor(GROUPED, "offsets", OTHER_SORT)
def offsets_count_another_ids_tensor(s: S) -> Any:
    other = torch.topk(s.other[:, :E], K, dim=-1)[1].reshape(-1)
    return torch.cumsum(torch.histc(other.float(), bins=E, min=0, max=E - 1), 0, dtype=torch.int32)


@impostor(GATHERED, "second_flat", OTHER_IDS)
def ids_edited_in_place_between_the_linears(s: S) -> Any:
    s.ids.fill_(0)
    return s.ids.reshape(-1)


@impostor(GROUPED, "second_offsets", OTHER_SORT)
def ids_edited_in_place_and_counted_again(s: S) -> Any:
    s.ids.fill_(0)
    return torch.cumsum(torch.histc(s.flat.float(), bins=E, min=0, max=E - 1), 0, dtype=torch.int32)


@impostor(GATHERED, "flat", NEGATIVE)
def an_id_below_zero_wraps_around(s: S) -> Any:
    return (s.ids - 1).reshape(-1)


@impostor(GATHERED, "flat", NEGATIVE)
def an_id_below_zero_made_in_place(s: S) -> Any:
    s.ids.sub_(1)
    return s.ids.reshape(-1)


@impostor(GATHERED, "flat", NEGATIVE)
def ids_below_zero_by_more_than_is_masked(s: S) -> Any:
    less = torch.full_like(s.ids[:1], -1).expand(2, -1)
    ids = s.ids.index_add(0, torch.zeros(2, dtype=torch.int64), less)
    return ids.masked_fill(ids == -1, 0).reshape(-1)


@impostor(GATHERED, "flat", NEGATIVE)
def ids_cast_from_scores(s: S) -> Any:
    return (s.choice[0] * -2).to(torch.int64).reshape(-1)


@impostor(GATHERED, "flat", NEGATIVE)
def ids_below_zero_by_an_operation_that_no_table_names(s: S) -> Any:
    return torch.rsub(s.ids, 2).reshape(-1)


@impostor(GATHERED, "flat", NEGATIVE)
def differences_of_ids(s: S) -> Any:
    return torch.diff(s.ids, prepend=s.ids[:, :1]).reshape(-1)


@impostor(GATHERED, "flat", NEGATIVE)
def ids_filled_with_a_number_below_zero(s: S) -> Any:
    return s.ids.clone().fill_(-1).reshape(-1)


@impostor(GATHERED, "second_flat", OTHER_IDS)
def weights_of_the_neighbouring_slot(s: S) -> Any:
    return s.ids.flip(-1).reshape(-1)


@impostor(GATHERED, "second_flat", "not a tensor of experts by rows by columns")
def the_second_linear_of_the_choice_not_the_expert(s: S) -> Any:
    return torch.arange(T * K) % K


@impostor(GATHERED, "second_flat", "the second linear is not read at the expert id")
def the_second_linear_by_row_number(s: S) -> Any:
    return torch.arange(T * K) % E


# Sorting, counting, offsets


@impostor(GROUPED, "sort", "a descending sort of expert ids")
def sorted_the_other_way(s: S) -> Any:
    return torch.sort(s.flat, descending=True)


UNCOUNTED = "offsets that are not proved to be the running count of the expert ids"


@impostor(GROUPED, "offsets", UNCOUNTED)
def counts_taken_for_offsets(s: S) -> Any:
    return s.counts.to(torch.int32)


@impostor(GROUPED, "offsets", UNCOUNTED)
def offsets_of_the_next_expert(s: S) -> Any:
    return torch.cumsum(torch.histc(s.flat.float(), bins=E + 1, min=0, max=E), 0, dtype=torch.int32)[1:]


@impostor(GROUPED, "offsets", "a running sum over a part of the counts, or along another dim")
def offsets_that_forget_the_first_expert(s: S) -> Any:
    return torch.cumsum(torch.histc(s.flat.float(), bins=E + 1, min=0, max=E)[1:], 0, dtype=torch.int32)


@impostor(GROUPED, "offsets", "a running sum over a part of the counts, or along another dim")
def a_running_sum_along_a_dim_of_one(s: S) -> Any:
    return torch.cumsum(s.counts.unsqueeze(0), 0, dtype=torch.int32)[0]


@impostor(GROUPED, "offsets", "offsets in a dtype that doesn't hold them")
def experts_counted_once_each(s: S) -> Any:
    return torch.cumsum(s.counts.bool(), 0, dtype=torch.int32)


@impostor(GROUPED, "offsets", UNCOUNTED)
def offsets_off_by_one(s: S) -> Any:
    return torch.cumsum(s.counts, 0, dtype=torch.int32) - 1


@impostor(GROUPED, "offsets", "a histogram whose bins are not one per expert")
def a_histogram_of_wider_bins(s: S) -> Any:
    return torch.cumsum(torch.histc(s.flat.float(), bins=E, min=0, max=2 * E), 0, dtype=torch.int32)


@impostor(
    GROUPED, "first", "a different permutation on the way back", inverse=lambda s: torch.argsort(torch.sort(s.flat)[1])
)
def the_inverse_of_another_sort(s: S) -> Any:
    return GROUPED["first"](s)


@impostor(GROUPED, "inverse", "sorted rows are read at an index that is not a route's position")
def the_permutation_applied_twice(s: S) -> Any:
    return s.perm


@impostor(GROUPED, "routes", "reshape splits routes in sorted order")
def rows_never_put_back(s: S) -> Any:
    return s.weighed.view(-1, K, H)


@impostor(GROUPED, "routes", "sorted rows are read at an index that is not a route's position")
def rows_dropped_on_the_way_back(s: S) -> Any:
    return s.weighed[torch.clamp(s.inverse, max=T * K - 2)].view(-1, K, H)


# The hidden states


def _after(effect: Step) -> Step:
    """The weighing of rows after something else was done."""
    return lambda s: (effect(s), s.second * s.weights.reshape(-1, 1))[-1]


@impostor(GROUPED, "rows", "the first linear's input is not a tensor of hidden states")
def rows_of_the_next_token(s: S) -> Any:
    return s.x[(s.perm // K + 1) % T]


@impostor(GROUPED, "rows", "the hidden states is not read at its own token and choice")
def rows_by_choice_instead_of_token(s: S) -> Any:
    return s.x[s.perm % K]


@impostor(GATHERED, "rows", "the hidden states is not read at its own token and choice")
def tokens_repeated_as_a_whole(s: S) -> Any:
    return s.x.repeat(K, 1)


@impostor(SEPARATE, "up_rows", "gate and up read different hidden states")
def gate_and_up_from_different_tensors(s: S) -> Any:
    return s.other[s.perm // K]


@impostor(SEPARATE, "up_rows", "the hidden states is not read at its own token and choice")
def gate_and_up_from_different_tokens(s: S) -> Any:
    return s.x[s.perm % T]


@impostor(GROUPED, "weighed", "a tensor was changed after the block read it")
def hidden_mutated_after_it_was_gathered(s: S) -> Any:
    s.x.add_(1)
    return GROUPED["weighed"](s)


@impostor(GATHERED, "rows", "a tensor was changed after the block read it", weighed=_after(lambda s: s.base.mul_(2)))
def the_base_of_a_view_mutated(s: S) -> Any:
    s.base = s.x + 0.0
    return s.base.view(T, H).repeat_interleave(K, dim=0)


@impostor(GROUPED, "weighed", "a tensor was changed after the block read it")
def hidden_mutated_by_a_list_operation(s: S) -> Any:
    torch._foreach_add_([s.x], 1.0)
    return GROUPED["weighed"](s)


@impostor(GROUPED, "weighed", "a tensor was changed after the block read it")
def an_experts_weights_mutated(s: S) -> Any:
    s.down[0].zero_()
    return GROUPED["weighed"](s)


@impostor(GATHERED, "weighed", "a tensor was changed after the block read it")
def hidden_mutated_through_an_alias(s: S) -> Any:
    s.x.t()[0].zero_()
    return GATHERED["weighed"](s)


@impostor(GROUPED, "halves", "rows that are not in expert order")
def halves_taken_after_their_base_was_written(s: S) -> Any:
    both = s.first.chunk(2, dim=-1)
    s.first.abs_()
    return both[0], both[1]


# Between the linears

ELSE = "the activation reads something else than the first linear"


@impostor(GROUPED, "act", ELSE)
def the_expert_number_used_as_data(s: S) -> Any:
    return F.silu(s.halves[0]) * s.halves[1] * s.sort[0].unsqueeze(-1)


@impostor(GROUPED, "act", ELSE)
def the_row_number_used_as_data(s: S) -> Any:
    return F.silu(s.halves[0]) * s.halves[1] * s.perm.unsqueeze(-1)


@impostor(GATHERED, "act", ELSE)
def a_scale_of_each_channel(s: S) -> Any:
    return F.silu(s.halves[0]) * s.halves[1] * s.other[0, :I]


@impostor(GROUPED, "act", ELSE)
def a_mean_over_rows(s: S) -> Any:
    return F.silu(s.halves[0]) * s.halves[1] - s.halves[1].mean(0, keepdim=True)


@impostor(GROUPED, "act", ELSE)
def a_sum_over_rows(s: S) -> Any:
    return F.silu(s.halves[0]) * s.halves[1] + s.halves[1].sum(0, keepdim=True)


@impostor(GATHERED, "act", "between the linears there is more than a pointwise function")
def a_softmax_over_channels(s: S) -> Any:
    return F.softmax(s.halves[0], dim=-1) * s.halves[1]


@impostor(GATHERED, "act", "no rule knows this operation: roll")
def rows_shifted_between_the_linears(s: S) -> Any:
    return (F.silu(s.halves[0]) * s.halves[1]).roll(1, 0)


@impostor(GATHERED, "act", "no rule knows this operation: flip")
def channels_crossed_between_the_linears(s: S) -> Any:
    return F.silu(s.halves[0]) * s.halves[1].flip(-1)


@impostor(GATHERED, "halves", "gate and up rows are neither halves nor interleaved")
def gate_rows_read_in_pairs(s: S) -> Any:
    return s.first[:, : 2 * I : 2], s.first[:, I : 2 * I]


@impostor(GATHERED, "act", "the activation uses a function that kernels don't have")
def a_sum_of_truth_values(s: S) -> Any:
    return ((s.halves[0] > 0) + (s.halves[1] > 0)) * s.halves[1]


@impostor(GATHERED, "act", "between the linears there is more than a pointwise function")
def quantized_between_the_linears(s: S) -> Any:
    return GATHERED["act"](s).to(torch.float8_e4m3fn).to(torch.float32)


@impostor(GATHERED, "weighed", "the experts' output is not a linear")
def quantized_after_the_linears(s: S) -> Any:
    return s.second.to(torch.float8_e5m2).to(torch.float32) * s.weights.reshape(-1, 1)


@impostor(GATHERED, "act", "a view as another dtype")
def bits_of_a_float_as_an_integer(s: S) -> Any:
    return (F.silu(s.halves[0]) * s.halves[1]).view(dtype=torch.int32) * 1.0


@impostor(GATHERED, "first", ELSE)
def the_bias_of_the_choice_not_the_expert(s: S) -> Any:
    return GATHERED["first"](s) + s.gate_up_bias[torch.arange(T * K) % K]


@impostor(GATHERED, "first", OTHER_IDS)
def the_bias_of_another_expert(s: S) -> Any:
    return GATHERED["first"](s) + s.gate_up_bias[(s.flat + 1) % E]


@impostor(GATHERED, "second", OTHER_IDS)
def the_output_bias_of_another_expert(s: S) -> Any:
    return GATHERED["second"](s) + s.down_bias[(s.flat + 1) % E]


# The routing weights


@impostor(GROUPED, "weighed", "the routing weight is applied more than once, or is an expression")
def the_weight_applied_twice(s: S) -> Any:
    return s.second * by_route(s, s.weights) * by_route(s, s.weights)


@impostor(GROUPED, "rows", "the routing weight is applied twice")
def the_weight_on_input_and_output(s: S) -> Any:
    return s.x[s.perm // K] * by_route(s, s.weights)


def _unweighed(s: S) -> Any:
    return s.second


@impostor(GROUPED, "rows", "a product of more than hidden states and a weight", weighed=_unweighed)
def the_weight_twice_on_the_input(s: S) -> Any:
    return s.x[s.perm // K] * by_route(s, s.weights) * by_route(s, s.weights)


@impostor(SEPARATE, "up_rows", "gate and up are weighted differently", weighed=_unweighed)
def the_weight_on_the_input_of_up_alone(s: S) -> Any:
    return s.rows * by_route(s, s.weights)


@impostor(SEPARATE, "gate_rows", "gate and up are weighted differently", weighed=_unweighed)
def the_weight_on_the_input_of_gate_alone(s: S) -> Any:
    return s.rows * by_route(s, s.weights)


@impostor(GROUPED, "weighed", "the routing weight is not a tensor of tokens by choices")
def the_weight_of_the_row_not_the_route(s: S) -> Any:
    return s.second * s.weights.reshape(-1)[s.perm][s.perm].unsqueeze(-1)


@impostor(GATHERED, "weighed", "a tensor was changed after the block read it")
def the_weight_changed_after_it_was_read(s: S) -> Any:
    weighed = s.second * s.weights.reshape(-1, 1)
    s.weights.zero_()
    return weighed


@impostor(GROUPED, "weighed", "routes are masked by something else than ids beyond the experts")
def routes_masked_by_another_tensor(s: S) -> Any:
    dropped = s.other[:, :K].to(torch.int64).reshape(-1)[s.perm] >= E
    return (s.second * by_route(s, s.weights)).masked_fill(dropped.unsqueeze(-1), 0.0)


@impostor(GROUPED, "weighed", "routes are masked by something else than ids beyond the experts")
def an_expert_masked_out(s: S) -> Any:
    ids = (s.ids % E).reshape(-1)[s.perm]
    return (s.second * by_route(s, s.weights)).masked_fill((ids >= E - 1).unsqueeze(-1), 0.0)


# The combination

ADDED: Table = {"inverse": lambda s: None, "routes": lambda s: None}  # written or added straight from sorted rows


@impostor(GATHERED, "out", "a maximum where a sum is expected")
def max_instead_of_sum(s: S) -> Any:
    return s.routes.max(dim=1)[0]


@impostor(GATHERED, "out", "a mean where a sum is expected")
def mean_instead_of_sum(s: S) -> Any:
    return s.routes.mean(dim=1)


@impostor(GATHERED, "routes", "the routing weight is not read at its own token and choice")
def the_sum_over_tokens(s: S) -> Any:
    return s.weighed.view(K, -1, H).transpose(0, 1)


@impostor(GATHERED, "out", "the experts' outputs leave the graph without being summed over the choices")
def the_first_choice_alone(s: S) -> Any:
    return s.routes[:, 0]


@impostor(GATHERED, "out", "the experts' outputs leave the graph without being summed over the choices")
def twice_the_first_choice(s: S) -> Any:
    return s.routes[:, :1].expand(-1, K, -1).sum(dim=1)


@impostor(GATHERED, "out", "the routing weight is not read at its own token and choice")
def a_choice_left_out_of_the_sum(s: S) -> Any:
    return s.routes[:, 1:].sum(dim=1)


@impostor(GROUPED, "out", "rows written at positions that are not proved distinct and complete", **ADDED)
def scattered_over_one_another(s: S) -> Any:
    out = torch.zeros(T, H)
    out[s.perm // K] = s.weighed
    return out


@impostor(GROUPED, "out", "rows added onto values that are not zero", **ADDED)
def added_onto_ones(s: S) -> Any:
    return torch.ones(T, H).index_add(0, s.perm // K, s.weighed)


@impostor(GROUPED, "out", "rows added along another dim, or scaled", **ADDED)
def added_with_a_factor(s: S) -> Any:
    return torch.zeros(T, H).index_add(0, s.perm // K, s.weighed, alpha=2)


@impostor(GROUPED, "out", "rows written at positions", **ADDED)
def tokens_dropped_at_the_end(s: S) -> Any:
    return torch.zeros(T, H).index_add(0, torch.clamp(s.perm // K, max=T - 2), s.weighed)


@impostor(GROUPED, "out", "rows written at positions", **ADDED)
def added_to_the_next_token(s: S) -> Any:
    return torch.zeros(T + 1, H).index_add(0, s.perm // K + 1, s.weighed)[:T]


@impostor(GROUPED, "out", "rows written at positions that are not proved distinct and complete", **ADDED)
def duplicates_dropped(s: S) -> Any:
    return torch.zeros(T, H).index_copy(0, s.perm // K, s.weighed)


@impostor(GATHERED, "out", "the experts' output is not a linear")
def a_norm_by_the_sum(s: S) -> Any:
    return (s.routes / (s.routes * s.routes).sum(-1, keepdim=True).sqrt()).sum(dim=1)


DROPOUT = "dropout inside of a block"


@impostor(GROUPED, "rows", DROPOUT)
def dropout_of_the_rows_of_each_expert(s: S) -> Any:
    return F.dropout(s.x[s.perm // K], 0.5, training=True)


@impostor(GATHERED, "act", DROPOUT)
def dropout_between_the_linears(s: S) -> Any:
    return F.dropout(GATHERED["act"](s), 0.5, training=True)


@impostor(GROUPED, "second", DROPOUT)
def dropout_of_each_experts_output(s: S) -> Any:
    return F.dropout(GROUPED["second"](s), 0.5, training=True)


@impostor(GATHERED, "weighed", "the experts' output is not a linear")
def an_activation_after_the_second_linear(s: S) -> Any:
    return F.silu(s.second) * s.weights.reshape(-1, 1)


@pytest.mark.parametrize("name", list(IMPOSTORS))
def test_an_impostor_is_refused_with_the_right_reason(name: str) -> None:
    table, changes, reason = IMPOSTORS[name]
    graph = graphs.trace(program(table, changes), inputs())
    result = recognize(graph)
    assert not result.regions
    said = [str(r.verdict) for r in result.rejections]
    assert reason and any(reason in text for text in said), said
