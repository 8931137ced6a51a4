"""The experts' benchmark on a CPU: the limit is the formula, a wrong contender is named and not timed, whole JSON, what
is missing is said, and others' libraries are called with the arguments that they document."""

import dataclasses
import json
import sys
import types

import pytest
import torch

from moe_compile import cli, contest, peers, reference, suite
from moe_compile.hardware import facts, named
from moe_compile.providers import Candidate, launcher
from moe_compile.spec import ExpertsSpec, Layout
from moe_compile.verdict import Reject

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TINY = suite.GEOMETRIES["tiny"]


def test_the_limit_counts_active_experts_once_and_every_route():
    here, each = facts(CPU), TINY.H * 3 * TINY.I
    one = torch.tensor([[0, 1, 2, 3]])
    assert suite.limit(TINY, one) == pytest.approx(4 * each * 4 / here.bandwidth)
    many = one.expand(10_000, 4)
    assert suite.limit(TINY, many) == pytest.approx(2 * 40_000 * each / here.flop_rate("f32"))


def test_routes_are_distinct_and_weights_sum_to_one():
    x, ids, weights = suite.tokens_of(TINY, 50, CPU)
    assert x.shape == (50, TINY.H) and ids.shape == weights.shape == (50, TINY.K)
    assert all(len(set(row)) == TINY.K for row in ids.tolist())
    torch.testing.assert_close(weights.sum(-1), torch.ones(50))
    assert len(ids.unique()) > TINY.K


@pytest.mark.parametrize("name", sorted(set(suite.GEOMETRIES) - {"tiny"}))
def test_a_wrong_contender_is_named_and_not_timed(name, monkeypatch):
    spec = dataclasses.replace(suite.GEOMETRIES[name], E=6, K=2, H=32, I=48, x="f32", out="f32")

    def good(x, ids, w, weights):
        return launcher(Candidate(provider="aten"), spec, CPU)(x, ids, w, weights)

    def fails(x, ids, w, weights):
        raise ValueError("no such kernel")

    offered = {
        "good": {"good": lambda: good}, "near": {"near": lambda: lambda *a: good(*a) * 1.001},
        "fails": {"fails": lambda: fails}, "absent": Reject("not installed"),
    }  # fmt: skip
    monkeypatch.setitem(suite.GEOMETRIES, name, spec)
    monkeypatch.setattr(contest, "contenders", lambda *a, **k: offered)
    cell = contest.Contest(name, CPU, rounds=2, layers=2).cell(5)
    assert set(cell.times) == {"good"} and set(cell.failed) == {"near", "fails", "absent"}
    assert "wrong" in cell.failed["near"] and "no such kernel" in cell.failed["fails"]
    found = contest.record([cell], CPU)
    assert found["absent"]["absent"] == {"not installed": {name: [5]}}
    row = found["cells"][0]
    assert row["ratio"]["good"] == pytest.approx(row["us"]["good"] / row["limit_us"], rel=0.01)


def test_of_several_tactics_the_fastest_that_is_right_is_the_column(monkeypatch):
    calls = []

    def named_run(name, factor=1.0):
        def run(*a):
            calls.append(name)
            return launcher(Candidate(provider="aten"), TINY, CPU)(*a) * factor

        return lambda: run

    made = {"slow": named_run("slow"), "wrong": named_run("wrong", 1.1), "quick": named_run("quick")}
    monkeypatch.setattr(contest, "contenders", lambda *a, **k: {"theirs": made})
    times = {"slow": 3.0, "quick": 1.0, "theirs": 1.0}
    monkeypatch.setattr(
        contest.bench, "compare", lambda ready, rounds: {n: contest.Timing(samples=(times[n],) * 2) for n in ready}
    )
    cell = contest.Contest("tiny", CPU, layers=1).cell(3)
    assert cell.chosen == {"theirs": "quick"} and not cell.failed and set(cell.times) == {"theirs"}
    assert "wrong" in calls


def test_every_column_of_a_gpu_is_there_or_says_why_not(monkeypatch):
    h200 = named("H200")
    monkeypatch.setattr(contest, "facts", lambda device: h200)
    spec = suite.GEOMETRIES["qwen3_30b"]
    found = contest.contenders(spec, 4, CUDA, tactics=0, peers=True)
    assert {"moe", "moe_tuned", "moe_decode", "moe_grouped", *peers.PEERS} <= set(found) and "aten" not in found
    assert len(found["moe_tuned"]) == contest.SHORT_LIST
    assert all(label.startswith("triton_") for label in found["moe_tuned"])
    assert len(found["moe_decode"]) == 1
    if "flashinfer" not in sys.modules:
        assert "flashinfer is not installed" in str(found["flashinfer_cutlass"])
    several = contest.contenders(spec, 4, CUDA, tactics=2, peers=False)
    assert "moe" not in several and sum(name.startswith("triton_decode(") for name in several) == 2


@pytest.mark.parametrize("name", ["vllm", "sonicmoe"])
def test_a_peer_that_is_not_installed_says_so(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)  # importing it raises
    spec = suite.GEOMETRIES["qwen3_30b"]
    assert "is not installed" in str(peers.PEERS[name](spec, CUDA))
    assert "layout" in str(peers.PEERS[name](suite.GEOMETRIES["gpt_oss_20b"], CUDA))
    assert "on CUDA only" in str(peers.PEERS[name](spec, CPU))


def test_a_peer_that_lacks_a_package_of_its_own_says_which(monkeypatch):
    package = types.ModuleType("sonicmoe")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "sonicmoe", package)
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: exec("import no_such_dsl"))
    said = str(peers.PEERS["sonicmoe"](suite.GEOMETRIES["qwen3_30b"], CUDA))
    assert "doesn't import" in said and "no_such_dsl" in said


SMALL = ExpertsSpec(E=6, K=2, H=32, I=48, act=peers.SWIGLU, x="bf16", out="bf16")


def _close(spec, run):
    weights, inputs = suite.weights_of(spec, CPU), suite.tokens_of(spec, 9, CPU)
    x, ids, w = inputs
    exact = suite.ExpertWeights(gate_up=(weights.gate_up[0].double(),), down=weights.down.double())
    want = reference.experts(reference.exact(spec), x.double(), ids, w.double(), exact)
    torch.testing.assert_close(run(*inputs, weights).double(), want, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("halves", ["gate_up", "gate_up_interleaved"])
def test_sonicmoe_is_called_as_its_layer_calls_it(halves, monkeypatch):
    spec = dataclasses.replace(SMALL, gate_up=Layout(storage="EGH", halves=halves))

    def metadata(topk, E, counts, offsets, gather, scatter, back):
        assert topk.dtype is torch.int32 and topk.shape[1] == spec.K
        order = topk.view(-1).argsort(stable=True)
        counts.copy_(torch.bincount(topk.view(-1), minlength=E))
        offsets.copy_(torch.nn.functional.pad(counts.cumsum(0), (1, 0)))
        gather.copy_(order // spec.K)
        scatter.copy_(order)
        back[order] = torch.arange(len(order), dtype=torch.int32)

    def up(x, w1, b1, offsets, R, K, gather, scatter, back, tokens, varying, kind, inference, concat_layout=False):
        assert w1.shape == (2 * spec.I, spec.H, spec.E) and w1.permute(2, 0, 1).is_contiguous()
        assert b1 is tokens is None and not varying and kind == "swiglu" and inference and (R, K) == (len(gather), 2)
        rows = []
        for e in range(spec.E):
            h = x[gather[offsets[e] : offsets[e + 1]]].float() @ w1[..., e].float().T
            gate, up = h.chunk(2, -1) if concat_layout else (h[:, ::2], h[:, 1::2])
            rows.append(torch.nn.functional.silu(gate) * up)
        return torch.cat(rows).to(x.dtype), None

    def down(a, h, w2, b2, scores, offsets, T, K, gather, scatter, back, tokens, varying, kind):
        assert w2.shape == (spec.H, spec.I, spec.E) and w2.permute(2, 0, 1).is_contiguous()
        assert h is b2 is tokens is None and not varying and scores.dtype is torch.float32
        spans = zip(offsets[:-1].tolist(), offsets[1:].tolist())
        y = torch.cat([a[i:j].float() @ w2[..., e].float().T for e, (i, j) in enumerate(spans)])
        return (y[back].view(T, K, -1) * scores[..., None]).sum(1).to(a.dtype)

    steps = types.SimpleNamespace(
        TC_topk_router_metadata_triton=metadata, _UpProjection=types.SimpleNamespace(apply=up),
        _DownProjection=types.SimpleNamespace(apply=down),
    )  # fmt: skip
    enums = types.SimpleNamespace(ActivationType=types.SimpleNamespace(SWIGLU="swiglu"))
    for name, module in (("sonicmoe", types), ("sonicmoe.functional", steps), ("sonicmoe.enums", enums)):
        monkeypatch.setitem(sys.modules, name, module)
    _close(spec, peers.PEERS["sonicmoe"](spec, CUDA))


def test_vllm_is_called_as_it_documents(monkeypatch):
    def fused_experts(hidden_states, w1, w2, topk_weights, topk_ids, inplace=False, activation="silu"):
        assert topk_weights.dtype is torch.float32 and topk_ids.dtype is torch.int32 and not inplace
        assert w1.shape == (SMALL.E, 2 * SMALL.I, SMALL.H) and w2.shape == (SMALL.E, SMALL.H, SMALL.I)
        weights = suite.ExpertWeights(gate_up=(w1,), down=w2)
        return reference.experts(SMALL, hidden_states, topk_ids.long(), topk_weights, weights)

    name = "vllm.model_executor.layers.fused_moe"
    for parent in ("vllm", "vllm.model_executor", "vllm.model_executor.layers"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(fused_experts=fused_experts))
    _close(SMALL, peers.PEERS["vllm"](SMALL, CUDA))


def test_huggingface_modules_go_with_the_weights(monkeypatch):
    import gc
    import weakref

    spec = dataclasses.replace(TINY, E=4, K=2, H=16, I=8)
    run = peers._huggingface("grouped_mm")(spec, CPU)
    monkeypatch.setattr(torch, "compile", lambda forward, **k: forward)
    kept = []
    for seed in range(2):
        weights, inputs = suite.weights_of(spec, CPU, seed), suite.tokens_of(spec, 3, CPU)
        run(*inputs, weights)
        kept.append(weakref.ref(weights.down))
        del weights
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


def test_the_command_prints_a_line_a_cell_and_json(capsys, tmp_path):
    arguments = ["bench", "--tokens", "1,3", "--only", "moe", "--rounds", "2", "--json"]
    assert cli.main(arguments) == 0
    out, lines = capsys.readouterr()
    found = json.loads(out)
    assert [c["T"] for c in found["cells"]] == [1, 3] and set(found["cells"][0]["us"]) == {"moe", "moe_aten"}
    assert lines.count("tiny T=") == 2
    (tmp_path / "found.json").write_text(out.replace('"tiny"', '"olmoe"'))
    assert cli.main(["bench", "--read", str(tmp_path / "found.json")]) == 0
    assert "over the limit, T <= 8" in capsys.readouterr().out
    assert cli.main(["bench", "--geometry", "mixtrol"]) == 1
    assert "mixtral" in capsys.readouterr().err
