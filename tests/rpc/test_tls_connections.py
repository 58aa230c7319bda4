"""Mutual TLS on real connections: who is let in, who is not and hears why, and what changes when files change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moot.core.errors import PeerLost, PeerRefused
from moot.rpc.certificates import check, read_pems
from moot.rpc.grpc_server import GrpcServer
from moot.rpc.identity import Identity
from moot.rpc.link import LinkConfig, failure_of, open_channel
from moot.rpc.tls import PodTls
from moot.runtime.metrics import Metrics
from moot.testing.made_certificates import Authority, Leaf, PodFiles, shown_serial_number
from moot.v1 import drafter_service_pb2 as pb
from moot.v1 import drafter_service_pb2_grpc as pb_grpc
from tests.waiting import GIVE_UP_S, eventually

ROUTER = Identity("prod", "demo", "router")
VERIFIER, DRAFTER = ROUTER.peer("verifier"), ROUTER.peer("drafter")
OURS = Authority("ours", starts=-9)


class Greeter(pb_grpc.DrafterServiceServicer):
    """Says the serial number of the certificate that the caller came with, once for each question."""

    async def Draft(
        self, request_iterator: AsyncIterator[pb.DraftRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.DraftResponse]:
        (pem,) = context.auth_context()["x509_pem_cert"]
        serial_number = x509.load_pem_x509_certificate(pem).serial_number
        async for _ in request_iterator:
            yield pb.DraftResponse(answers=[pb.DraftAnswer(session_id=serial_number & 0xFFFFFFFF)])


class Stage:
    """A verifier and whoever calls it; everything ends with the `async with`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = AsyncExitStack()
        self._count = 0

    async def __aenter__(self) -> Stage:
        self.files = PodFiles(self.folder / "verifier").write(OURS.issue(VERIFIER), OURS)
        self.tls = PodTls(self.files.paths, "verifier", Metrics("verifier"))
        self.address = await self.serve(self.tls)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    async def serve(self, tls: PodTls | None) -> str:
        server = GrpcServer(LinkConfig(), ["moot.v1.DrafterService"], tls=tls)
        pb_grpc.add_DrafterServiceServicer_to_server(Greeter(), server.server)
        await server.start("127.0.0.1", 0)
        await server.set_serving(True)
        self._stack.push_async_callback(server.stop, 0.0)
        return f"127.0.0.1:{server.port}"

    def pod(self, leaf: Leaf, role: str, *authorities: Authority) -> PodTls:
        self._count += 1
        files = PodFiles(self.folder / f"pod-{self._count}").write(leaf, *(authorities or (OURS,)))
        return PodTls(files.paths, role, Metrics(role))

    async def channel(self, caller: PodTls | None, role: str = "verifier", address: str = "") -> grpc.aio.Channel:
        channel = open_channel(address or self.address, LinkConfig(), caller, role)
        return await self._stack.enter_async_context(channel)

    async def raw_channel(self, leaf: Leaf | None, trusted: Authority, name: str) -> grpc.aio.Channel:
        """As somebody would call who is none of our programs: they would not start with such certificates."""
        pair = (None, None) if leaf is None else (leaf.key, leaf.cert)
        credentials = grpc.ssl_channel_credentials(trusted.pem, *pair)
        options = (("grpc.ssl_target_name_override", name),)
        return await self._stack.enter_async_context(grpc.aio.secure_channel(self.address, credentials, options))

    async def line(self, caller: PodTls) -> Callable[[], Awaitable[int]]:
        """One stream of a router's; called, it asks."""
        call = pb_grpc.DrafterServiceStub(await self.channel(caller)).Draft()

        async def ask() -> int:
            await call.write(pb.DraftRequest())
            return int((await asyncio.wait_for(call.read(), GIVE_UP_S)).answers[0].session_id)

        return ask


async def health(channel: grpc.aio.Channel) -> int:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=GIVE_UP_S)
    return int(answer.status)


async def refusal(
    channel: grpc.aio.Channel, server_name: str | None = VERIFIER.server_name
) -> tuple[type[PeerRefused | PeerLost], str]:
    """What a router says of a call that must fail; a stream fails alike."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health(channel)
    assert caught.value.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE)
    with pytest.raises(grpc.aio.AioRpcError) as of_stream:
        await asyncio.wait_for(pb_grpc.DrafterServiceStub(channel).Draft().read(), GIVE_UP_S)
    assert of_stream.value.code() is caught.value.code()
    failure = failure_of(caught.value, server_name)
    return type(failure), str(failure)


async def test_only_a_router_of_the_installation_may_call(tmp_path: Path) -> None:
    """A drafter may not call a verifier, nor may another installation's router: both roles are named."""
    async with Stage(tmp_path) as stage:
        assert await health(await stage.channel(stage.pod(OURS.issue(ROUTER), "router"))) == 1
        strangers = {
            DRAFTER: "saw role drafter (moot://prod/demo/drafter)",
            VERIFIER: "saw role verifier (moot://prod/demo/verifier)",
            Identity("prod", "second", "router"): "saw role router (moot://prod/second/router)",
            Identity("test", "demo", "router"): "saw role router (moot://test/demo/router)",
        }
        for stranger, seen in strangers.items():
            channel = await stage.raw_channel(OURS.issue(stranger), OURS, VERIFIER.server_name)
            expected = f"this verifier expects role router (moot://prod/demo/router), and {seen}"
            assert await refusal(channel) == (PeerRefused, expected)
        nameless = await stage.raw_channel(OURS.issue(ROUTER, uris=("spiffe://x/router",)), OURS, VERIFIER.server_name)
        assert "saw a certificate with no URI moot://NAMESPACE/RELEASE/ROLE" in (await refusal(nameless))[1]


async def test_a_server_must_be_of_the_role_that_is_called(tmp_path: Path) -> None:
    """A drafter's certificate is not taken for a verifier's, nor another installation's, nor another authority's."""
    async with Stage(tmp_path) as stage:
        router = stage.pod(OURS.issue(ROUTER), "router")
        found = await refusal(await stage.channel(router, "drafter"), DRAFTER.server_name)
        assert found == (PeerRefused, "its certificate is not that of drafter.demo.prod.moot.internal")
        second = stage.pod(OURS.issue(Identity("prod", "second", "router")), "router")
        other = Identity("prod", "second", "verifier").server_name
        assert (await refusal(await stage.channel(second), other))[1] == f"its certificate is not that of {other}"
        theirs = Authority("theirs")
        believer = stage.pod(theirs.issue(ROUTER), "router", theirs)
        _, said = await refusal(await stage.channel(believer))
        assert said.startswith("its certificate is not trusted: unable to get")
        plain = await stage.channel(router, address=await stage.serve(None))
        assert await refusal(plain) == (PeerRefused, "it does not speak TLS, which this side does")


async def test_a_client_without_a_good_certificate_gets_no_connection(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """None, another authority's, an ended one, plain text. The reason stands in the server's log: TLS tells the client
    nothing, which is what the router's sentence says."""
    async with Stage(tmp_path) as stage:
        strangers = {
            "PEER_DID_NOT_RETURN_A_CERTIFICATE": None,
            "CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate": Authority("x").issue(ROUTER),
            "CERTIFICATE_VERIFY_FAILED: certificate has expired": OURS.issue(ROUTER, starts=-3, ends=-1),
        }
        for said, leaf in strangers.items():
            capfd.readouterr()
            kind, reason = await refusal(await stage.raw_channel(leaf, OURS, VERIFIER.server_name))
            assert kind is PeerLost
            assert "it may refuse this side's certificate: its log says why" in reason
            assert said in capfd.readouterr().err
        plain = await refusal(await stage.channel(None), None)
        assert plain == (PeerLost, "it closed the connection before it answered; it may want TLS")
        assert await health(await stage.channel(stage.pod(OURS.issue(ROUTER), "router"))) == 1


async def test_an_ended_certificate_of_a_server_is_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was good when the server started, and nobody renewed it: both sides say so. Streams go on."""
    async with Stage(tmp_path) as stage:
        router = stage.pod(OURS.issue(ROUTER), "router")
        line = await stage.line(router)
        await line()
        stage.files.write(OURS.issue(VERIFIER, starts=-3, ends=-1), OURS)
        then = datetime.now(UTC) - timedelta(days=2)
        stage.tls.certificates = check(read_pems(*stage.files.paths), "verifier", then)
        found = await refusal(await stage.channel(router))
        assert found == (PeerRefused, "its certificate is not trusted: certificate has expired")
        await line()
        for _ in range(2):
            assert not stage.tls.refresh()
        assert [one.message for one in caplog.records].count("the certificates in use have ended") == 1


@pytest.mark.parametrize("kind", ["P-384", "RSA"])
async def test_other_keys_than_p256_are_spoken_as_well(tmp_path: Path, kind: str) -> None:
    """What is not refused at the start works: of the kinds that authorities issue, these and P-256 do."""

    def key() -> CertificateIssuerPrivateKeyTypes:
        return ec.generate_private_key(ec.SECP384R1()) if kind == "P-384" else rsa.generate_private_key(65537, 2048)

    async with Stage(tmp_path) as stage:
        stage.files.write(OURS.issue(VERIFIER, key=key()), OURS)
        assert stage.tls.refresh()
        assert await health(await stage.channel(stage.pod(OURS.issue(ROUTER, key=key()), "router"))) == 1


async def test_streams_outlive_certificates_and_new_connections_have_the_new_ones(tmp_path: Path) -> None:
    """Both sides' files change under a stream: it goes on; the next connection shows both new certificates."""
    async with Stage(tmp_path) as stage:
        first, second = OURS.issue(ROUTER), OURS.issue(ROUTER)
        files = PodFiles(tmp_path / "router").write(first, OURS)
        router = PodTls(files.paths, "router", Metrics("router"))
        line = await stage.line(router)
        assert await line() == first.serial_number & 0xFFFFFFFF
        files.write(second, OURS)
        assert router.refresh()
        served = OURS.issue(VERIFIER)
        stage.files.write(served, OURS)
        # The server looks by itself.
        await eventually(lambda: stage.tls.certificates.serial_number == served.serial_number)
        assert await line() == first.serial_number & 0xFFFFFFFF
        assert await (await stage.line(router))() == second.serial_number & 0xFFFFFFFF
        assert await asyncio.to_thread(shown_serial_number, stage.address, VERIFIER, files) == served.serial_number
        assert await line() == first.serial_number & 0xFFFFFFFF


async def test_authorities_change_over_a_bundle_of_both(tmp_path: Path) -> None:
    """Old, both, both with new leaves, new: whoever is at the same stage or one from it can connect, streams go on."""
    async with Stage(tmp_path) as stage:
        new = Authority("new")
        files = PodFiles(tmp_path / "router").write(OURS.issue(ROUTER), OURS)
        router = PodTls(files.paths, "router", Metrics("router"))
        line = await stage.line(router)
        stages = (((OURS, new), OURS), ((OURS, new), new), ((new,), new))
        for trusted, signer in stages:
            stage.files.write(signer.issue(VERIFIER), *trusted)
            stage.tls.refresh()
            await (await stage.line(router))()
            files.write(signer.issue(ROUTER), *trusted)
            router.refresh()
            await (await stage.line(router))()
            await line()
        late = await stage.raw_channel(OURS.issue(ROUTER), new, VERIFIER.server_name)
        assert "it may refuse this side's certificate" in (await refusal(late))[1]
