"""Replayed calls on a CUDA device: the bits of calls as written, whatever moved, from several streams and threads."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
pytest.importorskip("triton")

from moe_compile import ops  # noqa: E402
from moe_compile.hardware import facts  # noqa: E402
from moe_compile.kernels import tape  # noqa: E402
from moe_compile.operands import ExpertWeights  # noqa: E402
from moe_compile.providers import Candidate, Plan, launcher, providers  # noqa: E402
from moe_compile.providers.base import Tactic  # noqa: E402
from moe_compile.spec import ExpertsSpec  # noqa: E402
from moe_compile.suite import SWIGLU, tokens_of, weights_of  # noqa: E402
from moe_compile.verdict import Reject  # noqa: E402

GPU = torch.device("cuda", 0)
SPEC = ExpertsSpec(E=8, K=2, H=256, I=192, act=SWIGLU)
TACTICS = [
    ("triton_decode", "N1=1,K1=256,W1=4,N2=4,K2=64,W2=4"),
    ("triton_grouped", "M=64,N1=64,K1=64,W1=4,S1=3,SWAP1=0,TMA1=1,N2=128,K2=64,W2=4,S2=3,SWAP2=0,TMA2=1"),
    ("triton_hopper", "M=128,N1=128,N2=256,GATHER=0"),
    ("triton_hopper", "M=192,N1=128,N2=256,GATHER=1"),
]
CANDIDATES = [Candidate(provider=name, tactic=Tactic.parse(text)) for name, text in TACTICS]
each = pytest.mark.parametrize("candidate", CANDIDATES, ids=str)
TOGETHER, ONE_BY_ONE = "together", "one by one"


@pytest.fixture(autouse=True)
def _hopper(candidate):
    if candidate.provider != "triton_decode" and facts(GPU).capability != (9, 0):
        pytest.skip("these tactics want compute capability 9.0")


@pytest.fixture(autouse=True, params=[TOGETHER, ONE_BY_ONE])
def way(request, monkeypatch):
    """How replays launch."""
    launcher.cache_clear()
    ops._call.cache_clear()
    if request.param == ONE_BY_ONE:
        monkeypatch.setattr(tape, "together", lambda *_: Reject("not in this test"))
    yield request.param
    launcher.cache_clear()
    ops._call.cache_clear()


def written(candidate: Candidate, *inputs) -> torch.Tensor:
    """The call as written, by a launcher that has recorded nothing."""
    return providers()[candidate.provider].build(candidate.tactic, SPEC, GPU)(*inputs)


@pytest.fixture
def replays(monkeypatch, way):
    """The tapes that were replayed, once for each call."""
    counted = []
    replay = tape.Tape.__call__
    monkeypatch.setattr(tape.Tape, "__call__", lambda *a: counted.append(a[0]) or replay(*a))
    yield counted
    assert {str(t.together) for t in counted if isinstance(t.together, Reject) == (way == TOGETHER)} == set()


@each
def test_other_tokens_and_weights_that_moved(candidate, replays):
    run, p = launcher(candidate, SPEC, GPU), weights_of(SPEC, GPU)
    for T in (37, 700, 37, 700, 1):
        for seed in range(3):
            inputs = tokens_of(SPEC, T, GPU, seed=seed)
            assert torch.equal(run(*inputs, p), written(candidate, *inputs, p))
            assert torch.equal(run(*inputs, p), written(candidate, *inputs, p))
            p.down.data = p.down * 1.5
            assert torch.equal(run(*inputs, p), written(candidate, *inputs, p))
            p.gate_up[0].mul_(0.5)
            assert torch.equal(run(*inputs, p), written(candidate, *inputs, p))
    assert len(replays) >= 4 * 15 - 3


@each
def test_what_a_kernel_cannot_read_in_place(candidate):
    run, p = launcher(candidate, SPEC, GPU), weights_of(SPEC, GPU)
    x, ids, w = tokens_of(SPEC, 90, GPU)
    want = written(candidate, x, ids, w, p)
    columns = torch.empty((SPEC.H, 90), device=GPU, dtype=x.dtype).T.copy_(x)
    shifted = torch.empty(x.numel() + 1, device=GPU, dtype=x.dtype)[1:].view_as(x).copy_(x)
    wide = torch.empty((90, 2 * SPEC.H), device=GPU, dtype=x.dtype)[:, : SPEC.H].copy_(x)
    for _ in range(3):
        for same in (x, columns, shifted, wide):
            assert torch.equal(run(same, ids.T.contiguous().T, w.T.contiguous().T, p), want)
            assert torch.equal(run(same, ids, w, p), want)


@each
def test_streams_and_threads(candidate, replays):
    run, p = launcher(candidate, SPEC, GPU), weights_of(SPEC, GPU)
    inputs = [tokens_of(SPEC, 300, GPU, seed=seed) for seed in range(4)]
    want = [written(candidate, *i, p) for i in inputs]
    run(*inputs[0], p)
    torch.cuda.synchronize()

    def calls(k: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            outs = [run(*inputs[k], p) for _ in range(40)]
            torch.cuda.current_stream().synchronize()
            return all(torch.equal(out, want[k]) for out in outs)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(calls, range(4)))
    assert len(replays) >= 160


@each
def test_a_thread_that_has_not_used_the_device(candidate, replays):
    """torch binds a thread to the device's context when it first needs one, which a replay may come before."""
    run, p, inputs = launcher(candidate, SPEC, GPU), weights_of(SPEC, GPU), tokens_of(SPEC, 300, GPU)
    want = run(*inputs, p)
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(run, *inputs, p).result(), want)
    assert len(replays) == 1


@each
def test_a_graph_reads_what_lies_there_when_it_is_replayed(candidate, replays):
    run, p = launcher(candidate, SPEC, GPU), weights_of(SPEC, GPU)
    first, second = tokens_of(SPEC, 300, GPU, seed=1), tokens_of(SPEC, 300, GPU, seed=2)
    static = [t.clone() for t in first]
    run(*static, p)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*static, p)
    for inputs in (first, second):
        for t, new in zip(static, inputs):
            t.copy_(new)
        graph.replay()
        assert torch.equal(out, written(candidate, *inputs, p))
    assert len(replays) == 1


@each
def test_the_operator_under_autocast_and_grad_modes(candidate, replays):
    p, inputs = weights_of(SPEC, GPU), tokens_of(SPEC, 60, GPU)
    want = written(candidate, *inputs, p)
    operands = (*inputs, *p.arguments(), str(SPEC), str(Plan.of([(None, candidate)])))
    frozen = ExpertWeights(gate_up=(torch.nn.Parameter(p.gate_up[0]),), down=torch.nn.Parameter(p.down))
    trained = (*inputs, *frozen.arguments(), *operands[-2:])
    call = torch.ops.moe_compile.experts
    autocast = partial(torch.autocast, "cuda", torch.float16)
    for context in (torch.no_grad, torch.inference_mode, autocast, torch.enable_grad):
        with context():
            assert torch.equal(call(*operands), want)
    with torch.no_grad():
        out = call(*trained)
    assert torch.equal(out, want)
    assert not out.requires_grad
    assert call(*trained).requires_grad
    assert len(replays) >= 4
