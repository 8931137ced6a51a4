"""Our part of torch's structured trace: with TORCH_TRACE=folder, tlparse lists `moe_compile_report` beside the graphs.

In: the events of one graph. Out: artifacts in the trace of the compilation that is going on; nothing where none is.
"""

from __future__ import annotations

from collections.abc import Sequence

from .explain import Report
from .journal import Event


def artifacts(events: Sequence[Event]) -> None:
    """The report of these events as an artifact of the graph that Dynamo is compiling."""
    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "moe_compile_report", "encoding": "string"},
        payload_fn=lambda: str(Report.from_events(events)),
    )
