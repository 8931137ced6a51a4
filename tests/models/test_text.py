"""Greedy text of a small trained model, token for token that of eager: prefill and decode, `generate` and a plain loop.

The model is not part of this repository; it lies beside it in ../shared/models/byte_moe where it is at hand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_compile import journal
from moe_compile.backend import moe_backend

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "models" / "byte_moe"
NEW_TOKENS = 256
PROMPT = "The compiler reads a graph and"
LAYERS = 4

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"the trained model byte_moe is not at {FOLDER}")


@pytest.fixture(scope="module")
def model() -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return torch.tensor(list(PROMPT.encode()))[None]


@pytest.fixture(scope="module")
def expected(model: Any, prompt: torch.Tensor) -> list[int]:
    """Eager's greedy continuation, by a plain loop with a static cache."""
    return greedy(model, model, prompt)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def greedy(model: Any, forward: Callable[..., Any], prompt: torch.Tensor) -> list[int]:
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=len(prompt[0]) + NEW_TOKENS)
    out: list[int] = []
    ids, position = prompt, torch.arange(prompt.shape[1])
    with torch.no_grad():
        while len(out) < NEW_TOKENS:
            logits = forward(input_ids=ids, past_key_values=cache, position_ids=position[None], use_cache=True).logits
            out.append(int(logits[0, -1].argmax()))
            ids, position = torch.tensor([[out[-1]]]), position[-1:] + 1
    return out


def test_a_plain_loop_gives_eagers_text(model: Any, prompt: torch.Tensor, expected: list[int]) -> None:
    backend = functools.partial(moe_backend, options={"moe.inner": "aot_eager", "moe.strict": True})
    with journal.capture() as events:
        got = greedy(model, torch.compile(model, backend=backend), prompt)
    found = [e for e in events if isinstance(e, journal.RegionFound)]
    # prefill and decode are graphs of their own, and every layer of each was replaced
    assert len(found) >= 2 * LAYERS
    assert len(found) == LAYERS * len([e for e in events if isinstance(e, journal.Lowered)])
    assert got == expected


def test_generate_with_a_static_cache_gives_eagers_text(model: Any, prompt: torch.Tensor, expected: list[int]) -> None:
    from transformers import CompileConfig

    config = CompileConfig(backend="moe")
    config._compile_all_devices = True  # transformers compiles on accelerators only unless told
    with journal.capture() as events, torch.no_grad():
        text = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            cache_implementation="static",
            compile_config=config,
            pad_token_id=0,
            eos_token_id=None,
        )
    found = [e for e in events if isinstance(e, journal.RegionFound)]
    assert len(found) >= LAYERS
    assert text[0, prompt.shape[1] :].tolist() == expected
