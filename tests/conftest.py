import importlib.util
import sys

spec = importlib.util.find_spec("triton")
if spec is not None and spec.origin is None:
    sys.modules["triton"] = None  # type: ignore[assignment]
