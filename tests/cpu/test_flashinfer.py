"""FlashInfer's backends without a GPU: who is refused and why, what a launcher does around the library's calls.

The calls themselves: tests/gpu/test_flashinfer_cuda.py.
"""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moe_compile import cli, tune
from moe_compile.activation import Activation
from moe_compile.cache import Cache
from moe_compile.clock import Clock
from moe_compile.hardware import named
from moe_compile.kernels.merge import merge_routes_torch
from moe_compile.operands import ExpertWeights
from moe_compile.plan import COPIES, plan_experts
from moe_compile.providers import base, copied_bytes, flashinfer, keep_in, launcher, providers
from moe_compile.providers import flashinfer_api as fi
from moe_compile.providers.base import Candidate, Priced, Tactic, Unserved
from moe_compile.providers.flashinfer import FlashInfer, pick_text
from moe_compile.providers.stored import Stored, stored_weights
from moe_compile.spec import ExpertsSpec, Layout
from moe_compile.verdict import OK, Reject
from moe_compile.workload import ZIPF, Workload, zipf

H200 = named("H200")
INSTALLED = bool(fi.installed()) and importlib.util.find_spec("flashinfer") is not None
needs_flashinfer = pytest.mark.skipif(not INSTALLED, reason="flashinfer is not installed")
OAI = "mul(add(minimum(maximum(up,-7),7),1),mul(minimum(gate,7),sigmoid(mul(minimum(gate,7),1.702))))"
FROST = "fused_moe.backends.cudnn_frost"
QWEN3 = ExpertsSpec(E=128, K=8, H=2048, I=768, act=Activation.parse("swiglu"))
OURS = [name for name in providers() if name.startswith(("flashinfer", "cudnn_frost"))]


def with_act(text: str) -> ExpertsSpec:
    act = Activation.parse(text)
    return replace(QWEN3, act=act, gate_up=Layout(halves="gate_up" if act.gated else "up"))


@pytest.fixture
def fresh():
    """No verdict of another test is remembered, before or after."""
    caches = (fi.installed, fi.importable, fi.module, fi.built, flashinfer._on_device, flashinfer._ready)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


# Whether it is there


@pytest.mark.parametrize(
    ("found", "reason"),
    [(None, "flashinfer is not installed"), ((0, 7, 3), "flashinfer is too old"), ((0, 7, 4), None)],
)
def test_absent_and_old_versions_say_how_to_get_one(monkeypatch, fresh, found, reason):
    monkeypatch.setattr(fi, "release", lambda package: found)
    monkeypatch.setattr(fi, "version", lambda package: ".".join(map(str, found)))
    verdict = fi.installed()
    assert (verdict.reason if reason else verdict) == (reason or OK)
    if reason:
        assert 'pip install "flashinfer-python>=0.7.4"' in verdict.detail
        assert all(providers()[name].available() == verdict for name in OURS)
        assert all(providers()[name].on_arch(QWEN3, 90) == verdict for name in OURS)


def test_a_missing_dependency_of_the_library_is_named(monkeypatch, fresh):
    def fails(name):
        raise ModuleNotFoundError("No module named 'cuda.bindings'", name="cuda.bindings")

    monkeypatch.setattr(fi, "module", fails)
    assert str(fi.importable()) == "flashinfer doesn't import: cuda.bindings is missing: pip install cuda"


def test_planning_for_a_cpu_imports_nothing_of_it():
    code = (
        "import sys, json, torch\n"
        "from moe_compile.plan import plan_experts\n"
        "from moe_compile.hardware import facts\n"
        "from moe_compile.spec import ExpertsSpec\n"
        "from moe_compile.activation import Activation\n"
        "spec = ExpertsSpec(E=8, K=2, H=64, I=64, act=Activation.parse('swiglu'))\n"
        "plan = plan_experts(spec, facts(torch.device('cpu')), 'flashinfer_cutlass', weight_copy_bytes=1 << 40)\n"
        "new = {'flashinfer', 'cutlass', 'cudnn', 'tvm_ffi'} & set(sys.modules)\n"
        "print(json.dumps({'new': sorted(new), 'plan': str(plan.plan), 'lines': plan.candidates}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(out.stdout)
    assert found["new"] == []
    assert found["plan"].startswith("*:aten")
    assert {line.partition(":")[0] for line in found["lines"]} >= {"aten", *OURS}


# Whether it fits

ARCHS = {
    "flashinfer_cutlass": {89, 90, 100, 103, 107, 110, 120, 121},
    "flashinfer_frost_low_latency": {80, 90, 100, 103, 107, 120},
    "flashinfer_cute_dsl_sm90": {90},
    "flashinfer_cutile": {89, 90, 120, 121},
    "flashinfer_cudnn": {80, 89, 90, 100, 103, 107, 110, 120, 121},
    "flashinfer_trtllm_routed": {100, 103, 107},
    "flashinfer_prims_ts": {100, 103},
}


@needs_flashinfer
@pytest.mark.parametrize("name", ARCHS)
def test_architectures_are_the_librarys(name):
    for arch in (75, 80, 89, 90, 100, 103, 107, 110, 120, 121):
        verdict = providers()[name].on_arch(QWEN3, arch)
        assert bool(verdict) == (arch in ARCHS[name]), verdict
        if not verdict:
            assert verdict.reason == "not on this architecture"


REFUSED = [
    ("flashinfer_cutlass", replace(QWEN3, x="f32", out="f32"), 90, "dtype"),
    ("flashinfer_cutlass", replace(QWEN3, out="f32"), 90, "output dtype"),
    ("flashinfer_cutlass", replace(QWEN3, weight="input"), 90, "routing weights scale the input"),
    ("flashinfer_cutlass", replace(QWEN3, post="rms", eps=1e-6), 90, "norm of each expert's result"),
    ("flashinfer_cutlass", with_act("mul(tanh(gate),up)"), 90, "FlashInfer has no such activation"),
    ("flashinfer_cutlass", replace(QWEN3, x="f16", out="f16"), 90, "weight format"),
    ("flashinfer_cutlass", replace(QWEN3, I=764), 90, "outside its limits"),
    ("flashinfer_cutlass", replace(QWEN3, bias="down"), 90, "outside its limits"),
    ("flashinfer_frost_low_latency", replace(QWEN3, bias="both"), 90, "outside its limits"),
    ("flashinfer_frost_low_latency", replace(QWEN3, H=2112), 90, "outside its limits"),
    ("flashinfer_frost_low_latency", replace(QWEN3, I=784), 90, "outside its limits"),
    ("flashinfer_frost_low_latency", replace(QWEN3, K=33), 90, "outside its limits"),
    ("flashinfer_cute_dsl_sm90", with_act("geglu"), 90, "activation"),
    ("flashinfer_cute_dsl_sm90", replace(QWEN3, bias="both"), 90, "outside its limits"),
    ("flashinfer_cute_dsl_sm90", replace(QWEN3, H=2052), 90, "outside its limits"),
    ("flashinfer_cute_dsl_sm90", replace(QWEN3, I=784), 90, "outside its limits"),
    ("flashinfer_cute_dsl_sm90", replace(QWEN3, E=2304), 90, "outside its limits"),
    ("flashinfer_cutile", replace(QWEN3, bias="both"), 90, "outside its limits"),
    ("flashinfer_cudnn", with_act(OAI), 90, "outside its limits"),
    ("flashinfer_cudnn", with_act("relu2"), 90, "activation"),
    ("flashinfer_cudnn", replace(QWEN3, I=764), 90, "outside its limits"),
    ("flashinfer_cudnn", replace(QWEN3, K=40), 90, "outside its limits"),
    ("flashinfer_trtllm_routed", with_act("geglu"), 100, "activation"),
    ("flashinfer_trtllm_routed", replace(QWEN3, H=2080), 100, "outside its limits"),
    ("flashinfer_trtllm_routed", replace(QWEN3, E=576), 100, "outside its limits"),
    ("flashinfer_trtllm", QWEN3, 100, "routes from logits"),
    ("flashinfer_prims_ts", replace(QWEN3, I=800), 100, "outside its limits"),
    ("flashinfer_prims_ts", replace(QWEN3, I=832), 100, "outside its limits"),
    ("flashinfer_prims_ts", replace(QWEN3, E=576), 103, "outside its limits"),
    ("flashinfer_cute_dsl", QWEN3, 100, "weight format"),
    ("cudnn_frost_bf16", with_act(OAI), 107, "activation"),
    ("cudnn_frost_bf16", replace(QWEN3, I=800), 107, "outside its limits"),
    ("cudnn_frost_bf16", replace(QWEN3, bias="both"), 120, "outside its limits"),
    ("cudnn_frost_mxfp8", QWEN3, 107, "weight format"),
    ("cudnn_frost_nvfp4", QWEN3, 120, "weight format"),
    ("cudnn_frost_mxfp8_mxfp4", QWEN3, 120, "weight format"),
]


@needs_flashinfer
@pytest.mark.parametrize(("name", "spec", "arch", "reason"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_every_refusal_has_its_reason(name, spec, arch, reason):
    verdict = providers()[name].on_arch(spec, arch)
    assert isinstance(verdict, Reject), verdict
    assert verdict.reason == reason
    assert verdict.detail


@needs_flashinfer
def test_every_limit_is_met_by_a_test():
    for provider in (providers()[name] for name in OURS):
        specs = [spec for name, spec, _, reason in REFUSED if name == provider.name and reason == "outside its limits"]
        for holds, text in provider.limits if any(n == provider.name for n in ARCHS) else ():
            shared = [s for n, s, *_ in REFUSED if providers()[n].limits == provider.limits or n == provider.name]
            assert any(not holds(spec) for spec in (*specs, *shared, replace(QWEN3, bias="both"))), text


@needs_flashinfer
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("swiglu", "SwiGLU()"),
        (OAI, "SwiGLU(alpha=1.702, beta=1.0, limit=7.0)"),
        ("mul(silu(minimum(gate,10)),minimum(maximum(up,-10),10))", "SwiGLU(limit=10.0)"),
        ("mul(minimum(silu(gate),7),minimum(maximum(up,-7),7))", "SwiGLUStep(limit=7.0)"),
        ("relu2", "ReLU2()"), ("geglu_tanh", "GeGLUTanh()"), ("gelu", "GELU()"), ("identity", "Identity()"),
    ],
)  # fmt: skip
def test_activations_are_the_librarys(text, expected):
    api = fi.module("fused_moe.api")
    assert fi.activation(with_act(text)) == eval(expected, vars(api))


@needs_flashinfer
def test_a_catalog_without_kernels_is_a_refusal(monkeypatch):
    """Frost and Prims-TS are asked for their kernels."""
    from moe_compile.providers import flashinfer_trtllm, frost

    for module in (flashinfer_trtllm, frost):
        module._listed.cache_clear()
    mapper, moe = fi.module("prims_ts.moe.config_mapper"), fi.module(f"{FROST}.bf16.moe")
    monkeypatch.setattr(mapper, "valid_prims_ts_bf16_moe_tactics", lambda **given: [])
    monkeypatch.setattr(moe, "_matching_kernels", lambda *given: ((), ("one",)))
    assert providers()["flashinfer_prims_ts"].on_arch(QWEN3, 103).reason == "no kernel in its list"
    verdict = providers()["cudnn_frost_bf16"].on_arch(QWEN3, 120)
    assert str(verdict) == "no kernel in its catalog: 0 for the first linear, 1 for the second"
    for module in (flashinfer_trtllm, frost):
        module._listed.cache_clear()


# What must be built


def spec_of(compiled: bool, builds: object = None):
    def build_and_load():
        if builds is not None:
            raise builds

    return SimpleNamespace(is_compiled=compiled, build_and_load=build_and_load)


@pytest.mark.parametrize(
    ("module", "made", "reason", "says"),
    [
        ("fused_moe", spec_of(True), None, ""),
        ("fused_moe", spec_of(False), "FlashInfer's kernels aren't built", "fused_moe_90 takes 30 minutes"),
        ("moe_utils", spec_of(False), "FlashInfer's kernels aren't built", "pip install flashinfer-jit-cache"),
        ("moe_utils", OSError("no route to host"), "FlashInfer can't build a module", "no route to host"),
        ("trtllm_utils", spec_of(False), None, ""),
        ("trtllm_moe", spec_of(False), "FlashInfer's kernels aren't built", "trtllm_moe takes a download and nvcc"),
        ("trtllm_utils", spec_of(False, RuntimeError("Could not find nvcc\nhint")),
         "FlashInfer can't build a module", "trtllm_utils: Could not find nvcc;"),
    ],
)  # fmt: skip
def test_modules_that_are_not_built_say_how(monkeypatch, fresh, module, made, reason, says):
    def generate(**options):
        if isinstance(made, Exception):
            raise made
        return made

    names = (
        "gen_cutlass_fused_moe_sm90_module", "gen_moe_utils_module", "gen_trtllm_utils_module",
        "gen_trtllm_gen_fused_moe_sm100_module",
    )  # fmt: skip
    monkeypatch.setattr(
        fi, "module", lambda name: SimpleNamespace(download_file=None, **dict.fromkeys(names, generate))
    )
    verdict = fi.built(module, 90)
    if reason is None:
        assert verdict
    else:
        assert verdict.reason == reason
        assert says in verdict.detail and "python -c" in verdict.detail


def test_a_module_is_built_for_the_architecture(monkeypatch, fresh):
    asked = []
    made = lambda **options: (asked.append(options), spec_of(False))[1]
    monkeypatch.setattr(
        fi, "module", lambda name: SimpleNamespace(download_file=None, gen_trtllm_gen_fused_moe_sm100_module=made)
    )
    assert "module().build" in fi.built("trtllm_moe", 100).detail
    assert "module(enable_rubin=True).build" in fi.built("trtllm_moe", 107).detail
    assert asked == [{}, {"enable_rubin": True}]


@needs_flashinfer
@pytest.mark.parametrize("name", ["moe_utils", "trtllm_moe"])
def test_planning_downloads_nothing(monkeypatch, fresh, name):
    requests = pytest.importorskip("requests")
    monkeypatch.setattr(requests.Session, "get", lambda *args, **kwargs: pytest.fail("a download"))
    verdict = fi.built(name, 100)
    assert verdict or verdict.reason in ("FlashInfer can't build a module", "FlashInfer's kernels aren't built")
    assert verdict or "pip install flashinfer-jit-cache" in verdict.detail


def test_packages_that_a_backend_needs(monkeypatch):
    monkeypatch.setattr(fi, "release", lambda package: (4, 7, 2))
    assert fi.package_needed("nvidia-cutlass-dsl", (4, 7))
    verdict = fi.package_needed("nvidia-cutlass-dsl", (4, 8))
    assert str(verdict) == 'nvidia-cutlass-dsl is missing: 4.7.2; pip install "nvidia-cutlass-dsl>=4.8"'
    monkeypatch.setattr(fi, "release", lambda package: None)
    assert "not installed" in fi.package_needed("cuda-tile", (1, 4)).detail


def test_what_the_library_says_on_a_device_is_passed_on(monkeypatch, fresh):
    backend = Fake()
    monkeypatch.setattr(fi, "present", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(flashinfer, "_arch", lambda device: 90)
    monkeypatch.setattr(FlashInfer, "on_arch", lambda *args: OK)
    monkeypatch.setattr(fi, "built", lambda *args: OK)

    def refuses(*args):
        raise NotImplementedError("Frost FMA requires top_k <= 32")

    backend._make_runner, backend.remedy = refuses, "pip install something"
    verdict = backend.supports(QWEN3, H200)
    assert str(verdict) == "FlashInfer refuses: Frost FMA requires top_k <= 32; pip install something"
    assert backend.supports(QWEN3, named("cpu")).reason == "not a CUDA device"


# How many bytes


def test_a_layout_of_its_own_needs_a_budget(monkeypatch):
    needed = 2 * QWEN3.E * 2 * QWEN3.I * QWEN3.H
    assert copied_bytes(["flashinfer_cutlass"], QWEN3) == needed
    assert copied_bytes(["flashinfer_cutlass", "flashinfer_frost_low_latency", "flashinfer_cudnn"], QWEN3) == needed
    assert copied_bytes(["flashinfer_cutlass", "flashinfer_cute_dsl_sm90"], QWEN3) == 2 * needed
    assert copied_bytes(["flashinfer_cutile"], QWEN3) == needed * 3 // 2
    assert copied_bytes(["flashinfer_cutlass"], replace(QWEN3, gate_up=Layout(halves="up_gate"))) == 0
    gpt_oss = replace(QWEN3, gate_up=Layout(storage="EHG"), down="EIH")
    assert copied_bytes(["flashinfer_cutile"], gpt_oss) == 0

    backend = Fake()
    monkeypatch.setattr(Fake, "available", lambda self: OK)
    monkeypatch.setattr(Fake, "supports", lambda *args: OK)
    monkeypatch.setitem(providers(), "fake", backend)
    short = plan_experts(QWEN3, H200, "fake", weight_copy_bytes=needed - 1)
    assert f"fake: {COPIES}: {needed} bytes, allowed are {needed - 1}" in short.candidates
    assert short.copied_bytes == 0 and "fake" not in str(short.plan)
    enough = plan_experts(QWEN3, H200, "fake", weight_copy_bytes=needed)
    assert str(enough.plan).startswith("8:fake;") and enough.copied_bytes == needed


# How it is called


class Fake(FlashInfer):
    """A backend whose library is torch, for up to 8 tokens; it writes down what happens."""

    name = "fake"
    config, runner = "", ":"
    most_tokens = 8
    any_size = True

    def __init__(self):
        self.did = []

    def bucket(self, T):
        return 4 if T <= 4 else 8

    def _routes(self, spec, ids, w):
        return merge_routes_torch(ids, w, spec.E, self.absent)

    def _make_runner(self, spec, device):
        self.did.append("runner")
        return object()

    def _tune(self, ready, x, ids, w, weights):
        self.did.append(f"tune {len(x)}")
        return ("best", len(x))

    def _call(self, ready, x, ids, w, weights, pick):
        self.did.append(f"call {len(x)} {pick_text(pick)}")
        out = torch.zeros(len(x), ready.spec.H)
        up, gate = weights.gate_up[0].float().chunk(2, 1)
        for t, k in (ids >= 0).nonzero().tolist():
            e = ids[t, k]
            h = torch.nn.functional.silu(gate[e] @ x[t].float()) * (up[e] @ x[t].float())
            out[t] += w[t, k] * (weights.down[e].float() @ h)
        return out.to(x.dtype)


SMALL = ExpertsSpec(E=4, K=2, H=16, I=16, act=Activation.parse("swiglu"))
CPU = torch.device("cpu")


def small_weights() -> ExpertWeights:
    g = torch.Generator().manual_seed(0)
    first, down = (torch.randn(s, generator=g).bfloat16() / 4 for s in SMALL.weight_shapes())
    return ExpertWeights(gate_up=(first,), down=down)


def routed(T: int):
    g = torch.Generator().manual_seed(T)
    ids = torch.randint(-1, 5, (T, 2), generator=g)
    return torch.randn(T, 16, generator=g).bfloat16(), ids, torch.rand(T, 2, generator=g)


@pytest.fixture
def fake(monkeypatch, fresh):
    monkeypatch.setattr(fi, "aside", lambda work, device: work())
    monkeypatch.setattr(fi, "capturing", lambda: False)
    monkeypatch.setattr(fi, "activation", lambda spec: None)
    backend = Fake()
    monkeypatch.setitem(providers(), "fake", backend)
    launcher.cache_clear()
    yield backend
    launcher.cache_clear()


def call(T: int, weights: ExpertWeights, tactic: str = "") -> torch.Tensor:
    return launcher(Candidate(provider="fake", tactic=Tactic.parse(tactic)), SMALL, CPU)(*routed(T), weights)


def by_aten(T: int, weights: ExpertWeights) -> torch.Tensor:
    return launcher(Candidate(provider="aten"), SMALL, CPU)(*routed(T), weights)


def test_a_bucket_is_tuned_once_and_before_it_is_used(fake):
    weights = small_weights()
    for T in (3, 4, 2, 7):
        torch.testing.assert_close(call(T, weights), by_aten(T, weights), rtol=2e-2, atol=2e-2)
    assert fake.did == [
        "runner", "tune 3", "call 3 best_3", "call 3 best_3", "call 4 best_3", "call 2 best_3", "tune 7",
        "call 7 best_7", "call 7 best_7",
    ]  # fmt: skip
    assert call(0, weights).shape == (0, 16)


def test_a_named_pick_is_used_as_it_is(fake):
    weights = small_weights()
    call(3, weights, "PICK=ffma_1_4")
    call(3, weights, "PICK=ffma_1_4")
    assert fake.did == ["runner", "call 3 ffma_1_4", "call 3 ffma_1_4", "call 3 ffma_1_4"]
    with pytest.raises(ValueError, match="the only knob is PICK"):
        call(3, weights, "PICKS=1")


def test_it_competes_by_measurement_only(monkeypatch):
    monkeypatch.setattr(Fake, "available", lambda self: OK)
    monkeypatch.setattr(Fake, "supports", lambda *args: OK)
    monkeypatch.setitem(providers(), "fake", Fake())
    planning = plan_experts(QWEN3, H200, weight_copy_bytes=1 << 40)
    assert "fake" not in str(planning.plan)
    assert "fake" in planning.within and planning.copied_bytes == copied_bytes(planning.within, QWEN3)
    for bound, ranked in planning.lists.items():
        assert [p.candidate.provider for p in ranked].count("fake") == (bound is not None and bound <= 8)
        assert providers()[ranked[0].candidate.provider].priced
    assert not any("fake" in str(p.candidate) for ranked in plan_experts(QWEN3, H200).lists.values() for p in ranked)


def test_candidates_share_the_budget(monkeypatch):
    """Two layouts of their own, and bytes for one: the second does not compete. A third that shares the first does."""
    for name, at in (("first", Stored()), ("second", Stored(block=32)), ("third", Stored(multiple=128))):
        fake = Fake()
        fake.name, fake.stored, fake.available, fake.supports = name, at, lambda: OK, lambda *args: OK
        monkeypatch.setitem(providers(), name, fake)
    one = copied_bytes(["first"], QWEN3)
    planning = plan_experts(QWEN3, H200, weight_copy_bytes=one)
    assert planning.within & {"first", "second", "third"} == {"first", "third"} and planning.copied_bytes == one
    assert plan_experts(QWEN3, H200, weight_copy_bytes=2 * one).copied_bytes == 2 * one


def test_the_librarys_results_are_kept_beside_ours(monkeypatch, tmp_path):
    monkeypatch.setattr(fi, "tuning_folder", "")
    assert fi.tuning_file() is None
    monkeypatch.setattr(fi, "version", lambda package: "0.7.4")
    keep_in(str(tmp_path))
    assert fi.tuning_file() == str(tmp_path / "flashinfer-0.7.4.json")


def test_a_tuner_can_ask_what_an_open_tactic_came_to(fake):
    weights = small_weights()
    call(3, weights)
    tactic = fake.settled(Tactic(), SMALL, CPU, 3)
    assert str(tactic) == "PICK=best_3"
    assert fake.settled(Tactic(), SMALL, CPU, 4) == tactic
    assert fake.settled(Tactic(), SMALL, CPU, 8) == Tactic()
    fake.did.clear()
    call(3, weights, str(tactic))
    assert fake.did == ["call 3 best_3"]
    fake.any_size = False  # as FrostLowLatency's, which are of exact sizes
    assert fake.settled(Tactic(), SMALL, CPU, 3) == Tactic()


def test_tuning_times_and_keeps_what_the_librarys_tuner_came_to(fake, tmp_path):
    offers = [
        Priced(candidate=Candidate(provider=n), seconds=1.0, work=providers()["aten"].tactics(SMALL, H200, 4)[0][1])
        for n in ("aten", "fake")
    ]
    pool = zipf(SMALL, small_weights().arguments(), CPU, rows=16, seed=0)
    workload = Workload(spec=SMALL, kind=ZIPF, pools=(pool,), seed=0)
    clock, key = Clock(device=CPU, launch="eager"), tune.key_of(SMALL, 4, "cpu", "eager", ZIPF, ["aten"])
    (tuned,) = tune.tune(
        SMALL, {4: offers}, {4: 4}, workload, device=CPU, clock=clock, key=lambda _: key, cache=Cache(tmp_path),
        seconds=60,
    )  # fmt: skip
    assert [t.candidate for t in tuned.trials] == ["aten", "fake(PICK=best_4)"]
    assert all(t.us for t in tuned.trials) and tuned.chosen in (Candidate.parse(t.candidate) for t in tuned.trials)
    assert fake.did.count("tune 4") == 1


def test_what_it_cannot_serve_goes_to_aten(fake, monkeypatch):
    weights = small_weights()
    with pytest.warns(UserWarning, match="fake leaves calls to aten: too many tokens: 9 are over 8"):
        assert torch.equal(call(9, weights), by_aten(9, weights))
    monkeypatch.setattr(fi, "capturing", lambda: True)
    with pytest.warns(UserWarning, match="FlashInfer isn't tuned for these sizes inside a CUDA graph"):
        assert torch.equal(call(4, weights), by_aten(4, weights))
    assert fake.did == []  # never untuned
    monkeypatch.setattr(fi, "capturing", lambda: False)
    call(4, weights)
    monkeypatch.setattr(fi, "capturing", lambda: True)
    assert not torch.equal(call(4, weights), by_aten(4, weights))  # the library's own rounding: it ran
    other = small_weights()
    with pytest.warns(UserWarning, match="weights aren't laid out yet inside a CUDA graph"):
        assert torch.equal(call(4, other), by_aten(4, other))
    strided = ExpertWeights(gate_up=weights.gate_up, down=weights.down.mT.contiguous().mT)
    monkeypatch.setattr(fi, "capturing", lambda: False)
    with pytest.warns(UserWarning, match="weights are not contiguous"):
        call(4, strided)


def test_a_tuner_that_measures_nothing_is_not_believed(monkeypatch):
    class Nothing:
        @staticmethod
        def get():
            return SimpleNamespace(choose_one=lambda **kwargs: (None, -1))

    class autotune:
        def __init__(self, *args, **kwargs): ...
        def __enter__(self): ...
        def __exit__(self, *args): ...

    monkeypatch.setattr(fi, "module", lambda name: SimpleNamespace(autotune=autotune, AutoTuner=Nothing))
    monkeypatch.setattr(fi, "tuning_file", lambda: None)
    with pytest.raises(Unserved, match="measured no tactic"):
        flashinfer._choose("op", None, None, [])


@pytest.mark.parametrize(
    ("name", "pick"),
    [
        ("flashinfer_cutlass", (21, 100)),
        ("flashinfer_frost_low_latency", ("wgmma", 2, 4, 64)),
        ("flashinfer_cute_dsl_sm90", (128, ((128, 64), 8), ((128, 256), (1, 2), True))),
    ],
)
def test_picks_survive_their_text(name, pick):
    tactic = Tactic.parse(str(Tactic.of(PICK=pick_text(pick))))
    assert providers()[name].pick(tactic) == pick
    plan = base.Plan.parse(f"8:{name}({tactic});*:aten")
    assert providers()[name].pick(plan.at(8).tactic) == pick


@needs_flashinfer
def test_the_named_tactics_are_valid():
    backend, tuner = providers()["flashinfer_cute_dsl_sm90"], fi.module("fused_moe.cute_dsl.sm90_tuner")
    picks = [backend.pick(tactic) for tactic, _ in backend.tactics(QWEN3, H200, 64)]
    assert picks[0] == tuner.DEFAULT_SM90_MOE_TACTIC and len(set(picks)) == 4
    for E, K, H, I in ((128, 8, 2048, 768), (8, 2, 4096, 14336), (64, 8, 256, 64)):
        sizes = {"hidden_size": H, "intermediate_size": I, "top_k": K, "num_local_experts": E}
        assert all(tuner.is_valid_tactic(p, dtype=torch.bfloat16, num_tokens=64, **sizes) for p in picks)


# What the library checks itself


PACKED = [
    "flashinfer_cutlass", "flashinfer_frost_low_latency", "flashinfer_cutile", "flashinfer_cudnn",
    "flashinfer_trtllm_routed", "flashinfer_prims_ts", "cudnn_frost_bf16",
]  # fmt: skip


@needs_flashinfer
@pytest.mark.parametrize("name", PACKED)
def test_packs_pass_the_librarys_checks(name):
    backend = providers()[name]
    ready = flashinfer.Ready(spec=SMALL, device=CPU, act=fi.activation(SMALL), runner=backend._runner_class())
    x, ids, w = routed(3)
    ids, w = merge_routes_torch(ids, w, SMALL.E, backend.absent)
    act, pack = backend._packs(ready, x, ids, w, small_weights())
    assert pack.get_view(backend._runner_class().backend_key).keys() == backend._view(ready, small_weights()).keys()
    fi.module("fused_moe.runners")._validate_prerouted_inputs(
        act, 3, SMALL.K, name, allowed_weights_dtypes=(torch.float32,), require_contiguous=True
    )


@needs_flashinfer
@pytest.mark.parametrize(("H", "I", "act"), [(256, 128, "swiglu"), (128, 192, "relu2")])
def test_the_block_major_layout_is_the_librarys(H, I, act):
    spec = replace(with_act(act), E=3, K=2, H=H, I=I)
    g = torch.Generator().manual_seed(0)
    first, down = (torch.randn(s, generator=g).bfloat16() for s in spec.weight_shapes())
    weights = ExpertWeights(gate_up=(first,), down=down)
    stored = providers()["flashinfer_trtllm_routed"].stored
    got = stored_weights(stored, spec, weights, lambda fill: fill())
    up_gate = torch.cat(first.chunk(2, 1)[::-1], 1) if spec.gated else first
    expected = fi.module("fused_moe.prepare").prepare_trtllm_bf16_weights(
        up_gate, down, num_local_experts=3, hidden_size=H, intermediate_size=I, activation=fi.activation(spec)
    )
    assert torch.equal(got.gate_up[0], expected["gemm1_weights"])
    assert torch.equal(got.down, expected["gemm2_weights"])
    assert sum(stored.bytes_of(spec).values()) == 2 * (first.numel() + down.numel())


@needs_flashinfer
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_107a", "sm_120a"])
def test_the_low_latency_kernels_compile_for_every_architecture(arch, tmp_path):
    cutlass = pytest.importorskip("cutlass")
    runtime = fi.module("fused_moe.backends.frost_low_latency.fma.bf16.runtime")
    cute, T, K, E, H, I = cutlass.cute, 4, 8, 8, 256, 128
    bf16, whole, real = cutlass.BFloat16, cutlass.Int32, cutlass.Float32
    tensors = (  # x, gate_up, ids, intermediate, down, weights, result
        (bf16, (T, H)), (bf16, (E, 2 * I, H)), (whole, (T, K)), (bf16, (T * K, I)), (bf16, (E, H, I)), (real, (T, K)),
        (bf16, (T, H)),
    )  # fmt: skip
    fakes = [
        cute.runtime.make_fake_compact_tensor(
            kind, shape, stride_order=tuple(range(len(shape)))[::-1], assumed_align=16
        )
        for kind, shape in tensors
    ]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--gpu-arch {arch} --enable-tvm-ffi"
    made = cute.compile(runtime.launch, *fakes, 1, 4, "swiglu", True, None, False, True, stream, options=options)
    made.export_to_c(str(tmp_path / "kernels.o"), function_name="kernels")
    assert (tmp_path / "kernels.o").stat().st_size > 10_000


@needs_flashinfer
@pytest.mark.parametrize(("arch", "smem"), [("sm_107a", 227 << 10), ("sm_120a", 99 << 10)])
def test_frosts_kernels_compile(arch, smem, tmp_path, monkeypatch):
    """The first of its catalog for each linear, as it binds them to a device of so much shared memory a block."""
    pytest.importorskip("cutlass")
    monkeypatch.setenv("CUTE_DSL_ARCH", arch)
    moe, device, compiler = (fi.module(f"{FROST}.{name}") for name in ("bf16.moe", "device", "compiler"))
    facts = device.DeviceFacts(arch, smem, 128 << 20, tuple(148 // n for n in range(1, 17)))
    roots = fi.module(f"{FROST}.bf16.runtime")._artifact_roots()
    for linear in moe._matching_kernels(roots, arch, QWEN3.K, QWEN3.H, QWEN3.I, QWEN3.E, "swiglu"):
        kernel = getattr(linear[0], "original", linear[0])
        recipe, _ = device.specialize_parameters(kernel.source_parameters, facts)
        path, _ = fi.module(f"{FROST}.source_template").materialize_source(kernel.template_path, recipe)
        source = importlib.util.spec_from_file_location("frost_kernel", path)
        module = importlib.util.module_from_spec(source)
        monkeypatch.setitem(sys.modules, "frost_kernel", module)
        source.loader.exec_module(module)
        made = compiler.compile_module(module, arch, "")
        made.export_to_c(str(tmp_path / "kernel.o"), function_name="kernel")
        assert (tmp_path / "kernel.o").stat().st_size > 10_000
        (tmp_path / "kernel.o").unlink()


@needs_flashinfer
@pytest.mark.parametrize("arch", [100, 103])
def test_prims_tss_packs_pass_its_checks_and_its_kernels_compile(arch, monkeypatch):
    """Its own launch arguments of weights in our layout; the first pair of kernels that it lists."""
    pytest.importorskip("cutlass")
    from cuda.bindings import driver

    monkeypatch.setenv("CUTE_DSL_ARCH", f"sm_{arch}a")
    mapper, adapter = (fi.module(f"prims_ts.moe.{name}") for name in ("config_mapper", "tensor_adapter"))
    spec, T, rows = replace(QWEN3, E=8, K=2, H=256, I=128), 4, 64
    first, down = (torch.zeros(s, dtype=torch.bfloat16) for s in spec.weight_shapes())
    stored = providers()["flashinfer_prims_ts"].stored
    weights = stored_weights(stored, spec, ExpertWeights(gate_up=(first,), down=down), lambda fill: fill())
    given = {
        "activation_type": int(fi.activation(spec).type), "num_tokens": T, "top_k": spec.K, "num_experts": spec.E,
    }  # fmt: skip
    listed = {"weight_layout": int(fi.module("tllm_enums").WeightLayout.BlockMajorK), "num_local_experts": spec.E}
    tactic = mapper.valid_prims_ts_bf16_moe_tactics(sm_arch=arch, **given, **listed)[0]
    pair = mapper.map_trtllm_bf16_moe_tactic(tactic, sm_arch=arch, **given, **listed)
    sizes = {"tile_idx": 8, "mn_limit": 8, "route_map": rows, "num_non_exiting_ctas": 1, "total_num_padded_tokens": 1}
    for name, kernel in (("fc1", pair.fc1), ("fc2", pair.fc2)):
        packed = adapter.build_bf16_launch_io(
            fc=name, cfg=kernel.cfg.build(), hidden_states=torch.zeros(T, spec.H, dtype=torch.bfloat16),
            gemm1_weights=weights.gate_up[0], gemm2_weights=weights.down,
            gemm1_output=torch.zeros(rows, spec.I, dtype=torch.bfloat16),
            gemm2_output=torch.zeros(rows, spec.H, dtype=torch.bfloat16),
            **{n: torch.zeros(size, dtype=torch.int32) for n, size in sizes.items()},
            routed_token_capacity=rows, intermediate_size=spec.I, hidden_size=spec.H, **given,
        )  # fmt: skip
        made = fi.module("prims_ts.batched_gemm.batched_gemm_run")._compile_for_launch(packed, driver.CUstream(0))
        assert len(made.dump_to_object(name)) > 10_000


# What `moe-compile explain --thiek` says


def explained(capsys, *arguments: str) -> dict[str, str]:
    assert cli.main(["explain", "--thiek", "4,2048,768,128,8", "--json", *arguments]) == 0
    return {offer["provider"]: offer["verdict"] for offer in json.loads(capsys.readouterr().out)["offers"]}


@needs_flashinfer
@pytest.mark.parametrize("arch", [80, 89, 90, 100, 103, 107, 120])
def test_every_candidate_of_an_architecture_is_listed_or_has_its_reason(capsys, arch):
    found = explained(capsys, "--arch", f"sm_{arch}")
    assert found.keys() == providers().keys()
    able = {name for name, verdict in found.items() if verdict == "ok"}
    expected = {name for name, archs in ARCHS.items() if arch in archs}
    expected |= {"cudnn_frost_bf16"} if arch in (107, 120) else set()
    assert able - {"aten", "triton_decode", "triton_grouped"} == expected


def test_without_the_library_everything_else_is_listed(capsys, monkeypatch, fresh):
    monkeypatch.setattr(fi, "release", lambda package: None)
    found = explained(capsys, "--arch", "sm_90")
    assert all(found[name] == f"flashinfer is not installed: {fi.INSTALL}" for name in OURS)
    assert found["aten"] == "ok"


def test_wrong_sizes_and_devices_say_what_is_right(capsys):
    for arguments, says in (
        (["--thiek", "4,2048,768"], "not T,H,I,E,K"),
        (["--thiek", "4,2048,768,128,8", "--arch", "ampere"], "is not one of A100 (sm_80)"),
    ):
        assert cli.main(["explain", *arguments]) == 1
        assert says in capsys.readouterr().err
