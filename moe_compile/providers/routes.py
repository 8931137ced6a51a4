"""Routes grouped by expert, and ways to multiply their rows by their expert's matrix without asking the host.

In: ids_TK. Out: a `Routes`, whose S rows are the routes in expert order, with gather (tokens -> rows), linear, outer,
total (rows -> experts) and combine (rows -> tokens). Forward and backward are written once over these. Invariant: a
route whose id is outside [0, E) reaches no expert, sum or output, whatever it or its operands hold; and padding,
where there is some, is never read back.

    Grouped  torch._grouped_mm over offsets that stay on the device. bf16.
    Blocks   padded blocks of one expert each, bmm over gathered weights in bounded memory. Any device and dtype.

Neither can pick a matrix from a list by a number that the device holds: listed experts are stacked for each product.
routes_host.py has those of a CPU, where the host knows the counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ..operands import PerExpert, stacked
from ..spec import ExpertsSpec

GATHERED_BYTES = 256 << 20  # the most that Blocks copies of weights at a time


def arange(n: int, like: Tensor) -> Tensor:
    # never cached: made under CUDA graph capture, it would live in that graph's pool
    return torch.arange(n, dtype=like.dtype, device=like.device)


class Routes(ABC):
    """T*K routes in S rows by expert. `route_S` is each row's flat index t*K + k; None where row s is route s."""

    S: int
    route_S: Tensor | None

    def __init__(self, ids_TK: Tensor, E: int) -> None:
        (self.T, self.K), self.E = ids_TK.shape, E

    @abstractmethod
    def linear(
        self, x_SA: Tensor, w_ENA: PerExpert, bias_EN: PerExpert | None = None, out: Tensor | None = None
    ) -> Tensor:
        """y[s] = w[e(s)] @ x[s] + bias[e(s)]: [S, N], in x's dtype, or wider where the bias came after a rounding."""

    def precise(self, x_SA: Tensor, w_ENA: PerExpert) -> Tensor:
        """`linear` for the backward, in x's dtype or a wider one: on a CPU in the next wider, where that is at hand."""
        return self.linear(x_SA.to(w_ENA.dtype), w_ENA)

    @abstractmethod
    def outer(self, a_SM: Tensor, b_SN: Tensor) -> Tensor:
        """sum over the rows s of expert e of a[s] b[s]^T: [E, M, N] in a's dtype, accumulated in fp32 at least."""

    @abstractmethod
    def total(self, a_SM: Tensor) -> Tensor:
        """sum over the rows s of expert e of a[s]: [E, M] in a's dtype."""

    @abstractmethod
    def of_expert(self, p_EM: PerExpert) -> Tensor:
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


class _OnDevice(Routes):
    """Rows of every route, in expert order, the invalid ones last; counts stay on the device."""

    route_S: Tensor

    def __init__(self, ids_TK: Tensor, E: int) -> None:
        super().__init__(ids_TK, E)
        ids_R = ids_TK.reshape(-1)
        self.expert_S, self.route_S = torch.sort(ids_R.masked_fill((ids_R < 0) | (ids_R >= E), E), stable=True)
        self.invalid_S = self.expert_S == E
        self.S = self.T * self.K

    def total(self, a_SM: Tensor) -> Tensor:
        # row E takes the invalid routes
        return a_SM.new_zeros(self.E + 1, a_SM.shape[1]).index_add_(0, self.expert_S, a_SM)[: self.E]

    def of_expert(self, p_EM: PerExpert) -> Tensor:
        return stacked(p_EM).index_select(0, self.expert_S.clamp(max=self.E - 1))

    def combine(self, y_SH: Tensor, w_TK: Tensor | None, acc: torch.dtype) -> Tensor:
        y_SH = y_SH.to(acc)
        if w_TK is not None:
            y_SH = y_SH * self.of_route(w_TK).to(acc)[:, None]
        y_SH = y_SH.masked_fill(self.invalid_S[:, None], 0)
        row_R = torch.empty_like(self.route_S).scatter_(0, self.route_S, arange(self.S, self.route_S))
        return y_SH.index_select(0, row_R).view(self.T, self.K, -1).sum(1)

    def scatter(self, v_S: Tensor) -> Tensor:
        v_S = v_S.masked_fill(self.invalid_S, 0)
        return torch.empty_like(v_S).scatter_(0, self.route_S, v_S).view(self.T, self.K)


class Grouped(_OnDevice):
    """torch._grouped_mm. It rounds before a bias can be added, so a bias gives an fp32 result: one rounding still."""

    def __init__(self, ids_TK: Tensor, spec: ExpertsSpec) -> None:
        super().__init__(ids_TK, spec.E)
        self.offsets_E = torch.searchsorted(self.expert_S, arange(self.E + 1, self.expert_S)[1:], out_int32=True)

    def linear(
        self, x_SA: Tensor, w_ENA: PerExpert, bias_EN: PerExpert | None = None, out: Tensor | None = None
    ) -> Tensor:
        y_SN = torch._grouped_mm(x_SA, stacked(w_ENA).mT, offs=self.offsets_E)
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
        start_E1 = torch.searchsorted(self.expert_S, arange(E + 1, self.expert_S))
        blocks_E = (start_E1.diff() + (B - 1)) // B
        last_E = blocks_E.cumsum(0)
        index_b = arange(blocks, start_E1)
        expert_b = torch.searchsorted(last_E, index_b, right=True)
        self.expert_b = expert_b.clamp(max=E - 1)  # a block beyond the last has padding rows only
        first_b = start_E1[self.expert_b] + (index_b - (last_E - blocks_E)[self.expert_b]) * B
        row_bB = first_b[:, None] + arange(B, start_E1)
        padding_bB = (row_bB >= start_E1[self.expert_b + 1][:, None]) | (expert_b >= E)[:, None]
        self.row_bB = row_bB.masked_fill(padding_bB, self.S)
        self.padding_bB1 = padding_bB[:, :, None]

    def _rows(self, x_SA: Tensor, chunk: slice) -> Tensor:
        return x_SA[self.row_bB[chunk].clamp(max=self.S - 1)].masked_fill(self.padding_bB1[chunk], 0)

    def _chunks(self, expert_bytes: int) -> list[slice]:
        n = max(1, GATHERED_BYTES // expert_bytes)
        return [slice(i, i + n) for i in range(0, len(self.row_bB), n)]

    def linear(
        self, x_SA: Tensor, w_ENA: PerExpert, bias_EN: PerExpert | None = None, out: Tensor | None = None
    ) -> Tensor:
        w_ENA, bias_EN = stacked(w_ENA), None if bias_EN is None else stacked(bias_EN)
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
