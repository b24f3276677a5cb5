"""XML of the management API: parses request bodies, and escapes text for documents that are written as text.

Request bodies are untrusted. `parse_xml` bounds the depth, the number of elements and the length of names, and refuses
document types. Elements are recognised by XML namespace, never by prefix.

Documents are written as text, so that each prefix is exactly as in the service: the JavaScript client looks for the
attribute name `i:type` and does not resolve the prefix.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Final
from xml.sax.saxutils import escape

from defusedxml import DefusedXmlException  # type: ignore[import-untyped]  # it ships no types
from defusedxml.ElementTree import DefusedXMLParser  # type: ignore[import-untyped]  # it ships no types

ATOM: Final = "http://www.w3.org/2005/Atom"
SERVICE_BUS: Final = "http://schemas.microsoft.com/netservices/2010/10/servicebus/connect"
COUNTS: Final = "http://schemas.microsoft.com/netservices/2011/06/servicebus"
INSTANCE: Final = "http://www.w3.org/2001/XMLSchema-instance"

_MAX_DEPTH: Final = 32
_MAX_ELEMENTS: Final = 10_000
# The parser expands the prefix of every tag and attribute name to the URI of its namespace. Two bounds keep the work of
# this expansion proportional to the size of the body: the most bytes from one `<` to the next `<`, and the most
# characters of a name. The parser raises errors of the tree builder only at the end of a chunk, so a chunk is no larger
# than one tag.
_MAX_PIECE_BYTES: Final = 16 * 1024
_MAX_NAME: Final = 1024
_CHUNK: Final = 16 * 1024
_DECLARED_ENCODING: Final = re.compile(r"<\?xml[^>]{0,100}?\bencoding\s{0,9}=\s{0,9}[\"']([A-Za-z0-9._-]+)")
_ENCODINGS: Final = ("utf-8", "us-ascii", "ascii")
_ILLEGAL: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML cannot contain."""


class AtomError(ValueError):
    """A request body is wrong. The text is for the client and names the element."""


# --- reading -----------------------------------------------------------------------------------------------------


class _BoundedBuilder(ET.TreeBuilder):
    """Builds the element tree. Raises AtomError if depth, number of elements or length of a name exceeds its limit."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._count = 0

    def start(self, tag: str, attrs: dict[str, str], /) -> ET.Element:
        self._depth += 1
        self._count += 1
        if self._depth > _MAX_DEPTH or self._count > _MAX_ELEMENTS:
            raise AtomError("the XML of the request is nested too deep or has too many elements")
        if max(map(len, (tag, *attrs))) > _MAX_NAME:
            raise AtomError(f"a name in the XML of the request has more than {_MAX_NAME} characters")
        return super().start(tag, attrs)

    def end(self, tag: str, /) -> ET.Element:
        self._depth -= 1
        return super().end(tag)


def parse_xml(body: bytes) -> ET.Element:
    """Return the root element of a request body. Raises AtomError."""
    if max(map(len, body.split(b"<"))) > _MAX_PIECE_BYTES:
        raise AtomError(f"a tag or text in the XML of the request has more than {_MAX_PIECE_BYTES} bytes")
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise AtomError("the body is not XML in UTF-8") from None
    declared = _DECLARED_ENCODING.match(text)
    if declared is not None and declared[1].lower() not in _ENCODINGS:
        raise AtomError(f"the XML of the request declares the encoding {declared[1][:50]!r}; send UTF-8")
    parser = DefusedXMLParser(target=_BoundedBuilder(), forbid_dtd=True)
    try:
        # The parser gets text, not bytes, so that it ignores the encoding that the document declares. In another
        # encoding, `<` could have other bytes, and the check above would miss a long tag.
        for start in range(0, len(text), _CHUNK):
            parser.feed(text[start : start + _CHUNK])
        root: ET.Element = parser.close()
    except AtomError:
        raise
    except DefusedXmlException:
        raise AtomError("the XML of the request may not define entities or a document type") from None
    except (ET.ParseError, ValueError) as error:
        raise AtomError(f"the body is not well-formed XML: {error}") from None
    return root


def local_name(node: ET.Element) -> str | None:
    """Return the name of an element of the Service Bus namespace, or None for any other element."""
    namespace, _, name = node.tag.rpartition("}")
    return name if namespace == "{" + SERVICE_BUS else None


def children(node: ET.Element) -> dict[str, ET.Element]:
    """Return the children of an element that are in the Service Bus namespace, by name.

    If several children have the same name, the last of them is returned.
    """
    return {name: child for child in node if (name := local_name(child)) is not None}


def text_of(node: ET.Element | None) -> str:
    """Return the text of an element, or '' if the element is None or has no text."""
    return "" if node is None else node.text or ""


def is_nil(node: ET.Element) -> bool:
    """Return whether an element is marked as having no value."""
    return node.get(f"{{{INSTANCE}}}nil") == "true"


# --- writing -----------------------------------------------------------------------------------------------------


def element(name: str, text: str) -> str:
    """Return an element with text."""
    return f"<{name}>{escaped(text)}</{name}>"


def escaped(text: str) -> str:
    """Return the text, escaped for the content of an element. Characters that XML cannot contain become U+FFFD."""
    return escape(_ILLEGAL.sub("\ufffd", text), {"\r": "&#13;"})


def render_error(status: int, detail: str) -> bytes:
    """Return the body of an error response."""
    return f"<Error>{element('Code', str(status))}{element('Detail', detail)}</Error>".encode()
