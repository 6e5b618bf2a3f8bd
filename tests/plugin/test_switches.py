"""The plugins' environment variables: right values, and clear errors for all others."""

from __future__ import annotations

import pytest

from firstlight.errors import FirstlightError
from firstlight.plugin.switches import active, switches, without_effect


def test_values_and_defaults():
    assert switches({}).plugin == "on"
    assert switches({"FIRSTLIGHT_PLUGIN_SKIP": " A, B,"}).plugin_skip == ("A", "B")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("FIRSTLIGHT_PLUGIN", "Off", "FIRSTLIGHT_PLUGIN: Input should be 'on' or 'off'; it is 'Off'"),
        ("FIRSTLIGHT_PLUGIN", "", "FIRSTLIGHT_PLUGIN: Input should be 'on' or 'off'; it is ''"),
        ("FIRSTLIGHT_INVARIANT", "maybe", "FIRSTLIGHT_INVARIANT: .*'maybe'"),
        ("FIRSTLIGHT_OPS", "x", "FIRSTLIGHT_OPS sets no option; unset it, or set FIRSTLIGHT_OP"),
        ("FIRSTLIGHT_PLUGINS", "off", "FIRSTLIGHT_PLUGINS sets no option; unset it, or set FIRSTLIGHT_PLUGIN"),
    ],
)
def test_wrong_ones_are_named(name, text, message):
    with pytest.raises(FirstlightError, match=message):
        switches({name: text})


def test_architectures_are_skipped_by_their_names(monkeypatch):
    monkeypatch.setenv("FIRSTLIGHT_PLUGIN_SKIP", "B")
    assert active(["A", "B", "C"]) == ("A", "C")
    with pytest.raises(FirstlightError, match="FIRSTLIGHT_PLUGIN_SKIP: B: we serve A, C"):
        active(["A", "C"])


def test_a_cluster_may_use_our_name():
    """Of a service called `firstlight`, Kubernetes tells every container like this."""
    links = {"FIRSTLIGHT_SERVICE_HOST": "10.0.0.1", "FIRSTLIGHT_PORT_8000_TCP": "tcp://10.0.0.1:8000"}
    assert switches(links | {"FIRSTLIGHT_PORT": "tcp://10.0.0.1:8000"}).plugin == "on"
    assert switches({"FIRSTLIGHT_PLUGIN": "off", "FIRSTLIGHT_PLUGINS": "on"}).plugin == "off"


def test_what_means_nothing_inside_a_host_is_said():
    held = {"FIRSTLIGHT_OP": "linear=reference", "FIRSTLIGHT_PLUGIN": "on"}
    assert without_effect(held) is None
    said = without_effect({**held, "FIRSTLIGHT_KV_DTYPE": "x", "FIRSTLIGHT_PORT": "1"})
    assert said is not None
    assert said.startswith("FIRSTLIGHT_KV_DTYPE, FIRSTLIGHT_PORT: of no effect here")
