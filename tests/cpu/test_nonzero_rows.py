"""Rows of one expert as the column that nonzero() of a mask over tokens gives, and near misses of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from spelled import E, K, Table, Tensor, listed, route

TABLE = Table()
spelling, miss = TABLE.spelling, TABLE.miss


def added(x: Tensor, router: Tensor, weights: tuple[Tensor, ...], rows: Callable[[Tensor], Tensor]) -> Any:
    """Each expert's output added to the rows that `rows` makes of a mask over tokens."""
    w, ids = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        gate, up, down = weights[3 * e : 3 * e + 3]
        t = rows((ids == e).any(dim=-1))
        y = F.linear(F.silu(F.linear(x[t], gate)) * F.linear(x[t], up), down)
        out = out.index_add(0, t, y * (w * (ids == e)).sum(-1)[t].unsqueeze(-1))
    return out


@spelling(listed, tensors="listed", E=E)
def a_column_squeezed(x, router, *weights):
    return added(x, router, weights, lambda hit: hit.nonzero().squeeze(-1))


@spelling(listed, tensors="listed", E=E)
def a_column_flattened(x, router, *weights):
    return added(x, router, weights, lambda hit: torch.nonzero(hit, as_tuple=False).flatten())


@spelling(listed, tensors="listed", E=E)
def the_first_column(x, router, *weights):
    return added(x, router, weights, lambda hit: hit.nonzero()[:, 0])


@miss(listed, "rows written at positions that depend on data")
def tokens_that_were_not_hit(x, router, *weights):
    return added(x, router, weights, lambda hit: (~hit).nonzero().squeeze(-1))


@miss(listed, "rows written at positions that are not proved distinct and complete")
def the_next_token(x, router, *weights):
    return added(x, router, weights, lambda hit: hit.nonzero().squeeze(-1) + 1)


@miss(listed, "rows written at positions that are not proved distinct and complete")
def the_first_token_for_all(x, router, *weights):
    return added(x, router, weights, lambda hit: hit.nonzero().squeeze(-1) * 0)


def by_route(x: Tensor, router: Tensor, weights: tuple[Tensor, ...], token: Callable[[Tensor], Tensor]) -> Any:
    """Each expert's output added for the routes that a flat mask hits, at the token that `token` makes of a route."""
    w, ids = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        gate, up, down = weights[3 * e : 3 * e + 3]
        r = (ids.view(-1) == e).nonzero().view(-1)
        t = token(r)
        y = F.linear(F.silu(F.linear(x[t], gate)) * F.linear(x[t], up), down)
        out = out.index_add(0, t, y * w.view(-1)[r].unsqueeze(-1))
    return out


@spelling(listed, tensors="listed", E=E)
def routes_of_a_flat_mask(x, router, *weights):
    return by_route(x, router, weights, lambda r: r // K)


@miss(listed, "rows written at positions that are not proved distinct and complete")
def routes_read_as_tokens(x, router, *weights):
    return by_route(x, router, weights, lambda r: r)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", list(TABLE.spellings))
def test_a_spelling_is_proved_and_equal_to_eager(name: str, dynamic: bool) -> None:
    TABLE.check_spelling(name, dynamic)


@pytest.mark.parametrize("name", list(TABLE.misses))
def test_a_near_miss_is_refused(name: str) -> None:
    TABLE.check_miss(name)
