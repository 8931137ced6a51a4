"""Routes whose counts the host knows: on a CPU, reading them costs nothing.

In: ids_TK and the spec. Out: by `on_host`, the cheaper of two `Routes` (whose invariant is theirs):

    Loop     one mm for each expert that was hit; rows are compact.
    Padded   every expert padded to the largest count, then one bmm over all weights, in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operands import Listed, PerExpert, stacked
from ..spec import ExpertsSpec
from .routes import Routes, arange

NARROW = 8  # rows an expert, on average, up to which Loop swaps the operands of its products
SWAP = 11  # rows an expert up to which Padded does: there MKL's bmm rounds 0.7 times as much as mm, else 1 or more


class OnHost(Routes):
    """Rows that a host loop or a host size decides. `row_R`: the row of each route, S if it is invalid."""

    row_R: Tensor
    all_valid: bool

    def blocks(self, x_SA: Tensor) -> Iterable[tuple[int, Tensor]]:
        """Each expert that has rows, with its rows."""
        raise NotImplementedError

    def precise(self, x_SA: Tensor, w_ENA: PerExpert) -> Tensor:
        """One expert's weights at a time are widened. In a model's own graph these products may be matrix by vector,
        whose lanes round 0.7 times as much as a matrix product of the same dtype; this keeps below either."""
        wide = torch.float64 if w_ENA.dtype in (torch.float32, torch.float64) else torch.float32
        y_SN = x_SA.new_empty(self.S, w_ENA.shape[1], dtype=wide)
        stop = 0
        for e, x in self.blocks(x_SA):
            start, stop = stop, stop + len(x)
            torch.mm(x.to(wide), w_ENA[e].to(wide).T, out=y_SN[start:stop])
        return y_SN

    def combine(self, y_SH: Tensor, w_TK: Tensor | None, acc: torch.dtype) -> Tensor:
        y_SH = y_SH.to(acc)
        w_TK = None if w_TK is None else w_TK.to(acc)
        if self.route_S is None:
            return y_SH.sum(0, keepdim=True) if w_TK is None else w_TK @ y_SH
        row_TK = self.row_R.view(self.T, self.K)
        if not self.all_valid:  # invalid routes read a row of zeros with weight zero
            y_SH = torch.cat((y_SH, y_SH.new_zeros(1, y_SH.shape[1])))
            w_TK = None if w_TK is None else w_TK.masked_fill(row_TK == self.S, 0)
        # gather, scale and sum in one pass: 28 us, index_copy and bmm 109 us (T=256 K=8 H=256 fp32, EPYC, 2026-11)
        return F.embedding_bag(row_TK, y_SH, mode="sum", per_sample_weights=w_TK)

    def scatter(self, v_S: Tensor) -> Tensor:
        if self.route_S is None:
            return v_S.view(self.T, self.K)
        if not self.all_valid:
            v_S = torch.cat((v_S, v_S.new_zeros(1)))
        return v_S.index_select(0, self.row_R).view(self.T, self.K)


class Loop(OnHost):
    """Compact rows: `experts` that were hit, with the `sizes` of their runs; an invalid route has no row."""

    def __init__(self, ids_TK: Tensor, E: int, order: _Order | None) -> None:
        super().__init__(ids_TK, E)
        self.offsets_E: Tensor | None = None
        if order:
            hit = [(e, n) for e, n in enumerate(order.counts) if n]
            self.experts, self.sizes = [e for e, _ in hit], [n for _, n in hit]
            self.route_S = order.route_V
            self.offsets_E = order.start_E1[1:].int()
        else:  # one token: its routes need no sorting, and an expert may have several runs
            ids = ids_TK.reshape(-1).tolist()
            valid = [r for r, e in enumerate(ids) if 0 <= e < E]
            self.experts, self.sizes = [ids[r] for r in valid], [1] * len(valid)
            self.route_S = None if len(valid) == self.K else ids_TK.new_tensor(valid, dtype=torch.int64)
        self.S = sum(self.sizes)
        self.all_valid = self.S == self.T * self.K
        if self.route_S is not None:
            self.row_R = _inverse(self.route_S, arange(self.S, self.route_S), self.T * self.K, self.S)

    def blocks(self, x_SA: Tensor) -> Iterable[tuple[int, Tensor]]:
        return zip(self.experts, x_SA.split_with_sizes(self.sizes))

    def linear(
        self, x_SA: Tensor, w_ENA: PerExpert, bias_EN: PerExpert | None = None, out: Tensor | None = None
    ) -> Tensor:
        narrow = self.T > 1 and self.S <= NARROW * len(self.experts) and x_SA.dtype in (torch.float32, torch.float64)
        if narrow and out is None:
            return self._narrow(x_SA, w_ENA, bias_EN)
        if out is None and bias_EN is None and self.offsets_E is not None and _grouped(x_SA, w_ENA):
            # the same mm calls, looped over in C++: 30 us less for 25 to 32 experts (EPYC, 2026-11)
            return torch._grouped_mm(x_SA, w_ENA.mT, offs=self.offsets_E)
        if out is None:
            out = x_SA.new_empty(self.S, w_ENA.shape[1])
        w_EAN = w_ENA.mT
        # unbind costs 0.3 us an expert, indexing 1.2 us a hit (EPYC, 2026-11)
        w = w_EAN.unbind(0) if 4 * len(self.experts) > self.E else w_EAN
        rows = zip(self.experts, x_SA.split_with_sizes(self.sizes), out.split_with_sizes(self.sizes), strict=True)
        if bias_EN is None:
            for e, x, y in rows:
                torch.mm(x, w[e], out=y)
        else:
            for e, x, y in rows:
                torch.addmm(bias_EN[e], x, w[e], out=y)
        return out

    def _narrow(self, x_SA: Tensor, w_ENA: PerExpert, bias_EN: PerExpert | None) -> Tensor:
        """For few rows an expert: w @ x.T into columns, transposed at the end.

        MKL takes 10 us for 2 to 4 rows of 256 x 256 so, 24 to 27 us for x @ w.T, and rounds 0.75 times as much (EPYC,
        2 cores, 2026-11-30). A single row falls into a slower gemv, 21 us, so it is computed together with the row
        before it; going down, the previous expert overwrites that one.
        """
        x_AS, y_NS = x_SA.contiguous().mT, x_SA.new_empty(w_ENA.shape[1], self.S)
        stop = self.S
        for e, n in zip(reversed(self.experts), reversed(self.sizes)):
            start = stop - n
            columns = slice(max(start - 1, 0) if n == 1 else start, stop)
            if bias_EN is None:
                torch.mm(w_ENA[e], x_AS[:, columns], out=y_NS[:, columns])
            else:
                torch.addmm(bias_EN[e][:, None], w_ENA[e], x_AS[:, columns], out=y_NS[:, columns])
            stop = start
        return y_NS.mT.contiguous()

    def outer(self, a_SM: Tensor, b_SN: Tensor) -> Tensor:
        grad_EMN = a_SM.new_zeros(self.E, a_SM.shape[1], b_SN.shape[1])
        for (e, a), (_, b) in zip(self.blocks(a_SM), self.blocks(b_SN), strict=True):
            grad_EMN[e] += _outer(a, b)
        return grad_EMN

    def total(self, a_SM: Tensor) -> Tensor:
        sums_EM = a_SM.new_zeros(self.E, a_SM.shape[1])
        for e, a in zip(self.experts, a_SM.split_with_sizes(self.sizes), strict=True):
            sums_EM[e] += a.sum(0)
        return sums_EM

    def of_expert(self, p_EM: PerExpert) -> Tensor:
        index = [e for e, n in zip(self.experts, self.sizes, strict=True) for _ in range(n)]
        p_EM = stacked(p_EM)
        return p_EM.index_select(0, torch.tensor(index, dtype=torch.int64, device=p_EM.device))


class Padded(OnHost):
    """E * C rows, C the largest count; a padding row repeats some route and is masked wherever rows are summed."""

    def __init__(self, ids_TK: Tensor, E: int, order: _Order) -> None:
        super().__init__(ids_TK, E)
        self.C = max(order.counts)
        self.S = E * self.C
        self.all_valid = order.valid == self.T * self.K
        expert_V = order.expert_V.long()
        row_V = arange(order.valid, expert_V) - order.start_E1.index_select(0, expert_V) + expert_V * self.C
        self.route_S = torch.zeros(self.S, dtype=torch.int64, device=ids_TK.device).scatter_(0, row_V, order.route_V)
        self.row_R = _inverse(order.route_V, row_V, self.T * self.K, self.S)
        self.row_V = row_V

    def blocks(self, x_SA: Tensor) -> Iterable[tuple[int, Tensor]]:
        return enumerate(x_SA.view(self.E, self.C, -1))

    def linear(
        self, x_SA: Tensor, w_ENA: PerExpert, bias_EN: PerExpert | None = None, out: Tensor | None = None
    ) -> Tensor:
        x_ECA, w_EAN = x_SA.reshape(self.E, self.C, -1), w_ENA.mT
        if self.C <= SWAP and x_SA.dtype == torch.float32:  # operands swapped, as in Loop
            y_ENC = torch.bmm(w_ENA, x_ECA.mT)
            y_ECN = y_ENC.mT if bias_EN is None else y_ENC.mT + bias_EN[:, None]
        elif bias_EN is None:
            y_ECN = torch.bmm(x_ECA, w_EAN)
        else:
            y_ECN = torch.baddbmm(bias_EN[:, None], x_ECA, w_EAN)
        return y_ECN.flatten(0, 1) if out is None else out.copy_(y_ECN.flatten(0, 1))

    def _full(self, a_SM: Tensor) -> Tensor:
        # rows that are no route become 0, so that a NaN in an expert that none chose stays there
        full_SM = torch.zeros_like(a_SM).index_copy_(0, self.row_V, a_SM.index_select(0, self.row_V))
        return full_SM.view(self.E, self.C, -1)

    def outer(self, a_SM: Tensor, b_SN: Tensor) -> Tensor:
        return torch.stack([_outer(a, b) for a, b in zip(self._full(a_SM), self._full(b_SN), strict=True)])

    def total(self, a_SM: Tensor) -> Tensor:
        return self._full(a_SM).sum(1)

    def of_expert(self, p_EM: PerExpert) -> Tensor:
        return stacked(p_EM).repeat_interleave(self.C, 0)


@lru_cache(None)
def _grouped_mm_takes(dtype: torch.dtype) -> bool:
    """Whether this torch has a grouped product for the dtype on a CPU (fp32 came after bf16)."""
    x, offsets = torch.ones(8, 8, dtype=dtype), torch.tensor([8], dtype=torch.int32)
    try:
        torch._grouped_mm(x, x[None], offs=offsets)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _grouped(x_SA: Tensor, w_ENA: PerExpert) -> bool:
    """Whether torch._grouped_mm takes these: one tensor of a dtype it knows, dense, rows of whole 16 bytes."""
    if isinstance(w_ENA, Listed):
        return False
    dense = w_ENA.is_contiguous() or w_ENA.mT.is_contiguous()
    whole = all(n * x_SA.element_size() % 16 == 0 for n in w_ENA.shape[1:])
    aligned = x_SA.data_ptr() % 16 == 0 and w_ENA.data_ptr() % 16 == 0
    return dense and whole and aligned and x_SA.is_contiguous() and len(x_SA) > 0 and _grouped_mm_takes(x_SA.dtype)


def _outer(a_SM: Tensor, b_SN: Tensor) -> Tensor:
    """a^T b in a's dtype; sums over rows are kept in fp64 for fp32 (mm keeps them in fp32 for bf16)."""
    if a_SM.dtype == torch.float32:
        return (a_SM.T.double() @ b_SN.double()).float()
    return a_SM.T @ b_SN


class _Order:
    """The V valid routes in expert order, and each expert's count on the host."""

    def __init__(self, ids_TK: Tensor, E: int) -> None:
        expert_R, route_R = torch.sort(ids_TK.reshape(-1), stable=True)
        start_E1 = torch.searchsorted(expert_R, arange(E + 1, expert_R))
        starts = start_E1.tolist()
        first, last = starts[0], starts[-1]
        self.counts = [stop - start for start, stop in pairwise(starts)]
        self.valid = last - first
        if self.valid == expert_R.numel():
            self.expert_V, self.route_V, self.start_E1 = expert_R, route_R, start_E1
        else:
            self.expert_V, self.route_V, self.start_E1 = expert_R[first:last], route_R[first:last], start_E1 - first


def _inverse(route_V: Tensor, row_V: Tensor, routes: int, missing: int) -> Tensor:
    full = len(route_V) == routes
    row_R = torch.empty_like(route_V) if full else route_V.new_full((routes,), missing)
    return row_R.scatter_(0, route_V, row_V)


def on_host(ids_TK: Tensor, spec: ExpertsSpec) -> Routes:
    """Padded where its wasted work costs less than the calls of Loop, else Loop; Loop for listed experts.

    A bf16 mm costs 12 us before it begins (oneDNN's wrapper): the time of 1.2e6 multiply-adds, or of reading 300 kB.
    So Padded takes 0.2 to 0.9 of Loop's time. In fp32 it gains only by threading over experts. (EPYC, 2 cores,
    2026-11.)
    """
    if len(ids_TK) == 1:
        return Loop(ids_TK, spec.E, None)
    order = _Order(ids_TK, spec.E)
    if spec.tensors == "listed":
        return Loop(ids_TK, spec.E, order)
    hit, most = spec.E - order.counts.count(0), max(order.counts)
    rows, low = spec.E * most, spec.x in ("bf16", "f16")
    wasted = (rows - order.valid) * (spec.G + spec.I) * spec.H
    unread = (spec.E - hit) * spec.G * spec.H * (2 if low else 4)
    cheap = wasted <= 2.4e6 * hit and unread <= 3e5 * hit and order.valid > 0
    if cheap and (low or (rows <= 2 * order.valid and torch.get_num_threads() > 1)):
        return Padded(ids_TK, spec.E, order)
    return Loop(ids_TK, spec.E, order)
