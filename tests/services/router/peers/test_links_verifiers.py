"""Verifiers that die, freeze, drain, forget, refuse or vanish: the request moves, or fails alone within its bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from moot.core.errors import DeadlineExceeded, NoCapacity, PeerLost, RequestPoisoned
from moot.core.types import FinishReason, Verification
from moot.testing import ScriptedVerifier, TcpProxy
from moot.v1 import verifier_service_pb2 as pb
from services.router.generation.ports import Prefix
from services.router.peers.links import PeerState
from tests.services.router.generation.rounds_rig import LINK, TARGET, TEXT, WATCHFUL_TARGET, Outcome, Rig, request, rig
from tests.waiting import GIVE_UP_S, eventually


def holder(router: Rig) -> ScriptedVerifier:
    return next(verifier for verifier in router.verifiers if verifier.num_sessions)


def moves(router: Rig, reason: str) -> float:
    return router.counter("request_moves_total", reason=reason)


async def four_on_two(router: Rig) -> asyncio.Task[list[Outcome]]:
    """Four requests that run, two on each of two verifiers."""
    running = router.begin(request(max_tokens=100) for _ in range(4))
    await eventually(lambda: all(verifier.num_sessions == 2 for verifier in router.verifiers))
    return running


@pytest.mark.parametrize("fault", ["killed", "stuck", "silent"])
async def test_a_request_moves_from_a_lost_verifier(fault: str) -> None:
    """One that is killed, or that three heartbeats find: a stuck compute thread behind a live loop, a loop that answers
    nothing. Prompt + committed tokens are opened elsewhere: no gap, no double token, no error; and it may come back."""
    options = {"drafters": {"good": 0.3}, "num_speculative_tokens": 2}
    async with rig(verifiers=2, step_s=0.002, target=WATCHFUL_TARGET, **options) as router:
        task = await router.started(request(max_tokens=200))
        lost = holder(router)
        lost.freeze()
        lost.answer_heartbeats = fault != "silent"
        if fault == "killed":
            await lost.kill()
        await task
        assert moves(router, "lost") == 1
        lost.thaw()
        lost.answer_heartbeats = True
        if fault == "killed":
            await lost.start()
        await router.ready(2)


async def test_an_idle_or_slow_verifier_is_not_lost() -> None:
    """Standing still with nothing queued, and long steps that progress, are no faults."""
    async with rig(target=WATCHFUL_TARGET) as router:
        (verifier,), (link,) = router.verifiers, router.targets.links.values()
        await asyncio.sleep(8 * WATCHFUL_TARGET.heartbeat_interval_s)
        assert link.is_ready
        verifier.step_s = 1.5 * WATCHFUL_TARGET.heartbeat_interval_s
        await router.check(request(max_tokens=6))
        assert verifier.counts["streams"] == 1


async def test_all_verifiers_lost_is_no_capacity_within_the_bound() -> None:
    """Nobody left: the request waits the configured time, then fails with Retry-After, before and after its start."""
    async with rig(step_s=0.005, target=replace(TARGET, no_verifier_wait_s=0.3)) as router:
        (verifier,) = router.verifiers
        running = await router.started(request(max_tokens=1000), rounds=3)
        await verifier.kill()
        loop = asyncio.get_running_loop()
        started = loop.time()
        with pytest.raises(NoCapacity) as caught:
            await running
        assert caught.value.retry_after_s > 0
        with pytest.raises(NoCapacity):
            await router.generate(request())
        assert loop.time() - started >= 0.5
        await verifier.start()
        await eventually(lambda: router.targets.is_available)
        await router.check(request())


async def test_a_restarted_verifier_is_waited_for() -> None:
    """A verifier that is back within the wait costs its requests nothing but time."""
    async with rig(step_s=0.005) as router:
        running = await router.started(request(max_tokens=60), rounds=3)
        await router.verifiers[0].kill()
        await router.verifiers[0].start()
        await running


async def test_a_request_that_kills_is_quarantined_and_its_neighbours_live() -> None:
    """It takes two verifiers down and is not tried on a third; those beside it move and finish."""
    async with rig(verifiers=3, step_s=0.003) as router:
        for verifier in router.verifiers:
            verifier.lose_on = {"killer"}
        neighbours = router.begin(request(max_tokens=150) for _ in range(9))
        await eventually(lambda: router.counter("rounds_total") > 30)
        with pytest.raises(RequestPoisoned, match="not tried again"):
            await router.generate(request(request_id="killer", max_tokens=20))
        await neighbours
        assert sum(link.is_ready for link in router.targets.links.values()) == 1


async def test_moves_of_a_request_are_bounded() -> None:
    """At most three moves: a request that loses a fourth verifier gets an error, not an endless journey."""
    async with rig(step_s=0.01, target=replace(TARGET, max_losses=100)) as router:
        running = asyncio.create_task(router.generate(request(max_tokens=5000)))

        async def kill_again_and_again() -> None:
            while True:
                rounds = router.counter("rounds_total")
                await eventually(lambda rounds=rounds: router.counter("rounds_total") > rounds + 1)
                await router.verifiers[0].kill()
                await router.verifiers[0].start()

        killing = asyncio.create_task(kill_again_and_again())
        with pytest.raises(NoCapacity, match="4 verifiers"):
            await running
        killing.cancel()
        assert moves(router, "lost") == 4


async def test_draining_verifier_is_left_without_a_failed_request() -> None:
    """Drain: what runs moves at its next round, nothing new is opened there."""
    async with rig(verifiers=2, step_s=0.002) as router:
        running, draining = await four_on_two(router), router.verifiers[0]
        draining.drain()
        await running
        assert moves(router, "draining") == 2
        before = draining.counts["open"]
        await router.generate(request(max_tokens=5))
        assert draining.counts["open"] == before


async def test_the_only_verifier_keeps_its_sessions_while_it_drains_until_there_is_another() -> None:
    """Nobody could take them; once somebody can they move, without a gap."""
    async with rig(step_s=0.02) as router:
        (only,), another = router.verifiers, ScriptedVerifier(TEXT)
        another.step_s = 0.002
        task = await router.started(request(max_tokens=300))
        only.drain()
        await eventually(lambda: not router.targets.is_available)
        rounds = router.counter("rounds_total")
        await eventually(lambda: router.counter("rounds_total") > rounds + 5)
        assert only.num_sessions == 1
        await router.join(another)
        await eventually(lambda: another.num_sessions == 1)
        await task
        assert moves(router, "draining") == 1


async def test_a_verifier_whose_address_is_gone_is_drained() -> None:
    """Taken out of discovery it serves its rounds to their end; requests move at the next one, and count no loss."""
    async with rig(verifiers=2, step_s=0.002, target=replace(TARGET, max_losses=1)) as router:
        running, (going, staying) = await four_on_two(router), router.verifiers
        before = going.counts["open"]
        await router.targets.set_addresses([staying.address])
        await running
        assert moves(router, "draining") == 2
        assert router.total("request_moves_total") == 2
        await eventually(lambda: going.num_streams == 0)
        assert going.counts["open"] == before
        assert len(router.targets.all_links) == 1


async def test_a_verifier_that_dies_after_its_address_has_gone_is_held_against_nobody() -> None:
    """What was computing there when it ended moves as in a drain; the address may come back meanwhile."""
    async with rig(verifiers=2, step_s=0.002, target=replace(TARGET, max_losses=1)) as router:
        task = await router.started(request(max_tokens=100))
        going = holder(router)
        (staying,) = (verifier for verifier in router.verifiers if verifier is not going)
        going.freeze()
        await router.targets.set_addresses([staying.address])
        await router.targets.set_addresses([staying.address, going.address])
        await eventually(lambda: sum(link.is_ready for link in router.targets.all_links) == 2)
        await going.kill()
        await task
        assert moves(router, "lost") == 0
        assert moves(router, "draining") == 1
        await eventually(lambda: len(router.targets.all_links) == 2)


async def test_a_full_send_queue_is_held_against_nobody() -> None:
    """The stream ends with what it holds, but no request killed the verifier: not the one whose command was one too
    many, nor those that were computing."""
    link_policy, target = replace(LINK, max_queued_commands=16), replace(TARGET, max_losses=1)
    async with rig(step_s=0.005, link=link_policy, target=target) as router:
        asked = request(max_tokens=100)
        running = await router.started(asked)
        (link,) = router.targets.links.values()

        def fill(count: int) -> None:
            for _ in range(count):
                link.send(pb.VerifyCommand(heartbeat=pb.Heartbeat()))

        with pytest.raises(PeerLost):
            fill(17)
        await running
        other = router.targets.target(Prefix("other", (1, 2), asked.params), 0)
        fill(16)
        assert len((await other.open()).output_token_ids) == 1
        other.end(aborted=True)
        assert moves(router, "lost") == 2


@pytest.mark.parametrize(
    ("other", "both"),
    [
        ({"model": "another"}, ("scripted", "another")),
        ({"tokenizer_fingerprint": "permuted"}, ("scripted", "permuted")),
        ({"revision": "r2"}, ("1", "r2")),
        ({"vocab_size": 300}, (str(TEXT.vocab_size), "300")),
        ({"end_token_ids": frozenset({7, 3})}, (str(sorted(TEXT.end_token_ids)), "[3, 7]")),
        ({"context_limit": 4096}, ("8192", "4096")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_a_verifier_of_another_model_is_refused(other: dict[str, object], both: tuple[str, str]) -> None:
    """Whatever could make another text of a request is compared before use; the refusal says both values."""
    wrong = ScriptedVerifier(TEXT)
    wrong.info = replace(wrong.info, **other)  # type: ignore[arg-type]  # the names are the fields'
    async with rig() as router:
        await router.join(wrong)
        link = router.targets.links[wrong.address]
        await eventually(lambda: link.state is PeerState.REFUSED)
        assert all(value in (link.refusal or "") for value in both)
        await router.generate(request(max_tokens=5))
        assert wrong.counts["open"] == 0


async def test_a_longer_context_is_admitted_and_changes_no_text() -> None:
    """The pool's limit stays what it was: a request of any length is cut at the same token on every verifier."""
    first, longer = ScriptedVerifier(TEXT, context_limit=64), ScriptedVerifier(TEXT, context_limit=8192)
    async with rig(verifiers=[first]) as router:
        await router.join(longer)
        await router.ready(2)
        assert router.targets.context_limit == 64
        assert router.targets.info == first.info


async def test_a_move_prefers_equal_numerics() -> None:
    """Equal bits are promised between equal fingerprints: of two ways out the equal one is taken, loaded or not."""
    unlike, equal = ScriptedVerifier(TEXT, numerics_fingerprint="other"), ScriptedVerifier(TEXT)
    async with rig(step_s=0.002) as router:
        (origin,) = router.verifiers
        running = router.begin(request(max_tokens=150) for _ in range(3))
        await eventually(lambda: origin.num_sessions == 3)
        origin.freeze()  # so that the texts are not over before the others are there
        await router.join(unlike, equal)
        await router.ready(3)
        await origin.kill()
        await running
        assert equal.counts["open"] == 3
        assert unlike.counts["open"] == 0
        assert moves(router, "other_numerics") == 0


async def test_c06_stale_and_doubled_verify_answers_are_dropped_and_counted() -> None:
    """A verify answer of another round or session, or a second one, is counted and never applied."""
    async with rig(drafters={"good": 0.3}) as router:
        (verifier,) = router.verifiers
        verifier.double_answers = verifier.stale_answers = True
        await router.check_all(request(max_tokens=60) for _ in range(4))
        stale = router.counter("answers_dropped_total", role="verifier", reason="stale")
        doubled = router.counter("answers_dropped_total", role="verifier", reason="duplicate")
        assert stale >= 2 * router.counter("rounds_total")
        assert doubled > 0


class OneLie(ScriptedVerifier):
    """A verifier whose first answer to a draft of which something is accepted is `lie` of the right one."""

    def __init__(self, lie: Callable[[Verification], Verification]) -> None:
        super().__init__(TEXT)
        self._lies = [lie]

    def _verify(self, stream: Any, command: pb.VerifyCommand) -> Verification:
        verification = super()._verify(stream, command)
        return self._lies.pop()(verification) if self._lies and verification.num_accepted else verification


@pytest.mark.parametrize(
    "lie",
    [
        lambda told: replace(told, output_token_ids=(told.output_token_ids[0] ^ 1, *told.output_token_ids[1:])),
        lambda told: replace(told, num_accepted=told.num_accepted - 1, finish_reason=FinishReason.STOP),
        lambda told: replace(told, output_token_ids=told.output_token_ids[: told.num_accepted]),
        lambda told: replace(told, output_token_ids=(*told.output_token_ids[:-1], TEXT.vocab_size)),
    ],
    ids=["an accepted token that was not drafted", "two next tokens", "no next token", "outside the vocabulary"],
)
async def test_an_answer_that_cannot_be_right_is_never_committed(lie: Callable[[Verification], Verification]) -> None:
    """The verifier counts as lost, the request is opened anew, and its text is the true one."""
    async with rig(verifiers=[OneLie(lie)], drafters={"good": 0.0}, num_speculative_tokens=3) as router:
        await router.check(request(max_tokens=30))
        assert moves(router, "lost") == 1


async def test_failures_of_one_session_stay_there() -> None:
    """Poisoned: an error for that request alone. Forgotten: opened again."""
    async with rig(step_s=0.001) as router:
        (verifier,) = router.verifiers
        running = asyncio.create_task(router.check(request(max_tokens=200)))
        verifier.poison = {"poisoned"}
        with pytest.raises(RequestPoisoned):
            await router.generate(request(request_id="poisoned"))
        opened = verifier.counts["open"]
        forgotten = asyncio.create_task(router.check(request(request_id="forgotten", max_tokens=60)))
        await eventually(lambda: verifier.counts["open"] == opened + 1)
        verifier.forget = {"forgotten"}
        await forgotten
        assert moves(router, "unknown_session") == 1
        await running


@pytest.mark.parametrize("wait_s", [0.3, GIVE_UP_S])
async def test_room_is_waited_for_and_then_it_is_503(wait_s: float) -> None:
    """A request that a verifier has no room for is offered again and again, until the wait is over."""
    async with rig(target=replace(TARGET, no_verifier_wait_s=wait_s, capacity_retry_s=0.02)) as router:
        (verifier,) = router.verifiers
        verifier.refuse_capacity = {"late"}
        served = asyncio.create_task(router.check(request(request_id="late")))
        if wait_s == GIVE_UP_S:
            await eventually(lambda: verifier.counts["open"] > 2)
            verifier.refuse_capacity = set()
            await served
        else:
            with pytest.raises(NoCapacity):
                await served


async def test_a_verify_that_takes_too_long_is_ended() -> None:
    """Progress elsewhere does not keep one command waiting for ever."""
    async with rig(target=replace(TARGET, verify_timeout_s=1.0)) as router:
        running = await router.started(request(max_tokens=100000), rounds=3)
        router.verifiers[0].freeze()
        with pytest.raises(DeadlineExceeded):
            await running
        router.verifiers[0].thaw()


@pytest.mark.parametrize(
    "fault",
    [TcpProxy.cut, TcpProxy.reset, TcpProxy.partition, lambda proxy: proxy.partition("down")],
    ids=["cut", "reset", "partition", "half"],
)
async def test_a_broken_network_is_a_lost_verifier(fault: Callable[[TcpProxy], object]) -> None:
    """A closed, reset or silent connection, in one direction or both, moves the request; healing brings it back."""
    near, far = ScriptedVerifier(TEXT), ScriptedVerifier(TEXT)
    near.step_s, far.step_s = 0.002, 0.02  # the far one is still at work when the near one is connected
    async with (
        far,
        TcpProxy.to(far.address) as proxy,
        rig(verifiers=[], verifier_addresses=[proxy.address], target=WATCHFUL_TARGET) as router,
    ):
        router.verifiers.append(far)
        task = await router.started(request(max_tokens=150))
        await router.join(near)
        await router.ready(2)
        fault(proxy)
        await task
        assert moves(router, "lost") == 1
        proxy.heal()
        await router.ready(2)
