"""Find constructs that tie source code to CUDA."""

from hyperion.porting.scan import GRADES, Finding, Rule, rules, scan, scan_text

__all__ = ["GRADES", "Finding", "Rule", "rules", "scan", "scan_text"]
