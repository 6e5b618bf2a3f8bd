"""`benchmarks` is no installed package: tests of the published points import it from the repository's root."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
