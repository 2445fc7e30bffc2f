"""The roofline: the least time that arithmetic and traffic need, from ceilings and shapes alone.

Source: Williams, Waterman, Patterson, Roofline: an insightful visual performance model, CACM 52 (2009) 65-76.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ceilings:
    """What a device can do at best, either from its datasheet or measured.

    Args:
        tflops: arithmetic ceiling in 10¹² FLOP/s.
        bandwidth_gb_s: memory ceiling in 10⁹ bytes/s, None when unknown.
        source: where both come from.
    """

    tflops: float
    bandwidth_gb_s: float | None
    source: str

    @property
    def ridge_flop_per_byte(self) -> float | None:
        """Arithmetic intensity above which work is bound by arithmetic."""
        return self.tflops * 1e3 / self.bandwidth_gb_s if self.bandwidth_gb_s else None

    def least_time_s(self, flops: float, traffic_bytes: float) -> float:
        """The larger of arithmetic time and traffic time; with the bandwidth unknown, arithmetic time alone."""
        arithmetic = flops / (self.tflops * 1e12)
        traffic = traffic_bytes / (self.bandwidth_gb_s * 1e9) if self.bandwidth_gb_s else 0.0
        return max(arithmetic, traffic)
