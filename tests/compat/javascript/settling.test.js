// Settling: complete, abandon, defer and dead-letter. A deferred message, or one whose receiver is closed, is settled
// over the management link.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { CHAPTER, openClient, openQueue } from "./namespace.js";
import { assertEmpty, assertNothingToReceive, bodies, peekAll, receiveExactly, receiveOne } from "./waiting.js";

async function openQueueWith(t, message, options = {}) {
  const opened = await openQueue(t, options);
  await opened.sender.sendMessages(message);
  return opened;
}

function deadLettersOf({ client, queue }, options = {}) {
  return client.createReceiver(queue, { subQueueType: "deadLetter", ...options });
}

describe("settling a locked message", CHAPTER, () => {
  test("complete removes it", async (t) => {
    const { receiver } = await openQueueWith(t, { body: "done" });
    await receiver.completeMessage(await receiveOne(receiver));
    await assertEmpty(receiver);
  });

  test("a message is settled once", async (t) => {
    const { receiver } = await openQueueWith(t, { body: "done" });
    const message = await receiveOne(receiver);
    await receiver.completeMessage(message);
    await assert.rejects(receiver.completeMessage(message), /already settled/);
  });

  test("abandon gives it back, its delivery count raised and its properties modified", async (t) => {
    const { receiver } = await openQueueWith(t, { body: "again", applicationProperties: { kept: 1, changed: "old" } });
    const message = await receiveOne(receiver);
    await receiver.abandonMessage(message, { changed: "new", added: true });
    const again = await receiveOne(receiver);
    assert.equal(again.deliveryCount, 1);
    assert.deepEqual(again.applicationProperties, { kept: 1, changed: "new", added: true });
    assert.ok(again.sequenceNumber.equals(message.sequenceNumber));
    assert.notEqual(again.lockToken, message.lockToken);
  });

  test("an abandoned message comes back before those behind it", async (t) => {
    const { receiver } = await openQueueWith(t, [{ body: 1 }, { body: 2 }]);
    await receiver.abandonMessage(await receiveOne(receiver));
    assert.deepEqual(bodies(await receiveExactly(receiver, 2)), [1, 2]);
  });

  test("too many deliveries move it to the dead letters", async (t) => {
    const opened = await openQueueWith(t, { body: "unlucky" }, { maxDeliveryCount: 2 });
    const { receiver } = opened;
    await receiver.abandonMessage(await receiveOne(receiver));
    await receiver.abandonMessage(await receiveOne(receiver));
    const dead = await receiveOne(deadLettersOf(opened));
    assert.equal(dead.body, "unlucky");
    assert.equal(dead.deadLetterReason, "MaxDeliveryCountExceeded");
    await assertEmpty(receiver);
  });

  test("dead-letter keeps reason, description and modified properties", async (t) => {
    const opened = await openQueueWith(t, { body: "bad", messageId: "m", applicationProperties: { kept: 1 } });
    const { receiver } = opened;
    await receiver.deadLetterMessage(await receiveOne(receiver), {
      deadLetterReason: "Malformed",
      deadLetterErrorDescription: "no customer",
      seenBy: "validator",
    });
    const dead = await receiveOne(deadLettersOf(opened));
    assert.deepEqual([dead.body, dead.messageId], ["bad", "m"]);
    assert.deepEqual([dead.deadLetterReason, dead.deadLetterErrorDescription], ["Malformed", "no customer"]);
    assert.equal(dead.applicationProperties.kept, 1);
    assert.equal(dead.applicationProperties.seenBy, "validator");
    await assertEmpty(receiver);
  });

  test("dead-letter needs no reason, and dead letters are a queue like any other", async (t) => {
    const opened = await openQueueWith(t, [{ body: 1 }, { body: 2 }]);
    const { receiver } = opened;
    for (const message of await receiveExactly(receiver, 2)) await receiver.deadLetterMessage(message);

    const deadLettersReceiver = deadLettersOf(opened);
    assert.deepEqual(bodies(await peekAll(deadLettersReceiver)), [1, 2]);
    const first = await receiveOne(deadLettersReceiver);
    assert.equal(first.deadLetterReason ?? null, null);
    await deadLettersReceiver.abandonMessage(first);
    const [again, second] = await receiveExactly(deadLettersReceiver, 2);
    assert.deepEqual([again.body, again.deliveryCount], [1, 1]);
    await deadLettersReceiver.completeMessage(again);
    await deadLettersReceiver.deferMessage(second);
    const [deferred] = await deadLettersReceiver.receiveDeferredMessages(second.sequenceNumber);
    await deadLettersReceiver.completeMessage(deferred);
    await assertEmpty(deadLettersReceiver);
  });

  test("dead letters can be received and deleted, and streamed", async (t) => {
    const opened = await openQueueWith(t, { body: "gone" });
    await opened.receiver.deadLetterMessage(await receiveOne(opened.receiver));
    assert.equal((await receiveOne(deadLettersOf(opened, { receiveMode: "receiveAndDelete" }))).body, "gone");
    await assertEmpty(deadLettersOf(opened));
  });

  test("after its receiver was closed a message is still settled", async (t) => {
    const { queue, client, receiver } = await openQueueWith(t, [{ body: 1 }, { body: 2 }]);
    const closingReceiver = client.createReceiver(queue);
    const [first] = await receiveExactly(closingReceiver, 1);
    await closingReceiver.close();
    await receiver.completeMessage(first);
    assert.deepEqual(bodies(await peekAll(receiver)), [2]);
  });
});

describe("deferring", CHAPTER, () => {
  async function deferOne(t, message = { body: "later", applicationProperties: { kept: 1 } }) {
    const opened = await openQueueWith(t, message);
    const received = await receiveOne(opened.receiver);
    await opened.receiver.deferMessage(received, { deferredBy: "test" });
    return { ...opened, sequenceNumber: received.sequenceNumber };
  }

  test("a deferred message is only received by its number, with its modified properties", async (t) => {
    const { receiver, sequenceNumber } = await deferOne(t);
    await assertNothingToReceive(receiver);
    const [message] = await receiver.receiveDeferredMessages(sequenceNumber);
    assert.equal(message.body, "later");
    assert.equal(message.state, "deferred");
    assert.ok(message.sequenceNumber.equals(sequenceNumber));
    assert.deepEqual(message.applicationProperties, { kept: 1, deferredBy: "test" });
    assert.match(message.lockToken, /^[0-9a-f-]{36}$/);
  });

  test("a deferred message can be completed", async (t) => {
    const { receiver, sequenceNumber } = await deferOne(t);
    const [message] = await receiver.receiveDeferredMessages([sequenceNumber]);
    await receiver.completeMessage(message);
    await assertEmpty(receiver);
  });

  test("a deferred message that is abandoned stays deferred", async (t) => {
    const { receiver, sequenceNumber } = await deferOne(t);
    const [message] = await receiver.receiveDeferredMessages(sequenceNumber);
    await receiver.abandonMessage(message, { tried: 1 });
    await assertNothingToReceive(receiver);
    const [again] = await receiver.receiveDeferredMessages(sequenceNumber);
    assert.equal(again.deliveryCount, message.deliveryCount + 1);
    assert.equal(again.applicationProperties.tried, 1);
  });

  test("a deferred message can be deferred again", async (t) => {
    const { receiver, sequenceNumber } = await deferOne(t);
    const [message] = await receiver.receiveDeferredMessages(sequenceNumber);
    await receiver.deferMessage(message, { times: 2 });
    const [again] = await receiver.receiveDeferredMessages(sequenceNumber);
    assert.equal(again.applicationProperties.times, 2);
  });

  test("a deferred message can be dead-lettered", async (t) => {
    const opened = await deferOne(t);
    const { receiver, sequenceNumber } = opened;
    const [message] = await receiver.receiveDeferredMessages(sequenceNumber);
    await receiver.deadLetterMessage(message, {
      deadLetterReason: "late",
      deadLetterErrorDescription: "too late",
      mark: 1,
    });
    const dead = await receiveOne(deadLettersOf(opened));
    assert.deepEqual([dead.deadLetterReason, dead.deadLetterErrorDescription], ["late", "too late"]);
    assert.equal(dead.applicationProperties.mark, 1);
  });

  test("a deferred message's lock can be renewed", async (t) => {
    const { receiver, sequenceNumber } = await deferOne(t);
    const [message] = await receiver.receiveDeferredMessages(sequenceNumber);
    const before = message.lockedUntilUtc;
    const after = await receiver.renewMessageLock(message);
    assert.ok(after >= before);
  });

  test("several deferred messages come in one call", async (t) => {
    const { receiver } = await openQueueWith(t, [{ body: 1 }, { body: 2 }, { body: 3 }]);
    const messages = await receiveExactly(receiver, 3);
    for (const message of messages) await receiver.deferMessage(message);
    const numbers = messages.map((message) => message.sequenceNumber);
    const deferred = await receiver.receiveDeferredMessages(numbers);
    assert.deepEqual(bodies(deferred).sort(), [1, 2, 3]);
    assert.deepEqual(await receiver.receiveDeferredMessages([]), []);
  });

  test("a deferred message can be received and deleted", async (t) => {
    const { queue, client, receiver, sequenceNumber } = await deferOne(t);
    const deletingReceiver = client.createReceiver(queue, { receiveMode: "receiveAndDelete" });
    const [message] = await deletingReceiver.receiveDeferredMessages(sequenceNumber);
    assert.equal(message.body, "later");
    await assertEmpty(receiver);
  });

  test("another client receives what was deferred here", async (t) => {
    const { queue, sequenceNumber } = await deferOne(t);
    const otherReceiver = openClient(t).createReceiver(queue);
    const [message] = await otherReceiver.receiveDeferredMessages(sequenceNumber);
    await otherReceiver.completeMessage(message);
    await assertEmpty(otherReceiver);
  });

  test("a number that is not there is not found", async (t) => {
    const { receiver, sequenceNumber } = await deferOne(t);
    await assert.rejects(receiver.receiveDeferredMessages(sequenceNumber.add(1000)), { code: "MessageNotFound" });
  });

  test("a message that was not deferred is not found by its number", async (t) => {
    const { receiver } = await openQueueWith(t, { body: "active" });
    const [peeked] = await peekAll(receiver);
    await assert.rejects(receiver.receiveDeferredMessages(peeked.sequenceNumber), { code: "MessageNotFound" });
  });
});
