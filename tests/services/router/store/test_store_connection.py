"""Commands as the server reads them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from services.router.store.connection import pack

CONNECTION = Redis().connection_pool.make_connection()
arguments = st.one_of(st.integers(-(2**63), 2**63 - 1), st.binary(max_size=40), st.text(max_size=40))


@given(st.lists(arguments, max_size=8))
def test_a_command_is_packed_as_the_library_packs_it(rest: list[int | bytes | str]) -> None:
    """The same bytes, whatever the arguments hold: lengths are of bytes, not of characters."""
    assert pack(("FCALL", *rest)) == b"".join(CONNECTION.pack_commands([("FCALL", *rest)]))
