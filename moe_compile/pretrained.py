"""A HuggingFace model by name, for the command line: in, a folder or hub id; out, the model and inputs to run it once.

A folder with a configuration and no weights is enough to say what becomes of the blocks: the model is then built on the
meta device, which has shapes and no memory. This is the one file, with demo.py, that needs transformers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json")


def load(name: str, tokens: int, device: str | None = None) -> tuple[Any, dict[str, Any]]:
    """(the model of `name` in eval mode, keyword arguments of a forward over `tokens` tokens).

    device: "cpu", "cuda:1", ...; CUDA where there is one unless given. The model's class is the one that the
    configuration names, else the causal language model of its type. ValueError where `name` looks like a path and is no
    folder, or has no model; RuntimeError where there is no such device; OSError where a hub id can't be reached.
    """
    # Else a mistyped path is taken for a hub id, and the message is about that.
    if name.startswith((".", "/", "~")) and not os.path.isdir(name):
        raise ValueError(f"{name} is not a folder")
    if os.path.isdir(name) and not (Path(name) / "config.json").is_file():
        raise ValueError(f"{name} has no config.json: it is not the folder of a HuggingFace model")
    import torch
    import transformers

    here = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    config = transformers.AutoConfig.from_pretrained(name)
    named = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    cls = named or transformers.AutoModelForCausalLM
    if os.path.isdir(name) and not any(True for pattern in _WEIGHTS for _ in Path(name).glob(pattern)):
        on = torch.device("meta")
        with on:
            build = cls._from_config if named else cls.from_config
            model = build(config, dtype=config.dtype or torch.bfloat16)
    else:
        on = here
        model = cls.from_pretrained(name, dtype="auto").to(on)
    vocabulary = config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0)).to(on)
    return model.eval(), {"input_ids": ids, "use_cache": False}
