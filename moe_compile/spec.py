"""What an MoE block computes: MoESpec = ExpertsSpec + RouterSpec (or None). The hinge of the package.

Every spelling of a block that recognition proves becomes one of these, and every kernel is chosen for one of these.
Specs are pure, frozen, hashable, and print on one line that `parse` takes back; the line is an argument of the
operators and the key of plans and of the tuning cache.

    experts(E=128 K=8 H=2048 I=768 act=swiglu gate_up=EGH:gate_up down=EHI bias=none weight=output x=bf16 w=f32
            out=bf16)
    router(E=128 K=8 score=softmax.f32 renorm=sum eps=0 scale=1 logits=bf16 out=bf16)

Meaning of the experts, for token t (T of them), slot k, e = ids_TK[t, k], w = weights_TK[t, k] (accumulated in fp32
at least; see reference.py):

    g, u = gate_up[e] @ x[t] + gate_up_bias[e]      split into its gate and up rows, each of I
    y    = down[e] @ cast(act(g, u), x.dtype) + down_bias[e]
    y    = norm(y)                                  post=rms: y / sqrt(mean_h(y^2) + eps); scaled_rms: of y * scale[h]
    out[t] = cast(sum_k w * y, out.dtype)           weight=output; weight=input scales x[t] instead; weight=none: w = 1

tensors=stacked: the experts lie in one tensor with an axis E. tensors=listed: each expert has tensors of its own, of
the same layout without that axis, and is read where it is. `tensors`, `post` and `eps` are printed where they differ
from stacked, none and 0.

A route whose id is not in [0, E) contributes exactly 0 (expert-parallel sentinels).
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from .activation import Activation

DTYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}
ELEMENT_BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2}
_SHORT = {long: short for short, long in DTYPES.items()}

GATE_UP_STORAGE = ("EGH", "EHG")  # G = 2I rows (or I where there is no gate)
HALVES = ("gate_up", "up_gate", "gate_up_interleaved", "up_gate_interleaved", "up", "separate")
DOWN_STORAGE = ("EHI", "EIH")
BIASES = ("none", "gate_up", "down", "both")
WEIGHT_SIDES = ("output", "input", "none")
TENSORS = ("stacked", "listed")
POSTS = ("none", "rms", "scaled_rms")
SCORES = ("softmax", "sigmoid", "sqrtsoftplus", "topk_softmax", "topk_sigmoid")
GROUP_SCORES = ("none", "max", "top2_sum")
RENORMS = ("none", "sum", "sum_plus_eps", "sum_at_least_eps")
VALUES = ("score", "choice")
TIES = ("any", "first")

_QUIET = MappingProxyType({"quiet": True})  # of a field that is printed only where it differs from its default


@lru_cache(None)
def torch_dtype(short: str) -> Any:
    """The torch dtype of "bf16", "f16", "f32" or "f64"."""
    import torch

    return getattr(torch, DTYPES[short])


def short_dtype(dtype: Any) -> str | None:
    """The short name of a torch dtype ("bf16"); None where a spec can't hold it."""
    return _SHORT.get(str(dtype).removeprefix("torch."))


def _check(owner: str, field: str, value: Any, allowed: tuple[str, ...] | dict[str, str]) -> None:
    if value not in allowed:
        raise ValueError(f"{owner}: {field}={value!r} is not one of {', '.join(allowed)}")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the first linear's weights are stored: `storage` is the axis order, `halves` where gate and up rows sit on G.

    gate_up: gate rows [0, I), up rows [I, 2I). gate_up_interleaved: gate row i at 2i, up row i at 2i + 1.
    up: no gate, G = I. separate: two tensors, gate then up, each with I rows.
    Text: `EGH:gate_up`.
    """

    storage: str = "EGH"
    halves: str = "gate_up"

    def __post_init__(self) -> None:
        _check("Layout", "storage", self.storage, GATE_UP_STORAGE)
        _check("Layout", "halves", self.halves, HALVES)

    def __str__(self) -> str:
        return f"{self.storage}:{self.halves}"

    @classmethod
    def parse(cls, text: str) -> Layout:
        storage, _, halves = text.partition(":")
        return cls(storage=storage, halves=halves)


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """The experts of a block; the module's docstring has the meaning. Sizes are static, the token count T is free.

    E experts, K choices per token, H hidden, I intermediate per expert. `x`, `w`, `out` are the dtypes (bf16, f16,
    f32, f64) of the hidden states and expert weights, of the routing weights, and of the result.
    tensors: one for all experts, or one each. post, eps: what happens to an expert's output before it is weighted.
    """

    E: int
    K: int
    H: int
    I: int
    act: Activation
    gate_up: Layout = Layout()
    down: str = "EHI"
    bias: str = "none"
    weight: str = "output"
    x: str = "bf16"
    w: str = "f32"
    out: str = "bf16"
    tensors: str = dataclasses.field(default="stacked", metadata=_QUIET)
    post: str = dataclasses.field(default="none", metadata=_QUIET)
    eps: float = dataclasses.field(default=0.0, metadata=_QUIET)

    def __post_init__(self) -> None:
        for field in ("E", "K", "H", "I"):
            if getattr(self, field) < 1:
                raise ValueError(f"ExpertsSpec: {field}={getattr(self, field)} must be at least 1")
        _check("ExpertsSpec", "down", self.down, DOWN_STORAGE)
        _check("ExpertsSpec", "bias", self.bias, BIASES)
        _check("ExpertsSpec", "weight", self.weight, WEIGHT_SIDES)
        _check("ExpertsSpec", "tensors", self.tensors, TENSORS)
        _check("ExpertsSpec", "post", self.post, POSTS)
        if not self.eps >= 0 or (self.eps and self.post == "none"):
            raise ValueError(f"ExpertsSpec: eps={self.eps} must be at least 0, and 0 with post=none")
        for field in ("x", "w", "out"):
            _check("ExpertsSpec", field, getattr(self, field), DTYPES)
        if self.act.gated == (self.gate_up.halves == "up"):
            raise ValueError(f"ExpertsSpec: act={self.act} and gate_up={self.gate_up} disagree: is there a gate?")

    @property
    def gated(self) -> bool:
        return self.act.gated

    @property
    def G(self) -> int:
        """Rows of the first linear: 2I with a gate, else I."""
        return 2 * self.I if self.gated else self.I

    @property
    def has_gate_up_bias(self) -> bool:
        return self.bias in ("gate_up", "both")

    @property
    def has_down_bias(self) -> bool:
        return self.bias in ("down", "both")

    def weight_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the expert weights, in operand order: gate_up (or gate, up), then down; listed, each without E."""
        rows = self.I if self.gate_up.halves == "separate" else self.G
        lead = (self.E,) if self.tensors == "stacked" else ()
        first = (*lead, rows, self.H) if self.gate_up.storage == "EGH" else (*lead, self.H, rows)
        second = (*lead, self.H, self.I) if self.down == "EHI" else (*lead, self.I, self.H)
        return (first,) * (2 if self.gate_up.halves == "separate" else 1) + (second,)

    def operand_shapes(self) -> tuple[list[tuple[int, ...]], ...]:
        """Shapes of the tensors in the operator's four lists: gate_up, down, gate_up_bias, down_bias."""
        *first, second = self.weight_shapes()
        rows = self.I if self.gate_up.halves == "separate" else self.G
        lead, each = ((self.E,), 1) if self.tensors == "stacked" else ((), self.E)
        biases = len(first) * each * self.has_gate_up_bias, each * self.has_down_bias
        return (
            [first[0]] * len(first) * each,
            [second] * each,
            [(*lead, rows)] * biases[0],
            [(*lead, self.H)] * biases[1],
        )

    def __str__(self) -> str:
        return _print("experts", self)

    @classmethod
    def parse(cls, text: str) -> ExpertsSpec:
        spec: ExpertsSpec = _parse("experts", text)
        return spec


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """From logits_TE to weights_TK and ids_TK. Selection is exact: its dtypes and the order of steps are the meaning.

    1. s = score(cast(logits, score_dtype)): softmax or sigmoid or sqrt(softplus) over E; for topk_softmax and
       topk_sigmoid the score is taken after selection, over the K chosen logits, and s = logits here.
    2. c = s + bias[e], where `bias` (its own operand) is used to choose only. c and all that is compared is in the
       wider of the dtypes of s and of the bias.
    3. With groups > 1: a group's score is the `group_score` of its c (max, or the sum of its top two); the best
       `top_groups` groups stay, the c of the others become `group_fill` (-inf or 0).
    4. ids = top-K of c. w = s[ids] (of s, not c); values=choice takes c[ids] instead, which differs only where an
       expert of a group that was left out is chosen after all. topk_ scores are taken of w here.
    5. renorm: sum divides w by its sum over k; sum_plus_eps by (sum + eps), sum_at_least_eps by max(sum, eps).
       Then w *= scale; then w *= expert_scale[ids] where that operand ([E]) is there; cast to `out`. These are in the
       wider of the score's dtype, the scale operand's and `out`.

    Ties: both top-ks are torch.topk, which takes any of equal scores (other ones on other devices) and holds NaN for
    the greatest. ties=first, with K = 1, is argmax, which takes the first. The slots of a token are in any order: the
    experts' sum does not depend on it.
    """

    E: int
    K: int
    score: str = "softmax"
    score_dtype: str = "f32"
    bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: str = "none"
    group_fill: float = 0.0
    values: str = "score"
    renorm: str = "none"
    eps: float = 0.0
    scale: float = 1.0
    expert_scale: bool = False
    logits: str = "bf16"
    out: str = "f32"
    ties: str = dataclasses.field(default="any", metadata=_QUIET)

    def __post_init__(self) -> None:
        _check("RouterSpec", "score", self.score, SCORES)
        _check("RouterSpec", "group_score", self.group_score, GROUP_SCORES)
        _check("RouterSpec", "values", self.values, VALUES)
        _check("RouterSpec", "renorm", self.renorm, RENORMS)
        _check("RouterSpec", "ties", self.ties, TIES)
        for field in ("score_dtype", "logits", "out"):
            _check("RouterSpec", field, getattr(self, field), DTYPES)
        if not 1 <= self.K <= self.E:
            raise ValueError(f"RouterSpec: K={self.K} must be in 1..E={self.E}")
        if self.ties == "first" and self.K != 1:
            raise ValueError(f"RouterSpec: ties=first is for K=1, not K={self.K}")
        if self.groups < 1 or self.E % self.groups or not 1 <= self.top_groups <= self.groups:
            sizes = f"groups={self.groups} must divide E={self.E}, top_groups={self.top_groups} be in 1..groups"
            raise ValueError(f"RouterSpec: {sizes}")
        if (self.groups > 1) != (self.group_score != "none"):
            raise ValueError(f"RouterSpec: groups={self.groups} and group_score={self.group_score} disagree")
        if self.values == "choice" and (self.bias or self.groups == 1 or self.score.startswith("topk_")):
            raise ValueError("RouterSpec: values=choice is for scores of all experts, in groups and without a bias")

    def __str__(self) -> str:
        return _print("router", self)

    @classmethod
    def parse(cls, text: str) -> RouterSpec:
        spec: RouterSpec = _parse("router", text)
        return spec


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """A block: its experts, and its router where that was recognized (else ids and weights come from the graph).

    The router may choose among more than the experts: what it calls expert E or above is none (one that skips the
    block, say), and such a route contributes 0.
    """

    experts: ExpertsSpec
    router: RouterSpec | None = None

    def __post_init__(self) -> None:
        if self.router and (self.router.K != self.experts.K or self.router.E < self.experts.E):
            raise ValueError(
                f"MoESpec: experts E={self.experts.E} K={self.experts.K}, but the router chooses "
                f"{self.router.K} of {self.router.E}"
            )

    def __str__(self) -> str:
        return f"{self.experts} {self.router}" if self.router else str(self.experts)

    @classmethod
    def parse(cls, text: str) -> MoESpec:
        """The spec that `str` printed; ValueError says what can't be read."""
        found = re.fullmatch(r"(experts\(.*?\))(?: (router\(.*\)))?", text)
        if not found or (" router(" in text) != bool(found.group(2)):
            raise ValueError(f"MoESpec: {text!r} is not 'experts(...)' or 'experts(...) router(...)'")
        router = RouterSpec.parse(found.group(2)) if found.group(2) else None
        return cls(experts=ExpertsSpec.parse(found.group(1)), router=router)


def _print(head: str, spec: Any) -> str:
    parts = []
    for f in dataclasses.fields(spec):
        value = getattr(spec, f.name)
        if f.metadata.get("quiet") and value == f.default:
            continue
        parts.append(f"{f.name}={int(value) if isinstance(value, bool) else value}")
    return f"{head}({' '.join(parts)})"


@lru_cache(4096)
def _parse(head: str, text: str) -> Any:
    cls: Any = {"experts": ExpertsSpec, "router": RouterSpec}[head]
    if not (text.startswith(head + "(") and text.endswith(")")):
        raise ValueError(f"{cls.__name__}: {text!r} is not '{head}(key=value ...)'")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for part in text[len(head) + 1 : -1].split(" "):
        key, equals, raw = part.partition("=")
        if not equals or key not in fields:
            raise ValueError(f"{cls.__name__}: {key!r} is not one of {', '.join(fields)}")
        values[key] = _READERS[fields[key].type](raw)
    missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in values]
    if missing:
        raise ValueError(f"{cls.__name__}: {', '.join(missing)} missing in {text!r}")
    return cls(**values)


_READERS: dict[Any, Any] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": lambda raw: bool(int(raw)),
    "Activation": Activation.parse,
    "Layout": Layout.parse,
}
