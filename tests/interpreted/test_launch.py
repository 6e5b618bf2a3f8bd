"""`kernel` launches what Triton would: the same variant with the same arguments, the first time and later."""

from __future__ import annotations

from interpreted.own_process import needs_gluon, printed

SAME = {"another address", "address off by 16", "n = 17", "factor = 1", "two sizes", "three sizes"}
"""Cases that the variant of the first serves."""
KNOWN = {"n = 0", "least n in 32 bits", "negative n in 64 bits"}
"""Cases that the variant of one between serves."""


@needs_gluon
def test_every_launch_is_the_one_that_triton_makes() -> None:
    *lines, hooked = printed("launch_variants.py")
    assert len(lines) == 34
    plain = lines[0]["triton"][0]
    assert len({line["triton"][0] for line in lines if line["case"].startswith("constant")}) == 3
    for line in lines:
        case = line["case"]
        assert line["first"] == line["triton"], f"{case}: the first launch isn't Triton's"
        assert line["quick"] == line["triton"], f"{case}: the quick launch isn't Triton's"
        assert (line["triton"][0] == plain) == (case in SAME | {"plain", "device"}), case
        assert line["new"] == (case not in SAME | KNOWN), f"{case}: {line['new']} of two launches went through Triton"
    assert hooked["launches"] == ["hook", "launch"], "a launch hook is called for variants that are known"
