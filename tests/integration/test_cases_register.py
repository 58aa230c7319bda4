"""The table of cases is true: every case has its tests, and the table counts exactly those."""

from __future__ import annotations

from tests.integration.cases_table import CASES, TABLE, keepers, table


def test_every_case_is_kept_by_a_test() -> None:
    """No case is without a test, and no test claims a case that there is not."""
    by_case = keepers()
    assert set(by_case) == set(CASES), "a test's docstring names a case that there is not"
    assert [case for case, tests in by_case.items() if not tests] == []


def test_the_table_of_cases_is_up_to_date() -> None:
    """docs/cases.md is what `python tests/integration/cases_table.py` makes."""
    assert TABLE.read_text() == table(keepers()), "run: python tests/integration/cases_table.py"
