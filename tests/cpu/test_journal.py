"""The journal: order, listeners coming and going, and that a listener's fault stays its own."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moe_compile import journal


def seen(nodes: int = 1) -> journal.GraphSeen:
    return journal.GraphSeen(graph=journal.next_graph(), nodes=nodes)


def test_capture_sees_events_in_order_and_only_inside():
    before, first, second, after = (seen(n) for n in range(4))
    journal.record(before)
    with journal.capture() as events:
        journal.record(first)
        assert events == [first]  # at once, not at the end
        journal.record(second)
    journal.record(after)
    assert events == [first, second]
    assert journal.recent()[-4:] == (before, first, second, after)


def test_captures_nest_and_end_in_any_order():
    outer, inner = journal.capture(), journal.capture()
    a, b = outer.__enter__(), inner.__enter__()
    journal.record(event := seen())
    outer.__exit__(None, None, None)
    journal.record(later := seen())
    inner.__exit__(None, None, None)
    journal.record(seen())
    assert (a, b) == ([event], [event, later])


def test_text_is_wanted_only_while_somebody_wants_it():
    assert not journal.wants_text()
    with journal.capture():
        assert not journal.wants_text()
        with journal.capture(text=True):
            assert journal.wants_text()
        assert not journal.wants_text()


def test_a_capture_ends_when_its_body_raises():
    with pytest.raises(KeyError), journal.capture(text=True):
        raise KeyError
    assert not journal.wants_text()


def test_a_failing_listener_is_dropped_and_logged(caplog):
    calls = []

    def broken(event):
        calls.append(event)
        raise RuntimeError("broken reader")

    stop = journal.subscribe(broken, text=True)
    with journal.capture() as events, caplog.at_level(logging.ERROR, "moe_compile"):
        journal.record(first := seen())
        journal.record(second := seen())
    assert calls == [first]
    assert events == [first, second]
    assert "broken reader" in caplog.text
    assert not journal.wants_text()
    stop()  # a second drop is harmless


def test_a_listener_may_record():
    def echo(event):
        if event.nodes == 1:
            journal.record(seen(nodes=2))

    stop = journal.subscribe(echo)
    with journal.capture() as events:
        journal.record(seen(nodes=1))
    stop()
    assert sorted(e.nodes for e in events) == [1, 2]


def test_graph_numbers_are_unique_across_threads():
    numbers: list[int] = []

    def take():
        numbers.extend(journal.next_graph() for _ in range(500))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(set(numbers)) == 2000


@pytest.mark.parametrize(
    ("where", "text"),
    [
        (journal.Where(module="model.layers.0.mlp", source="m.py:3", code="y = f(x)"), "model.layers.0.mlp (m.py:3)"),
        (journal.Where(source="m.py:3"), "(m.py:3)"),
        (journal.Where(), "?"),
    ],
)
def test_where_prints(where, text):
    assert str(where) == text


_PROGRAM = """
import torch
from blocks import GroupedBlock, H
with torch.no_grad():
    torch.compile(GroupedBlock(), backend="moe", options={"moe.inner": "eager"})(torch.randn(10, H))
"""


@pytest.mark.parametrize(
    ("logs", "shown", "hidden"),
    [("+moe_compile", ["RegionFound", "Planned", "Lowered"], []), ("+moe_compile.plan", ["Planned"], ["RegionFound"])],
)
def test_torchs_own_switches_show_the_events(logs, shown, hidden, tmp_path):
    here = Path(__file__).parent
    environ = {**os.environ, "TORCH_LOGS": logs, "TORCH_TRACE": str(tmp_path)}
    environ["PYTHONPATH"] = os.pathsep.join([str(here.parents[1]), str(here)])
    done = subprocess.run([sys.executable, "-c", _PROGRAM], env=environ, capture_output=True, text=True, check=True)
    assert all(f"{word}(" in done.stderr for word in shown)
    assert not any(f"{word}(" in done.stderr for word in hidden)
    (trace,) = tmp_path.iterdir()
    assert "moe_compile_report" in trace.read_text() and "1 of 1 MoE block replaced" in trace.read_text()
