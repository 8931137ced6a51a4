"""What the compiler did: an append-only record of typed events. explain, dump and logs only ever read it.

A compilation writes events with `record`; a reader collects them with `with capture() as events:`, or is called with
each from `subscribe` on. Recording never fails and never changes what is compiled. Each event is logged at DEBUG by the
logger of its stage, `moe_compile.recognize` say, so TORCH_LOGS="+moe_compile" shows them all.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

log = logging.getLogger("moe_compile")


@dataclass(frozen=True, kw_only=True)
class Where:
    """A place in the model: module path ("model.layers.0.mlp"), source ("file.py:12"), its text; "" if unknown."""

    module: str = ""
    source: str = ""
    code: str = ""

    def __str__(self) -> str:
        return " ".join(p for p in (self.module, f"({self.source})" if self.source else "") if p) or "?"


@dataclass(frozen=True, kw_only=True)
class Event:
    """`graph` counts the graphs that this process compiled, from 0. `logger`: the stage whose logger tells of it."""

    graph: int
    logger: ClassVar[str] = "backend"


@dataclass(frozen=True, kw_only=True)
class GraphSeen(Event):
    """A graph reached the backend. text: its readable code; ops: (operation, how often), made with it, only when
    somebody captures with `text=True`."""

    nodes: int
    text: str = ""
    ops: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class RegionFound(Event):
    """A block was proved. `spec`: the MoESpec's line. `router_why`: why its router keeps its nodes, if it does."""

    logger: ClassVar[str] = "recognize"
    region: int
    spec: str
    where: Where
    root: str
    nodes: int
    router_why: str = ""


@dataclass(frozen=True, kw_only=True)
class RegionRejected(Event):
    """Something looked like a block and was not proved: the deepest proof's node, source and reason."""

    logger: ClassVar[str] = "recognize"
    where: Where
    node: str
    reason: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A candidate of a token bucket, and the seconds that a call of it is predicted to take; measured where it was."""

    candidate: str
    predicted: float
    measured: float | None = None


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A token bucket of a plan, as the cost model sees it at `tokens`, its largest count (`bound`; None: unbounded).

    limit: seconds below which no kernel can be, by the device's datasheet; bound_by: "memory" (bytes of the weights
    of the experts that are reached) or "compute" (FLOP). active: experts that so many tokens reach. offers: cheapest
    first. steps: the chosen one's launches, each with the rows of its sheet (cost.SHEETS).
    """

    bound: int | None
    tokens: int
    limit: float
    bound_by: str
    active: float
    chosen: str
    offers: tuple[Offer, ...]
    steps: tuple[tuple[str, tuple[tuple[str, float], ...]], ...] = ()

    def step_rows(self, row: str) -> list[float]:
        """A row of each step that has it."""
        return [value for _, rows in self.steps for name, value in rows if name == row]


@dataclass(frozen=True, kw_only=True)
class Planned(Event):
    """The plan of a region: every candidate considered ("triton_grouped: Reject ..."), and the plan's text.

    device: what it was planned for, in words. buckets: what each token bucket was offered, and why it chose.
    load: how the workload's tokens choose experts, most popular first: (so many experts, the probability that a token
    chooses each of them); empty where no workload was collected. copied_bytes: of weights that the plan may keep in
    layouts of its own, beside the model's. training: whose kernels train the block, in words.
    """

    logger: ClassVar[str] = "plan"
    region: int
    candidates: tuple[str, ...]
    plan: str
    device: str = ""
    buckets: tuple[Bucket, ...] = ()
    load: tuple[tuple[int, float], ...] = ()
    copied_bytes: int = 0
    training: str = ""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A candidate of a bucket: microseconds a call, predicted and measured (None: not measured), half the distance
    between the quartiles over the median, the relative RMS error where it was compared, and why it may not win."""

    candidate: str
    predicted_us: float
    us: float | None = None
    spread: float = 0.0
    error: float | None = None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Tuned(Event):
    """A token bucket of a spec got its candidate by measurement, for some regions.

    tokens: the bucket's upper bound, "*" for the last; at: the T that was measured. source: "measured" or "cache".
    workload: which tokens, and `why` they were not more like real ones. reach: experts that T rows reach, a mean.
    complete: False where the budget ended before every trial.
    """

    logger: ClassVar[str] = "tune"
    regions: tuple[int, ...]
    spec: str
    tokens: str
    at: int
    chosen: str
    source: str
    workload: str
    why: str = ""
    reach: float = 0.0
    complete: bool = True
    seconds: float = 0.0
    trials: tuple[Trial, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Beside(Event):
    """The operator was timed beside the nodes that it replaces, on the example's tokens; whichever is slower goes."""

    logger: ClassVar[str] = "tune"
    regions: tuple[int, ...]
    tokens: int
    nodes_us: float
    operator_us: float
    kept: str


@dataclass(frozen=True, kw_only=True)
class RegionSkipped(Event):
    """A proved block stays as it was because the user's options say so; `why` names the option."""

    logger: ClassVar[str] = "recognize"
    region: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Lowered(Event):
    """The regions were replaced; nodes before and after. `text` and `ops` as in GraphSeen."""

    logger: ClassVar[str] = "lower"
    regions: int
    nodes_before: int
    nodes_after: int
    text: str = ""
    ops: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Verified(Event):
    """moe.verify compared a block's operator with the original nodes on real values; relative differences, bounds."""

    logger: ClassVar[str] = "verify"
    region: int
    ok: bool
    rms: float
    max: float
    rms_bound: float
    max_bound: float


@dataclass(frozen=True, kw_only=True)
class StageFailed(Event):
    """A stage raised; the graph was compiled as it was."""

    stage: str
    error: str


@dataclass(frozen=True, kw_only=True)
class GraphAbandoned(Event):
    """Dynamo starts this graph over (a number turned out to be a constant, say): its other events don't count."""


@dataclass(frozen=True, kw_only=True)
class Compiled(Event):
    """The inner backend took the graph. Seconds spent in our stages, by stage."""

    inner: str
    seconds: dict[str, float] = field(default_factory=dict, hash=False)


_RECENT: deque[Event] = deque(maxlen=10_000)
_LISTENERS: dict[object, tuple[Callable[[Event], object], bool]] = {}
_LOCK = threading.Lock()
_GRAPHS = itertools.count()


def next_graph() -> int:
    """A fresh graph number, unique in this process."""
    return next(_GRAPHS)


def record(event: Event) -> None:
    """Append an event; listeners see it at once, loggers at DEBUG. A listener that raises is dropped, and logged."""
    with _LOCK:
        _RECENT.append(event)
        listeners = tuple(_LISTENERS.items())
    for key, (listener, _) in listeners:
        try:
            listener(event)
        except Exception:  # a reader's fault must not become the compilation's
            _drop(key)
            log.exception("a journal listener failed and is dropped")
    logging.getLogger(f"{log.name}.{event.logger}").debug("%s", event)


def wants_text() -> bool:
    """Whether a listener asked for graph texts (they cost time to print)."""
    return any(text for _, text in tuple(_LISTENERS.values()))


def subscribe(listener: Callable[[Event], object], *, text: bool = False) -> Callable[[], None]:
    """Call `listener` with every event from now on, until the returned function is called. `text`: see wants_text."""
    key = object()
    with _LOCK:
        _LISTENERS[key] = (listener, text)
    return lambda: _drop(key)


def _drop(key: object) -> None:
    with _LOCK:
        _LISTENERS.pop(key, None)


@contextlib.contextmanager
def capture(*, text: bool = False) -> Iterator[list[Event]]:
    """The events recorded inside the `with`, in order, in a list that grows as they come."""
    events: list[Event] = []
    stop = subscribe(events.append, text=text)
    try:
        yield events
    finally:
        stop()


def recent() -> tuple[Event, ...]:
    """The last events of this process (at most 10,000)."""
    with _LOCK:
        return tuple(_RECENT)
