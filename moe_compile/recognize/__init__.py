"""Recognition: an FX graph in, proved regions and reasons out. See walk.py for the one pass that does it."""

from .walk import Found, Recognition, Rejection, recognize

__all__ = ["Found", "Recognition", "Rejection", "recognize"]
