"""The table of errors: a row for every class, each fit for the borders that read it."""

from __future__ import annotations

import grpc
import pytest

from moot.core import errors
from moot.core.errors import ERRORS, MOVING, MootError, row_of
from moot.rpc import convert
from moot.rpc.interceptors import status_of
from moot.runtime.metrics import MOVE_REASONS, REFUSAL_CODES
from moot.v1 import verifier_service_pb2 as pb
from services.router.api.error_responses import describe

CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MootError)]


def made(kind: type[MootError]) -> MootError:
    return errors.LeaseHeld("x", 2.0) if kind is errors.LeaseHeld else kind("x")


def test_every_class_has_a_row_of_its_own() -> None:
    assert len(CLASSES) > 20
    assert set(ERRORS) == set(CLASSES)


@pytest.mark.parametrize("kind", CLASSES)
def test_every_border_answers_with_the_row(kind: type[MootError]) -> None:
    """HTTP with a status that is counted, gRPC with a code that it knows."""
    row, reply = ERRORS[kind], describe(made(kind))
    assert (reply.status, reply.body["error"]["code"]) == (row.http_status, row.http_code)
    assert reply.status in REFUSAL_CODES
    assert status_of(made(kind)) is grpc.StatusCode[row.grpc_status]


def test_the_message_of_an_error_for_operators_stays_inside() -> None:
    for kind in CLASSES:
        shown = describe(made(kind)).body["error"]["message"]
        assert shown == ("internal error" if ERRORS[kind].http_code == errors.UNTOLD else "x"), kind


def test_verifier_and_router_mean_the_same_by_every_session_failure() -> None:
    """One class for each code of the wire, there and back; a code of a later version is the verifier's own fault."""
    kinds = {kind for kind in CLASSES if ERRORS[kind].session_failure}
    codes = set()
    for kind in kinds:
        message = convert.failed_to_pb(kind, "why", 3)
        codes.add(message.code)
        error = convert.failed_from_pb(message)
        assert type(error) is kind
        assert (str(error), message.round_index) == ("why", 3)
    assert codes == set(pb.SessionFailed.Code.values()) - {pb.SessionFailed.CODE_UNSPECIFIED}
    for code in (pb.SessionFailed.CODE_UNSPECIFIED, 99):
        assert type(convert.failed_from_pb(pb.SessionFailed(code=code))) is errors.PeerError


def test_what_ends_no_session_is_not_sent_as_its_failure() -> None:
    with pytest.raises(ValueError, match="CODE_None"):
        convert.failed_to_pb(errors.StoreError, "why", 0)


def test_whoever_is_caught_as_moving_has_a_reason_that_is_counted() -> None:
    for kind in CLASSES:
        assert issubclass(kind, MOVING) == (ERRORS[kind].moves is not None), kind
        assert ERRORS[kind].moves in (None, *MOVE_REASONS)
    assert set(MOVING) == {kind for kind in CLASSES if issubclass(kind, MOVING)}


def test_a_class_from_elsewhere_is_treated_as_its_base() -> None:
    class Full(errors.NoCapacity):
        pass

    assert row_of(Full) is ERRORS[errors.NoCapacity]
    assert row_of(KeyError) is ERRORS[MootError]
