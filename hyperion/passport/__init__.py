"""Write and verify passports.

A passport is one JSON file with the fingerprint, the measured ceilings and the floors of a machine.
"""

from hyperion.passport.measure import measure_passport, new_passport_path, not_measured, passport_name, write_passport
from hyperion.passport.verify import PassportError, verify_passport

__all__ = [
    "PassportError",
    "measure_passport",
    "new_passport_path",
    "not_measured",
    "passport_name",
    "verify_passport",
    "write_passport",
]
