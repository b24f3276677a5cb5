// A received message can be sent on: as the SDK gave it to the program, or as the annotated message inside of it.
// The SDK writes dates as numbers then, and numbers in other types than they had.
import assert from "node:assert/strict";
import { describe, it } from "node:test";
import { CHAPTER, createQueue, openQueue } from "./namespace.js";
import { peekAll, receiveExactly, receiveOne } from "./waiting.js";

const MESSAGES = 60;
const LATER = new Date("2031-02-03T04:05:06.789Z");
const BROKERS = [
  "x-opt-sequence-number",
  "x-opt-enqueued-time",
  "x-opt-locked-until",
  "x-opt-enqueue-sequence-number",
  "x-opt-message-state",
];

/** Numbers that look random and are the same in every run (a linear congruential generator). */
function drawing(seed) {
  let state = seed * 2654435761 + 12345;
  return () => {
    state = (Math.imul(state, 1103515245) + 12345) >>> 0;
    return state / 2 ** 32;
  };
}

function randomMessage(seed) {
  const draw = drawing(seed);
  const oneOf = (values) => values[Math.floor(draw() * values.length)];
  const sometimes = (value) => (draw() < 0.5 ? value : undefined);
  const text = () => oneOf(["a", "Grüße, 世界", "x".repeat(128)]);
  const sessionId = sometimes(text());
  const value = () => oneOf([true, 0, -1, 7, 2 ** 31, 2 ** 40, -(2 ** 40), 1.5, "text", "", new Date(1_700_000_000_000)]);
  return {
    body: oneOf(["text", { an: ["object"] }, Buffer.from([0, 255]), 42, null]),
    messageId: oneOf([`${seed}`, seed, "x".repeat(128)]),
    correlationId: sometimes(oneOf([text(), 7])),
    contentType: sometimes("text/plain"),
    subject: sometimes(text()),
    to: sometimes(text()),
    replyTo: sometimes(text()),
    replyToSessionId: sometimes(text()),
    timeToLive: sometimes(3_600_000),
    sessionId,
    partitionKey: sometimes(sessionId ?? text()),
    scheduledEnqueueTimeUtc: sometimes(new Date(1_700_000_000_000)),
    applicationProperties: sometimes({ one: value(), two: value(), three: value() }),
  };
}

/** What a receiver sees of a message, without what belongs to this delivery. */
function seen(message) {
  const { body, messageId, correlationId, contentType, subject, to, replyTo, replyToSessionId } = message;
  const { sessionId, partitionKey, timeToLive, applicationProperties, scheduledEnqueueTimeUtc } = message;
  const annotations = { ...message._rawAmqpMessage.messageAnnotations };
  for (const name of BROKERS) delete annotations[name];
  return JSON.parse(
    JSON.stringify({
      ...{ body, messageId, correlationId, contentType, subject, to, replyTo, replyToSessionId },
      ...{ sessionId, partitionKey, timeToLive, applicationProperties, scheduledEnqueueTimeUtc, annotations },
    }),
  );
}

describe("sending on", CHAPTER, () => {
  for (const [what, taken, compared] of [
    ["a received message", (message) => message, seen],
    [
      "the annotated message of a received message",
      (message) => message._rawAmqpMessage,
      // The SDK encodes the body of an annotated message a second time.
      (message) => ({ ...seen(message), body: null }),
    ],
  ]) {
    it(`${what} arrives with everything that it carried`, async (t) => {
      const { client, sender, receiver } = await openQueue(t);
      await sender.sendMessages(Array.from({ length: MESSAGES }, (_, seed) => randomMessage(seed)));
      const received = await receiveExactly(receiver, MESSAGES);
      const next = await createQueue();
      const nextSender = client.createSender(next);
      const before = received.map(compared);

      for (const message of received.slice(0, 20)) await nextSender.sendMessages(taken(message));
      await nextSender.sendMessages(received.slice(20, 40).map(taken));
      const batch = await nextSender.createMessageBatch();
      for (const message of received.slice(40)) assert.ok(batch.tryAddMessage(taken(message)));
      await nextSender.sendMessages(batch);

      const after = (await receiveExactly(client.createReceiver(next), MESSAGES)).map(compared);
      for (const [seed, message] of before.entries()) assert.deepEqual(after[seed], message, `seed ${seed}`);
    });
  }

  it("a scheduled message that was peeked is scheduled again, and a dead letter is delivered", async (t) => {
    const { queue, client, sender, receiver } = await openQueue(t);
    await sender.sendMessages([{ body: "later", scheduledEnqueueTimeUtc: LATER, partitionKey: "p" }, { body: "dead" }]);
    const [scheduled] = (await peekAll(receiver)).filter((message) => message.state === "scheduled");
    await receiver.deadLetterMessage(await receiveOne(receiver), { deadLetterReason: "why", note: "added" });
    const dead = await receiveOne(client.createReceiver(queue, { subQueueType: "deadLetter" }));
    const next = await createQueue();
    for (const message of [scheduled, scheduled._rawAmqpMessage, dead, dead._rawAmqpMessage]) {
      await client.createSender(next).sendMessages(message);
    }

    const peeked = await peekAll(client.createReceiver(next));
    assert.deepEqual(peeked.map((message) => message.state).sort(), ["active", "active", "scheduled", "scheduled"]);
    for (const message of peeked.filter((each) => each.state === "scheduled")) {
      assert.equal(message.scheduledEnqueueTimeUtc.getTime(), LATER.getTime());
      assert.equal(message.partitionKey, "p");
    }
    for (const message of peeked.filter((each) => each.state === "active")) {
      assert.equal(message.applicationProperties.DeadLetterReason, "why");
      assert.equal(message.applicationProperties.note, "added");
    }
  });

  it("a batch that the SDK filled to its limit is accepted", async (t) => {
    const { sender, receiver } = await openQueue(t);
    const batch = await sender.createMessageBatch();
    const long = "s".repeat(128);
    assert.ok(batch.tryAddMessage({ body: "1", messageId: long, sessionId: long, partitionKey: long }));
    for (const size of [20_000, 1_000, 10, 1]) {
      while (batch.tryAddMessage({ body: Buffer.alloc(size) }));
    }
    assert.ok(batch.maxSizeInBytes - batch.sizeInBytes < 60, "no room for another message");
    await sender.sendMessages(batch);
    assert.equal((await receiveExactly(receiver, batch.count)).length, batch.count);
  });
});
