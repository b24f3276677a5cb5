"""`twinbus serve --azure-names`: any client, unmodified, at the names and ports that it would use in Azure.

In place of lines in /etc/hosts and a redirection of ports, these tests answer `getaddrinfo` for the names.
"""

import asyncio
import os
import shlex
import socket
import ssl
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage, TransportType
from azure.servicebus.aio import ServiceBusClient as AioClient
from azure.servicebus.aio.management import ServiceBusAdministrationClient as AioAdministrationClient
from azure.servicebus.management import ServiceBusAdministrationClient

from tests.cli.running import COMMAND, SOURCE, Serving, invoke, run, serving
from twinbus import connect as native
from twinbus.amqp.frames import AMQP_HEADER
from twinbus.message import Message
from twinbus.namespace import AzurePorts
from twinbus.namespace.serve_plan import AzureNames

SECONDS = 30.0
ONE, OTHER = "contoso.servicebus.windows.net", "contoso-backup.servicebus.windows.net"
NAMES = ("--azure-names", "contoso=primary", "--azure-names", "Contoso-Backup=secondary")
SERVE = ("--json", "--memory", "--namespace", "primary=0", "--namespace", "secondary=0", *NAMES, "--azure-ports", "0,0")


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(*SERVE, "--queue", "orders", "--queue", "secondary:orders") as server:
        yield server


class Azure:
    """Both namespaces as clients of Azure see them."""

    def __init__(self, server: Serving) -> None:
        told = {name: one["azure"] for name, one in server.namespaces.items()}
        self.ports = dict(zip((5671, 443), told["primary"]["ports"], strict=True))
        self.ca = told["primary"]["ca"]
        self.strings = {name: one["connection_strings"][0] for name, one in told.items()}


@pytest.fixture
def azure(server: Serving, monkeypatch: pytest.MonkeyPatch) -> Azure:
    found = Azure(server)
    resolve = socket.getaddrinfo

    def resolved(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if isinstance(name, str) and name.lower().endswith(".servicebus.windows.net"):
            return resolve("127.0.0.1", found.ports[int(port)], *args, **options)
        return resolve(host, port, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    return found


def test_one_certificate_has_both_names_and_the_authority_can_sign_for_no_other(azure: Azure) -> None:
    assert azure.strings["primary"].startswith(f"Endpoint=sb://{ONE}/;")
    assert azure.strings["secondary"].startswith(f"Endpoint=sb://{OTHER}/;")
    folder = Path(azure.ca).parent
    assert not list(folder.glob("azure-ca.key")), "the authority's key is not on the disk"
    assert stat.S_IMODE((folder / "azure-server.key").stat().st_mode) == 0o600
    trust = ssl.create_default_context(cafile=azure.ca)
    for name in (ONE, OTHER):
        with (
            socket.create_connection(("127.0.0.1", azure.ports[443])) as raw,
            trust.wrap_socket(raw, server_hostname=name) as made,
        ):
            certificate = made.getpeercert()
            assert certificate is not None
            assert set(certificate["subjectAltName"]) == {("DNS", ONE), ("DNS", OTHER)}


@pytest.mark.parametrize(
    "kind", [TransportType.Amqp, pytest.param(TransportType.AmqpOverWebsocket, marks=pytest.mark.thorough)]
)
async def test_n1_the_name_chooses_the_namespace_for_every_client(azure: Azure, kind: TransportType) -> None:
    options: dict[str, Any] = {"connection_verify": azure.ca, "transport_type": kind, "retry_total": 0}

    def sync_sdk(side: str) -> None:
        client = ServiceBusClient.from_connection_string(azure.strings[side], **options)
        with client, client.get_queue_sender("orders") as sender:
            sender.send_messages(ServiceBusMessage(f"sync {side}"))

    async def aio_sdk(side: str) -> None:
        client = AioClient.from_connection_string(azure.strings[side], **options)
        async with client, client.get_queue_sender("orders") as sender:
            await sender.send_messages(ServiceBusMessage(f"aio {side}"))

    network = native.NetworkOptions(transport_type=native.TransportType[kind.name], connection_verify=azure.ca)
    async with asyncio.timeout(SECONDS):
        await asyncio.gather(
            *(asyncio.to_thread(sync_sdk, side) for side in azure.strings), *map(aio_sdk, azure.strings)
        )
        for side, text in azure.strings.items():
            async with native.connect(text, network=network, timeout=SECONDS) as bus:
                await (await bus.sender("orders")).send([Message(f"ours {side}".encode())])
                receiver = await bus.receiver("orders")
                found: list[native.ReceivedMessage] = []
                while len(found) < 3:
                    found += await receiver.receive(3, SECONDS)
                await receiver.complete(found)
                assert sorted(bytes(one.body).decode() for one in found) == [
                    f"{who} {side}" for who in ("aio", "ours", "sync")
                ]


async def test_n1_the_host_header_chooses_the_namespace_of_the_management_api(azure: Azure) -> None:
    queue = "only-in-the-secondary"
    keywords: dict[str, Any] = {"connection_verify": azure.ca, "use_env_settings": False, "retry_total": 0}
    with ServiceBusAdministrationClient.from_connection_string(azure.strings["secondary"], **keywords) as admin:
        await asyncio.to_thread(admin.create_queue, queue)
    found = {}
    for side, text in azure.strings.items():
        async with AioAdministrationClient.from_connection_string(text, **keywords) as client:
            found[side] = {one.name async for one in client.list_queues()}
    assert queue in found["secondary"]
    assert queue not in found["primary"]


async def refused_by_name(azure: Azure) -> None:
    """Connect under a name that is not the server's, over AMQP and WebSocket. Both are refused with the known names."""
    foreign = azure.strings["primary"].replace(ONE, "fabrikam.servicebus.windows.net")
    trust = ssl.create_default_context(cafile=azure.ca)
    trust.check_hostname = False
    for kind in native.TransportType:
        network = native.NetworkOptions(transport_type=kind)
        async with native.connect(foreign, tls=trust, network=network, timeout=SECONDS) as bus:
            with pytest.raises(native.ServiceBusError, match=rf"fabrikam\.servicebus\.windows\.net.*{ONE} \(primary\)"):
                await bus.sender("orders")


async def test_x3_an_unknown_name_is_refused_by_name(azure: Azure) -> None:
    await refused_by_name(azure)


async def test_x1_what_a_peer_sends_before_its_open_is_held_within_its_limit(azure: Azure, server: Serving) -> None:
    trust = ssl.create_default_context(cafile=azure.ca)
    half = AMQP_HEADER + (60_000).to_bytes(4) + b"\2\0\0\0" + bytes(50_000)
    async with asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", azure.ports[5671], ssl=trust, server_hostname=ONE)
        writer.write(half)
        await reader.readexactly(len(AMQP_HEADER))
        figures = f"http://localhost:{server.namespaces['primary']['port']}/metrics"
        held = 0.0
        while held < 50_000:
            lines = (await asyncio.to_thread(lambda: urlopen(figures).read().decode())).splitlines()
            (line,) = (one for one in lines if one.startswith('twinbus_held_bytes{authenticated="no"}'))
            held = float(line.split()[-1])
        writer.write(bytes(20_000))  # the frame is complete, and no open
        assert b"amqp:" in await reader.read()
    writer.transport.abort()


@pytest.mark.parametrize("port", [5671, 443])
def test_x3_the_ports_take_tls_only(azure: Azure, port: int) -> None:
    with socket.create_connection(("127.0.0.1", azure.ports[port]), timeout=SECONDS) as raw:
        raw.sendall(b"AMQP\x00\x01\x00\x00")
        assert raw.recv(1) == b""


@pytest.mark.thorough
async def test_n4_a_fault_of_one_namespace_leaves_the_other_alone(azure: Azure, server: Serving) -> None:
    primary = server.namespaces["primary"]["connection_string"]
    assert run("fault", "set", "refuse", TWINBUS_CONNECTION_STRING=primary).returncode == 0
    try:
        network = native.NetworkOptions(connection_verify=azure.ca)
        async with native.connect(azure.strings["secondary"], network=network, timeout=SECONDS) as bus:
            await bus.sender("orders")
        async with native.connect(azure.strings["primary"], network=network, timeout=SECONDS) as bus:
            with pytest.raises(native.ServiceBusError):
                await bus.sender("orders")
    finally:
        assert run("fault", "clear", TWINBUS_CONNECTION_STRING=primary).returncode == 0


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["refuse", "black-hole"])
async def test_n4_no_fault_hits_a_peer_that_named_no_namespace(azure: Azure, server: Serving, kind: str) -> None:
    first = server.namespaces["primary"]["connection_string"]
    assert run("fault", "set", kind, TWINBUS_CONNECTION_STRING=first).returncode == 0
    try:
        await refused_by_name(azure)
    finally:
        assert run("fault", "clear", TWINBUS_CONNECTION_STRING=first).returncode == 0


@pytest.mark.thorough
def test_the_lines_to_set_up_a_machine_are_printed_and_nothing_is_changed() -> None:
    before = Path("/etc/hosts").read_bytes()
    with serving("--memory", "--namespace", "primary=0", *NAMES[:2], "--azure-ports", "0,0") as server:
        for part in (
            f"127.0.0.1 {ONE}",
            f"Endpoint=sb://{ONE}/;SharedAccessKeyName=RootManageSharedAccessKey;SharedAccessKey=SAS_KEY_VALUE",
            "update-ca-certificates",
            "REQUESTS_CA_BUNDLE",
            "NODE_EXTRA_CA_CERTS",
            "keytool -importcert",
            "--dport 443 -j REDIRECT --to-ports",
        ):
            assert part in server.printed
    assert Path("/etc/hosts").read_bytes() == before


def set_up(host: str, ports: tuple[int, int], folder: Path) -> list[str]:
    """Return the printed lines for a server that listens at this address."""
    made = AzurePorts(AzureNames({ONE: "primary"}, *ports), host, folder)
    made.close()
    return made.set_up_lines()


def test_a_server_of_this_machine_alone_needs_its_loopback_address_only(tmp_path: Path) -> None:
    lines = set_up("localhost", (0, 0), tmp_path)
    assert f"  127.0.0.1 {ONE}" in lines
    assert [line.split(" -A ")[1].split()[0] for line in lines if "iptables" in line] == ["OUTPUT", "OUTPUT"]
    assert not [line for line in lines if "ADDRESS-OF-THIS-MACHINE" in line]


def test_a_server_for_other_machines_names_their_address_and_redirects_what_comes_from_them(tmp_path: Path) -> None:
    lines = set_up("0.0.0.0", (0, 0), tmp_path)  # noqa: S104 - the ports are closed at once
    here, there = lines.index(f"  127.0.0.1 {ONE}"), lines.index(f"  ADDRESS-OF-THIS-MACHINE {ONE}")
    assert "this machine" in lines[here - 1]
    assert "each other machine or container" in lines[there - 1]
    chains = [line.split(" -A ")[1].split()[0] for line in lines if "iptables" in line]
    assert chains == ["OUTPUT", "OUTPUT", "PREROUTING", "PREROUTING"]


def test_a_server_on_another_loopback_address_is_reached_there(tmp_path: Path) -> None:
    lines = set_up("127.0.0.5", (0, 0), tmp_path)
    assert f"  127.0.0.5 {ONE}" in lines
    rules = [line for line in lines if "iptables" in line]
    assert [" -A OUTPUT " in rule and "DNAT --to-destination 127.0.0.5:" in rule for rule in rules] == [True, True]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_a_server_on_all_addresses_of_both_kinds_redirects_both(tmp_path: Path) -> None:
    lines = set_up("::", (0, 0), tmp_path)
    assert f"  127.0.0.1 {ONE}" in lines
    rules = [(line.split()[1], line.split(" -A ")[1].split()[0]) for line in lines if "tables -t nat" in line]
    here, there = [("iptables", "OUTPUT")] * 2, [(tool, "PREROUTING") for tool in ("iptables", "ip6tables")] * 2
    assert sorted(rules) == sorted([*here, *there])


def test_the_lines_to_trust_the_ca_can_be_pasted(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    lines = set_up("localhost", (0, 0), folder)
    for word in ("cp", "-file"):
        (command,) = [shlex.split(line.partition(":")[2]) for line in lines if f" {word} " in line]
        assert command[command.index(word) + 1] == str(folder / "azure-ca.pem")
    assert f"  Node:    NODE_EXTRA_CA_CERTS='{folder}/azure-ca.pem'" in lines


def test_the_ports_of_clients_need_no_redirection(tmp_path: Path) -> None:
    ports = AzurePorts(AzureNames({ONE: "primary"}, 0, 0), "127.0.0.1", tmp_path)
    ports.close()
    ports.ports = (5671, 443)
    assert not [line for line in ports.set_up_lines() if "iptables" in line]


@pytest.mark.thorough
def test_a_new_ca_is_named_so_that_the_earlier_one_is_removed_from_the_stores(tmp_path: Path) -> None:
    data = ("--data", str(tmp_path / "data"), "--namespace", "primary=0", "--namespace", "secondary=0")
    told = []
    for names in (NAMES[:2], NAMES[:2], NAMES):
        with serving(*data, *names, "--azure-ports", "0,0") as server:
            told.append("The CA is new" in server.printed)
    assert told == [False, False, True]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--azure-names", "contoso"], "there is no namespace ''"),
        (["--azure-names", "contoso=third"], "there is no namespace 'third'"),
        (["--azure-names", "con toso=primary"], "is not a name of a namespace in Azure"),
        (["--azure-names", "a=primary", "--azure-names", "A=secondary"], "is given to primary and to secondary"),
        (["--azure-names", "a=primary", "--azure-ports", "5671"], "is not two ports"),
        (["--azure-ports", "1,2"], "--azure-ports needs --azure-names"),
    ],
)
def test_names_that_cannot_be_used_are_wrong_usage(options: list[str], told: str) -> None:
    done = invoke("serve", "--memory", *options)
    assert done.exit_code == 2
    assert told in done.output


@pytest.mark.thorough
def test_where_ports_below_1024_are_not_allowed_it_says_what_to_do() -> None:
    """As a user without rights: `setpriv` drops those of root."""
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"]
    shown = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
    if int(shown.read_text()) <= 443:
        pytest.skip("this machine allows port 443 to everybody")
    program = (
        "from pathlib import Path\n"
        "from twinbus.errors import OperatorError\n"
        "from twinbus.namespace.azure_ports import AzurePorts\n"
        "from twinbus.namespace.serve_plan import AzureNames\n"
        "try:\n    AzurePorts(AzureNames({'a.servicebus.windows.net': 'primary'}, 0, 443), '127.0.0.1', Path('x'))\n"
        "except OperatorError as error:\n    print(error.text, error.hint)\n"
    )
    prefix = command if os.geteuid() == 0 else []
    done = subprocess.run(
        [*prefix, COMMAND[0], "-c", program],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Ports below 1024 are for root" in done.stdout, done.stderr
    assert "net.ipv4.ip_unprivileged_port_start=443" in done.stdout
    assert "--azure-ports" in done.stdout
