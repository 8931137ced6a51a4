"""Makes `import zoo` work from any rootdir, and keeps HuggingFace quiet and offline.

Dynamo describes each side effect that it replays, for logs that nobody reads here: 6 % of what test_table.py takes
(torch 2.13, 2026-12-01).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parent))

import torch._dynamo.config

if hasattr(torch._dynamo.config, "side_effect_replay_policy"):
    torch._dynamo.config.side_effect_replay_policy = "silent"
