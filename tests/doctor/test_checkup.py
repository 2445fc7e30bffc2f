"""The whole visit: every check answers, and one that breaks does not end it."""

import pytest

from hyperion.doctor import CHECKS, CheckResult, run_checks


@pytest.mark.process
def test_every_check_answers_on_this_machine():
    results = run_checks()
    assert [result.id for result in results] == [check.__name__.removeprefix("check_") for check in CHECKS]
    for result in results:
        assert result.evidence and bool(result.remedy) == (result.status in ("warn", "fail")), result


def test_a_check_that_breaks_is_reported_and_the_rest_run():
    def check_broken() -> CheckResult:
        raise ZeroDivisionError("by design")

    def check_fine() -> CheckResult:
        return CheckResult("fine", "ok", "seen")

    broken, fine = run_checks((check_broken, check_fine))
    assert (broken.id, broken.status) == ("broken", "fail") and "by design" in broken.evidence
    assert fine.status == "ok"
