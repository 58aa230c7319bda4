"""Child processes: awaited, reported, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moot.core.errors import DeadlineExceeded
from moot.runtime.supervisor import Child, ChildFailed, Supervisor
from tests.waiting import GIVE_UP_S, until

READY = "import sys, json, pathlib, os, time, signal; p = pathlib.Path(sys.argv[1]); t = p.with_suffix('.tmp');"
SERVE = READY + "t.write_text(json.dumps({'port': 7, 'nice': os.nice(0), 'x': os.environ.get('X')})); t.rename(p);"
FOREVER = "time.sleep(600)"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN);"


def spawn(supervisor: Supervisor, script: str, name: str = "child", **options: object) -> Child:
    return supervisor.spawn(name, [sys.executable, "-c", script, "{ready_file}"], **options)  # type: ignore[arg-type]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_child_is_ready_when_it_says_so(tmp_path: Path) -> None:
    """Its ready file carries its port; environment and niceness are those asked for."""
    with Supervisor(tmp_path) as supervisor:
        children = [
            spawn(supervisor, SERVE + FOREVER, "a", environ={"X": "1"}, niceness=3),
            spawn(supervisor, SERVE + FOREVER, "b"),
        ]
        supervisor.wait_ready(children, GIVE_UP_S)
        assert children[0].port == 7
        assert children[0].facts["nice"] - children[1].facts["nice"] == 3
        assert children[0].facts["x"] == "1"
        pids = [child.process.pid for child in children]
    assert not any(map(is_alive, pids))


def test_settings_of_the_parent_do_not_reach_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config file of `moot serve` has keys that are errors for a service, and its own settings are not a service's
    unless they are passed on."""
    monkeypatch.setenv("MOOT_CONFIG", "x.yaml")
    monkeypatch.setenv("MOOT_MODEL", "mine")
    scripts = [SERVE.replace("'X'", repr(name)) + FOREVER for name in ("MOOT_CONFIG", "MOOT_MODEL", "MOOT_MODEL")]
    with Supervisor(tmp_path, own_variables=["MOOT_MODEL"]) as supervisor:
        environs = ({}, {}, {"MOOT_MODEL": "yours"})
        children = [
            spawn(supervisor, script, str(number), environ=environ)
            for number, (script, environ) in enumerate(zip(scripts, environs, strict=True))
        ]
        supervisor.wait_ready(children, GIVE_UP_S)
        assert [child.facts["x"] for child in children] == [None, None, "yours"]


def test_a_child_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    """Nobody has to look for the reason, and nobody waits for a process that is gone."""
    with (
        Supervisor(tmp_path) as supervisor,
        pytest.raises(ChildFailed, match=r"broken ended with status 3(.|\n)*no such model"),
    ):
        supervisor.wait_ready([spawn(supervisor, "print('no such model', flush=True); exit(3)", "broken")], GIVE_UP_S)


def test_a_child_that_never_gets_ready_has_a_deadline(tmp_path: Path) -> None:
    """Every wait has a bound, and the message names who is late."""
    with Supervisor(tmp_path) as supervisor, pytest.raises(DeadlineExceeded, match="slow"):
        supervisor.wait_ready([spawn(supervisor, "import time;" + FOREVER, "slow")], 0.3)


def test_an_ended_child_is_reported_once_and_not_restarted(tmp_path: Path) -> None:
    """The system goes on without a drafter, and says so; without an essential part it ends."""
    told: list[str] = []
    with Supervisor(tmp_path, say=told.append) as supervisor:
        extra = spawn(supervisor, SERVE + FOREVER, "extra", essential=False)
        vital = spawn(supervisor, SERVE + FOREVER, "vital")
        supervisor.wait_ready([extra, vital], GIVE_UP_S)
        supervisor.check()
        assert told == []
        extra.process.kill()
        extra.process.wait()
        supervisor.check()
        supervisor.check()
        assert len(told) == 1
        assert "extra ended with status -9" in told[0]
        vital.process.kill()
        vital.process.wait()
        with pytest.raises(ChildFailed, match="vital"):
            supervisor.check()


def test_a_replaced_child_starts_again_after_longer_and_longer_pauses(tmp_path: Path) -> None:
    """It ends again and again: each pause is twice the last, up to a bound. One that served for long starts at once."""
    told: list[str] = []
    with Supervisor(tmp_path, say=told.append) as supervisor:
        child = spawn(supervisor, SERVE + FOREVER)
        child.replaced = True
        supervisor.wait_ready([child], GIVE_UP_S)
        assert child.ready_at is not None
        now = child.ready_at
        pauses: list[float] = []

        def end() -> int:
            pid = child.process.pid
            child.process.kill()
            child.process.wait()
            supervisor.check(now)
            assert child.facts == {}
            return pid

        for _ in range(8):
            pid = end()
            pauses.append(float(told[-1].split()[-2]))
            supervisor.check(now + 0.9 * pauses[-1])
            assert child.process.pid == pid
            now += pauses[-1]
            supervisor.check(now)
            assert child.process.pid != pid
        assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30]
        supervisor.wait_ready([child], GIVE_UP_S)
        now = child.ready_at + 61
        end()
        assert told[-1].endswith("starts again in 0 s")
        supervisor.check(now)
        assert child.status is None
        assert is_alive(child.process.pid)
        assert len(supervisor.children) == 1
        last = child.process.pid
    assert not is_alive(last)


def test_a_child_without_a_log_writes_where_its_parent_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Both its outputs arrive, and the error that it ended with says that its words stand above."""
    script = READY + "print('out', flush=True); print('err', file=sys.stderr); exit(3)"
    with Supervisor(tmp_path) as supervisor, pytest.raises(ChildFailed, match="status 3 before it served; its last"):
        supervisor.wait_ready([spawn(supervisor, script, logged=False)], GIVE_UP_S)
    out, err = capfd.readouterr()
    assert (out, err) == ("out\n", "err\n")
    assert list(tmp_path.iterdir()) == []


def test_stop_is_orderly_and_ends_even_the_stubborn(tmp_path: Path) -> None:
    """The last started ends first; who ignores SIGTERM is killed when the grace is over."""
    told: list[str] = []
    log = tmp_path / "order"
    note = f"signal.signal(signal.SIGTERM, lambda *a: (open({str(log)!r}, 'a').write(NAME), sys.exit(0)));"
    with Supervisor(tmp_path, grace_s=3.0, say=told.append) as supervisor:
        children = [
            spawn(supervisor, READY + note.replace("NAME", repr(name)) + SERVE + FOREVER, name) for name in "ab"
        ]
        children.append(spawn(supervisor, READY + STUBBORN + SERVE + FOREVER, "stubborn"))
        supervisor.wait_ready(children, GIVE_UP_S)
        stubborn = children[-1].process
    assert sorted(log.read_text()) == ["a", "b"]
    assert stubborn.returncode == -signal.SIGKILL
    assert told == ["stubborn did not end in 3 s and is killed"]


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal of a parent exists on Linux only")
def test_children_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    """A parent that is killed cannot clean up: the system does it."""
    script = (
        "import sys, time; from pathlib import Path; from moot.runtime.supervisor import Supervisor;"
        f"s = Supervisor(Path({str(tmp_path)!r}));"
        f"c = s.spawn('c', [sys.executable, '-c', {SERVE + FOREVER!r}, '{{ready_file}}']);"
        f"s.wait_ready([c], {GIVE_UP_S}); print(c.process.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(GIVE_UP_S)
    parent.stdout.close()
    until(lambda: not is_alive(pid), "the child has ended")


def test_children_start_beside_grpc(tmp_path: Path) -> None:
    """Nothing of ours runs between fork and exec: with gRPC's threads at work that crashed one child in four."""
    script = (
        "import asyncio, pathlib, sys, grpc, grpc.aio\n"
        "from moot.runtime.supervisor import Supervisor\n"
        "async def echo(request, context):\n"
        "    return request\n"
        "async def call(port):\n"
        "    async with grpc.aio.insecure_channel(f'127.0.0.1:{port}') as channel:\n"
        "        while True:\n"
        "            await channel.unary_unary('/a/b')(b'')\n"
        "def start():\n"
        "    with Supervisor(pathlib.Path(sys.argv[1])) as supervisor:\n"
        "        children = [supervisor.spawn(str(number), ['true']) for number in range(100)]\n"
        "        print(*{child.process.wait(60) for child in children})\n"
        "async def main():\n"
        "    server = grpc.aio.server()\n"
        "    handler = grpc.unary_unary_rpc_method_handler(echo)\n"
        "    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler('a', {'b': handler})])\n"
        "    port = server.add_insecure_port('127.0.0.1:0')\n"
        "    await server.start()\n"
        "    callers = [asyncio.create_task(call(port)) for _ in range(4)]\n"
        "    await asyncio.to_thread(start)\n"
        "    for caller in callers:\n"
        "        caller.cancel()\n"
        "    await asyncio.wait(callers)\n"
        "    await server.stop(None)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=GIVE_UP_S, check=False
    )
    assert done.stdout == "0\n", done.stderr
