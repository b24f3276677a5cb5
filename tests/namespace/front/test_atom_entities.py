"""ATOM entries: read as each client writes them, and written so that each client can read them."""

import itertools
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from azure.core.pipeline.transport import HttpTransport
from azure.servicebus.management import (
    AccessRights,
    ServiceBusAdministrationClient,
    SqlRuleFilter,
    TrueRuleFilter,
)
from azure.servicebus.management import AuthorizationRule as SdkRule
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.namespace.front import recorded_requests
from twinbus.namespace.engine.descriptions import (
    AuthorizationRule,
    Claim,
    CorrelationFilter,
    Description,
    EntityInfo,
    EntityMessageCounts,
    EntityStatus,
    QueueDescription,
    RuleDescription,
    RuleFilter,
    SqlAction,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
    TrueFilter,
    path_of_address,
)
from twinbus.namespace.engine.entity_properties import PropertyType, properties_of
from twinbus.namespace.front.atom_entities import (
    EntityEntry,
    EntryUrls,
    FeedPage,
    read_entry,
    render_entities,
    render_entity,
    render_namespace,
    render_rule,
    render_rules,
)
from twinbus.namespace.front.atom_xml import ATOM, SERVICE_BUS, AtomError, render_error

PLACE = EntryUrls("https://localhost:5672", "2021-05", "primary")
BOOK = {"a": ATOM, "s": SERVICE_BUS, "c": "http://schemas.microsoft.com/netservices/2011/06/servicebus"}


def read(body: bytes) -> EntityEntry:
    keys = (f"new-{number}" for number in itertools.count())
    entry = read_entry(body, new_key=lambda: next(keys))
    assert isinstance(entry, EntityEntry)
    return entry


def queue(inner: str) -> EntityEntry:
    return read(recorded_requests.python("QueueDescription", inner))


class Wire(HttpTransport[Any, Any]):
    """Records the request that a client would send."""

    bodies: list[bytes]

    def __init__(self) -> None:
        self.bodies = []

    def send(self, request: Any, **_: Any) -> Any:
        self.bodies.append(request.body)
        raise InterruptedError

    def open(self) -> None: ...
    def close(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def client(wire: Wire) -> Iterator[ServiceBusAdministrationClient]:
    text = "Endpoint=sb://localhost;SharedAccessKeyName=n;SharedAccessKey=k"
    with ServiceBusAdministrationClient.from_connection_string(text, transport=wire) as made:
        yield made


def test_the_python_client_s_queue_is_read(wire: Wire, client: ServiceBusAdministrationClient) -> None:
    rule = SdkRule(
        type="SharedAccessAuthorizationRule",
        rights=[AccessRights.SEND, AccessRights.LISTEN],
        key_name="k",
        primary_key="p",
        secondary_key="s",
    )
    with pytest.raises(InterruptedError):
        client.create_queue(
            "q",
            authorization_rules=[rule],
            lock_duration="PT30S",
            max_delivery_count=5,
            requires_session=True,
            forward_to="other",
            user_metadata="x&<y>",
            max_message_size_in_kilobytes=1024,
        )
    entry = read(wire.bodies[0])
    assert entry.kind is QueueDescription
    assert entry.fields == {
        "lock_duration": 30_000,
        "max_delivery_count": 5,
        "requires_session": True,
        "forward_to": "sb://localhost/other",
        "user_metadata": "x&<y>",
        "authorization_rules": (AuthorizationRule("k", "p", "s", frozenset({Claim.SEND, Claim.LISTEN})),),
    }
    assert entry.max_message_kilobytes == 1024


def test_entities_of_the_python_client_without_properties_are_read(
    wire: Wire, client: ServiceBusAdministrationClient
) -> None:
    for create in (client.create_queue, client.create_topic):
        with pytest.raises(InterruptedError):
            create("q")
    with pytest.raises(InterruptedError):
        client.create_subscription("t", "s")
    assert [read(body) for body in wire.bodies] == [
        EntityEntry(QueueDescription, None),
        EntityEntry(TopicDescription, None),
        EntityEntry(SubscriptionDescription, None),
    ]


@pytest.mark.parametrize(
    ("rule_filter", "read_as"), [(TrueRuleFilter(), TrueFilter()), (SqlRuleFilter("a = 1"), SqlFilter("a = 1"))]
)
def test_the_python_client_s_rules_are_read(
    wire: Wire, client: ServiceBusAdministrationClient, rule_filter: TrueRuleFilter | SqlRuleFilter, read_as: RuleFilter
) -> None:
    with pytest.raises(InterruptedError):
        client.create_rule("t", "s", "mine", filter=rule_filter)
    assert read_entry(wire.bodies[0], new_key=str) == RuleDescription("mine", read_as)


def test_the_javascript_client_s_bodies_are_read() -> None:
    entry = read(recorded_requests.JAVASCRIPT_QUEUE)
    assert entry.fields == {
        "lock_duration": 30_000,
        "requires_session": True,
        "default_time_to_live": 3_600_000,
        "max_delivery_count": 5,
        "authorization_rules": (AuthorizationRule("k", "p", "s", frozenset({Claim.SEND, Claim.LISTEN})),),
        "status": EntityStatus.SEND_DISABLED,
        "forward_to": "sb://localhost:39655/other",
        "user_metadata": "x & <y>",
    }
    assert read(recorded_requests.JAVASCRIPT_TOPIC).fields == {"support_ordering": True}
    subscription = read(recorded_requests.JAVASCRIPT_SUBSCRIPTION)
    assert subscription.fields == {"dead_lettering_on_filter_errors": False}
    assert subscription.default_rule == RuleDescription("$Default", SqlFilter("1=1"))
    other = read(recorded_requests.JAVASCRIPT_SUBSCRIPTION_WITH_A_RULE).default_rule
    expected = CorrelationFilter(correlation_id="7", properties={"a": 1.0})
    assert other == RuleDescription("r", expected, SqlAction("SET a=1"))
    rule = read_entry(recorded_requests.JAVASCRIPT_RULE, new_key=str)
    assert rule == RuleDescription("r2", SqlFilter("a=@b", {"@b": "x"}))


def test_elements_are_recognised_by_namespace_not_by_prefix() -> None:
    odd = recorded_requests.described("QueueDescription", "<b:MaxDeliveryCount>3</b:MaxDeliveryCount>")
    assert read(odd).fields == {"max_delivery_count": 3}
    foreign = recorded_requests.described("QueueDescription", "<MaxDeliveryCount>3</MaxDeliveryCount>")
    assert read(foreign).fields == {}


def test_unknown_and_read_only_elements_are_ignored() -> None:
    assert queue("<SizeInBytes>7</SizeInBytes><MessageCount>x</MessageCount><Novelty/><!-- --><?p?>").fields == {}


def test_nil_means_left_out_and_an_empty_address_means_none() -> None:
    assert queue('<UserMetadata i:nil="true"/><LockDuration i:nil="true"/>').fields == {}
    assert queue("<ForwardTo/><UserMetadata/>").fields == {"forward_to": None, "user_metadata": ""}


def test_missing_keys_are_generated() -> None:
    rule = (
        "<AuthorizationRules><AuthorizationRule><Rights><AccessRights>Manage</AccessRights></Rights>"
        "<KeyName>k</KeyName></AuthorizationRule></AuthorizationRules>"
    )
    made = AuthorizationRule("k", "new-0", "new-1", frozenset({Claim.MANAGE}))
    assert queue(rule).fields == {"authorization_rules": (made,)}


RULE = "<AuthorizationRules><AuthorizationRule>{}</AuthorizationRule></AuthorizationRules>"


@pytest.mark.parametrize(
    ("inner", "says"),
    [
        ("<LockDuration>soon</LockDuration>", "LockDuration: 'soon'"),
        ("<LockDuration/>", "LockDuration: ''"),
        ("<LockDuration>-PT1S</LockDuration>", "negative"),
        ("<LockDuration>P10675199DT2H48M5.4775807S</LockDuration>", "LockDuration cannot be unlimited"),
        ("<AutoDeleteOnIdle>x</AutoDeleteOnIdle>", "AutoDeleteOnIdle"),
        ("<RequiresSession>maybe</RequiresSession>", "RequiresSession: 'maybe'"),
        ("<RequiresSession/>", "RequiresSession: ''"),
        ("<MaxDeliveryCount>many</MaxDeliveryCount>", "MaxDeliveryCount: 'many'"),
        ("<MaxDeliveryCount>1.5</MaxDeliveryCount>", "MaxDeliveryCount"),
        ("<MaxDeliveryCount>١</MaxDeliveryCount>", "MaxDeliveryCount"),
        (f"<MaxDeliveryCount>{'9' * 5000}</MaxDeliveryCount>", "MaxDeliveryCount"),
        ("<MaxDeliveryCount/>", "MaxDeliveryCount"),
        ("<MaxMessageSizeInKilobytes>big</MaxMessageSizeInKilobytes>", "MaxMessageSizeInKilobytes"),
        ("<Status>Asleep</Status>", "Status: 'Asleep' is none of Active"),
        ("<Status/>", "Status"),
        (
            "<RequiresSession>true</RequiresSession><RequiresSession>true</RequiresSession>",
            "RequiresSession is there twice",
        ),
        (RULE.format(""), "KeyName"),
        (RULE.format("<KeyName>k</KeyName>"), "'k' has no AccessRights"),
        (RULE.format("<KeyName>k</KeyName><Rights/>"), "'k' has no AccessRights"),
        (RULE.format("<KeyName>k</KeyName><Rights><AccessRights>Own</AccessRights></Rights>"), "AccessRights: 'Own'"),
    ],
)
def test_the_error_for_a_bad_value_names_its_element(inner: str, says: str) -> None:
    with pytest.raises(AtomError, match=says):
        queue(inner)


LAUGHS = b"<!DOCTYPE x [" + b'<!ENTITY a "ha">' + b'<!ENTITY b "&a;&a;">' + b"]><x>&b;</x>"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not well-formed"),
        (b"text", "not well-formed"),
        (b"\xff\xfe\x00", "not XML in UTF-8"),
        ("\ufeff<e xmlns:p='\u3c3c'/>".encode("utf-16-le"), "not XML in UTF-8"),
        (b"<e xmlns:p='" + b"u" * 2000 + b"' p:x='1'/>", "a name in the XML of the request has more than 1024"),
        (b'<?xml version="1.0" encoding="no-such"?><a/>', "declares the encoding 'no-such'; send UTF-8"),
        (b'<?xml version="1.0" encoding="utf-7"?><a/>', "declares the encoding 'utf-7'"),
        (recorded_requests.JAVASCRIPT_QUEUE[:-10], "not well-formed"),
        (recorded_requests.JAVASCRIPT_QUEUE + b"<a/>", "not well-formed"),
        (b"<a/>", "not an ATOM entry"),
        (b"<entry/>", "not an ATOM entry"),
        (f'<entry xmlns="{ATOM}"/>'.encode(), "no content"),
        (f'<entry xmlns="{ATOM}"><content/></entry>'.encode(), "no content"),
        (f'<entry xmlns="{ATOM}"><content><QueueDescription/></content></entry>'.encode(), "not a description"),
        (recorded_requests.described("RelayDescription", ""), "not a description"),
        (LAUGHS, "entities"),
        (b'<!DOCTYPE x SYSTEM "file:///etc/passwd"><x/>', "document type"),
        (b'<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><x>&e;</x>', "document type"),
        (b"<a>" * 100_000, "nested too deep"),
        (b"<a>" + b"<b/>" * 100_000 + b"</a>", "too many elements"),
        # X1: the URI of a namespace is repeated in every name with its prefix.
        (b'<a xmlns:n="' + b"u" * 20_000 + b'"><n:b/></a>', "tag or text in the XML of the request has more than"),
        (b'<a xmlns:n="' + b"u" * 10_000 + b'"><n:b/></a>', "a name in the XML of the request has more than"),
    ],
)
def test_a_body_that_is_no_entry_is_refused(body: bytes, says: str) -> None:
    with pytest.raises(AtomError, match=says):
        read(body)


# --- both ways -------------------------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn"]), min_size=1, max_size=20)
durations = st.integers(0, 10**13)
values = {
    PropertyType.DURATION: durations,
    PropertyType.DURATION_OR_NEVER: st.none() | durations,
    PropertyType.BOOLEAN: st.booleans(),
    PropertyType.INTEGER: st.integers(-(10**9), 10**9),
    PropertyType.TEXT: st.none() | texts,
    PropertyType.ENTITY_ADDRESS: st.none() | texts.map(str.strip).filter(bool),
    PropertyType.STATUS: st.sampled_from(EntityStatus),
    PropertyType.AUTHORIZATION_RULES: st.lists(
        st.builds(
            AuthorizationRule,
            texts.map(str.strip).filter(bool),
            texts,
            texts,
            st.frozensets(st.sampled_from(Claim), min_size=1),
        ),
        max_size=3,
    ).map(tuple),
}


def described(kind: type[Description]) -> st.SearchStrategy[Description]:
    settable = {row.field: values[row.type] for row in properties_of(kind)}
    names = {"topic": texts, "name": texts} if kind is SubscriptionDescription else {"path": texts}
    return st.builds(kind, **names, **settable)


infos = st.builds(
    EntityInfo,
    described(QueueDescription) | described(TopicDescription) | described(SubscriptionDescription),
    st.integers(1, 2**41),
    st.integers(1, 2**41),
    st.integers(0, 2**41),
    st.builds(EntityMessageCounts, *[st.integers(0, 10**12)] * 7),
    st.integers(0, 1000),
)


@given(infos)
@settings(max_examples=60)
def test_what_is_written_reads_back(info: EntityInfo) -> None:
    entry = read(render_entity(info, PLACE))
    said = {
        row.field: getattr(info.description, row.field)
        for row in properties_of(type(info.description))
        if getattr(info.description, row.field) is not None or row.field in entry.fields
    }
    for field in ("forward_to", "forward_dead_letters_to"):  # shown under the name of the namespace in the request
        if field in said:
            said[field] = PLACE.address(said[field])
            assert path_of_address(said[field]) == path_of_address(getattr(info.description, field))
    assert entry.kind is type(info.description)
    assert entry.fields == said
    assert entry.max_message_kilobytes in (None, 256)


@given(infos)
@settings(max_examples=30)
def test_counts_stand_under_one_prefix_and_add_up(info: EntityInfo) -> None:
    root = ET.fromstring(render_entity(info, PLACE))  # noqa: S314 - our own
    found = {node.tag.rpartition("}")[2]: int(node.text or "") for node in root.iterfind(".//s:CountDetails/*", BOOK)}
    counts = info.counts
    assert found == {
        "ActiveMessageCount": counts.active + counts.deferred,
        "DeadLetterMessageCount": counts.dead_letter,
        "ScheduledMessageCount": counts.scheduled,
        "TransferMessageCount": counts.transfer,
        "TransferDeadLetterMessageCount": counts.transfer_dead_letter,
    }
    total = root.findtext(".//s:MessageCount", namespaces=BOOK)
    assert total is None or int(total) == sum(found.values())


@given(
    st.binary(max_size=300) | st.text(max_size=100).map(lambda text: recorded_requests.python("QueueDescription", text))
)
def test_no_body_makes_the_reader_fail(body: bytes) -> None:
    with suppress(AtomError):
        assert isinstance(read_entry(body, new_key=str), EntityEntry | RuleDescription)


# --- written to the letter -------------------------------------------------------------------------------------------

INFO = EntityInfo(QueueDescription(path="a/b", user_metadata="<&\x00>"), 1_700_000_000_000, 1_700_000_000_000, 0)
SUBSCRIPTION = EntityInfo(SubscriptionDescription(topic="a/b", name="s"), 1_700_000_000_000, 1_700_000_000_000, 0)


def test_an_entry_is_unprefixed_and_names_its_type_and_counts_as_clients_look_for_them() -> None:
    text = render_entity(INFO, PLACE).decode()
    assert '<entry xmlns="http://www.w3.org/2005/Atom"><id>https://localhost:5672/a/b?api-version=2021-05</id>' in text
    assert '<title type="text">a/b</title>' in text
    assert '<content type="application/xml"><QueueDescription xmlns="' in text
    assert '<CountDetails xmlns:d2p1="http://schemas.microsoft.com/netservices/2011/06/servicebus"><d2p1:Act' in text
    assert "<UserMetadata>&lt;&amp;\ufffd&gt;</UserMetadata>" in text
    assert "<AccessedAt>0001-01-01T00:00:00Z</AccessedAt>" in text


def test_ids_name_subscriptions_and_rules_as_the_javascript_client_wants_them() -> None:
    assert "<id>https://localhost:5672/a/b/Subscriptions/s?" in render_entity(SUBSCRIPTION, PLACE).decode()
    rule = render_rule(RuleDescription("$Default"), SUBSCRIPTION, PLACE).decode()
    assert "<id>https://localhost:5672/a/b/Subscriptions/s/Rules/$Default?" in rule
    assert '<Filter i:type="TrueFilter"><SqlExpression>1=1</SqlExpression>' in rule
    assert '<Action i:type="EmptyRuleAction"/>' in rule


def test_the_entry_of_a_topic_has_the_counts_of_its_filters() -> None:
    info = EntityInfo(TopicDescription(path="t"), 1, 1, 1, subscriptions=2, sql_filters=3, correlation_filters=4)
    text = render_entity(info, PLACE).decode()
    assert "<SubscriptionCount>2</SubscriptionCount><SqlFilterCount>3</SqlFilterCount>" in text
    assert "<CorrelationFilterCount>4</CorrelationFilterCount>" in text


def test_what_would_end_the_path_of_an_id_is_escaped() -> None:
    odd = EntityInfo(QueueDescription(path="50%?#&"), 1, 1, 1)
    assert "<id>https://localhost:5672/50%25%3F%23&amp;?api-version=" in render_entity(odd, PLACE).decode()


@pytest.mark.parametrize("more", [True, False])
def test_a_feed_links_to_itself_and_to_the_next_page_only_when_there_is_one(more: bool) -> None:
    page = FeedPage("$Resources/queues", "Queues", 10, 5, more)
    root = ET.fromstring(render_entities([INFO, INFO], page, PLACE))  # noqa: S314 - our own
    links = [(link.get("rel"), link.get("href")) for link in root.findall("a:link", BOOK)]
    address = "https://localhost:5672/$Resources/queues?$skip={}&$top=5&api-version=2021-05"
    assert links == [("self", address.format(10)), ("next", address.format(12))][: 2 if more else 1]
    assert len(root.findall("a:entry", BOOK)) == 2


def test_a_feed_may_be_empty() -> None:
    root = ET.fromstring(render_rules([], SUBSCRIPTION, FeedPage("x", "Rules", 1, 5, False), PLACE))  # noqa: S314 - our own
    assert root.findall("a:entry", BOOK) == []


def test_the_namespace_and_errors_are_written() -> None:
    namespace = render_namespace("primary", 1_700_000_000_000, PLACE).decode()
    assert "<MessagingSKU>Standard</MessagingSKU>" in namespace
    assert "<Name>primary</Name>" in namespace
    assert render_error(404, "no <q>") == b"<Error><Code>404</Code><Detail>no &lt;q&gt;</Detail></Error>"
