// Locks of messages and sessions: renewing, renewing by itself, and losing. The shortest lock is 5 s, so all of these
// tests wait side by side.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { CHAPTER, createQueue, openClient, openQueue } from "./namespace.js";
import { assertEmpty, emptied, receiveOne, signal, until } from "./waiting.js";

const SHORTEST_LOCK = { lockDuration: "PT5S" };

// By itself the SDK renews the lock of every message it received and every session it accepted, for five minutes.
const WITHOUT_RENEWAL = { maxAutoLockRenewalDurationInMs: 0 };

async function openLockedMessage(t, receiverOptions = WITHOUT_RENEWAL) {
  const { queue, client, sender } = await openQueue(t, SHORTEST_LOCK);
  const receiver = client.createReceiver(queue, receiverOptions);
  await sender.sendMessages({ body: "locked" });
  return { queue, client, sender, receiver, message: await receiveOne(receiver) };
}

/** Waits on another connection until the lock has run out and the message is delivered again. */
async function redelivered(t, queue) {
  const receiver = openClient(t).createReceiver(queue);
  return { receiver, message: await receiveOne(receiver) };
}

async function openShortSession(t, options) {
  const queue = await createQueue({ requiresSession: true, lockDuration: "PT5S" });
  const client = openClient(t);
  await client.createSender(queue).sendMessages({ body: "held", sessionId: "s" });
  return { queue, client, session: await client.acceptSession(queue, "s", options) };
}

describe("locks", { ...CHAPTER, concurrency: 16 }, () => {
  test("a lock lasts as long as the queue says", async (t) => {
    const before = Date.now();
    const { message } = await openLockedMessage(t);
    const lockedUntil = message.lockedUntilUtc.getTime();
    assert.ok(lockedUntil - before >= 4990, `locked for ${lockedUntil - before} ms at most`);
    assert.ok(lockedUntil - Date.now() <= 5010, `locked for ${lockedUntil - Date.now()} ms more`);
  });

  test("renewing moves the end of the lock", async (t) => {
    const { receiver, message } = await openLockedMessage(t);
    const before = message.lockedUntilUtc;
    const renewed = await receiver.renewMessageLock(message);
    assert.ok(renewed > before);
    assert.deepEqual(message.lockedUntilUtc, renewed);
    await receiver.completeMessage(message);
    await assertEmpty(receiver);
  });

  test("a renewed message is not handed out at the end of its first lock", async (t) => {
    const { queue, sender, receiver, message } = await openLockedMessage(t);
    await sender.sendMessages({ body: "lost", messageId: "lost" });
    await receiveOne(receiver);
    await until(async () => Date.now() > message.lockedUntilUtc.getTime() - 2000, "the first lock is nearly over");
    await receiver.renewMessageLock(message);
    const again = await redelivered(t, queue);
    assert.equal(again.message.body, "lost");
    await receiver.completeMessage(message);
  });

  test("an expired lock gives the message to another receiver, and the first one has lost it", async (t) => {
    const { queue, receiver, message } = await openLockedMessage(t);
    const again = await redelivered(t, queue);
    assert.deepEqual([again.message.body, again.message.deliveryCount], ["locked", 1]);
    await assert.rejects(receiver.completeMessage(message), { code: "MessageLockLost" });
    await again.receiver.completeMessage(again.message);
    await assertEmpty(receiver);
  });

  test("every way to settle fails once the lock is lost", async (t) => {
    const { queue, sender, receiver, message: first } = await openLockedMessage(t);
    await sender.sendMessages([{ body: 2 }, { body: 3 }]);
    const second = await receiveOne(receiver);
    const third = await receiveOne(receiver);
    await redelivered(t, queue);
    await until(async () => Date.now() > third.lockedUntilUtc.getTime(), "the last lock is over");
    await assert.rejects(receiver.abandonMessage(first), { code: "MessageLockLost" });
    await assert.rejects(receiver.deferMessage(second), { code: "MessageLockLost" });
    await assert.rejects(receiver.deadLetterMessage(third), { code: "MessageLockLost" });
  });

  test("an expired lock cannot be renewed", async (t) => {
    const { queue, receiver, message } = await openLockedMessage(t);
    await redelivered(t, queue);
    await assert.rejects(receiver.renewMessageLock(message), { code: "MessageLockLost" });
  });

  test("lock expiries count as deliveries", async (t) => {
    const { queue, client, sender } = await openQueue(t, { ...SHORTEST_LOCK, maxDeliveryCount: 1 });
    await sender.sendMessages({ body: "once" });
    await receiveOne(client.createReceiver(queue, WITHOUT_RENEWAL));
    const dead = await receiveOne(client.createReceiver(queue, { subQueueType: "deadLetter" }));
    assert.equal(dead.deadLetterReason, "MaxDeliveryCountExceeded");
  });

  test("the SDK renews the lock of a received message by itself", async (t) => {
    const { receiver, message } = await openLockedMessage(t, {});
    const first = message.lockedUntilUtc;
    await until(() => message.lockedUntilUtc > first && new Date() > first, "the first lock is over");
    await receiver.completeMessage(message);
    await assertEmpty(receiver);
  });

  test("a subscriber's lock is renewed while its handler works", async (t) => {
    const { sender, receiver } = await openQueue(t, SHORTEST_LOCK);
    await sender.sendMessages({ body: "slow" });
    const done = signal();
    const subscription = receiver.subscribe({
      async processMessage(message) {
        const first = message.lockedUntilUtc;
        await until(() => message.lockedUntilUtc > first, "the SDK renewed the lock");
        done.give(message);
      },
      async processError({ error }) {
        done.fail(error);
      },
    });
    assert.equal((await done.given).body, "slow");
    await emptied(receiver);
    await subscription.close();
  });

  test("without renewal a slow subscriber loses its lock", async (t) => {
    const { queue, client, sender } = await openQueue(t, SHORTEST_LOCK);
    await sender.sendMessages({ body: "slow" });
    const slowReceiver = client.createReceiver(queue, WITHOUT_RENEWAL);
    const taken = signal();
    const lost = signal();
    slowReceiver.subscribe({
      async processMessage() {
        taken.give();
        const { message } = await redelivered(t, queue);
        assert.equal(message.deliveryCount, 1);
      },
      async processError(args) {
        lost.give(args);
      },
    });
    await taken.given;
    const { error, errorSource } = await lost.given;
    assert.deepEqual([error.code, errorSource], ["MessageLockLost", "complete"]);
  });

  test("an expired lock frees the session, and its first holder has lost it", async (t) => {
    const { queue, session } = await openShortSession(t, WITHOUT_RENEWAL);
    const message = await receiveOne(session);
    const again = await openClient(t).acceptNextSession(queue);
    assert.equal(again.sessionId, "s");
    const redelivered = await receiveOne(again);
    assert.deepEqual([redelivered.body, redelivered.deliveryCount], ["held", 1]);
    await assert.rejects(session.completeMessage(message), /closed|lock/i);
    await again.completeMessage(redelivered);
  });

  test("a subscriber is told that its session is lost", async (t) => {
    const { session } = await openShortSession(t, WITHOUT_RENEWAL);
    const lost = signal();
    session.subscribe({
      async processMessage() {
        await lost.given;
      },
      async processError({ error }) {
        lost.give(error);
      },
    });
    assert.equal((await lost.given).code, "SessionLockLost");
  });

  test("the SDK renews the lock of a session by itself", async (t) => {
    const { session } = await openShortSession(t);
    const first = session.sessionLockedUntilUtc;
    const message = await receiveOne(session);
    await until(() => session.sessionLockedUntilUtc > first && Date.now() > first.getTime(), "the first lock is over");
    await session.completeMessage(message);
  });

  test("a renewed session is not given to the next one who waits", async (t) => {
    const { queue, session } = await openShortSession(t, WITHOUT_RENEWAL);
    const first = session.sessionLockedUntilUtc;
    await until(() => Date.now() > first.getTime() - 2000, "the first lock is nearly over");
    await session.renewSessionLock();
    await until(() => Date.now() > first.getTime(), "the first lock is over");
    await assert.rejects(openClient(t).acceptSession(queue, "s"), { code: "SessionCannotBeLocked" });
    await session.completeMessage(await receiveOne(session));
  });
});
