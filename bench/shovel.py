"""A RabbitMQ shovel for comparison: in a broker of the benchmark, with its own folder, ports, node name and epmd.

A broker that the machine runs as a service is not used. All requests go through `rabbitmqctl eval`, and time is
measured inside the broker, so that no client uses CPU time of the broker.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from bench.measuring import ProcessMeter

_BIN: Final = Path("/usr/lib/rabbitmq/bin")
_START_SECONDS: Final = 60.0
_QUEUES: Final = """
Name = fun(Kind, Text) -> rabbit_misc:r(<<"/">>, Kind, Text) end,
Queue = fun(Text) -> {ok, Found} = rabbit_amqqueue:lookup(Name(queue, Text)), Found end,
Held = fun(Text) -> [{messages, Count}] = rabbit_amqqueue:info(Queue(Text), [messages]), Count end,
Until = fun Until(Text, Count) -> case Held(Text) of Count -> ok; _ -> timer:sleep(20), Until(Text, Count) end end,
"""
# Persistent messages into a durable queue, as a publisher's would be; the last are on disk a moment later.
_FILL: Final = """
Declare = fun(Text) -> rabbit_amqqueue:declare(Name(queue, Text), true, false, [], none, <<"bench">>) end,
Declare(<<"backlog">>), Declare(<<"orders">>),
rabbit_amqqueue:purge(Queue(<<"orders">>)),
lists:foreach(fun(_) ->
    rabbit_basic:publish(Name(exchange, <<>>), <<"backlog">>, [{delivery_mode, 2}], crypto:strong_rand_bytes(%(size)d))
end, lists:seq(1, %(count)d)),
Until(<<"backlog">>, %(count)d), timer:sleep(500).
"""
# The shovel runs in the broker that has the backlog, and sends to the other broker over TCP.
_DRAIN: Final = """
Shovel = [{<<"src-protocol">>, <<"amqp091">>}, {<<"src-uri">>, <<"amqp://">>}, {<<"src-queue">>, <<"backlog">>},
    {<<"dest-protocol">>, <<"amqp091">>}, {<<"dest-uri">>, <<"amqp://127.0.0.1:%(port)d">>},
    {<<"dest-queue">>, <<"orders">>}, {<<"ack-mode">>, <<"on-confirm">>}, {<<"src-prefetch-count">>, 1000}],
Began = erlang:monotonic_time(microsecond),
ok = rabbit_runtime_parameters:set_any(<<"/">>, <<"shovel">>, <<"home">>, Shovel, none),
Until(<<"backlog">>, 0),
Took = erlang:monotonic_time(microsecond) - Began,
rabbit_runtime_parameters:clear_any(<<"/">>, <<"shovel">>, <<"home">>, <<"bench">>),
io_lib:format("~b ~b", [Took, Held(<<"orders">>)]).
"""


def installed() -> bool:
    return (_BIN / "rabbitmq-server").exists() and shutil.which("epmd") is not None


class Shovel:
    """A broker, which is ready when the constructor returns."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        epmd, self._port, distribution = (_free_port() for _ in range(3))
        self._node = f"twinbus-bench-{os.getpid()}@localhost"
        for name, text in (("plugins", "[rabbitmq_shovel]."), ("env.conf", ""), ("rabbitmq.conf", "")):
            (folder / name).write_text(text)
        self._environment = {
            **os.environ,
            "HOME": str(folder),
            "ERL_EPMD_PORT": str(epmd),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": self._node,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self._port),
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_LOGS": str(folder / "log" / "broker.log"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "env.conf"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(folder / "generated"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
        }
        self._epmd = subprocess.Popen(["epmd", "-port", str(epmd)], env=self._environment)
        with (folder / "output").open("wb") as output:
            self._broker = subprocess.Popen(
                [_BIN / "rabbitmq-server"], env=self._environment, stdout=output, stderr=output
            )
        try:
            self._wait()
            self.meter = ProcessMeter(int((folder / "pid").read_text()))
        except BaseException:
            self.stop()
            raise

    def fill(self, count: int, size: int) -> None:
        self._ask(_QUEUES + _FILL % {"count": count, "size": size})

    def drain(self, count: int) -> float:
        """Seconds from the shovel's beginning until its source is empty, every message confirmed and acknowledged."""
        took, arrived = self._ask(_QUEUES + _DRAIN % {"port": self._port}).strip().strip('"').split()
        if int(arrived) != count:
            raise RuntimeError(f"the shovel moved {arrived} of {count} messages")
        return int(took) / 1e6

    def stop(self) -> None:
        if self._broker.poll() is None:
            self._broker.terminate()
        self._broker.wait()
        self._epmd.terminate()
        self._epmd.wait()

    def _wait(self) -> None:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end and self._broker.poll() is None:
            try:
                if self._ask("rabbit:is_running().").strip() == "true":
                    return
            except subprocess.CalledProcessError:
                time.sleep(0.5)
        raise RuntimeError(f"RabbitMQ did not start; see {self._environment['RABBITMQ_LOG_BASE']}")

    def _ask(self, expression: str) -> str:
        command = [str(_BIN / "rabbitmqctl"), "--node", self._node, "--timeout", "3600", "--quiet", "eval", expression]
        return subprocess.run(command, env=self._environment, check=True, capture_output=True, text=True).stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
