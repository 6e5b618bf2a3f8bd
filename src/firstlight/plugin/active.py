"""The metric that says who serves a model inside a host."""

from __future__ import annotations

from prometheus_client import Gauge

ACTIVE = Gauge(
    "firstlight_plugin_active",
    "1 if Firstlight serves the model, 0 if the host's own class does.",
    ["host", "architecture", "version"],
    multiprocess_mode="max",
)
