"""What a kernel did, counted while it is interpreted.

The ledger counts work, not time: `estimate` turns it into time under stated assumptions.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pilotage.kernels.nki.hardware import PSUM_BANK_BYTES


@dataclass
class Ledger:
    """The work of one core.

    Attributes:
        instructions: how often each instruction ran.
        dma_bytes: bytes that crossed between HBM and the core's memories, both directions.
        onchip_dma_bytes: bytes that DMA moved inside the core's memories.
        dma_runs: contiguous pieces that the DMA engines had to describe.
        tensor_cycles: cycles of the tensor engine at its bf16 rate.
        matmul_macs: multiply-accumulates asked of the tensor engine, transposes excluded.
        elements: elements a partition that each engine streamed ("vector", "scalar", "gpsimd"), at its plain rate.
        sbuf_peak, psum_peak: highest bytes a partition (SBUF) and banks (PSUM) alive at once.
    """

    instructions: Counter[str] = field(default_factory=Counter)
    dma_bytes: int = 0
    onchip_dma_bytes: int = 0
    dma_runs: int = 0
    tensor_cycles: float = 0.0
    matmul_macs: int = 0
    elements: Counter[str] = field(default_factory=Counter)
    starts: Counter[str] = field(default_factory=Counter)
    sbuf_live: int = 0
    sbuf_peak: int = 0
    psum_live: int = 0
    psum_peak: int = 0

    def compute(self, engine: str, name: str, elements: float, speedup: float = 1.0) -> None:
        """Count one instruction that streams `elements` a partition, `speedup` times as fast as plain."""
        self.instructions[name] += 1
        self.starts[engine] += 1
        self.elements[engine] += elements / speedup  # type: ignore[assignment]

    def matmul(self, name: str, cycles: float, macs: int) -> None:
        """Count one instruction of the tensor engine."""
        self.instructions[name] += 1
        self.starts["tensor"] += 1
        self.tensor_cycles += cycles
        self.matmul_macs += macs

    def dma(self, name: str, moved: int, runs: int, *, hbm: bool) -> None:
        """Count one transfer of `moved` bytes in `runs` contiguous pieces."""
        self.instructions[name] += 1
        self.starts["dma"] += 1
        self.dma_runs += runs
        if hbm:
            self.dma_bytes += moved
        else:
            self.onchip_dma_bytes += moved

    def allocate(self, buffer: str, partition_bytes: int) -> None:
        """Count a tensor that came to life on chip."""
        if buffer == "sbuf":
            self.sbuf_live += partition_bytes
            self.sbuf_peak = max(self.sbuf_peak, self.sbuf_live)
        elif buffer == "psum":
            self.psum_live += -(-partition_bytes // PSUM_BANK_BYTES)
            self.psum_peak = max(self.psum_peak, self.psum_live)

    def release(self, buffer: str, partition_bytes: int) -> None:
        """Count a tensor that nothing refers to any more."""
        if buffer == "sbuf":
            self.sbuf_live -= partition_bytes
        elif buffer == "psum":
            self.psum_live -= -(-partition_bytes // PSUM_BANK_BYTES)
