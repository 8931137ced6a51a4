"""The dump: what it writes, that it overwrites nothing and breaks nothing, and that its reproductions run."""

import contextlib
import csv
import json
import os
import runpy
import subprocess
import sys
import warnings

import pytest
import torch
from blocks import GroupedBlock, H

import moe_compile
from moe_compile import dump, journal
from moe_compile.cost import SHEETS
from moe_compile.journal import Where
from moe_compile.work import Passed

SWIGLU = (
    "experts(E=8 K=2 H=64 I=32 act=swiglu gate_up=EGH:gate_up down=EHI bias=none weight=output x=f32 w=f32 out=f32)"
)
SPECS = (
    SWIGLU,
    "experts(E=8 K=3 H=32 I=48 act=swiglu gate_up=EHG:gate_up_interleaved down=EIH bias=both weight=output x=bf16 "
    "w=bf16 out=bf16)",
    "experts(E=4 K=1 H=32 I=16 act=relu2 gate_up=EGH:up down=EHI bias=none weight=input x=bf16 w=f32 out=f32)",
    "experts(E=4 K=2 H=32 I=16 act=geglu gate_up=EGH:separate down=EHI bias=down weight=none x=f32 w=f32 out=f32)",
)


def record_graph(*specs, plan="*:aten", number=None):
    number = journal.next_graph() if number is None else number
    journal.record(journal.GraphSeen(graph=number, nodes=9, text="def forward(before): ...", ops=(("sort", 2),)))
    where = Where(module="model.layers.0.mlp", source="modeling.py:7", code="y = f(x)")
    for i, spec in enumerate(specs):
        journal.record(
            journal.RegionFound(graph=number, region=i, spec=spec, where=where, root="sum_1", nodes=5, router_why="")
        )
        journal.record(journal.Planned(graph=number, region=i, candidates=("aten: ok",), plan=plan))
    journal.record(journal.RegionRejected(graph=number, where=where, node="sort_3", reason="not ids", detail="f32"))
    journal.record(
        journal.Lowered(
            graph=number,
            regions=len(specs),
            nodes_before=9,
            nodes_after=5,
            text="def forward(after): ...",
            ops=(("experts", 2),),
        )
    )
    return number


def test_files_of_a_graph(tmp_path):
    with moe_compile.debug(tmp_path) as dumper:
        assert journal.wants_text()
        number = record_graph(SWIGLU, SWIGLU)
    record_graph(SWIGLU)  # after the `with`: not written
    assert dumper.path is not None
    assert dumper.path.parent == tmp_path
    assert dumper.path.name == f"rank0_pid{os.getpid()}"
    n = f"{number:03}"
    assert {f.name for f in dumper.path.iterdir()} == {
        f"{n}_before.py",
        f"{n}_after.py",
        f"{n}_0_costs.txt",
        f"{n}_0_repro.py",
        f"{n}_1_costs.txt",
        f"{n}_1_repro.py",
        "journal.jsonl",
        "report.html",
        "report.md",
    }
    assert (dumper.path / f"{n}_before.py").read_text() == "def forward(before): ...\n"
    after = (dumper.path / f"{n}_after.py").read_text()
    assert after.startswith("# 9 nodes before, 5 after: 2 blocks replaced\n#   -2 sort\n#   +2 experts\n")
    assert after.endswith("def forward(after): ...\n")
    events = [json.loads(line) for line in (dumper.path / "journal.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events[:3]] == ["GraphSeen", "RegionFound", "Planned"]
    assert (events[1]["spec"], events[2]["plan"]) == (SWIGLU, "*:aten")
    text = (dumper.path / "report.md").read_text()
    assert "not ids" in text and "modeling.py:7  y = f(x) [node sort_3]" in text


def test_a_real_plan_is_written_with_its_candidates_and_costs(tmp_path):
    torch._dynamo.reset()
    with torch.no_grad(), moe_compile.debug(tmp_path) as dumper:
        moe_compile.explain(GroupedBlock(), torch.randn(4, H))
    with open(dumper.path / "candidates.csv") as file:
        rows = list(csv.DictReader(file))
    chosen = [r for r in rows if r["chosen"] == "1"]
    assert [r["at_tokens"] for r in chosen] == [str(1 << i) for i in range(14)]
    assert all(r["candidate"].startswith("aten(path=") and float(r["predicted_us"]) > 0 for r in chosen)
    (costs,) = dumper.path.glob("*_0_costs.txt")
    assert f"= {SHEETS[Passed]['seconds']}\n" in costs.read_text()
    assert "?" not in costs.read_text(), "a row without its formula"


def test_failures_are_in_the_report(tmp_path):
    with moe_compile.debug(tmp_path) as dumper:
        journal.record(journal.StageFailed(graph=0, stage="lower", error="KeyError: 'x'"))
    assert "stage lower failed" in (dumper.path / "report.md").read_text()
    assert "stage lower failed" in (dumper.path / "report.html").read_text()


def test_nothing_is_overwritten(tmp_path):
    paths = set()
    for _ in range(3):
        with moe_compile.debug(tmp_path) as dumper:
            record_graph(SWIGLU, number=7)
        paths.add(dumper.path)
    base = f"rank0_pid{os.getpid()}"
    assert {p.name for p in paths} == {base, f"{base}_2", f"{base}_3"}


def test_a_child_process_has_its_own_folder(tmp_path):
    with moe_compile.debug(tmp_path):
        record_graph(SWIGLU)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork beside torch's threads; the child only writes
            child = os.fork()
        if not child:
            record_graph(SWIGLU)
            os._exit(0)
        os.waitpid(child, 0)
    assert {p.name for p in tmp_path.iterdir()} == {f"rank0_pid{os.getpid()}", f"rank0_pid{child}"}


def test_nothing_is_made_where_nothing_is_compiled(tmp_path):
    with moe_compile.debug(tmp_path / "new") as dumper:
        pass
    assert dumper.path is None
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("a file, where a folder should be made")
    with pytest.warns(UserWarning, match="can't write its dump, and goes on without") as warned:  # noqa: SIM117
        with moe_compile.debug(blocked / "dump"), journal.capture() as events:
            record_graph(SWIGLU)
            record_graph(SWIGLU)
    assert len(warned) == 1
    assert sum(isinstance(e, journal.Lowered) for e in events) == 2


def test_the_environment_starts_moves_and_stops_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_COMPILE_DUMP", str(tmp_path / "a"))
    dump.follow_environment()
    dump.follow_environment()  # the same folder: nothing new
    record_graph(SWIGLU)
    monkeypatch.setenv("MOE_COMPILE_DUMP", str(tmp_path / "b"))
    dump.follow_environment()
    record_graph(SWIGLU)
    monkeypatch.delenv("MOE_COMPILE_DUMP")
    dump.follow_environment()
    record_graph(SWIGLU)
    assert not journal.wants_text()
    for folder in ("a", "b"):
        (home,) = (tmp_path / folder).iterdir()
        assert len(list(home.glob("*_before.py"))) == 1


def run(program, *arguments):
    return subprocess.run([sys.executable, program, *arguments], capture_output=True, text=True, timeout=300)


def test_reproductions_run_and_catch_an_error(tmp_path, capsys, monkeypatch):
    with moe_compile.debug(tmp_path) as dumper:
        number = record_graph(*SPECS)
    programs = sorted(dumper.path.glob(f"{number:03}_*_repro.py"))
    assert len(programs) == len(SPECS)
    for program, spec in zip(programs, SPECS, strict=True):
        monkeypatch.setattr(sys, "argv", [str(program), "9"])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(program))
        out = capsys.readouterr().out
        assert not stop.value.code, out
        assert spec in out
        assert "plan *:aten on cpu, 9 tokens" in out
    text = programs[0].read_text()
    wrong = text.replace("PLAN\n).double()", "PLAN\n).double() * 1.001")
    assert wrong != text
    (tmp_path / "wrong.py").write_text(wrong)
    result = run(tmp_path / "wrong.py")
    assert (result.returncode, result.stderr) == (1, "")
    assert "rms error 1.0" in result.stdout


def test_a_real_compilation_is_dumped(tmp_path, monkeypatch):
    """Through MOE_COMPILE_DUMP: the graphs are readable, and each block has its reproduction."""
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
    )
    model = transformers.MixtralForCausalLM(config).eval()
    monkeypatch.setenv("MOE_COMPILE_DUMP", str(tmp_path))
    with torch.no_grad():
        torch.compile(model, backend="moe", options={"moe.inner": "eager"})(torch.arange(5)[None], use_cache=False)
    monkeypatch.delenv("MOE_COMPILE_DUMP")
    dump.follow_environment()  # and so the reports are written
    assert "2 of 2 MoE blocks replaced" in next(tmp_path.glob("*/report.html")).read_text()
    (home,) = tmp_path.iterdir()
    (before,), (after,) = home.glob("*_before.py"), home.glob("*_after.py")
    assert before.read_text().count("grouped_mm_fallback") >= 4
    assert "#   -4 grouped_mm_fallback\n" in after.read_text()
    assert "grouped_mm_fallback" not in after.read_text().partition("class")[2]
    assert after.read_text().count("moe_compile.experts") == 2
    programs = list(home.glob("*_repro.py"))
    assert len(programs) == 2
    result = run(programs[0])
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_looking_changes_no_bit(tmp_path, inner):
    x, module = torch.randn(10, H), GroupedBlock()
    outs = []
    with torch.no_grad():
        for folder in (None, tmp_path):
            torch._dynamo.reset()
            with moe_compile.debug(folder) if folder else contextlib.nullcontext():
                outs.append(torch.compile(module, backend="moe", options={"moe.inner": inner})(x))
    assert torch.equal(*outs)
    assert list(tmp_path.glob("*/report.html"))


def test_no_text_is_made_for_nobody():
    torch._dynamo.reset()
    options = {"moe.inner": "eager", "moe.strict": True}
    with torch.no_grad(), journal.capture() as events:
        torch.compile(GroupedBlock(), backend="moe", options=options)(torch.randn(4, H))
    assert [e.text + str(e.ops) for e in events if isinstance(e, journal.GraphSeen | journal.Lowered)] == ["()", "()"]
