"""Requests of the official clients as they went over the wire (Python 7.15.0, JavaScript 7.9.5)."""

from collections.abc import Iterable

from twinbus.namespace.front.atom_xml import ATOM, INSTANCE, SERVICE_BUS

_OF_JAVASCRIPT = (
    '<?xml version="1.0" encoding="UTF-8" standalone="yes"?><entry xmlns="http://www.w3.org/2005/Atom">'
    '<updated>2026-01-01T00:00:00.150Z</updated><content type="application/xml">'
    '<{kind} xmlns="http://schemas.microsoft.com/netservices/2010/10/servicebus/connect" '
    'xmlns:i="http://www.w3.org/2001/XMLSchema-instance">{inner}</{kind}></content></entry>'
)
_OF_PYTHON = (
    "<?xml version='1.0' encoding='utf-8'?>\n"
    '<ns0:entry xmlns:i="http://www.w3.org/2001/XMLSchema-instance" xmlns:ns0="http://www.w3.org/2005/Atom" '
    'xmlns="http://schemas.microsoft.com/netservices/2010/10/servicebus/connect">'
    '<ns0:content type="application/xml"><{kind}>{inner}</{kind}></ns0:content></ns0:entry>'
)


def javascript(kind: str, inner: str) -> bytes:
    return _OF_JAVASCRIPT.format(kind=kind, inner=inner).encode()


def python(kind: str, inner: str) -> bytes:
    return _OF_PYTHON.format(kind=kind, inner=inner).encode()


P4 = 'xmlns:p4="http://www.w3.org/2001/XMLSchema-instance"'
L28 = 'xmlns:l28="http://www.w3.org/2001/XMLSchema"'

JAVASCRIPT_QUEUE = javascript(
    "QueueDescription",
    "<LockDuration>PT30S</LockDuration><RequiresSession>true</RequiresSession>"
    "<DefaultMessageTimeToLive>PT1H</DefaultMessageTimeToLive><MaxDeliveryCount>5</MaxDeliveryCount>"
    '<AuthorizationRules><AuthorizationRule p5:type="SharedAccessAuthorizationRule" '
    'xmlns:p5="http://www.w3.org/2001/XMLSchema-instance"><ClaimType>SharedAccessKey</ClaimType>'
    "<ClaimValue>None</ClaimValue><Rights><AccessRights>Send</AccessRights><AccessRights>Listen</AccessRights></Rights>"
    "<KeyName>k</KeyName><PrimaryKey>p</PrimaryKey><SecondaryKey>s</SecondaryKey></AuthorizationRule>"
    "</AuthorizationRules><Status>SendDisabled</Status><ForwardTo>sb://localhost:39655/other</ForwardTo>"
    "<UserMetadata>x &amp; &lt;y&gt;</UserMetadata>",
)
JAVASCRIPT_TOPIC = javascript("TopicDescription", "<SupportOrdering>true</SupportOrdering>")
JAVASCRIPT_SUBSCRIPTION = javascript(
    "SubscriptionDescription",
    "<DeadLetteringOnFilterEvaluationExceptions>false</DeadLetteringOnFilterEvaluationExceptions>"
    f'<DefaultRuleDescription><Filter p4:type="SqlFilter" {P4}><SqlExpression>1=1</SqlExpression></Filter>'
    f'<Action p4:type="EmptyRuleAction" {P4}/><Name>$Default</Name></DefaultRuleDescription>',
)
JAVASCRIPT_SUBSCRIPTION_WITH_A_RULE = javascript(
    "SubscriptionDescription",
    f'<DefaultRuleDescription><Filter p4:type="CorrelationFilter" {P4}><CorrelationId>7</CorrelationId><Properties>'
    f'<KeyValueOfstringanyType><Key>a</Key><Value p4:type="l28:double" {L28}>1</Value></KeyValueOfstringanyType>'
    f'</Properties></Filter><Action p4:type="SqlRuleAction" {P4}><SqlExpression>SET a=1</SqlExpression></Action>'
    "<Name>r</Name></DefaultRuleDescription>",
)
JAVASCRIPT_RULE = javascript(
    "RuleDescription",
    f'<Filter p4:type="SqlFilter" {P4}><SqlExpression>a=@b</SqlExpression><Parameters><KeyValueOfstringanyType>'
    f'<Key>@b</Key><Value p4:type="l28:string" {L28}>x</Value></KeyValueOfstringanyType></Parameters></Filter>'
    f'<Action p4:type="EmptyRuleAction" {P4}/><Name>r2</Name>',
)
PYTHON_QUEUE = python(
    "QueueDescription",
    "<LockDuration>PT30S</LockDuration><RequiresSession>true</RequiresSession>"
    "<DefaultMessageTimeToLive>P10675199DT2H48M5.47758S</DefaultMessageTimeToLive>"
    "<MaxDeliveryCount>5</MaxDeliveryCount><Status>Active</Status><UserMetadata>x&amp;&lt;y&gt;</UserMetadata>",
)


def described(kind: str, inner: str) -> bytes:
    """A body in no client's spelling."""
    return (
        f'<a:entry xmlns:a="{ATOM}"><a:content><b:{kind} xmlns:b="{SERVICE_BUS}" xmlns:c="{INSTANCE}">{inner}'
        f"</b:{kind}></a:content></a:entry>"
    ).encode()


def request(
    method: str,
    target: str,
    body: bytes | None = None,
    headers: Iterable[tuple[str, str]] = (),
    host: str = "localhost",
) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", *(f"{name}: {value}" for name, value in headers)]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b"")


def traffic(token: str) -> list[bytes]:
    """One request of every kind that the clients and the command line make."""
    signed = [("Authorization", token)]
    update = [*signed, ("If-Match", "*")]
    version = "api-version=2024-05"
    return [
        request("PUT", f"/a%2Fb?{version}", PYTHON_QUEUE, signed),
        request("PUT", "/a/b%20c?api-version=2021-05", JAVASCRIPT_QUEUE, signed),
        request("PUT", f"/a%2Fb?{version}", PYTHON_QUEUE, update),
        request("PUT", f"/t?{version}", JAVASCRIPT_TOPIC, signed),
        request("PUT", f"/t/Subscriptions/s?{version}", JAVASCRIPT_SUBSCRIPTION, signed),
        request("PUT", f"/t/subscriptions/s/rules/r?{version}", JAVASCRIPT_RULE, signed),
        request("GET", f"/a%2Fb?enrich=false&{version}", None, signed),
        request("GET", f"/$Resources/queues?$skip=0&$top=100&{version}", None, signed),
        request("GET", f"/t/Subscriptions/s/Rules/?{version}", None, signed),
        request("GET", f"/t/subscriptions/s/rules/%24Default?enrich=false&{version}", None, signed),
        request("GET", f"/$namespaceinfo?{version}", None, signed),
        request("DELETE", f"/a%2Fb?{version}", None, signed),
        request("GET", "/metrics"),
        request("HEAD", "/$health"),
        request("POST", "/$faults", b'{"kind": "server-busy", "entity": "a/b", "probability": 0.5}', signed),
        request("GET", "/$faults", None, signed),
        request("DELETE", "/$faults/1", None, signed),
        b"PUT /x?api-version=1 HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nAuthorization: "
        + token.encode()
        + b"\r\n\r\n5\r\n<a/> \r\n0\r\n\r\n",
        request("PUT", f"/q?{version}", PYTHON_QUEUE, [*signed, ("Expect", "100-continue")]),
    ]
