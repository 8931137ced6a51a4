"""Where autograd was off: what was computed there has no gradient, and an operator in its place would have one.

In: the nodes in program order, among them the switches that Dynamo records (`torch.no_grad()` in the model's code).
Out: the floats that were computed without gradients before gradients came back: constants to autograd, so leaves to
the walk. A block that is without gradients as a whole stays one.
"""

from __future__ import annotations

import torch.fx

from ..canonical import Call
from ..nodes import fake

_SWITCHES = {"_set_grad_enabled": None, "_enter_inference_mode": False, "_exit_inference_mode": True}


class Gradients:
    """`constants`: nodes with floats that were computed while autograd was off, in a graph that switches it.
    `switch`: the last node that did."""

    def __init__(self) -> None:
        self._on: bool | None = None
        self._since: list[torch.fx.Node] = []
        self.constants: set[torch.fx.Node] = set()
        self.switch: torch.fx.Node | None = None

    def computed(self, node: torch.fx.Node, call: Call | None) -> None:
        """`node` computed something, or wrote it into a tensor."""
        if self._on is not True:
            target = call.args[call.mutates] if call is not None and call.mutates else node
            self._since.extend(n for n in {node, target} if isinstance(n, torch.fx.Node))

    def switched(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """The nodes that are constants from here on; none unless `node` turns gradients on.

        Before the first switch gradients were what it doesn't make them.
        """
        name = getattr(node.target, "__name__", "")
        if node.op != "call_function" or name not in _SWITCHES:
            return []
        self.switch, on = node, _SWITCHES[name]
        self._on, before = bool(node.args[0]) if on is None else on, self._on
        if not self._on and before is False:  # no_grad within no_grad
            return []
        since, self._since = self._since, []
        if not self._on or before is True:
            return []
        found = [n for n in since if floats(fake(n))]
        self.constants.update(found)
        return found


def floats(value: object) -> bool:
    """Whether a value has floats, which gradients flow through."""
    if isinstance(value, (tuple, list)):
        return any(map(floats, value))
    return isinstance(value, torch.Tensor) and value.is_floating_point()
