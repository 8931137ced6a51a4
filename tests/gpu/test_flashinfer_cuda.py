"""FlashInfer's backends on a CUDA device: as exact as torch's path, every kind of routes, graphs, memory, tactics."""

import functools
import gc
import json
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from moe_compile import ops as _registered  # noqa: F401  (the operator)
from moe_compile import suite, tune
from moe_compile.activation import Activation
from moe_compile.cache import Cache
from moe_compile.clock import Clock
from moe_compile.hardware import facts
from moe_compile.peers import PEERS
from moe_compile.plan import plan_experts
from moe_compile.providers import copied_bytes, flashinfer, launcher, providers, stored
from moe_compile.spec import ExpertsSpec, Layout
from moe_compile.workload import ZIPF, Workload, zipf

GPU = torch.device("cuda", 0)
DEFAULT = {  # their tuners take 20 s and 8 s a size, and cuTile's kernels 10 s each to compile
    "flashinfer_cutile": "(PICK=32_128_64_1_128_64_1)",
    "flashinfer_cute_dsl_sm90": "(PICK=128_128_64_1_128_64_1_1_0)",
    "flashinfer_frost_low_latency": "(PICK=ffma_1_4)",
}
BACKENDS = [name for name in providers() if name.startswith(("flashinfer", "cudnn_frost"))]
BOUND = 1.1  # times the error of torch's bf16 path
DRAWS = 64


def spec_of(act: str = "swiglu", **changes) -> ExpertsSpec:
    return ExpertsSpec(**{"E": 32, "K": 4, "H": 512, "I": 256, "act": Activation.parse(act), **changes})


SPECS = {
    "swiglu": spec_of(), "gpt_oss": replace(suite.GEOMETRIES["gpt_oss_20b"], E=32, K=4, H=512, I=256),
    "geglu_tanh": spec_of("geglu_tanh"), "relu2": spec_of("relu2", gate_up=Layout(halves="up")),
    "up_gate": spec_of(gate_up=Layout(halves="up_gate"), w="bf16"),
}  # fmt: skip


def weights_of(spec: ExpertsSpec, seed: int = 0):
    return suite.weights_of(spec, GPU, seed)


def tokens_of(spec: ExpertsSpec, T: int, seed: int = 0):
    return suite.tokens_of(spec, T, GPU, seed)


def error(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """(RMS, largest), each relative to the reference's."""
    d = got.double() - want
    return (d.norm() / want.norm()).item(), (d.abs().max() / want.abs().max()).item()


def needs(name: str, spec: ExpertsSpec, T: int) -> str:
    """The plan's text; skips where the backend can't."""
    provider = providers()[name]
    verdict = provider.available() and provider.supports(spec, facts(GPU))
    if not verdict:
        pytest.skip(str(verdict))
    if not provider.tactics(spec, facts(GPU), T):
        pytest.skip(f"not for {T} tokens")
    return f"*:{name}{DEFAULT.get(name, '')}"


def run(spec, weights, x, ids, w, plan):
    return torch.ops.moe_compile.experts(x, ids, w, *weights.arguments(), str(spec), plan)


def assert_as_exact(spec: ExpertsSpec, plan: str, T: int) -> None:
    """Its RMS and its largest error against float64 are at most BOUND times torch's, each a mean over DRAWS inputs.

    Of a single input the largest error is one element's, and which rounding that met is chance (+-30 %).
    """
    weights, by_torch, errors = weights_of(spec), PEERS["torch._grouped_mm"](spec, GPU), []
    for seed in range(DRAWS):
        tokens = tokens_of(spec, T, seed)
        truth = suite.exact(spec, range(T), tokens, weights)
        got, theirs = run(spec, weights, *tokens, plan), by_torch(*tokens, weights)
        errors.append((error(got, truth), error(theirs, truth)))
    ours, theirs = torch.tensor(errors, dtype=torch.float64).mean(0)
    print(plan, T, "rms, largest, of torch's:", [round(r, 3) for r in (ours / theirs).tolist()])
    assert (ours <= BOUND * theirs).all(), (ours, theirs)


@pytest.fixture(autouse=True)
def no_fallback(recwarn):
    yield
    said = [str(w.message) for w in recwarn if "leaves calls to aten" in str(w.message)]
    assert not said


@pytest.mark.parametrize("T", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_as_exact_as_torch(spec, name, T):
    assert_as_exact(spec, needs(name, spec, T), T)


@pytest.mark.parametrize("name", BACKENDS)
def test_repeated_ids_and_ids_outside(name):
    spec, T = spec_of(), 8
    plan = needs(name, spec, T)
    weights, (x, ids, w) = weights_of(spec), tokens_of(spec, T)
    ids[1, 1] = ids[1, 0]
    ids[2] = ids[2, 3]
    ids[3, 0], ids[4, 2], ids[5] = -1, spec.E, 2**31 - 1
    got = run(spec, weights, x, ids, w, plan)
    expected = run(spec, weights, x, ids, w, "*:aten")
    assert not got[5].any()
    assert (got - expected).abs().max() <= 1e-2 * expected.abs().max()
    assert run(spec, weights, x[:0], ids[:0], w[:0], plan).shape == (0, spec.H)


@pytest.mark.parametrize("name", BACKENDS)
def test_memory_is_what_was_declared(name):
    spec = spec_of(E=64, H=2048, I=768)
    plan = needs(name, spec, 4)
    tokens = tokens_of(spec, 4)
    run(spec, weights_of(spec), *tokens, plan)  # compiles and tunes
    gc.collect()
    weights, declared = weights_of(spec), copied_bytes((name,), spec)
    held = stored.held_bytes()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = run(spec, weights, *tokens, plan)
    torch.cuda.synchronize()
    kept, peak = (f() - before for f in (torch.cuda.memory_allocated, torch.cuda.max_memory_allocated))
    assert stored.held_bytes() - held == declared
    assert abs(kept - out.nbytes - declared) <= 0.01 * declared
    assert peak <= 1.01 * declared + (8 << 20)  # and a workspace for four tokens
    del weights
    gc.collect()
    assert stored.held_bytes() == held


@pytest.mark.parametrize("name", BACKENDS)
def test_a_captured_graph_follows_new_inputs_and_new_weights(name):
    spec, T = spec_of(), 4
    plan = needs(name, spec, T)
    weights, (x, ids, w) = weights_of(spec), tokens_of(spec, T)
    run(spec, weights, x, ids, w, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(spec, weights, x, ids, w, plan)
    fresh = tokens_of(spec, T, seed=1)
    for old, new in zip((x, ids, w), fresh):
        old.copy_(new)
    for t in (weights.gate_up[0], weights.down):
        t.mul_(-1.5)
    run(spec, weights, x, ids, w, plan)  # an eager call writes the copies again, where the graph reads them
    graph.replay()
    expected = run(spec, weights, *fresh, "*:aten")
    assert (got - expected).abs().max() <= 1e-2 * expected.abs().max()


@pytest.mark.parametrize("name", BACKENDS)
def test_under_inductor_with_cuda_graphs(name):
    spec, T = spec_of(), 4
    plan = needs(name, spec, T)
    layers, text = [weights_of(spec, seed).arguments() for seed in range(2)], str(spec)

    def forward(x, ids, w, plan):
        for arguments in layers:
            x = x + torch.ops.moe_compile.experts(x, ids, w, *arguments, text, plan)
        return x

    for *lists, _ in layers:  # as parameters are: Inductor copies other inputs of a CUDA graph to places of its own
        for t in (t for several in lists for t in several):
            torch._dynamo.mark_static_address(t)
    torch._dynamo.reset()
    compiled = torch.compile(functools.partial(forward, plan=plan), mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for seed in range(4):
            tokens = tokens_of(spec, T, seed)
            torch.compiler.cudagraph_mark_step_begin()
            got, expected = compiled(*tokens).clone(), forward(*tokens, "*:aten")
            assert (got - expected).abs().max() <= 1e-2 * expected.abs().max()


def test_what_its_tuner_found_is_timed_kept_and_not_searched_again(tmp_path, monkeypatch):
    name, spec = "flashinfer_cutlass", spec_of()
    needs(name, spec, 32)
    pools = tuple(zipf(spec, weights_of(spec, seed).arguments(), GPU, rows=64, seed=seed) for seed in range(2))
    offers = plan_experts(spec, facts(GPU), weight_copy_bytes=1 << 40).lists[32]
    (tuned,) = tune.tune(
        spec, {32: offers}, {32: 32}, Workload(spec=spec, kind=ZIPF, pools=pools, seed=0), device=GPU,
        clock=Clock(device=GPU, launch="graph"), key=lambda _: tune.key_of(spec, 32, "gpu", "graph", ZIPF, ["aten"]),
        cache=Cache(tmp_path), seconds=60,
    )  # fmt: skip
    (trial,) = (t for t in tuned.trials if t.candidate.startswith(name))
    assert trial.candidate.startswith(f"{name}(PICK=") and trial.us is not None and not trial.why.startswith("failed")
    flashinfer._ready.cache_clear()
    launcher.cache_clear()
    monkeypatch.setattr(flashinfer, "_choose", lambda *args, **kwargs: pytest.fail("searched again"))
    assert_as_exact(spec, f"*:{trial.candidate}", 24)


# A geometry and token count of each backend, and its tactics by kind: those of different kinds run different kernels.
LOW_LATENCY = "flashinfer_frost_low_latency"
FORCED = {
    LOW_LATENCY: (  # FMA and tensor cores, at their boundary
        spec_of(E=64, K=10, H=2048, I=512), 4,
        {"ffma_1_4": "FMA", "ffma_8_2": "FMA", "wgmma_2_2_128": "wgmma", "wgmma_2_4_128": "wgmma"},
    ),
    "flashinfer_cutlass": (spec_of(), 64, {"19_83": "19_83", "12_75": "12_75"}),
    "flashinfer_cute_dsl_sm90": (
        spec_of(), 64, {f"{m}_{m}_{n}_1_{m}_{n}_1_1_0": f"{m} x {n}" for m in (64, 128) for n in (64, 128)},
    ),
}  # fmt: skip


FACTS = ("grid", "block", "shared memory", "registers per thread")


@pytest.mark.parametrize("name", FORCED)
def test_the_tactic_that_is_named_is_the_one_that_runs(name, tmp_path):
    """By the names and FACTS of the kernels that ran."""
    spec, T, picks = FORCED[name]
    needs(name, spec, T)
    weights, tokens = weights_of(spec), tokens_of(spec, T)
    ran = {}
    for pick in picks:
        plan = f"*:{name}(PICK={pick})"
        run(spec, weights, *tokens, plan)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run(spec, weights, *tokens, plan)
            torch.cuda.synchronize()
        profile.export_chrome_trace(str(tmp_path / "trace.json"))
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        kernels = [e for e in events if e.get("cat") == "kernel"]
        ran[pick] = {(e["name"], *(str(e["args"].get(fact)) for fact in FACTS)) for e in kernels}
    for pick, kind in picks.items():
        others = [p for p, k in picks.items() if k != kind]
        assert all(ran[pick] - ran[other] for other in others), ran


@pytest.mark.parametrize("T", [4, 8])
def test_its_tuner_chooses_well_between_fma_and_tensor_cores(T):
    spec, _, picks = FORCED[LOW_LATENCY]
    needs(LOW_LATENCY, spec, T)
    weights, tokens = [weights_of(spec, seed) for seed in range(4)], tokens_of(spec, T)
    picks = [pick if T == 4 else pick.replace("_128", "_64") for pick in picks]  # tiles that it has for T
    plans = {pick: f"*:{LOW_LATENCY}(PICK={pick})" for pick in picks} | {"its own": f"*:{LOW_LATENCY}"}
    calls = {name: [functools.partial(run, spec, w, *tokens, plan) for w in weights] for name, plan in plans.items()}
    for several in calls.values():
        several[0]()
    took = {name: t.median for name, t in Clock(device=GPU, launch="graph")(calls, 11).items()}
    assert took["its own"] <= 1.1 * min(took.values()), took


@pytest.mark.parametrize("T", [4, 7])
@pytest.mark.parametrize("name", FORCED)
def test_every_named_tactic_is_as_exact_as_torch(name, T):
    spec, at, picks = FORCED[name]
    needs(name, spec, T)
    for pick in picks:
        if not pick.startswith("wgmma") or T == at:  # those are of their exact size
            assert_as_exact(spec, f"*:{name}(PICK={pick})", T)
