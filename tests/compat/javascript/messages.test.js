// Messages: every field and every kind of body comes back as it was sent.
import assert from "node:assert/strict";
import { randomBytes } from "node:crypto";
import { describe, test } from "node:test";
import { CHAPTER, openQueue } from "./namespace.js";
import { receiveExactly, receiveOne } from "./waiting.js";

async function roundTrip(t, message, receiverOptions = {}) {
  const { queue, client, sender } = await openQueue(t);
  await sender.sendMessages(message);
  return receiveOne(client.createReceiver(queue, receiverOptions));
}

describe("fields", CHAPTER, () => {
  test("every field the sender may set comes back", async (t) => {
    const fields = {
      messageId: "id-1",
      contentType: "application/json;charset=utf-8",
      correlationId: "correlation-1",
      partitionKey: "group",
      sessionId: "group",
      replyToSessionId: "reply-group",
      timeToLive: 3_600_000,
      subject: "subject: ünïcødé",
      to: "somewhere",
      replyTo: "here",
    };
    const received = await roundTrip(t, { body: "b", ...fields });
    const back = Object.fromEntries(Object.keys(fields).map((name) => [name, received[name]]));
    assert.deepEqual(back, fields);
  });

  test("the service's own fields are set", async (t) => {
    const before = Date.now();
    const { sender, receiver } = await openQueue(t);
    await sender.sendMessages([{ body: 1, timeToLive: 60_000 }, { body: 2 }]);
    const [first, second] = await receiveExactly(receiver, 2);
    assert.ok(first.sequenceNumber.greaterThan(0));
    assert.ok(second.sequenceNumber.greaterThan(first.sequenceNumber));
    assert.ok(Math.abs(first.enqueuedTimeUtc.getTime() - before) < 30_000);
    assert.equal(first.expiresAtUtc.getTime(), first.enqueuedTimeUtc.getTime() + 60_000);
    assert.ok(first.lockedUntilUtc > first.enqueuedTimeUtc);
    assert.deepEqual([first.deliveryCount, first.state], [0, "active"]);
  });

  test("a message without an id is given one", async (t) => {
    const { sender, receiver } = await openQueue(t);
    await sender.sendMessages({ body: 1 });
    await sender.sendMessages([{ body: 2 }, { body: 3 }]);
    const ids = (await receiveExactly(receiver, 3)).map(({ messageId }) => messageId);
    assert.ok(ids.every(Boolean));
    assert.equal(new Set(ids).size, 3);
  });

  for (const [kind, id] of [
    ["text", "plain"],
    ["a number", 4711],
    ["a uuid", randomBytes(16)],
  ]) {
    test(`message id and correlation id may be ${kind}`, async (t) => {
      const { messageId, correlationId } = await roundTrip(t, { body: 1, messageId: id, correlationId: id });
      assert.deepEqual([messageId, correlationId], [id, id]);
    });
  }

  test("application properties of every type come back", async (t) => {
    const applicationProperties = {
      text: "väl-ue",
      empty: "",
      small: 1,
      negative: -5,
      large: 2 ** 40,
      fraction: 0.25,
      yes: true,
      no: false,
      nothing: null,
      when: new Date("2024-02-29T12:34:56.789Z"),
    };
    const received = await roundTrip(t, { body: 1, applicationProperties }, { skipConvertingDate: true });
    assert.deepEqual(received.applicationProperties, applicationProperties);
  });

  test("dates are numbers unless the receiver says otherwise", async (t) => {
    const when = new Date();
    const received = await roundTrip(t, { body: 1, applicationProperties: { when } });
    assert.deepEqual(received.applicationProperties, { when: when.getTime() });
  });

  test("a message at the limits of its ids is taken", async (t) => {
    const longest = "x".repeat(128);
    const fields = { messageId: longest, sessionId: longest, partitionKey: longest };
    const { messageId, sessionId, partitionKey } = await roundTrip(t, { body: 1, ...fields });
    assert.deepEqual({ messageId, sessionId, partitionKey }, fields);
  });
});

describe("bodies", CHAPTER, () => {
  const values = [
    ["text", "hällo wörld"],
    ["an empty text", ""],
    ["a number", 12.5],
    ["true", true],
    ["null", null],
    ["an object", { a: { b: [1, 2, { c: "d" }] } }],
    ["an array", [1, "two", null, { three: 3 }]],
    ["bytes", Buffer.from([0, 1, 254, 255])],
    ["a large text", "0123456789".repeat(20_000)],
  ];
  for (const [kind, body] of values) {
    test(`${kind} comes back`, async (t) => {
      const received = await roundTrip(t, { body });
      assert.deepEqual(received.body, body);
      assert.equal(received._rawAmqpMessage.bodyType, "data");
    });
  }

  test("bytes are left alone when the receiver does not parse JSON", async (t) => {
    const received = await roundTrip(t, { body: { a: 1 } }, { skipParsingBodyAsJson: true });
    assert.deepEqual(received.body, Buffer.from('{"a":1}'));
  });

  const amqpBodies = [
    ["data", Buffer.from([1, 2, 255])],
    ["value", "text"],
    ["value", 77],
    ["value", -1.5],
    ["value", true],
    ["value", { key: "value", nested: { list: [1, "two"] } }],
    ["value", [1, 2, "three"]],
    ["sequence", [1, "two", true, { four: 4 }]],
  ];
  for (const [bodyType, body] of amqpBodies) {
    test(`an AMQP ${bodyType} section with ${JSON.stringify(body)} comes back`, async (t) => {
      const received = await roundTrip(t, { bodyType, body });
      assert.deepEqual(received.body, body);
      assert.equal(received._rawAmqpMessage.bodyType, bodyType);
    });
  }

  test("AMQP bodies of every kind travel in one batch", async (t) => {
    const { sender, receiver } = await openQueue(t);
    await sender.sendMessages(amqpBodies.map(([bodyType, body]) => ({ bodyType, body })));
    const received = await receiveExactly(receiver, amqpBodies.length);
    assert.deepEqual(
      received.map(({ body, _rawAmqpMessage }) => [_rawAmqpMessage.bodyType, body]),
      amqpBodies,
    );
  });
});

describe("the raw AMQP message", CHAPTER, () => {
  test("header, properties and annotations come back", async (t) => {
    const raw = {
      bodyType: "value",
      body: "raw",
      header: { priority: 7, durable: true, timeToLive: 120_000 },
      properties: {
        messageId: "raw-1",
        correlationId: "c",
        contentType: "text/plain",
        contentEncoding: "gzip",
        to: "to",
        replyTo: "reply",
        subject: "s",
        groupId: "g",
        groupSequence: 3,
        replyToGroupId: "rg",
      },
      applicationProperties: { one: 1 },
      messageAnnotations: { "x-opt-partition-key": "g", "x-own": "kept" },
    };
    const received = await roundTrip(t, raw);
    const back = received._rawAmqpMessage;
    assert.equal(received.body, "raw");
    assert.deepEqual([back.header.priority, back.header.durable, back.header.timeToLive], [7, true, 120_000]);
    const { absoluteExpiryTime, creationTime, ...properties } = back.properties;
    assert.equal(absoluteExpiryTime - creationTime, 120_000);
    assert.deepEqual(properties, raw.properties);
    assert.deepEqual(back.applicationProperties, { one: 1 });
    assert.equal(back.messageAnnotations["x-own"], "kept");
    assert.deepEqual([received.partitionKey, received.sessionId, received.timeToLive], ["g", "g", 120_000]);
  });

  // The SDK's codec writes the footer before the body.
  test("a footer comes back", async (t) => {
    const received = await roundTrip(t, { bodyType: "value", body: "raw", footer: { checksum: "abc" } });
    assert.deepEqual([received.body, received._rawAmqpMessage.footer], ["raw", { checksum: "abc" }]);
  });
});
