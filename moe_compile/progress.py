"""Tells a waiting person how far something is: a bar on a terminal's standard error, else one line in the log."""

from __future__ import annotations

import sys
import time

from .journal import log

WIDTH = 24


class Progress:
    """`total` steps; `step` after each, `end` once. Nothing is shown in the first half second."""

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total, self.done, self.begun = title, total, 0, time.monotonic()
        self.shown = 0

    def step(self, what: str) -> None:
        self.done += 1
        seconds = time.monotonic() - self.begun
        if seconds < 0.5 or not sys.stderr.isatty():
            return
        filled = WIDTH * self.done // self.total
        left = seconds / self.done * (self.total - self.done)
        bar = f"[{'#' * filled}{'.' * (WIDTH - filled)}]"
        self._show(f"{self.title} {bar} {self.done}/{self.total} {what}, {left:.0f} s left")

    def end(self, what: str) -> None:
        if self.shown:
            self._show("")
        log.info("%s: %s in %.1f s", self.title, what, time.monotonic() - self.begun)

    def _show(self, line: str) -> None:
        sys.stderr.write(f"\r{line.ljust(self.shown)}" + ("" if line else "\r"))
        sys.stderr.flush()
        self.shown = len(line)
