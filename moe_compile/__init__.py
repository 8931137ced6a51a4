"""`torch.compile(model, backend="moe")`. Public names only, each loaded on first use.

torch finds the backend by its entry point, so this package need not be imported at all; importing it is cheap and
loads no triton, flashinfer, sympy or transformers (tests/cpu/test_package.py holds that).
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import moe_backend
    from .dump import debug
    from .explain import Report, explain
    from .prepare import Prepared, prepare, restore
    from .spec import ExpertsSpec, MoESpec, RouterSpec

    __version__: str

_HOMES = {
    "ExpertsSpec": "spec",
    "MoESpec": "spec",
    "Prepared": "prepare",
    "Report": "explain",
    "RouterSpec": "spec",
    "debug": "dump",
    "explain": "explain",
    "moe_backend": "backend",
    "prepare": "prepare",
    "restore": "prepare",
}

__all__ = [
    "ExpertsSpec", "MoESpec", "Prepared", "Report", "RouterSpec", "__version__", "debug", "explain", "moe_backend",
    "prepare", "restore",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    value: Any
    if name == "__version__":
        from importlib.metadata import version

        value = version(__name__)
    elif name in _HOMES:
        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `moe_compile.explain` the function: importing the file of that name would put the module in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and _HOMES.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
