// Scheduling: messages that appear later, and those that are called back.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { CHAPTER, admin, openQueue } from "./namespace.js";
import { assertEmpty, bodies, peekAll, receiveExactly, receiveOne } from "./waiting.js";

const soon = () => new Date(Date.now() + 1000);
const muchLater = () => new Date(Date.now() + 3_600_000);

describe("scheduling", CHAPTER, () => {
  test("a scheduled message appears at its time, not before", async (t) => {
    const { sender, receiver } = await openQueue(t);
    const at = soon();
    const [sequenceNumber] = await sender.scheduleMessages({ body: "soon", messageId: "m" }, at);
    const message = await receiveOne(receiver);
    assert.ok(new Date() >= at);
    assert.ok(message.enqueuedTimeUtc >= at);
    assert.deepEqual([message.body, message.messageId], ["soon", "m"]);
    assert.deepEqual(message.scheduledEnqueueTimeUtc, at);
    assert.ok(sequenceNumber.greaterThan(0));
  });

  test("several are scheduled in one call, each with its own number", async (t) => {
    const { sender, receiver } = await openQueue(t);
    const numbers = await sender.scheduleMessages([{ body: 1 }, { body: 2 }, { body: 3 }], soon());
    assert.equal(new Set(numbers.map(String)).size, 3);
    assert.deepEqual(bodies(await receiveExactly(receiver, 3)).sort(), [1, 2, 3]);
    assert.deepEqual(await sender.scheduleMessages([], soon()), []);
  });

  test("a scheduled message can be peeked, and counts as scheduled", async (t) => {
    const { queue, sender, receiver } = await openQueue(t);
    const at = muchLater();
    const [sequenceNumber] = await sender.scheduleMessages({ body: "hidden" }, at);
    const [peeked] = await peekAll(receiver);
    assert.deepEqual([peeked.body, peeked.state], ["hidden", "scheduled"]);
    assert.deepEqual(peeked.scheduledEnqueueTimeUtc, at);
    assert.ok(peeked.sequenceNumber.equals(sequenceNumber));
    const runtime = await admin.getQueueRuntimeProperties(queue);
    assert.deepEqual([runtime.scheduledMessageCount, runtime.activeMessageCount], [1, 0]);
  });

  test("a cancelled message never appears", async (t) => {
    const { queue, sender, receiver } = await openQueue(t);
    const [sequenceNumber] = await sender.scheduleMessages({ body: "no" }, muchLater());
    await sender.cancelScheduledMessages(sequenceNumber);
    await assertEmpty(receiver);
    assert.equal((await admin.getQueueRuntimeProperties(queue)).scheduledMessageCount, 0);
  });

  test("several are cancelled in one call, the rest stays", async (t) => {
    const { sender, receiver } = await openQueue(t);
    const numbers = await sender.scheduleMessages([{ body: 1 }, { body: 2 }, { body: 3 }], muchLater());
    await sender.cancelScheduledMessages([numbers[0], numbers[2]]);
    assert.deepEqual(bodies(await peekAll(receiver)), [2]);
    await sender.cancelScheduledMessages([]);
  });

  test("what is not scheduled cannot be cancelled", async (t) => {
    const { sender } = await openQueue(t);
    const [sequenceNumber] = await sender.scheduleMessages({ body: "once" }, muchLater());
    await sender.cancelScheduledMessages(sequenceNumber);
    await assert.rejects(sender.cancelScheduledMessages(sequenceNumber), { code: "MessageNotFound" });
  });

  test("a message may carry its time itself", async (t) => {
    const { sender, receiver } = await openQueue(t);
    const scheduledEnqueueTimeUtc = soon();
    await sender.sendMessages([{ body: "later", scheduledEnqueueTimeUtc }, { body: "now" }]);
    assert.equal((await receiveOne(receiver)).body, "now");
    const later = await receiveOne(receiver);
    assert.deepEqual([later.body, later.scheduledEnqueueTimeUtc], ["later", scheduledEnqueueTimeUtc]);
    assert.ok(new Date() >= scheduledEnqueueTimeUtc);
  });

  test("a time that has passed means now", async (t) => {
    const { sender, receiver } = await openQueue(t);
    await sender.scheduleMessages({ body: "at once" }, new Date(Date.now() - 60_000));
    assert.equal((await receiveOne(receiver)).body, "at once");
  });

  test("every field of a scheduled message is kept", async (t) => {
    const { sender, receiver } = await openQueue(t);
    const message = {
      body: { a: 1 },
      messageId: "m",
      subject: "s",
      correlationId: "c",
      applicationProperties: { p: true },
    };
    await sender.scheduleMessages(message, soon());
    const { body, messageId, subject, correlationId, applicationProperties } = await receiveOne(receiver);
    assert.deepEqual({ body, messageId, subject, correlationId, applicationProperties }, message);
  });
});
