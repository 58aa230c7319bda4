"""A record comes back bit by bit, or it is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moot.core.errors import InvalidRequest, StoreError
from moot.core.types import FinishReason, SamplingParams
from services.router.store.records import (
    decode_params,
    decode_record,
    encode_fields,
    encode_params,
    keys_of,
    pack_ids,
    unpack_ids,
)
from tests.services.router.store.store_server import record

_ids = st.integers(0, 2**32 - 1)
_numbers = st.floats(allow_nan=False, allow_infinity=False)
_params = st.builds(
    SamplingParams,
    temperature=_numbers,
    top_k=st.integers(0, 10**6),
    top_p=_numbers,
    logit_bias=st.dictionaries(_ids, _numbers, max_size=5),
    allowed_token_ids=st.none() | st.frozensets(_ids, max_size=5),
    max_tokens=st.integers(1, 10**6),
    stop_token_ids=st.frozensets(_ids, max_size=5),
    ignore_eos=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.none() | st.integers(0, 20),
)


@given(_params)
def test_parameters_come_back_bit_by_bit(params: SamplingParams) -> None:
    """A resumed request draws the same tokens: no float of its parameters may change, nor a bit of its seed."""
    assert decode_params(encode_params(params), params.seed) == params


@given(st.lists(_ids))
def test_ids_come_back(token_ids: list[int]) -> None:
    """Packing loses no id, up to the largest uint32."""
    assert unpack_ids(pack_ids(token_ids)) == tuple(token_ids)


def _fields(length: int, finish: str = "") -> dict[bytes, bytes]:
    flat = [str(value).encode() for value in encode_fields(record())]
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    return fields | {b"epoch": b"1", b"length": str(length).encode(), b"finish": finish.encode()}


def test_decodes_what_the_server_holds() -> None:
    """Spans in order make the output; every field of the request comes back."""
    spans = [(b"0-2", (b"ids", pack_ids([1, 2]))), (b"0-3", (b"ids", pack_ids([3])))]
    decoded = decode_record("r1", _fields(3, "length"), pack_ids([5, 6, 7]), spans)
    assert decoded == record(output_token_ids=(1, 2, 3), finish_reason=FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("length", "prompt", "spans"),
    [
        (3, [5, 6, 7], [(b"0-3", (b"ids", pack_ids([3])))]),
        (3, [5, 6, 7], [(b"0-1", (b"ids", pack_ids([3])))]),
        (1, [5, 6], [(b"0-1", (b"ids", pack_ids([3])))]),
        (1, [5, 6, 7], [(b"0-1", (b"ids", pack_ids([3])[:3]))]),
    ],
    ids=["gap", "short", "prompt lost", "broken packing"],
)
def test_damage_is_refused(length: int, prompt: list[int], spans: list[tuple[bytes, tuple[bytes, bytes]]]) -> None:
    """A request resumed from half a record would give another text: it is not resumed."""
    with pytest.raises(StoreError, match="damaged"):
        decode_record("r1", _fields(length), pack_ids(prompt), spans)


@pytest.mark.parametrize("request_id", ["", "a{b}", "a b", "x" * 201, "é"])
def test_key_syntax_in_a_request_id_is_refused(request_id: str) -> None:
    """An id that reaches into the syntax of keys could name another request's keys."""
    with pytest.raises(InvalidRequest):
        keys_of("moot", request_id)


def test_keys_of_a_request_share_one_hash_tag() -> None:
    """A function may only touch keys of one node of a cluster."""
    assert keys_of("rel", "r1") == ("rel:{r1}", "rel:{r1}:p", "rel:{r1}:t")
