"""Passports: one JSON file per machine with its fingerprint, measured ceilings and floors; to write and to verify."""

from hyperion.passport.measure import measure_passport, passport_name, write_passport
from hyperion.passport.verify import PassportError, verify_passport

__all__ = ["PassportError", "measure_passport", "passport_name", "verify_passport", "write_passport"]
