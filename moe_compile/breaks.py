"""Where Dynamo ended a graph, or gave up a frame, and why: in, what Dynamo recorded since a moment; out, `Ending`s.

Dynamo keeps two records: reasons for graphs that it ended, and, of frames that it left to the interpreter (a break in a
loop), why the compilation failed; of the latter it keeps the last 64.
"""

from __future__ import annotations

import os
import re
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .journal import Where

_FLAG = re.compile(r"torch\._dynamo\.config\.\w+ = \w+")


@dataclass(frozen=True, kw_only=True)
class Break:
    """Where Dynamo ended a graph, and why, in its words; `times` counts frames, which run for several layers."""

    reason: str
    where: Where
    times: int


@dataclass(frozen=True, kw_only=True)
class Ending:
    """One frame's: what Dynamo calls it, its explanation ("" if none), the settings that it names as a way out, the
    user's stack, innermost last, and whether all of the frame was given up."""

    title: str
    why: str
    flags: tuple[str, ...]
    stack: tuple[traceback.FrameSummary, ...]
    given_up: bool = False

    @property
    def where(self) -> Where:
        """The innermost line of the model's code."""
        if not self.stack:
            return Where()
        frame = self.stack[-1]
        return Where(source=f"{os.path.basename(frame.filename)}:{frame.lineno}", code=frame.line or "")

    @classmethod
    def read(cls, reason: str, stack: Iterable[traceback.FrameSummary], given_up: bool = False) -> Ending:
        title, *rest = (line.strip() for line in reason.strip().splitlines() or [""])
        why = next((x.removeprefix("Explanation: ") for x in rest if x.startswith("Explanation: ")), "")
        return cls(
            title=title,
            why=why,
            flags=tuple(dict.fromkeys(_FLAG.findall(reason))),
            stack=tuple(stack),
            given_up=given_up,
        )


class Watch:
    """Of the endings since it was made."""

    def __init__(self) -> None:
        self._seen = len(torch._dynamo.utils.graph_break_reasons)
        self._since = time.time_ns() // 1000

    def endings(self) -> list[Ending]:
        """In the order of the records: graphs that ended, then frames that were given up."""
        reasons = torch._dynamo.utils.graph_break_reasons[self._seen :]
        found = [Ending.read(r.reason, r.user_stack) for r in reasons if r.graph_break]
        for m in torch._dynamo.utils.get_compilation_metrics():
            if m.fail_reason and m.fail_user_frame_filename and (m.start_time_us or 0) >= self._since:
                place = traceback.FrameSummary(m.fail_user_frame_filename, m.fail_user_frame_lineno, m.co_name or "")
                found.append(Ending.read(m.fail_reason, [place], given_up=True))
        return found


def breaks(endings: Iterable[Ending]) -> tuple[Break, ...]:
    """Each place once. Frames are given up in the wake of a break; they are named where Dynamo says of nothing else."""
    endings = tuple(endings)
    named = [e for e in endings if not e.given_up] or endings
    found = Counter((f"{e.title}: {e.why}" if e.why else e.title, e.where) for e in named)
    return tuple(Break(reason=reason, where=where, times=n) for (reason, where), n in found.items())
