"""report.html: everything that was recorded is on the page, the page needs nothing else, and text can't break it."""

from __future__ import annotations

import dataclasses
import re
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
import torch
from blocks import GroupedBlock, H

from moe_compile import explain, journal
from moe_compile.journal import Bucket, Offer, Where
from moe_compile.report import html

NARROW, WIDE = "triton_grouped(M=16)", "triton_grouped(M=64)"
SPEC = "experts(E=8 K=2 H=64 I=32 act=swiglu gate_up=EGH:gate_up down=EHI bias=none weight=output x=f32 w=f32 out=f32)"


def events(**changes: str) -> list[journal.Event]:
    where = Where(module=changes.get("module", "model.layers.0.mlp"), source="modeling.py:7", code="y = f(x)")
    buckets = tuple(
        Bucket(
            bound=bound,
            tokens=tokens,
            limit=tokens * 1e-6,
            bound_by="memory",
            active=8.0,
            chosen=chosen,
            offers=(
                Offer(candidate=chosen, predicted=tokens * 2e-6, measured=tokens * 2.5e-6),
                Offer(candidate="aten", predicted=tokens * 9e-6),
            ),
            steps=(("fc1", (("fill", 0.25), ("waves", 1.5))),),
        )
        for bound, tokens, chosen in ((4, 4, NARROW), (None, 8192, WIDE))
    )
    return [
        journal.GraphSeen(graph=3, nodes=9, text="a = sort(x)\nb = keep(a)"),
        journal.RegionFound(graph=3, region=0, spec=SPEC, where=where, root="sum_1", nodes=9),
        journal.Planned(
            graph=3,
            region=0,
            candidates=("aten: ok",),
            plan=f"4:{NARROW};*:{WIDE}",
            device="a GPU",
            buckets=buckets,
            load=((2, 0.5), (6, 1 / 6)),
        ),
        *(
            journal.Tuned(
                graph=3,
                regions=(0,),
                spec=SPEC,
                tokens=tokens,
                at=at,
                chosen=chosen,
                source="measured",
                workload="tokens=varied:1",
                reach=6.5,
                trials=(journal.Trial(candidate=chosen, predicted_us=2.0 * at, us=2.5 * at, spread=0.01),),
            )
            for tokens, at, chosen in (("4", 4, NARROW), ("*", 8192, WIDE))
        ),
        journal.Beside(graph=3, regions=(0,), tokens=16, nodes_us=80.0, operator_us=40.0, kept="operator"),
        journal.RegionRejected(graph=3, where=where, node="sort_3", reason=changes.get("reason", "not ids")),
        journal.Lowered(graph=3, regions=1, nodes_before=9, nodes_after=5, text="a = experts(x)\nb = keep(a)"),
    ]


class _Tags(HTMLParser):
    """Raises where an element is closed that is not the one open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def tags(page: str) -> list[str]:
    parser = _Tags()
    parser.feed(page)
    assert parser.open == []
    return parser.seen


def test_the_page_has_it_all() -> None:
    page = html(events())
    assert tags(page).count("svg") == 3
    assert "2 buckets measured on tokens=varied:1" in page
    assert "the block&#x27;s own nodes take 80.0 µs, the operator 40.0 µs" in page
    for text in ("1 of 1 MoE block replaced", SPEC, "y = f(x)", "a GPU", NARROW, WIDE, "more (at 8192)", "not ids"):
        assert text in page
    row = re.search(rf"<tr><td>4</td><td><code>{re.escape(NARROW)}</code></td>(.*?)</tr>", page)
    assert row
    assert re.findall("<td>(.*?)</td>", row[1]) == ["8.0", "10.0", "4.0", "memory", "8", "25%", "1.5"]


def test_the_graphs_mark_what_changed() -> None:
    page = html(events())
    assert "<pre><span class=gone>a = sort(x)</span>\nb = keep(a)</pre>" in page
    assert "<pre><span class=come>a = experts(x)</span>\nb = keep(a)</pre>" in page


def test_the_page_needs_no_network_and_no_script() -> None:
    page = html(events())
    assert "script" not in tags(page) and "link" not in tags(page)
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", page), "something would be fetched"
    assert "@import" not in page and "url(http" not in page


def test_names_cannot_become_markup() -> None:
    page = html(events(module="<b>layers</b>", reason="<script>alert(1)</script>"))
    assert "script" not in tags(page) and "b" not in tags(page)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_plots_take_the_colour_of_the_page() -> None:
    page = html(events())
    svg = re.findall(r"<svg.*?</svg>", page, flags=re.S)[0]
    assert "currentColor" in svg and "#000000" not in svg
    drawn = ElementTree.fromstring(svg)
    assert "viewBox" in drawn.attrib and not {"width", "height"} & set(drawn.keys())
    words = {t.text for t in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {"limit", "triton_grouped", "aten", "tokens", "4", "8192"} <= words, "text is text, and can be found"


def test_without_matplotlib_the_tables_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = html(events())
    assert "svg" not in tags(page)
    assert "No plots:" in page and "moe_compile[report]" in page
    assert "more (at 8192)" in page


def test_a_block_that_stayed_says_why() -> None:
    page = html([*events()[:2], journal.RegionSkipped(graph=3, region=0, why="moe.fuel=0 is spent")])
    assert "<th>not replaced</th><td>moe.fuel=0 is spent</td>" in page
    failed = [*events(), journal.StageFailed(graph=3, stage="lower", error="KeyError: 'x'")]
    assert "stage lower failed" in html(failed) and "a later stage failed" in html(failed)


def test_equal_pages_of_equal_events() -> None:
    assert html(events()) == html(dataclasses.replace(e) for e in events())


def test_a_real_compilation() -> None:
    torch._dynamo.reset()
    with torch.no_grad(), journal.capture(text=True) as seen:
        explain(GroupedBlock(), torch.randn(4, H))
    page = html(seen)
    assert tags(page).count("svg") == 1
    assert "<span class=gone>" in page and "experts" in page
