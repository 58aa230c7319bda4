"""Three failures, and what counts as one."""

from __future__ import annotations

from services.router.peers.outlier_ejection import EjectionPolicy, OutlierEjection


def test_third_failure_ejects_for_ever_longer() -> None:
    """The n-th ejection in a row lasts n times the first."""
    failures = OutlierEjection(EjectionPolicy(eject_s=30))
    now, lasted = 0.0, []
    for _ in range(9):
        now += 1
        duration = failures.malformed(now, now + 0.5)
        if duration is not None:
            lasted.append(duration)
            now += duration
    assert lasted == [30, 60, 90]


def test_one_hiccup_is_one_failure() -> None:
    """Of questions asked before the last failure, however many, none failures again."""
    failures = OutlierEjection(EjectionPolicy())
    assert [failures.missed(asked_at=1.0, now=2.0) for _ in range(64)] == [None] * 64
    assert failures.missed(3.0, 4.0) is None
    assert failures.missed(5.0, 6.0) == 30


def test_an_answer_in_time_forgives_misses_but_no_lies() -> None:
    """Lateness must happen in a row; malformed answers add up whatever comes between."""
    late = OutlierEjection(EjectionPolicy())
    for now in range(0, 100, 2):
        assert late.missed(now, now + 1) is None
        late.answered()
    lying = OutlierEjection(EjectionPolicy())
    outcomes = []
    for now in range(0, 6, 2):
        outcomes.append(lying.malformed(now, now + 1))
        lying.answered()
    assert outcomes == [None, None, 30]


def test_old_faults_are_forgotten() -> None:
    """Malformed answers far apart never eject, and a long good time resets the length of ejections."""
    failures = OutlierEjection(EjectionPolicy(memory_s=10))
    assert all(failures.malformed(now, now + 1) is None for now in range(0, 1000, 20))
    quick = [failures.malformed(now, now + 0.1) for now in (2000.0, 2001.0, 2002.0)]
    again = [failures.malformed(now, now + 0.1) for now in (3000.0, 3001.0, 3002.0)]
    assert quick[-1] == again[-1] == 30
