"""Which ranks there are, what each holds, and how they talk."""

from firstlight.parallel.mesh import Group, Mesh
from firstlight.parallel.shard import Share, share

__all__ = ["Group", "Mesh", "Share", "share"]
