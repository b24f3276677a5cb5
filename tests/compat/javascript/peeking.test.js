// Peeking: looking without locking.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { CHAPTER, openClient, openQueue } from "./namespace.js";
import { bodies, peekAll, receiveExactly, receiveOne } from "./waiting.js";

describe("peeking", CHAPTER, () => {
  test("an empty queue has nothing to peek", async (t) => {
    const { receiver } = await openQueue(t);
    assert.deepEqual(await receiver.peekMessages(5), []);
  });

  test("each peek goes on where the last one ended", async (t) => {
    const { sender, receiver } = await openQueue(t);
    await sender.sendMessages([1, 2, 3, 4].map((body) => ({ body })));
    assert.deepEqual(bodies(await receiver.peekMessages(1)), [1]);
    assert.deepEqual(bodies(await receiver.peekMessages(2)), [2, 3]);
    assert.deepEqual(bodies(await receiver.peekMessages(5)), [4]);
    assert.deepEqual(await receiver.peekMessages(5), []);
  });

  test("a peek may start at a sequence number", async (t) => {
    const { sender, receiver } = await openQueue(t);
    await sender.sendMessages([1, 2, 3].map((body) => ({ body })));
    const all = await peekAll(receiver);
    const rest = await receiver.peekMessages(5, { fromSequenceNumber: all[1].sequenceNumber });
    assert.deepEqual(bodies(rest), [2, 3]);
  });

  test("a peeked message is not locked and can still be received", async (t) => {
    const { sender, receiver } = await openQueue(t);
    await sender.sendMessages({ body: "free" });
    const [peeked] = await receiver.peekMessages(1);
    assert.equal(peeked.lockToken, undefined);
    assert.equal(peeked.state, "active");
    const received = await receiveOne(receiver);
    assert.ok(received.sequenceNumber.equals(peeked.sequenceNumber));
    assert.equal(received.deliveryCount, 0);
    await assert.rejects(receiver.completeMessage(peeked));
  });

  test("locked and deferred messages are seen as well, with their state", async (t) => {
    const { queue, sender, receiver } = await openQueue(t);
    await sender.sendMessages([{ body: "locked" }, { body: "deferred" }, { body: "active" }]);
    const [, second] = await receiveExactly(receiver, 2);
    await receiver.deferMessage(second);
    const peeked = await openClient(t).createReceiver(queue).peekMessages(10);
    assert.deepEqual(
      peeked.map(({ body, state }) => [body, state]),
      [
        ["locked", "active"],
        ["deferred", "deferred"],
        ["active", "active"],
      ],
    );
  });

  test("a peeked message shows every field", async (t) => {
    const { sender, receiver } = await openQueue(t);
    const sent = { body: [1, "two"], messageId: "m", sessionId: "g", subject: "s", contentType: "application/json" };
    await sender.sendMessages({ ...sent, applicationProperties: { a: 1 }, timeToLive: 60_000 });
    const [peeked] = await receiver.peekMessages(1);
    const { body, messageId, sessionId, subject, contentType } = peeked;
    assert.deepEqual({ body, messageId, sessionId, subject, contentType }, sent);
    assert.deepEqual(peeked.applicationProperties, { a: 1 });
    assert.equal(peeked.timeToLive, 60_000);
    assert.ok(peeked.enqueuedTimeUtc <= new Date());
  });

  test("completed messages are gone from the peek", async (t) => {
    const { sender, receiver } = await openQueue(t);
    await sender.sendMessages([{ body: 1 }, { body: 2 }]);
    await receiver.completeMessage(await receiveOne(receiver));
    assert.deepEqual(bodies(await peekAll(receiver)), [2]);
  });
});
