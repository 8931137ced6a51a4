"""Tokens that route like real ones: what tuning measures on.

In: the captured graph, its example inputs and the proved regions. Out: for each distinct spec a Workload, whose batches
are the operator's arguments for any T. Constant tokens send every row to the same experts and flatter wide tiles;
uniform routes reach too many and flatter narrow ones. So, by the first rung that can be climbed:

    tokens=varied   varied token ids through the captured graph: the rows, ids and weights that reach each block
    hidden=drawn    the graph's hidden states drawn at random: the real routers see them
    routes=zipf     no graph to run: rows drawn, routes of a skewed popularity, never constant and never uniform

Invariant: the same seed gives the same tokens on any machine; the user's tensors, random generators and weights are as
they were (replay.py). Seeds are equal on ranks that compute the same tokens, and differ by data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from .canonical import canonical
from .nodes import fake
from .replay import FAULTS, Node, Original, Replay
from .spec import ExpertsSpec, torch_dtype
from .verdict import Reject, Unproved
from .writes import mutated_arguments

VARIED, DRAWN, ZIPF = "tokens=varied:1", "hidden=drawn:1", "routes=zipf:1"
SITES = 4  # blocks of a spec whose rows and weights are used, spread over the model
PASSES = 32  # runs of the graph at most: one of a decode step adds one row
Where = tuple[ExpertsSpec, torch.device]
ZIPF_EXPONENT = 0.7  # the most popular of 64 experts gets 5.3 times the mean; trained routers: 2 to 6


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Arguments of torch.ops.moe_compile.experts before spec and plan."""

    hidden_TH: torch.Tensor
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor | None
    rest: tuple[Any, ...]

    def arguments(self) -> tuple[Any, ...]:
        return (self.hidden_TH, self.ids_TK, self.weights_TK, *self.rest)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Pools of routed rows, one a block, with the block's own weights.

    kind: which rung, and its version; why: what kept it off the rungs above. original: a block's own nodes on the rows
    of the example, where the graph could be run.
    """

    spec: ExpertsSpec
    kind: str
    pools: tuple[Batch, ...]
    seed: int
    why: str = ""
    original: Original | None = None
    _cache: dict[tuple[int, int], Batch] = field(default_factory=dict, repr=False, compare=False)

    @property
    def rows(self) -> int:
        """Distinct rows of the smallest pool."""
        return min(len(p.hidden_TH) for p in self.pools)

    def batch(self, T: int, number: int = 0) -> Batch:
        """T rows of a pool, drawn without replacement as far as it has rows; batch `number` is of pool number modulo
        their count, and always the same."""
        if (T, number) not in self._cache:
            pool = self.pools[number % len(self.pools)]
            rows = len(pool.hidden_TH)
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            full, rest = divmod(T, rows)
            order = [torch.randperm(rows, generator=generator) for _ in range(full + (rest > 0))]
            picked = torch.cat(order)[:T].to(pool.hidden_TH.device)
            weights = pool.weights_TK
            self._cache[T, number] = Batch(
                hidden_TH=pool.hidden_TH[picked],
                ids_TK=pool.ids_TK[picked],
                weights_TK=None if weights is None else weights[picked],
                rest=pool.rest,
            )
        return self._cache[T, number]

    def counts(self) -> tuple[list[int], int]:
        """(how many rows chose each expert, of how many rows), over all pools: an expert's rank, not its number, is
        what blocks have in common, so the counts are added in sorted order."""
        total = torch.zeros(self.spec.E, dtype=torch.int64)
        for pool in self.pools:
            ids = pool.ids_TK[(pool.ids_TK >= 0) & (pool.ids_TK < self.spec.E)].reshape(-1).cpu().long()
            total += torch.bincount(ids, minlength=self.spec.E).sort(descending=True).values
        return total.tolist(), sum(len(p.hidden_TH) for p in self.pools)

    def reach(self, T: int) -> float:
        """Experts that T rows reach, the mean over a batch of each pool."""
        found = [int(torch.unique(self.batch(T, i).ids_TK).numel()) for i in range(len(self.pools))]
        return sum(found) / len(found)

    def forget(self) -> None:
        """Drop the batches made so far: they are device memory."""
        self._cache.clear()


def collect(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], regions: Sequence[Any], *, rows: int, seed: int = 0
) -> dict[Where, Workload | Reject]:
    """The workload of each distinct (spec, device) of `regions` (recognize.Found), with about `rows` rows a pool.

    A Reject where a spec's weights can't be had: the graph is compiled without real tensors.
    """
    sites: dict[Where, list[Any]] = {}
    for region in regions:
        sites.setdefault((region.spec.experts, region.device), []).append(region)
    sites = {where: _spread(found) for where, found in sites.items()}
    chosen = [region for found in sites.values() for region in found]
    why: list[str] = []
    for kind, vary in ((VARIED, _tokens), (DRAWN, _hidden)):
        try:
            replay = Replay(gm, inputs)
            varied = vary(replay, chosen)
            return _through_the_graph(replay, varied, sites, kind, rows=rows, seed=seed, why="; ".join(why))
        except Unproved as no:
            why.append(f"{kind}: {no.verdict}")
        except torch.OutOfMemoryError:
            why.append(f"{kind}: no memory for the rows")
    text = "; ".join(dict.fromkeys(why))
    return {where: _zipf(gm, inputs, found[0], rows=rows, seed=seed, why=text) for where, found in sites.items()}


def _spread(found: list[Any]) -> list[Any]:
    if len(found) <= SITES:
        return found
    return [found[i * (len(found) - 1) // (SITES - 1)] for i in range(SITES)]


# tokens=varied and hidden=drawn: the graph is run


@dataclass(frozen=True, kw_only=True)
class _Varied:
    """An input and how to draw it: whole numbers below `limit` that avoid some, or normal ones of a scale."""

    node: Node
    limit: int = 0
    avoid: tuple[int, ...] = ()
    scale: float = 1.0

    def draw(self, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        if self.limit:
            drawn = torch.randint(0, self.limit - len(self.avoid), like.shape, generator=generator)
            for special in self.avoid:  # ascending: the numbers from it on move up by one
                drawn += drawn >= special
        else:
            drawn = torch.randn(like.shape, generator=generator) * self.scale
        return drawn.to(like.device, like.dtype)


def _through_the_graph(
    replay: Replay,
    varied: list[_Varied],
    sites: dict[Where, list[Any]],
    kind: str,
    *,
    rows: int,
    seed: int,
    why: str,
) -> dict[Where, Workload | Reject]:
    generator = torch.Generator().manual_seed(seed)
    chosen = [r for found in sites.values() for r in found]
    first = {found[0].root: replay.reads(found[0]) for found in sites.values()}
    moving = {n for r in chosen for n in (r.match.hidden, r.match.ids, r.match.weights) if n is not None}
    still = {n for r in chosen for n in _operands(r.match)}
    outer = {n for nodes in first.values() for n in nodes}
    passing = (moving | outer) - still - set(replay.placeholders)  # written again later in the graph, perhaps
    pools: dict[Node, list[tuple[Any, ...]]] = {r.root: [] for r in chosen}
    rest: dict[Node, tuple[Any, ...]] = {}
    originals: dict[Node, Original] = {}
    for number in range(PASSES):
        drawn = {v.node: v.draw(replay.inputs[v.node], generator) for v in varied}
        seen = replay.run(moving if number else moving | still | outer, drawn, copied=passing)
        for region in chosen:
            m, sizes = region.match, (region.spec.experts.H, region.spec.experts.K, region.spec.experts.K)
            values = [None if n is None else seen[n] for n in (m.hidden, m.ids, m.weights)]
            flat: tuple[Any, ...] = tuple(v if v is None else v.reshape(-1, n) for v, n in zip(values, sizes))
            pools[region.root].append(flat)
            if number == 0:
                rest[region.root] = _rest(m, seen)
                if region.root in first:
                    batch = Batch(hidden_TH=flat[0], ids_TK=flat[1], weights_TK=flat[2], rest=rest[region.root])
                    call = replay.original(region, seen)
                    originals[region.root] = Original(call=call, arguments=batch.arguments())
        if all(sum(len(h) for h, *_ in p) >= rows for p in pools.values()):
            break

    def joined(parts: Sequence[Any]) -> Any:
        return None if parts[0] is None else torch.cat(list(parts))[:rows].contiguous()

    def pool(region: Any) -> Batch:
        hidden, ids, weights = map(joined, zip(*pools[region.root]))
        return Batch(hidden_TH=hidden, ids_TK=ids, weights_TK=weights, rest=rest[region.root])

    return {
        (spec, device): Workload(
            spec=spec, kind=kind, pools=tuple(map(pool, found)), seed=seed, why=why, original=originals[found[0].root]
        )
        for (spec, device), found in sites.items()
    }


def _operands(match: Any) -> list[Node]:
    lists = (match.gate_up, match.down, match.gate_up_bias, match.down_bias)
    return [*(n for several in lists for n in several), *(() if match.post_scale is None else (match.post_scale,))]


def _rest(match: Any, seen: dict[Node, Any]) -> tuple[Any, ...]:
    lists = (match.gate_up, match.down, match.gate_up_bias, match.down_bias)
    scale = None if match.post_scale is None else seen[match.post_scale].detach()
    return (*([seen[n].detach() for n in several] for several in lists), scale)


def _tokens(replay: Replay, regions: Sequence[Any]) -> list[_Varied]:
    """The inputs that hold token ids: whole numbers that an embedding looks up, not positions and not token types."""
    found = []
    for n in replay.placeholders:
        value = replay.inputs[n]
        source = str(getattr(n, "_dynamo_source", None) or "") + n.name
        if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int64, torch.int32) or not value.dim():
            continue
        if "position" in source or "type" in source:
            continue
        tables, avoid = _tables(n)
        if tables:
            limit = min(tables)
            avoid = sorted({a % limit for a in avoid})
            if limit - len(avoid) > 1:
                found.append(_Varied(node=n, limit=limit, avoid=tuple(avoid)))
    if not found:
        raise Unproved("no token ids among the graph's inputs")
    return found


_SAME_NUMBERS = {"reshape", "flatten", "squeeze", "unsqueeze", "permute", "transpose", "t", "expand", "identity",
                 "to", "type", "slice", "getitem", "chunk", "split", "select"}  # fmt: skip
_HARMLESS = {"eq", "ne", "lt", "le", "gt", "ge", "size", "zeros_like", "ones_like", "full_like", "empty_like",
             "new_zeros", "new_ones", "new_full", "new_empty", "item"}  # fmt: skip


def _tables(placeholder: Node) -> tuple[list[int], list[int]]:
    """(rows of every table that these numbers index, padding ids). Unproved where something else reads them: a number
    out of its range would end the process on a GPU."""
    tables: list[int] = []
    avoid: list[int] = []
    todo = [placeholder]
    while todo:
        n = todo.pop()
        for user in n.users:
            call = canonical(user)
            name = getattr(user.target, "__name__", str(user.target))
            if name in ("embedding", "embedding.default"):
                function = user.target is torch.nn.functional.embedding
                table, index = (user.args[1], user.args[0]) if function else user.args[:2]
                padding = user.kwargs.get("padding_idx", user.args[2] if len(user.args) > 2 else None)
                if n is not index or not isinstance(table, Node):
                    raise Unproved("token ids are embedded in a way that is not known", user.name)
                tables.append(int(fake(table).shape[0]))
                avoid += [padding] if isinstance(padding, int) else []
            elif call is not None and call.op in ("getitem", "index") and n in _indices(call):
                tables.append(int(fake(call.get("input")).shape[0]))
            elif call is not None and call.op in _SAME_NUMBERS and call.get("input") is n and not call.mutates:
                todo.append(user)
            elif user.op == "call_function" and name == "getattr" and user.args[1] in ("shape", "device", "dtype"):
                continue
            elif call is None and name in ("dim", "numel", "ndimension", "stride", "is_contiguous", "type_as"):
                continue
            elif user.op != "output" and (call is None or call.op not in _HARMLESS or mutated_arguments(user)):
                raise Unproved("token ids are read by something else than an embedding", f"{user.name} ({name})")
    return tables, avoid


def _indices(call: Any) -> tuple[Any, ...]:
    """The nodes that index the first dim, and nothing else."""
    index = call.get("indices" if call.op == "index" else "index")
    return (index[0],) if isinstance(index, (tuple, list)) and len(index) == 1 else (index,)


def _hidden(replay: Replay, regions: Sequence[Any]) -> list[_Varied]:
    """The inputs that are hidden states: floating, of a block's H, and neither parameter nor buffer."""
    widths = {r.spec.experts.H for r in regions}
    found = []
    for n in replay.placeholders:
        value = replay.inputs[n]
        source = str(getattr(n, "_dynamo_source", None) or "") + n.name
        if (
            isinstance(value, torch.Tensor)
            and not isinstance(value, torch.nn.Parameter)
            and not any(word in source for word in ("_parameters", "_buffers"))
            and value.is_floating_point()
            and value.dim() >= 2
            and value.shape[-1] in widths
        ):
            scale = float(value.detach().float().std()) if value.numel() > 1 else 1.0
            found.append(_Varied(node=n, scale=scale if 0 < scale < float("inf") else 1.0))
    if not found:
        raise Unproved("no hidden states among the graph's inputs")
    return found


# routes=zipf: nothing is run


def zipf(spec: ExpertsSpec, rest: tuple[Any, ...], device: torch.device, *, rows: int, seed: int) -> Batch:
    """Drawn rows, K distinct experts each: popularity falls as rank ** -ZIPF_EXPONENT, ranks in random order."""
    generator = torch.Generator().manual_seed(seed)
    rank = torch.randperm(spec.E, generator=generator) + 1.0
    noise = torch.rand(rows, spec.E, generator=generator)  # Gumbel top-k: drawn without replacement, by popularity
    score = -ZIPF_EXPONENT * rank.log() - (-(noise.clamp_min(1e-9).log())).log()
    ids = score.topk(spec.K, dim=1).indices
    hidden = torch.randn(rows, spec.H, generator=generator)
    weights = torch.randn(rows, spec.K, generator=generator).softmax(-1)
    return Batch(
        hidden_TH=hidden.to(device, torch_dtype(spec.x)),
        ids_TK=ids.to(device),
        weights_TK=None if spec.weight == "none" else weights.to(device, torch_dtype(spec.w)),
        rest=rest,
    )


def _zipf(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], region: Any, *, rows: int, seed: int, why: str
) -> Workload | Reject:
    spec = region.spec.experts
    try:
        replay = Replay(gm, inputs)
        nodes = _operands(region.match)
        seen = replay.run(nodes, alone=True)
        pool = zipf(spec, _rest(region.match, seen), region.device, rows=rows, seed=seed)
    except Unproved as no:
        return no.verdict
    except FAULTS as error:
        return Reject("no memory for a workload", f"{type(error).__name__}: {error}")
    return Workload(spec=spec, kind=ZIPF, pools=(pool,), seed=seed, why=why)
