"""Namespaces for tests: a test can start, kill and restart them, and they leave nothing behind."""

import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from twinbus.namespace import AuthorizationRule, Claim, NamespaceRequestError, find_free_port, find_free_ports
from twinbus.testing import LocalNamespace, LocalNamespaceError, LocalNamespaces

SOURCE = Path(__file__).resolve().parents[2] / "src"
QUEUE = {"namespaces": [{"name": "primary", "queues": [{"name": "orders"}]}]}


@pytest.fixture(scope="module")
def namespace() -> Iterator[LocalNamespace]:
    with LocalNamespace() as namespace:
        yield namespace


def ended(pid: int, seconds: float = 20.0) -> bool:
    """Wait until a process that is not our child is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(descriptor)


def test_it_runs_in_a_process_of_its_own_and_tells_how_to_reach_it(namespace: LocalNamespace) -> None:
    assert namespace.pid != os.getpid()
    assert namespace.running
    assert f"sb://localhost:{namespace.port};" in namespace.connection_string
    assert namespace.ca.is_file()
    assert namespace.data is not None
    assert (namespace.data / "primary.sqlite").is_file()
    assert "listening" in namespace.log.read_text()


def test_after_a_kill_it_comes_back_on_the_same_port_with_the_same_data(namespace: LocalNamespace) -> None:
    port, pid, ca = namespace.port, namespace.pid, namespace.ca.read_bytes()
    namespace.kill()
    assert ended(pid)
    assert not namespace.running
    namespace.start()
    assert namespace.pid != pid
    assert (namespace.port, namespace.ca.read_bytes()) == (port, ca)


def test_a_restart_drains_first(namespace: LocalNamespace) -> None:
    port = namespace.port
    namespace.restart()
    assert namespace.port == port
    assert namespace.stop() == 0
    namespace.restart()
    assert namespace.running


def test_faults_are_set_listed_and_cleared_and_do_not_survive_a_restart(namespace: LocalNamespace) -> None:
    made = namespace.faults.set("delay", entity="orders", delay=0.5, points=["send"], seed=3)
    assert [fault["id"] for fault in namespace.faults.list()] == [made["id"]]
    assert namespace.faults.clear(made["id"]) == 1
    assert namespace.faults.clear(made["id"]) == 0
    namespace.faults.set("server-busy")
    namespace.restart()
    assert namespace.faults.list() == []


def test_a_fault_that_makes_no_sense_is_refused(namespace: LocalNamespace) -> None:
    with pytest.raises(NamespaceRequestError, match="choose from refuse") as refused:
        namespace.faults.set("flood")
    assert refused.value.status == 400


def test_a_crash_is_waited_for(namespace: LocalNamespace) -> None:
    assert namespace.faults.set("crash") == {}
    assert namespace.wait() == -signal.SIGKILL
    namespace.start()


def test_starting_it_twice_is_an_error_and_harms_nothing(namespace: LocalNamespace) -> None:
    pid = namespace.pid
    with pytest.raises(LocalNamespaceError, match="running already"):
        namespace.start()
    assert namespace.pid == pid
    assert namespace.running


def test_a_directory_of_its_own_goes_at_the_end_and_a_given_one_stays(tmp_path: Path) -> None:
    given = tmp_path / "given"
    with LocalNamespace(data=given) as namespace:
        own = namespace.log.parent
        assert own.is_dir()
    assert not own.exists()
    assert (given / "primary.sqlite").is_file()


def test_in_memory_nothing_is_kept_and_nothing_is_left_behind_even_by_a_kill() -> None:
    with LocalNamespace("passing", memory=True) as namespace:
        assert namespace.data is None
        assert namespace.ca.is_file()
        own = namespace.log.parent
        assert own in namespace.ca.parents
        namespace.kill()
    assert not own.exists()


def test_a_server_that_cannot_start_raises_with_what_it_said() -> None:
    with (
        pytest.raises(LocalNamespaceError) as failed,
        LocalNamespace(config={"namespaces": [{"name": "primary", "x": 1}]}),
    ):
        pass
    assert "exit code 1" in str(failed.value)
    assert "namespaces[0].x: is not known here" in str(failed.value)


def test_rules_replace_the_well_known_key() -> None:
    rule = AuthorizationRule("mine", "a-key-of-my-own", "", frozenset({Claim.MANAGE}))
    with LocalNamespace(memory=True, rules=[rule]) as namespace:
        assert "SharedAccessKeyName=mine;SharedAccessKey=a-key-of-my-own;" in namespace.connection_string
        assert namespace.faults.list() == []


def test_what_excludes_each_other_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data and memory"):
        LocalNamespace(data=tmp_path, memory=True)
    with pytest.raises(ValueError, match="config and rules"):
        LocalNamespace(config=QUEUE, rules=[AuthorizationRule("a", "b", "", frozenset({Claim.SEND}))])


def test_before_the_start_there_is_nothing_to_reach() -> None:
    namespace = LocalNamespace()
    with pytest.raises(LocalNamespaceError, match="not started"):
        _ = namespace.connection_string
    namespace.close()


def test_the_server_ends_with_a_parent_that_was_killed() -> None:
    script = """
        import time
        from twinbus.testing import LocalNamespace
        namespace = LocalNamespace(memory=True).start()
        print(namespace.pid, flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        server = int(parent.stdout.readline())
        parent.kill()
    assert ended(server)


def test_importing_the_package_does_not_import_pytest() -> None:
    code = "import sys, twinbus.testing; sys.exit('pytest' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SOURCE)}, check=False
        ).returncode
        == 0
    )


def test_a_port_is_below_those_of_outgoing_connections() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(find_free_port() < first for _ in range(20))


def test_free_ports_that_are_chosen_together_are_different() -> None:
    # If they were drawn one by one, two of so many ports would almost certainly be the same.
    ports = find_free_ports(2000)
    assert len(set(ports)) == 2000
    assert not set(find_free_ports(20, ports)) & set(ports)


def test_a_pair_is_one_process_with_two_namespaces() -> None:
    with LocalNamespaces("primary", "secondary", memory=True) as pair:
        primary, secondary = pair
        assert (primary.name, secondary.name) == ("primary", "secondary")
        assert pair["primary"].port != pair["secondary"].port
        primary.faults.set("server-busy")
        assert secondary.faults.list() == []


def test_the_fixtures_give_running_namespaces(
    twinbus_namespace: LocalNamespace, twinbus_namespace_pair: LocalNamespaces
) -> None:
    assert twinbus_namespace.faults.list() == []
    assert [one.faults.list() for one in twinbus_namespace_pair] == [[], []]
