"""One exception type for everything a user can put right: what was wrong, where, and the next step."""


class HyperionError(Exception):
    """An error with a remedy.

    Args:
        what: the fault in one sentence, with the offending value.
        where: the file, record, cell or device it was found in.
        next_step: what the reader should do now, as a command or an instruction.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: object = None, next_step: str | None = None):
        self.what, self.where, self.next_step = what, where, next_step
        super().__init__(what, where, next_step)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where is not None:
            lines.append(f"  where: {self.where}")
        if self.next_step is not None:
            lines.append(f"  next:  {self.next_step}")
        return "\n".join(lines)
