"""Routes grouped by expert, and the ways to multiply their rows by their expert's matrix.

In: ids_TK. Out: a `Routes`, whose S rows are the routes in expert order, with gather (tokens -> rows), linear, outer,
total (rows -> experts) and combine (rows -> tokens). Forward and backward are written once over these. Invariant: a
route whose id is outside [0, E) reaches no expert, sum or output, whatever it or its operands hold; and padding,
where there is some, is never read back.

    Loop     the host knows the counts: one mm for each expert that was hit. CPU.
    Padded   the host knows the counts: every expert padded to the largest, one bmm over all weights in place. CPU.
    Grouped  torch._grouped_mm over offsets that stay on the device. bf16.
    Blocks   padded blocks of one expert each, bmm over gathered weights in bounded memory. Any device and dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ..spec import ExpertsSpec

GATHERED_BYTES = 256 << 20  # the most that Blocks copies of weights at a time


def _arange(n: int, like: Tensor) -> Tensor:
    # never cached: made under CUDA graph capture, it would live in that graph's pool
    return torch.arange(n, dtype=like.dtype, device=like.device)


class Routes(ABC):
    """T*K routes in S rows by expert. `route_S` is each row's flat index t*K + k; None where row s is route s."""

    S: int
    route_S: Tensor | None

    def __init__(self, ids_TK: Tensor, E: int) -> None:
        (self.T, self.K), self.E = ids_TK.shape, E

    @abstractmethod
    def linear(self, x_SA: Tensor, w_ENA: Tensor, bias_EN: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """y[s] = w[e(s)] @ x[s] + bias[e(s)]: [S, N], in x's dtype, or wider where the bias came after a rounding."""

    @abstractmethod
    def outer(self, a_SM: Tensor, b_SN: Tensor) -> Tensor:
        """sum over the rows s of expert e of a[s] b[s]^T: [E, M, N] in a's dtype, accumulated in fp32 at least."""

    @abstractmethod
    def total(self, a_SM: Tensor) -> Tensor:
        """sum over the rows s of expert e of a[s]: [E, M] in a's dtype."""

    @abstractmethod
    def of_expert(self, p_EM: Tensor) -> Tensor:
        """p[e(s)]: [S, M]."""

    @abstractmethod
    def combine(self, y_SH: Tensor, w_TK: Tensor | None, acc: torch.dtype) -> Tensor:
        """sum_k w[t, k] * y[row of (t, k)] (w = 1 if None), without the invalid routes: fresh [T, H] in `acc`."""

    @abstractmethod
    def scatter(self, v_S: Tensor) -> Tensor:
        """v[row of (t, k)]: [T, K], 0 for invalid routes."""

    def gather(self, x_TH: Tensor) -> Tensor:
        """x[t(s)]: [S, H]."""
        if self.route_S is None:
            return x_TH.expand(self.K, -1)
        return x_TH.index_select(0, self.route_S if self.K == 1 else self.route_S // self.K)

    def of_route(self, w_TK: Tensor) -> Tensor:
        """w[t(s), k(s)]: [S]."""
        return w_TK.reshape(-1) if self.route_S is None else w_TK.reshape(-1).index_select(0, self.route_S)


class _OnHost(Routes):
    """Rows that a host loop or a host size decides. `row_R`: the row of each route, S if it is invalid."""

    row_R: Tensor
    all_valid: bool

    def combine(self, y_SH: Tensor, w_TK: Tensor | None, acc: torch.dtype) -> Tensor:
        y_SH = y_SH.to(acc)
        w_TK = None if w_TK is None else w_TK.to(acc)
        if self.route_S is None:
            return y_SH.sum(0, keepdim=True) if w_TK is None else w_TK @ y_SH
        row_TK = self.row_R.view(self.T, self.K)
        if not self.all_valid:  # invalid routes read a row of zeros with weight zero
            y_SH = torch.cat((y_SH, y_SH.new_zeros(1, y_SH.shape[1])))
            w_TK = None if w_TK is None else w_TK.masked_fill(row_TK == self.S, 0)
        # gather, scale and sum in one pass: 28 us, index_copy and bmm 109 us (T=256 K=8 H=256 fp32, EPYC, 2026-10)
        return F.embedding_bag(row_TK, y_SH, mode="sum", per_sample_weights=w_TK)

    def scatter(self, v_S: Tensor) -> Tensor:
        if self.route_S is None:
            return v_S.view(self.T, self.K)
        if not self.all_valid:
            v_S = torch.cat((v_S, v_S.new_zeros(1)))
        return v_S.index_select(0, self.row_R).view(self.T, self.K)


class Loop(_OnHost):
    """Compact rows: `experts` that were hit, with the `sizes` of their runs; an invalid route has no row."""

    def __init__(self, ids_TK: Tensor, E: int, order: _Order | None) -> None:
        super().__init__(ids_TK, E)
        if order:
            hit = [(e, n) for e, n in enumerate(order.counts) if n]
            self.experts, self.sizes = [e for e, _ in hit], [n for _, n in hit]
            self.route_S = order.route_V
        else:  # one token: its routes need no sorting, and an expert may have several runs
            ids = ids_TK.reshape(-1).tolist()
            valid = [r for r, e in enumerate(ids) if 0 <= e < E]
            self.experts, self.sizes = [ids[r] for r in valid], [1] * len(valid)
            self.route_S = None if len(valid) == self.K else torch.tensor(valid, device=ids_TK.device, dtype=torch.int64)
        self.S = sum(self.sizes)
        self.all_valid = self.S == self.T * self.K
        if self.route_S is not None:
            self.row_R = _inverse(self.route_S, _arange(self.S, self.route_S), self.T * self.K, self.S)

    def linear(self, x_SA: Tensor, w_ENA: Tensor, bias_EN: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = x_SA.new_empty(self.S, w_ENA.shape[1])
        w_EAN = w_ENA.mT
        # unbind costs 0.3 us an expert, indexing 1.2 us a hit (EPYC, 2026-10)
        w = w_EAN.unbind(0) if 4 * len(self.experts) > self.E else w_EAN
        rows = zip(self.experts, x_SA.split(self.sizes), out.split(self.sizes), strict=True)
        if bias_EN is None:
            for e, x, y in rows:
                torch.mm(x, w[e], out=y)
        else:
            for e, x, y in rows:
                torch.addmm(bias_EN[e], x, w[e], out=y)
        return out

    def outer(self, a_SM: Tensor, b_SN: Tensor) -> Tensor:
        grad_EMN = a_SM.new_zeros(self.E, a_SM.shape[1], b_SN.shape[1])
        rows = zip(self.experts, a_SM.split(self.sizes), b_SN.split(self.sizes), strict=True)
        if len(set(self.experts)) == len(self.experts):
            for e, a, b in rows:
                torch.mm(a.T, b, out=grad_EMN[e])
        else:
            for e, a, b in rows:
                grad_EMN[e].addmm_(a.T, b)
        return grad_EMN

    def total(self, a_SM: Tensor) -> Tensor:
        sums_EM = a_SM.new_zeros(self.E, a_SM.shape[1])
        for e, a in zip(self.experts, a_SM.split(self.sizes), strict=True):
            sums_EM[e] += a.sum(0)
        return sums_EM

    def of_expert(self, p_EM: Tensor) -> Tensor:
        index = [e for e, n in zip(self.experts, self.sizes, strict=True) for _ in range(n)]
        return p_EM.index_select(0, torch.tensor(index, dtype=torch.int64, device=p_EM.device))


class Padded(_OnHost):
    """E * C rows, C the largest count; a padding row repeats some route and is masked wherever rows are summed."""

    def __init__(self, ids_TK: Tensor, E: int, order: _Order) -> None:
        super().__init__(ids_TK, E)
        self.C = max(order.counts)
        self.S = E * self.C
        self.all_valid = order.valid == self.T * self.K
        expert_V = order.expert_V.long()
        row_V = _arange(order.valid, expert_V) - order.start_E1.index_select(0, expert_V) + expert_V * self.C
        self.route_S = torch.zeros(self.S, dtype=torch.int64, device=ids_TK.device).scatter_(0, row_V, order.route_V)
        self.row_R = _inverse(order.route_V, row_V, self.T * self.K, self.S)
        self.row_V = row_V

    def linear(self, x_SA: Tensor, w_ENA: Tensor, bias_EN: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        x_ECA, w_EAN = x_SA.view(self.E, self.C, -1), w_ENA.mT
        if bias_EN is None:
            y_ECN = torch.bmm(x_ECA, w_EAN)
        else:
            y_ECN = torch.baddbmm(bias_EN[:, None], x_ECA, w_EAN)
        return y_ECN.flatten(0, 1) if out is None else out.copy_(y_ECN.flatten(0, 1))

    def _full(self, a_SM: Tensor) -> Tensor:
        # rows that are no route become 0, so that a NaN in an expert that none chose stays there
        full_SM = torch.zeros_like(a_SM).index_copy_(0, self.row_V, a_SM.index_select(0, self.row_V))
        return full_SM.view(self.E, self.C, -1)

    def outer(self, a_SM: Tensor, b_SN: Tensor) -> Tensor:
        return torch.bmm(self._full(a_SM).mT, self._full(b_SN))

    def total(self, a_SM: Tensor) -> Tensor:
        return self._full(a_SM).sum(1)

    def of_expert(self, p_EM: Tensor) -> Tensor:
        return p_EM.repeat_interleave(self.C, 0)


class _Order:
    """The V valid routes in expert order, and each expert's count on the host."""

    def __init__(self, ids_TK: Tensor, E: int) -> None:
        expert_R, route_R = torch.sort(ids_TK.reshape(-1), stable=True)
        start_E1 = torch.searchsorted(expert_R, _arange(E + 1, expert_R))
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
    """Loop or Padded. One bmm is 1.5 to 7 times faster than a mm an expert while its padding and the weights of the
    experts that none chose cost less than the calls: about 12 us a call in bf16, 4 us in fp32 (EPYC, 2 cores, 2026-10).
    """
    if len(ids_TK) == 1:
        return Loop(ids_TK, spec.E, None)
    order = _Order(ids_TK, spec.E)
    hit, most = spec.E - order.counts.count(0), max(order.counts)
    size, per_call = (2, 300_000) if spec.x in ("bf16", "f16") else (4, 120_000)  # bytes read in a call's overhead
    unread = (spec.E - hit) * spec.G * spec.H * size
    if unread <= hit * per_call and spec.E * most <= (4 if most <= 8 else 2) * order.valid:
        return Padded(ids_TK, spec.E, order)
    return Loop(ids_TK, spec.E, order)


class _OnDevice(Routes):
    """Rows of every route, in expert order, the invalid ones last; counts stay on the device."""

    def __init__(self, ids_TK: Tensor, E: int) -> None:
        super().__init__(ids_TK, E)
        ids_R = ids_TK.reshape(-1)
        self.expert_S, self.route_S = torch.sort(ids_R.masked_fill((ids_R < 0) | (ids_R >= E), E), stable=True)
        self.invalid_S = self.expert_S == E
        self.S = self.T * self.K

    def total(self, a_SM: Tensor) -> Tensor:
        # row E takes the invalid routes
        return a_SM.new_zeros(self.E + 1, a_SM.shape[1]).index_add_(0, self.expert_S, a_SM)[: self.E]

    def of_expert(self, p_EM: Tensor) -> Tensor:
        return p_EM.index_select(0, self.expert_S.clamp(max=self.E - 1))

    def combine(self, y_SH: Tensor, w_TK: Tensor | None, acc: torch.dtype) -> Tensor:
        y_SH = y_SH.to(acc)
        if w_TK is not None:
            y_SH = y_SH * self.of_route(w_TK).to(acc)[:, None]
        y_SH = y_SH.masked_fill(self.invalid_S[:, None], 0)
        row_R = torch.empty_like(self.route_S).scatter_(0, self.route_S, _arange(self.S, self.route_S))
        return y_SH.index_select(0, row_R).view(self.T, self.K, -1).sum(1)

    def scatter(self, v_S: Tensor) -> Tensor:
        v_S = v_S.masked_fill(self.invalid_S, 0)
        return torch.empty_like(v_S).scatter_(0, self.route_S, v_S).view(self.T, self.K)


class Grouped(_OnDevice):
    """torch._grouped_mm. It rounds before a bias can be added, so a bias gives an fp32 result: one rounding still."""

    def __init__(self, ids_TK: Tensor, spec: ExpertsSpec) -> None:
        super().__init__(ids_TK, spec.E)
        self.offsets_E = torch.searchsorted(self.expert_S, _arange(self.E + 1, self.expert_S)[1:], out_int32=True)

    def linear(self, x_SA: Tensor, w_ENA: Tensor, bias_EN: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        y_SN = torch._grouped_mm(x_SA, w_ENA.mT, offs=self.offsets_E)
        if bias_EN is not None:
            y_SN = y_SN.float() + self.of_expert(bias_EN)
        return y_SN if out is None else out.copy_(y_SN)

    def outer(self, a_SM: Tensor, b_SN: Tensor) -> Tensor:
        return torch._grouped_mm(a_SM.T, b_SN, offs=self.offsets_E)


class Blocks(_OnDevice):
    """Each expert's rows padded to blocks of `B` rows; their number has a static bound, so shapes are static."""

    def __init__(self, ids_TK: Tensor, spec: ExpertsSpec) -> None:
        super().__init__(ids_TK, spec.E)
        E, B = spec.E, min(64, 1 << max(1, self.S // spec.E).bit_length() - 1)
        blocks = min(self.S, (self.S + E * (B - 1)) // B)
        start_E1 = torch.searchsorted(self.expert_S, _arange(E + 1, self.expert_S))
        blocks_E = (start_E1.diff() + (B - 1)) // B
        last_E = blocks_E.cumsum(0)
        index_b = _arange(blocks, start_E1)
        expert_b = torch.searchsorted(last_E, index_b, right=True)
        self.expert_b = expert_b.clamp(max=E - 1)  # a block beyond the last has padding rows only
        first_b = start_E1[self.expert_b] + (index_b - (last_E - blocks_E)[self.expert_b]) * B
        row_bB = first_b[:, None] + _arange(B, start_E1)
        padding_bB = (row_bB >= start_E1[self.expert_b + 1][:, None]) | (expert_b >= E)[:, None]
        self.row_bB = row_bB.masked_fill(padding_bB, self.S)
        self.padding_bB1 = padding_bB[:, :, None]

    def _rows(self, x_SA: Tensor, chunk: slice) -> Tensor:
        return x_SA[self.row_bB[chunk].clamp(max=self.S - 1)].masked_fill(self.padding_bB1[chunk], 0)

    def _chunks(self, expert_bytes: int) -> list[slice]:
        n = max(1, GATHERED_BYTES // expert_bytes)
        return [slice(i, i + n) for i in range(0, len(self.row_bB), n)]

    def linear(self, x_SA: Tensor, w_ENA: Tensor, bias_EN: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        N, A = w_ENA.shape[1:]
        y_SN = x_SA.new_zeros(self.S + 1, N)  # row S takes the padding
        for chunk in self._chunks(N * A * x_SA.element_size()):
            x_bBA, w_bAN = self._rows(x_SA, chunk), w_ENA[self.expert_b[chunk]].mT
            if bias_EN is None:
                y_bBN = torch.bmm(x_bBA, w_bAN)
            else:
                y_bBN = torch.baddbmm(bias_EN[self.expert_b[chunk]][:, None], x_bBA, w_bAN)
            y_SN[self.row_bB[chunk].reshape(-1)] = y_bBN.flatten(0, 1)
        return y_SN[: self.S] if out is None else out.copy_(y_SN[: self.S])

    def outer(self, a_SM: Tensor, b_SN: Tensor) -> Tensor:
        acc = torch.promote_types(a_SM.dtype, torch.float32)
        grad_EMN = a_SM.new_zeros(self.E, a_SM.shape[1], b_SN.shape[1], dtype=acc)
        for chunk in self._chunks(a_SM.shape[1] * b_SN.shape[1] * acc.itemsize):
            product = torch.bmm(self._rows(a_SM, chunk).mT.to(acc), self._rows(b_SN, chunk).to(acc))
            grad_EMN.index_add_(0, self.expert_b[chunk], product)
        return grad_EMN.to(a_SM.dtype)
