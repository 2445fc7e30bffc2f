"""Passport: one file that says what a machine is, what it reaches and which floors it meets; measured, and verified."""

from hyperion.passport.measure import measure_passport, passport_name, write_passport
from hyperion.passport.verify import PassportError, verify_passport

__all__ = ["PassportError", "measure_passport", "passport_name", "verify_passport", "write_passport"]
