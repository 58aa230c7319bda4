"""The table of cases is true: every case has its tests, and the table counts exactly those."""

from __future__ import annotations

from tests.integration.cases_table import CASES, TABLE, keepers, table


def test_every_case_is_kept_by_a_test_and_the_table_of_them_is_up_to_date() -> None:
    """No case is without a test, no test claims a case that there is not, and docs/cases.md is what
    `python tests/integration/cases_table.py` makes."""
    by_case = keepers()
    assert set(by_case) == set(CASES), "a test's docstring names a case that there is not"
    assert [case for case, tests in by_case.items() if not tests] == []
    assert TABLE.read_text() == table(by_case), "run: python tests/integration/cases_table.py"
