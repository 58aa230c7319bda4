"""The store's address that the chart puts together reaches a server over TLS, and no server of another authority."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
from redis.exceptions import RedisError

from services.router.store.config import StoreConfig
from services.router.store.connection import RedisConnection
from tests.deploy.charts import rendered
from tests.integration.store_certificates import make_certificates


def address(port: int, certificates: Path) -> str:
    """MOOT_REDIS_URL of the scenario's router as the kubelet would fill it in, with the mount where the files are."""
    router = rendered("external-redis-tls").pod("router")
    url = str(router.env["MOOT_REDIS_URL"]["value"]).replace("$(STORE_URL)", f"rediss://127.0.0.1:{port}/0")
    (mount,) = [mount for mount in router.container["volumeMounts"] if mount["name"] == "redis-tls"]
    assert mount["mountPath"] in url
    return url.replace(mount["mountPath"], str(certificates))


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As much of the protocol as a PING needs: every command is answered."""
    try:
        while (line := await reader.readline()).startswith(b"*"):
            for _ in range(int(line[1:])):
                await reader.readline()
                await reader.readline()
            writer.write(b"+PONG\r\n")
    finally:
        writer.close()


def test_the_store_is_reached_over_tls_and_both_sides_prove_who_they_are(tmp_path: Path) -> None:
    """The right authority: connected, with a certificate of the router's own; another's: refused by either side."""
    ours, theirs = make_certificates(tmp_path / "ours"), make_certificates(tmp_path / "theirs")

    async def main() -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(ours / "ca.crt"))
        context.load_cert_chain(ours / "tls.crt", ours / "tls.key")
        context.verify_mode = ssl.CERT_REQUIRED
        server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        # A handshake on a busy machine takes more than the token path's tenth of a second.
        patient = {"timeout_s": 10.0, "connect_timeout_s": 10.0}
        good = RedisConnection(StoreConfig(url=address(port, ours), **patient))
        assert await good.send([("PING",)]) == ["PONG"] or await good.send([("PING",)]) == [b"PONG"]
        await good.drop()
        stranger = RedisConnection(StoreConfig(url=address(port, theirs), **patient))
        with pytest.raises((RedisError, OSError)):
            await stranger.send([("PING",)])
        await stranger.drop()
        server.close()

    asyncio.run(main())
