"""Recognition: an FX graph in, proved regions and reasons out. See regions.py, and walk.py for its one pass."""

from .regions import Found, Recognition, Rejection, recognize

__all__ = ["Found", "Recognition", "Rejection", "recognize"]
