"""Tuning on a GPU: real kernels in CUDA graphs, every winner right, nothing compiled twice; ranks on two GPUs agree."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moe_compile import backend, choose, journal
from moe_compile.kernels import launch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Block(nn.Module):
    """Embedding -> top-k of a softmax -> experts gathered for each route, bf16."""

    def __init__(self, device: str = "cuda", E: int = 32, H: int = 256, I: int = 128) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = ((512, H), (E, H), (E, 2 * I, H), (E, H, I))
        self.embedding, self.gate, self.up, self.down = (
            nn.Parameter((torch.randn(*s, generator=generator) * s[-1] ** -0.5).to(device, torch.bfloat16))
            for s in shapes
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = nn.functional.layer_norm(nn.functional.embedding(ids, self.embedding), (self.gate.shape[1],))
        w, ids = torch.topk(torch.softmax((x @ self.gate.T).float(), -1), 4)
        rows = x.repeat_interleave(4, 0).unsqueeze(-1)
        g, u = torch.bmm(self.up[ids.reshape(-1)], rows).squeeze(-1).chunk(2, -1)
        y = torch.bmm(self.down[ids.reshape(-1)], (nn.functional.silu(g) * u).unsqueeze(-1)).squeeze(-1)
        return (y * w.to(y.dtype).reshape(-1, 1)).view(len(x), 4, -1).sum(1)


def compiled(block: nn.Module, ids: torch.Tensor, folder: Path, dynamic: bool, **more: Any) -> list[Any]:
    torch._dynamo.reset()
    options = {"moe.inner": "eager", "moe.strict": True, "moe.tune": "measure", "moe.cache": str(folder), **more}
    with torch.no_grad(), journal.capture() as events:
        got = torch.compile(block, backend=functools.partial(backend.moe_backend, options=options), dynamic=dynamic)(
            ids
        )
        torch.testing.assert_close(got, block(ids), rtol=0.05, atol=0.05)
    return events


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_a_block_is_tuned_in_every_bucket(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block, ids = Block(), torch.randint(0, 512, (24,), device="cuda")
    events = compiled(block, ids, tmp_path, True, **{"moe.launch": mode})
    tuned = [e for e in events if isinstance(e, journal.Tuned)]
    assert len(tuned) == len(choose.TOKEN_BUCKETS) and all(e.complete for e in tuned)
    for e in tuned:
        times = {t.candidate: t.us for t in e.trials if not t.why and t.us is not None}
        assert len(times) >= 2, [t.why for t in e.trials]
        assert e.workload == "tokens=varied:1"
        chosen = next(t for t in e.trials if t.candidate == e.chosen)
        assert chosen.error is not None and chosen.error < 0.01
    assert len([e for e in events if isinstance(e, journal.Beside)]) == 1

    choose._caches.clear()
    loaded: list[Any] = []
    compile_one = launch.Bound._compile
    monkeypatch.setattr(launch.Bound, "_compile", lambda self, *a: (loaded.append(self), compile_one(self, *a))[1])
    again = compiled(block, ids, tmp_path, True, **{"moe.launch": mode})
    assert [e.source for e in again if isinstance(e, journal.Tuned)] == ["cache"] * len(tuned)
    plans = {e.plan for e in (*events, *again) if isinstance(e, journal.Planned)}
    assert len(plans) == 1
    assert len(loaded) <= 5, "only the kernels of this call, if they are not there yet"


def _rank(rank: int, world: int, folder: str, out: Any) -> None:
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    file = f"file://{folder}/rendezvous"
    dist.init_process_group("nccl", rank=rank, world_size=world, init_method=file, device_id=torch.device("cuda", rank))
    ids = torch.randint(0, 512, (24,), device="cuda")
    plans = []
    for cache in ("cold", f"rank{rank}"):  # one folder for both, then one each
        events = compiled(Block(f"cuda:{rank}"), ids, Path(folder, cache), True, **{"moe.launch": "graph"})
        plans += [e.plan for e in events if isinstance(e, journal.Planned)]
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total)  # the group's collectives are in step
    out.put((rank, plans, float(total)))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_under_nccl_take_one_plan(tmp_path: Path) -> None:
    spawn = torch.multiprocessing.get_context("spawn")
    out = spawn.Queue()
    processes = [spawn.Process(target=_rank, args=(r, 2, str(tmp_path), out)) for r in range(2)]
    for p in processes:
        p.start()
    found = sorted(out.get(timeout=150) for _ in processes)
    for p in processes:
        p.join(timeout=30)
    (_, first, total), (_, second, _) = found
    assert first == second and len(first) == 2 and total == 2.0
