"""Verifiers that die, freeze, drain, forget, refuse or vanish: the request moves, or fails alone within its bound."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from moot.core.errors import DeadlineExceeded, NoCapacity, PeerLost, RequestPoisoned
from moot.core.types import FinishReason, Verification
from moot.testing import ScriptedDrafter, ScriptedText, ScriptedVerifier, TcpProxy
from moot.v1 import verifier_service_pb2 as pb
from services.router.generation.ports import Prefix
from services.router.peers.links import PeerState
from tests.services.router.generation.rounds_rig import LINK, TARGET, WATCHFUL_TARGET, request, rig
from tests.waiting import GIVE_UP_S, eventually

TEXT = ScriptedText()


def two() -> list[ScriptedVerifier]:
    verifiers = [ScriptedVerifier(TEXT), ScriptedVerifier(TEXT)]
    for verifier in verifiers:
        verifier.step_s = 0.002
    return verifiers


def holder(verifiers: list[ScriptedVerifier]) -> ScriptedVerifier:
    return next(verifier for verifier in verifiers if verifier.num_sessions)


def test_killed_verifier_the_request_moves() -> None:
    """Prompt + committed tokens are opened elsewhere: no gap, no double token, no error."""

    async def main() -> None:
        verifiers = two()
        drafters = {"good": [ScriptedDrafter(TEXT, spoil=0.3)]}
        async with rig(text=TEXT, verifiers=verifiers, drafters=drafters, num_speculative_tokens=2) as router:
            asked = request(max_tokens=200)
            task = asyncio.create_task(router.generate(asked))
            await eventually(lambda: router.counter("rounds_total") > 5)
            await holder(verifiers).kill()
            outcome = await task
            assert outcome.token_ids == router.plain(asked)[0]
            assert router.counter("request_moves_total", reason="lost") == 1
            await router.nothing_left()

    asyncio.run(main())


@pytest.mark.parametrize("whole", [False, True], ids=["compute thread", "whole process"])
def test_frozen_verifier_is_found_by_heartbeats(whole: bool) -> None:
    """A stuck compute thread behind a live loop, and a loop that answers nothing, are lost after three heartbeats."""

    async def main() -> None:
        verifiers = two()
        async with rig(text=TEXT, verifiers=verifiers, target=WATCHFUL_TARGET) as router:
            asked = request(max_tokens=100)
            task = asyncio.create_task(router.generate(asked))
            await eventually(lambda: router.counter("rounds_total") > 5)
            frozen = holder(verifiers)
            frozen.freeze()
            frozen.answer_heartbeats = not whole
            outcome = await task
            assert outcome.token_ids == router.plain(asked)[0]
            assert router.counter("request_moves_total", reason="lost") == 1
            frozen.thaw()
            frozen.answer_heartbeats = True
            await eventually(lambda: all(link.is_ready for link in router.targets.links.values()))
            await router.nothing_left()

    asyncio.run(main())


def test_an_idle_or_slow_verifier_is_not_lost() -> None:
    """Standing still with nothing queued, and long steps that progress, are no faults."""

    async def main() -> None:
        verifier = ScriptedVerifier(TEXT)
        async with rig(text=TEXT, verifiers=[verifier], target=WATCHFUL_TARGET) as router:
            (link,) = router.targets.links.values()
            await asyncio.sleep(8 * WATCHFUL_TARGET.heartbeat_interval_s)
            assert link.is_ready
            verifier.step_s = 1.5 * WATCHFUL_TARGET.heartbeat_interval_s
            asked = request(max_tokens=6)
            assert (await router.generate(asked)).token_ids == router.plain(asked)[0]
            assert verifier.counts["streams"] == 1

    asyncio.run(main())


def test_all_verifiers_lost_is_no_capacity_within_the_bound() -> None:
    """Nobody left: the request waits the configured time, then fails with Retry-After, before and after its start."""

    async def main() -> None:
        verifier = ScriptedVerifier(TEXT)
        verifier.step_s = 0.005
        target = dataclasses.replace(TARGET, no_verifier_wait_s=0.3)
        async with rig(text=TEXT, verifiers=[verifier], target=target) as router:
            running = asyncio.create_task(router.generate(request(max_tokens=1000)))
            await eventually(lambda: router.counter("rounds_total") > 3)
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
            asked = request()
            assert (await router.generate(asked)).token_ids == router.plain(asked)[0]
            await router.nothing_left()

    asyncio.run(main())


def test_a_restarted_verifier_is_waited_for() -> None:
    """A verifier that is back within the wait costs its requests nothing but time."""

    async def main() -> None:
        verifier = ScriptedVerifier(TEXT)
        verifier.step_s = 0.005
        async with rig(text=TEXT, verifiers=[verifier]) as router:
            asked = request(max_tokens=60)
            running = asyncio.create_task(router.generate(asked))
            await eventually(lambda: router.counter("rounds_total") > 3)
            await verifier.kill()
            await verifier.start()
            assert (await running).token_ids == router.plain(asked)[0]

    asyncio.run(main())


def test_a_request_that_kills_is_quarantined_and_its_neighbours_live() -> None:
    """It takes two verifiers down and is not tried on a third; those beside it move and finish."""

    async def main() -> None:
        verifiers = [ScriptedVerifier(TEXT) for _ in range(3)]
        for verifier in verifiers:
            verifier.step_s = 0.003
            verifier.lose_on = {"killer"}
        async with rig(text=TEXT, verifiers=verifiers) as router:
            asked = [request(max_tokens=150) for _ in range(9)]
            tasks = [asyncio.create_task(router.generate(one)) for one in asked]
            await eventually(lambda: router.counter("rounds_total") > 30)
            with pytest.raises(RequestPoisoned, match="not tried again"):
                await router.generate(request(request_id="killer", max_tokens=20))
            outcomes = await asyncio.gather(*tasks)
            assert [outcome.token_ids for outcome in outcomes] == [router.plain(one)[0] for one in asked]
            assert sum(link.is_ready for link in router.targets.links.values()) == 1
            await router.nothing_left()

    asyncio.run(main())


def test_moves_of_a_request_are_bounded() -> None:
    """At most three moves: a request that loses a fourth verifier gets an error, not an endless journey."""

    async def main() -> None:
        verifier = ScriptedVerifier(TEXT)
        verifier.step_s = 0.01
        target = dataclasses.replace(TARGET, max_losses=100)
        async with rig(text=TEXT, verifiers=[verifier], target=target) as router:
            running = asyncio.create_task(router.generate(request(max_tokens=5000)))

            async def kill_again_and_again() -> None:
                while True:
                    rounds = router.counter("rounds_total")
                    await eventually(lambda rounds=rounds: router.counter("rounds_total") > rounds + 1)
                    await verifier.kill()
                    await verifier.start()

            killing = asyncio.create_task(kill_again_and_again())
            with pytest.raises(NoCapacity, match="4 verifiers"):
                await running
            killing.cancel()
            assert router.counter("request_moves_total", reason="lost") == 4
            await router.nothing_left()

    asyncio.run(main())


def test_draining_verifier_is_left_without_a_failed_request() -> None:
    """Drain: what runs moves at its next round, nothing new is opened there."""

    async def main() -> None:
        verifiers = two()
        async with rig(text=TEXT, verifiers=verifiers) as router:
            asked = [request(max_tokens=100) for _ in range(4)]
            tasks = [asyncio.create_task(router.generate(one)) for one in asked]
            await eventually(lambda: all(verifier.num_sessions == 2 for verifier in verifiers))
            verifiers[0].drain()
            outcomes = await asyncio.gather(*tasks)
            assert [outcome.token_ids for outcome in outcomes] == [router.plain(one)[0] for one in asked]
            assert router.counter("request_moves_total", reason="draining") == 2
            before = verifiers[0].counts["open"]
            await router.generate(request(max_tokens=5))
            assert verifiers[0].counts["open"] == before
            await router.nothing_left()

    asyncio.run(main())


def test_the_only_verifier_keeps_its_sessions_while_it_drains_until_there_is_another() -> None:
    """Nobody could take them; once somebody can they move, without a gap."""

    async def main() -> None:
        verifiers = two()
        verifiers[0].step_s = 0.02
        async with rig(text=TEXT, verifiers=verifiers[:1]) as router:
            asked = request(max_tokens=300)
            task = asyncio.create_task(router.generate(asked))
            await eventually(lambda: router.counter("rounds_total") > 5)
            verifiers[0].drain()
            await eventually(lambda: not router.targets.is_available)
            rounds = router.counter("rounds_total")
            await eventually(lambda: router.counter("rounds_total") > rounds + 5)
            assert verifiers[0].num_sessions == 1
            await verifiers[1].start()
            router.verifiers.append(verifiers[1])
            await router.targets.set_addresses([verifier.address for verifier in verifiers])
            await eventually(lambda: verifiers[1].num_sessions == 1)
            outcome = await task
            assert outcome.token_ids == router.plain(asked)[0]
            assert router.counter("request_moves_total", reason="draining") == 1
            await router.nothing_left()
        await verifiers[1].kill()

    asyncio.run(main())


def test_a_verifier_whose_address_is_gone_is_drained() -> None:
    """Taken out of discovery it serves its rounds to their end; requests move at the next one, and count no loss."""

    async def main() -> None:
        verifiers = two()
        target = dataclasses.replace(TARGET, max_losses=1)
        async with rig(text=TEXT, verifiers=verifiers, target=target) as router:
            asked = [request(max_tokens=100) for _ in range(4)]
            tasks = [asyncio.create_task(router.generate(one)) for one in asked]
            await eventually(lambda: all(verifier.num_sessions == 2 for verifier in verifiers))
            before = verifiers[0].counts["open"]
            await router.targets.set_addresses([verifiers[1].address])
            outcomes = await asyncio.gather(*tasks)
            assert [outcome.token_ids for outcome in outcomes] == [router.plain(one)[0] for one in asked]
            assert router.counter("request_moves_total", reason="draining") == 2
            assert router.total("request_moves_total") == 2
            await eventually(lambda: verifiers[0].num_streams == 0)
            assert verifiers[0].counts["open"] == before
            assert len(router.targets.all_links) == 1
            await router.nothing_left()

    asyncio.run(main())


def test_a_verifier_that_dies_after_its_address_has_gone_is_held_against_nobody() -> None:
    """What was computing there when it ended moves as in a drain; the address may come back meanwhile."""

    async def main() -> None:
        verifiers = two()
        target = dataclasses.replace(TARGET, max_losses=1)
        async with rig(text=TEXT, verifiers=verifiers, target=target) as router:
            asked = request(max_tokens=100)
            task = asyncio.create_task(router.generate(asked))
            await eventually(lambda: router.counter("rounds_total") > 5)
            going = holder(verifiers)
            (staying,) = (verifier for verifier in verifiers if verifier is not going)
            going.freeze()
            await router.targets.set_addresses([staying.address])
            await router.targets.set_addresses([staying.address, going.address])
            await eventually(lambda: sum(link.is_ready for link in router.targets.all_links) == 2)
            await going.kill()
            assert (await task).token_ids == router.plain(asked)[0]
            assert router.counter("request_moves_total", reason="lost") == 0
            assert router.counter("request_moves_total", reason="draining") == 1
            await eventually(lambda: len(router.targets.all_links) == 2)
            await router.nothing_left()

    asyncio.run(main())


def test_a_full_send_queue_is_held_against_nobody() -> None:
    """The stream ends with what it holds, but no request killed the verifier: not the one whose command was one too
    many, nor those that were computing."""

    async def main() -> None:
        verifier = ScriptedVerifier(TEXT)
        verifier.step_s = 0.005
        link_policy = dataclasses.replace(LINK, max_queued_commands=16)
        target = dataclasses.replace(TARGET, max_losses=1)
        async with rig(text=TEXT, verifiers=[verifier], link=link_policy, target=target) as router:
            asked = request(max_tokens=100)
            running = asyncio.create_task(router.generate(asked))
            await eventually(lambda: router.counter("rounds_total") > 5)
            (link,) = router.targets.links.values()

            def fill(count: int) -> None:
                for _ in range(count):
                    link.send(pb.VerifyCommand(heartbeat=pb.Heartbeat()))

            with pytest.raises(PeerLost):
                fill(17)
            assert (await running).token_ids == router.plain(asked)[0]
            other = router.targets.target(Prefix("other", (1, 2), asked.params), 0)
            fill(16)
            assert len((await other.open()).output_token_ids) == 1
            other.end(aborted=True)
            assert router.counter("request_moves_total", reason="lost") == 2
            await router.nothing_left()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("other", "both"),
    [
        ({"model": "another"}, ("scripted", "another")),
        ({"revision": "r2"}, ("1", "r2")),
        ({"vocab_size": 300}, (str(TEXT.vocab_size), "300")),
        ({"end_token_ids": frozenset({7, 3})}, (str(sorted(TEXT.end_token_ids)), "[3, 7]")),
        ({"context_limit": 4096}, ("8192", "4096")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_verifier_of_another_model_is_refused(other: dict[str, object], both: tuple[str, str]) -> None:
    """Whatever could make another text of a request is compared before use; the refusal says both values."""

    async def main() -> None:
        good, wrong = ScriptedVerifier(TEXT), ScriptedVerifier(TEXT)
        wrong.info = dataclasses.replace(wrong.info, **other)  # type: ignore[arg-type]  # the names are the fields'
        async with rig(text=TEXT, verifiers=[good]) as router, wrong:
            await router.targets.set_addresses([good.address, wrong.address])
            link = router.targets.links[wrong.address]
            await eventually(lambda: link.state is PeerState.REFUSED)
            assert all(value in (link.refusal or "") for value in both)
            await router.generate(request(max_tokens=5))
            assert wrong.counts["open"] == 0

    asyncio.run(main())


def test_a_longer_context_is_admitted_and_changes_no_text() -> None:
    """The pool's limit stays what it was: a request of any length is cut at the same token on every verifier."""

    async def main() -> None:
        first, longer = ScriptedVerifier(TEXT, context_limit=64), ScriptedVerifier(TEXT, context_limit=8192)
        async with rig(text=TEXT, verifiers=[first]) as router, longer:
            await router.targets.set_addresses([first.address, longer.address])
            await eventually(lambda: router.targets.links[longer.address].is_ready)
            assert router.targets.context_limit == 64
            assert router.targets.info == first.info

    asyncio.run(main())


def test_a_move_prefers_equal_numerics() -> None:
    """Equal bits are promised between equal fingerprints: of two ways out the equal one is taken, loaded or not."""

    async def main() -> None:
        origin, unlike = ScriptedVerifier(TEXT), ScriptedVerifier(TEXT, numerics_fingerprint="other")
        equal = ScriptedVerifier(TEXT)
        origin.step_s = equal.step_s = 0.002
        async with rig(text=TEXT, verifiers=[origin]) as router:
            asked = [request(max_tokens=150) for _ in range(3)]
            tasks = [asyncio.create_task(router.generate(one)) for one in asked]
            await eventually(lambda: origin.num_sessions == 3)
            origin.freeze()  # so that the texts are not over before the others are there
            for verifier in (unlike, equal):
                await verifier.start()
            await router.targets.set_addresses([origin.address, unlike.address, equal.address])
            await eventually(lambda: sum(link.is_ready for link in router.targets.links.values()) == 3)
            await origin.kill()
            for one, task in zip(asked, tasks, strict=True):
                assert (await task).token_ids == router.plain(one)[0]
            assert equal.counts["open"] == 3
            assert unlike.counts["open"] == 0
            assert router.counter("request_moves_total", reason="other_numerics") == 0
            await router.nothing_left()
            await unlike.kill()
            await equal.kill()

    asyncio.run(main())


def test_c06_stale_and_doubled_verify_answers_are_dropped_and_counted() -> None:
    """A verify answer of another round or session, or a second one, is counted and never applied."""

    async def main() -> None:
        verifier = ScriptedVerifier(TEXT)
        verifier.double_answers = verifier.stale_answers = True
        drafters = {"good": [ScriptedDrafter(TEXT, spoil=0.3)]}
        async with rig(text=TEXT, verifiers=[verifier], drafters=drafters) as router:
            asked = [request(max_tokens=60) for _ in range(4)]
            outcomes = await asyncio.gather(*(router.generate(one) for one in asked))
            assert [outcome.token_ids for outcome in outcomes] == [router.plain(one)[0] for one in asked]
            stale = router.counter("answers_dropped_total", role="verifier", reason="stale")
            doubled = router.counter("answers_dropped_total", role="verifier", reason="duplicate")
            assert stale >= 2 * router.counter("rounds_total")
            assert doubled > 0
            await router.nothing_left()

    asyncio.run(main())


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
        lambda told: dataclasses.replace(
            told, output_token_ids=(told.output_token_ids[0] ^ 1, *told.output_token_ids[1:])
        ),
        lambda told: dataclasses.replace(told, num_accepted=told.num_accepted - 1, finish_reason=FinishReason.STOP),
        lambda told: dataclasses.replace(told, output_token_ids=told.output_token_ids[: told.num_accepted]),
        lambda told: dataclasses.replace(told, output_token_ids=(*told.output_token_ids[:-1], TEXT.vocab_size)),
    ],
    ids=["an accepted token that was not drafted", "two next tokens", "no next token", "outside the vocabulary"],
)
def test_an_answer_that_cannot_be_right_is_never_committed(lie: Callable[[Verification], Verification]) -> None:
    """The verifier counts as lost, the request is opened anew, and its text is the true one."""

    async def main() -> None:
        drafters = {"good": [ScriptedDrafter(TEXT, spoil=0.0)]}
        async with rig(text=TEXT, verifiers=[OneLie(lie)], drafters=drafters, num_speculative_tokens=3) as router:
            asked = request(max_tokens=30)
            assert (await router.generate(asked)).token_ids == router.plain(asked)[0]
            assert router.counter("request_moves_total", reason="lost") == 1
            await router.nothing_left()

    asyncio.run(main())


def test_failures_of_one_session_stay_there() -> None:
    """Poisoned: an error for that request alone. Forgotten: opened again."""

    async def main() -> None:
        verifier = ScriptedVerifier(TEXT)
        verifier.step_s = 0.001
        async with rig(text=TEXT, verifiers=[verifier]) as router:
            neighbour = request(max_tokens=200)
            running = asyncio.create_task(router.generate(neighbour))
            verifier.poison = {"poisoned"}
            with pytest.raises(RequestPoisoned):
                await router.generate(request(request_id="poisoned"))
            opened = verifier.counts["open"]
            asked = request(request_id="forgotten", max_tokens=60)
            forgotten = asyncio.create_task(router.generate(asked))
            await eventually(lambda: verifier.counts["open"] == opened + 1)
            verifier.forget = {"forgotten"}
            assert (await forgotten).token_ids == router.plain(asked)[0]
            assert router.counter("request_moves_total", reason="unknown_session") == 1
            assert (await running).token_ids == router.plain(neighbour)[0]
            await router.nothing_left()

    asyncio.run(main())


@pytest.mark.parametrize("wait_s", [0.3, GIVE_UP_S])
def test_room_is_waited_for_and_then_it_is_503(wait_s: float) -> None:
    """A request that a verifier has no room for is offered again and again, until the wait is over."""

    async def main() -> None:
        verifier = ScriptedVerifier(TEXT)
        target = dataclasses.replace(TARGET, no_verifier_wait_s=wait_s, capacity_retry_s=0.02)
        async with rig(text=TEXT, verifiers=[verifier], target=target) as router:
            verifier.refuse_capacity = {"late"}
            asked = request(request_id="late")
            served = asyncio.create_task(router.generate(asked))
            if wait_s == GIVE_UP_S:
                await eventually(lambda: verifier.counts["open"] > 2)
                verifier.refuse_capacity = set()
                assert (await served).token_ids == router.plain(asked)[0]
            else:
                with pytest.raises(NoCapacity):
                    await served
            await router.nothing_left()

    asyncio.run(main())


def test_a_verify_that_takes_too_long_is_ended() -> None:
    """Progress elsewhere does not keep one command waiting for ever."""

    async def main() -> None:
        verifier = ScriptedVerifier(TEXT)
        target = dataclasses.replace(TARGET, verify_timeout_s=1.0)
        async with rig(text=TEXT, verifiers=[verifier], target=target) as router:
            running = asyncio.create_task(router.generate(request(max_tokens=100000)))
            await eventually(lambda: router.counter("rounds_total") > 3)
            verifier.freeze()
            with pytest.raises(DeadlineExceeded):
                await running
            verifier.thaw()
            await router.nothing_left()

    asyncio.run(main())


@pytest.mark.parametrize("fault", ["cut", "reset", "partition", "half"])
def test_a_broken_network_is_a_lost_verifier(fault: str) -> None:
    """A closed, reset or silent connection, in one direction or both, moves the request; healing brings it back."""

    async def main() -> None:
        verifiers = two()
        verifiers[0].step_s = 0.02  # still at work when the other one is connected
        for verifier in verifiers:
            await verifier.start()
        async with (
            TcpProxy.to(verifiers[0].address) as proxy,
            rig(text=TEXT, verifiers=[], verifier_addresses=[proxy.address], target=WATCHFUL_TARGET) as router,
        ):
            router.verifiers.extend(verifiers)
            asked = request(max_tokens=150)
            task = asyncio.create_task(router.generate(asked))
            await eventually(lambda: router.counter("rounds_total") > 5)
            await router.targets.set_addresses([proxy.address, verifiers[1].address])
            await eventually(lambda: sum(link.is_ready for link in router.targets.links.values()) == 2)
            match fault:
                case "cut":
                    proxy.cut()
                case "reset":
                    proxy.reset()
                case "partition":
                    proxy.partition()
                case _:
                    proxy.partition("down")
            outcome = await task
            assert outcome.token_ids == router.plain(asked)[0]
            assert router.counter("request_moves_total", reason="lost") == 1
            proxy.heal()
            link = router.targets.links[proxy.address]
            await eventually(lambda: link.state is PeerState.READY)
            await router.nothing_left()
        for verifier in verifiers:
            await verifier.kill()

    asyncio.run(main())
