"""GPUs as data: what each can do at most, how it is linked, what it costs to rent, and where that was published.

Peaks are dense (without structured sparsity) operations a second. Memory that makers state in GB counts in GiB, less what the
driver keeps for itself. Efficiencies are no part of a description: they belong to kernels. Prices are typical on-demand rents of
2026, rounded; every command that prints money lets you give your own.
"""

from __future__ import annotations

from firstlight.hardware.description import Hardware, Link

TERA, MICROSECOND = 1e12, 1e-6
SEEN_MEMORY = 139.8 / 141
"""Of the memory on board, what a program sees: as read on an H200."""

NIC_400G = Link(50e9, 5 * MICROSECOND, 1 << 20)
"""One 400 Gbit/s port a GPU, as in HGX and OAM servers."""


def _peaks(bfloat16: float, float8: float, float4: float = 0.0, float32: float = 67) -> dict[str, float]:
    """Operations a second by dtype, from teraoperations; tf32 runs at half of bfloat16 on all of these."""
    peaks = {
        "bfloat16": bfloat16,
        "float16": bfloat16,
        "float8_e4m3fn": float8,
        "tf32": bfloat16 / 2,
        "float32": float32,
    }
    if float4:
        peaks["float4_e2m1fn_x2"] = float4
    return {dtype: tera * TERA for dtype, tera in peaks.items()}


def _nvlink(bandwidth: float, reach: int = 8) -> tuple[Link, ...]:
    return (Link(bandwidth, 1 * MICROSECOND, reach), NIC_400G)


def _gpu(
    name: str,
    architecture: str,
    peak: dict[str, float],
    bandwidth: float,
    gigabytes: int,
    multiprocessors: int,
    l2_mib: int,
    links: tuple[Link, ...],
    dollars: float,
    source: str,
) -> Hardware:
    kind = "hip" if architecture.startswith("gfx") else "cuda"
    return Hardware(
        name=name,
        kind=kind,
        architecture=architecture,
        peak=peak,
        bandwidth=bandwidth,
        memory=int((gigabytes << 30) * SEEN_MEMORY),
        multiprocessors=multiprocessors,
        l2=l2_mib << 20,
        links=links,
        dollars_per_hour=dollars,
        source=source,
        features=frozenset({"triton"} if kind == "hip" else {"triton", "gluon"}),
    )


_HOPPER = _peaks(989, 1979)
_XGMI = (Link(448e9, 2 * MICROSECOND, 8), NIC_400G)  # seven Infinity Fabric links of 64 GB/s a direction

H200 = _gpu("NVIDIA H200", "sm_90", _HOPPER, 4.8e12, 141, 132, 60, _nvlink(450e9), 3.8, "NVIDIA H200 datasheet (SXM)")

GPUS = {
    "h20": _gpu(
        "NVIDIA H20",
        "sm_90",
        _peaks(148, 296, float32=44),
        4.0e12,
        96,
        78,
        60,
        _nvlink(450e9),
        1.8,
        "NVIDIA H20 product brief (HGX, 96 GB)",
    ),
    "h100": _gpu(
        "NVIDIA H100", "sm_90", _HOPPER, 3.35e12, 80, 132, 50, _nvlink(450e9), 3.0, "NVIDIA H100 datasheet (SXM)"
    ),
    "h200": H200,
    "h800": _gpu(
        "NVIDIA H800",
        "sm_90",
        _HOPPER,
        3.35e12,
        80,
        132,
        50,
        _nvlink(200e9),
        2.5,
        "NVIDIA H800 (SXM): an H100 with 400 GB/s of NVLink, both directions together",
    ),
    "b200": _gpu(
        "NVIDIA B200",
        "sm_100",
        _peaks(2250, 4500, 9000, 75),
        7.7e12,
        180,
        148,
        126,
        _nvlink(900e9),
        5.5,
        "NVIDIA HGX B200 datasheet: eight GPUs with 36 PFLOPS of dense FP8, 1.44 TB, 62 TB/s",
    ),
    "b300": _gpu(
        "NVIDIA B300",
        "sm_103",
        _peaks(2250, 4500, 13500, 75),
        7.7e12,
        270,
        148,
        126,
        _nvlink(900e9),
        6.5,
        "NVIDIA HGX B300 datasheet: eight GPUs with 108 PFLOPS of dense FP4, 36 of dense FP8, 2.1 TB",
    ),
    "gb200": _gpu(
        "NVIDIA GB200",
        "sm_100",
        _peaks(2500, 5000, 10000, 80),
        8.0e12,
        186,
        152,
        126,
        _nvlink(900e9, 72),
        7.0,
        "NVIDIA GB200 NVL72 datasheet: 72 GPUs with 360 PFLOPS of dense FP8, 13.4 TB, 576 TB/s",
    ),
    "gb300": _gpu(
        "NVIDIA GB300",
        "sm_103",
        _peaks(2500, 5000, 15000, 80),
        8.0e12,
        279,
        152,
        126,
        _nvlink(900e9, 72),
        8.0,
        "NVIDIA GB300 NVL72 datasheet: 72 GPUs with 1,080 PFLOPS of dense FP4, 360 of dense FP8, 20 TB, 576 TB/s",
    ),
    "mi300x": _gpu(
        "AMD Instinct MI300X",
        "gfx942",
        _peaks(1307.4, 2614.9, float32=163.4),
        5.3e12,
        192,
        304,
        256,
        _XGMI,
        2.5,
        "AMD Instinct MI300X datasheet",
    ),
    "mi308x": _gpu(
        "AMD Instinct MI308X",
        "gfx942",
        _peaks(344, 688, float32=43),
        5.3e12,
        192,
        80,
        256,
        _XGMI,
        1.6,
        "no datasheet is published: the MI300X's peaks times 80 of its 304 compute units, the same memory and links",
    ),
    "mi325x": _gpu(
        "AMD Instinct MI325X",
        "gfx942",
        _peaks(1307.4, 2614.9, float32=163.4),
        6.0e12,
        256,
        304,
        256,
        _XGMI,
        3.0,
        "AMD Instinct MI325X datasheet",
    ),
    "mi355x": _gpu(
        "AMD Instinct MI355X",
        "gfx950",
        _peaks(2516.6, 5033.2, 10066.3, 157.3),
        8.0e12,
        288,
        256,
        256,
        (Link(537e9, 2 * MICROSECOND, 8), NIC_400G),
        4.5,
        "AMD Instinct MI355X datasheet; seven links of 76.8 GB/s",
    ),
}
"""Described GPUs, by the name that options use."""
