"""What a kernel would cost on a NeuronCore: counts from an interpreted run, set against a stated roofline.

An estimate, not a measurement. Work is counted exactly; time follows from public figures and the assumptions below, and
lies between two bounds: every engine at once (the busiest one decides) and one after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pilotage.core.errors import Unsupported
from pilotage.kernels.nki.cost import Ledger
from pilotage.kernels.nki.hardware import PARTITIONS, PSUM_BANKS, target
from pilotage.kernels.nki.launch import Kernel, run


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Speeds of one NeuronCore.

    Attributes:
        dma_bytes_s: of the 16 DMA engines of a core together.
        dma_run_bytes: what describing one contiguous piece costs, in bytes that could have been moved.
        tensor_hz, vector_hz, scalar_hz, gpsimd_hz: clocks; an engine streams one element a partition a cycle.
        start_cycles: initiation interval of an instruction that has nothing to do.
        macs_cycle: multiply-accumulates of the tensor engine a cycle.
        source: where the figures are from.
        assumptions: what they do not say.
    """

    name: str
    dma_bytes_s: float
    dma_run_bytes: int
    tensor_hz: float
    vector_hz: float
    scalar_hz: float
    gpsimd_hz: float
    start_cycles: int
    macs_cycle: int
    source: str
    assumptions: tuple[str, ...]


TRN2 = Roofline(
    name="trn2",
    dma_bytes_s=368e9,
    dma_run_bytes=256,
    tensor_hz=2.4e9,
    vector_hz=0.96e9,
    scalar_hz=1.2e9,
    gpsimd_hz=1.2e9,
    start_cycles=64,
    macs_cycle=PARTITIONS * PARTITIONS,
    source="public Trainium 2 architecture guide and DMA bandwidth guide for NKI",
    assumptions=(
        "a core has its 16 DMA engines at 23 bytes/ns to itself; what its neighbours take of the HBM is not counted",
        "a contiguous piece costs as much as 256 bytes more would: half the peak at 256 bytes, 94% at 4 KiB",
        "a matmul takes as many cycles as the moving matrix has columns, 64 at least, 4 times that in float32; "
        "loading the stationary matrix hides behind the one before",
        "vector, scalar and GpSimd instructions take a cycle an element a partition, two for two operands, 64 or more; "
        "narrow floats in SBUF go 2 or 4 times as fast on the vector engine as the guide says",
        "semaphores, dependencies and the first transfer's latency (about 2 us) are not counted",
        "memory peaks are those of a compiler that frees a tensor when Python does",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The cost of one launch; of the busiest core where there are two.

    Attributes:
        label: always "estimate".
        kernel, roofline: names.
        seconds: each engine's and the DMA's own time.
        lower_s, upper_s: all at once, and one after another.
        bound_by: the one that takes longest.
        dma_bytes, onchip_dma_bytes, dma_runs: bytes between HBM and the core, bytes moved within it, pieces.
        matmul_cycles, matmul_macs: of the tensor engine.
        mac_utilization: multiply-accumulates over what the tensor engine could do in `lower_s`.
        elements: streamed a partition, by engine.
        sbuf_peak_bytes: a partition's, of `sbuf_bytes`.
        psum_peak_banks: of 8.
        instructions: how often each ran.
    """

    label: str
    kernel: str
    roofline: str
    cores: int
    seconds: Mapping[str, float]
    lower_s: float
    upper_s: float
    bound_by: str
    dma_bytes: int
    onchip_dma_bytes: int
    dma_runs: int
    matmul_cycles: float
    matmul_macs: int
    mac_utilization: float
    elements: Mapping[str, float]
    sbuf_peak_bytes: int
    sbuf_bytes: int
    psum_peak_banks: int
    instructions: Mapping[str, int]
    source: str
    assumptions: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Give everything, ready for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Describe the estimate for people."""
        busy = ", ".join(f"{name} {value * 1e6:.1f}" for name, value in self.seconds.items())
        return [
            f"{self.kernel}: estimate for {self.roofline}, cores: {self.cores}",
            f"time     {self.lower_s * 1e6:.1f} to {self.upper_s * 1e6:.1f} us, bound by {self.bound_by} (us: {busy})",
            f"DMA      {self.dma_bytes} bytes of HBM and {self.onchip_dma_bytes} on chip, in {self.dma_runs} pieces",
            f"matmul   {self.matmul_cycles:.0f} cycles, {self.matmul_macs} MACs, {self.mac_utilization:.1%} of peak",
            f"SBUF     {self.sbuf_peak_bytes} of {self.sbuf_bytes} bytes a partition",
            f"PSUM     {self.psum_peak_banks} of {PSUM_BANKS} banks",
            *[f"assumes  {one}" for one in self.assumptions],
        ]


def estimate(
    kernel: Any,
    args: Sequence[Any],
    grid: int | Sequence[int] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    roofline: Roofline = TRN2,
) -> Estimate:
    """Interpret one launch of a kernel and estimate what it would cost.

    Args:
        kernel: an NKI kernel, or a function that is one.
        args, kwargs: arrays or tensors of the shapes that matter; values matter only to run-time addresses.
        grid: cores.
        roofline: of one core.

    Raises:
        Unsupported: the real NKI packages are installed, and the kernel is theirs.
        NkiValidationError: the kernel asks for what the core does not have.
    """
    base = kernel if isinstance(kernel, Kernel) else _made(kernel)
    launched = base[grid] if grid else base
    _, ledgers = run(launched, tuple(args), dict(kwargs or {}))
    return summarise(launched.__name__, ledgers, roofline)


def _made(kernel: Any) -> Kernel:
    if not callable(kernel) or not hasattr(kernel, "__code__"):
        raise Unsupported(
            f"{kernel!r} is not a kernel of the interpreter", where="estimate", do="give the function itself"
        )
    return Kernel(kernel)


def summarise(name: str, ledgers: Sequence[Ledger], roofline: Roofline = TRN2) -> Estimate:
    """Turn ledgers into an estimate."""
    per_core = [seconds(one, roofline) for one in ledgers]
    times, ledger = max(zip(per_core, ledgers, strict=True), key=lambda pair: max(pair[0].values()))
    lower = max(times.values())
    return Estimate(
        label="estimate",
        kernel=name,
        roofline=roofline.name,
        cores=len(ledgers),
        seconds=times,
        lower_s=lower,
        upper_s=sum(times.values()),
        bound_by=max(times, key=lambda engine: times[engine]),
        dma_bytes=ledger.dma_bytes,
        onchip_dma_bytes=ledger.onchip_dma_bytes,
        dma_runs=ledger.dma_runs,
        matmul_cycles=ledger.tensor_cycles,
        matmul_macs=ledger.matmul_macs,
        mac_utilization=ledger.matmul_macs / (lower * roofline.tensor_hz * roofline.macs_cycle) if lower else 0.0,
        elements=dict(ledger.elements),
        sbuf_peak_bytes=ledger.sbuf_peak,
        sbuf_bytes=target().sbuf_bytes,
        psum_peak_banks=ledger.psum_peak,
        instructions=dict(ledger.instructions),
        source=roofline.source,
        assumptions=roofline.assumptions,
    )


def seconds(ledger: Ledger, roofline: Roofline = TRN2) -> dict[str, float]:
    """Give the time that each engine, and the DMA, would be busy."""
    moved = ledger.dma_bytes + ledger.onchip_dma_bytes + roofline.dma_run_bytes * ledger.dma_runs
    out = {"dma": moved / roofline.dma_bytes_s, "tensor": ledger.tensor_cycles / roofline.tensor_hz}
    for engine in ("vector", "scalar", "gpsimd"):
        cycles = ledger.elements[engine] + roofline.start_cycles * ledger.starts[engine]
        out[engine] = cycles / getattr(roofline, f"{engine}_hz")
    return out
