"""The findings of `check_numerics` as a table: the error of each quantity beside its tolerance."""

from rich.table import Table

from hyperion.doctor.numerics import Finding, NumericsReport


def numerics_table(report: NumericsReport) -> Table:
    """One line a quantity; what is off stands out, what this device cannot compute says why."""
    table = Table("model", "precision", "compared with float64", "error", "tolerance", "", "furthest off", pad_edge=False)
    for finding in report.findings:
        if finding.reason:
            table.add_row(finding.case, finding.dtype, finding.reason, "", "", "not here", "")
        else:
            numbers = (f"{finding.error:.1e}", f"{finding.tolerance:.0e}")
            table.add_row(finding.case, finding.dtype, finding.quantity, *numbers, _verdict(finding), finding.worst)
    return table


def _verdict(finding: Finding) -> str:
    return "[green]ok[/]" if finding.passed else "[red]WRONG[/]"
