// Time to live: of a message, of a queue, and where an expired message goes.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { CHAPTER, openQueue } from "./namespace.js";
import { assertNothingToReceive, emptied, receiveExactly, receiveOne, until } from "./waiting.js";

/** Sends to a receiver that waits already, so that even a short-lived message reaches it in time. */
async function sendToWaiting(receiver, sender, message) {
  await assertNothingToReceive(receiver);
  const [[received]] = await Promise.all([receiveExactly(receiver, 1), sender.sendMessages(message)]);
  return received;
}

describe("time to live", CHAPTER, () => {
  test("an expired message is dropped", async (t) => {
    const { sender, receiver } = await openQueue(t);
    await sender.sendMessages({ body: "short", timeToLive: 1000 });
    await emptied(receiver);
    await assertNothingToReceive(receiver);
  });

  test("an expired message is dead-lettered where the queue says so", async (t) => {
    const { queue, client, sender } = await openQueue(t, { deadLetteringOnMessageExpiration: true });
    await sender.sendMessages([{ body: "short", messageId: "m", timeToLive: 1000 }, { body: "long" }]);
    const dead = await receiveOne(client.createReceiver(queue, { subQueueType: "deadLetter" }));
    assert.deepEqual([dead.body, dead.messageId, dead.deadLetterReason], ["short", "m", "TTLExpiredException"]);
  });

  test("the queue's time to live counts where the message has none, or a longer one", async (t) => {
    const { queue, client, sender } = await openQueue(t, {
      defaultMessageTimeToLive: "PT1S",
      deadLetteringOnMessageExpiration: true,
    });
    await sender.sendMessages([{ body: "none" }, { body: "longer", timeToLive: 600_000 }]);
    const dead = await receiveExactly(client.createReceiver(queue, { subQueueType: "deadLetter" }), 2);
    assert.deepEqual(dead.map(({ body }) => body).sort(), ["longer", "none"]);
  });

  test("a message is received until it expires", async (t) => {
    const { sender, receiver } = await openQueue(t);
    await sender.sendMessages({ body: "in time", timeToLive: 20_000 });
    const message = await receiveOne(receiver);
    assert.equal(message.timeToLive, 20_000);
    assert.ok(message.expiresAtUtc > new Date());
  });

  test("a message that expires while locked can still be completed", async (t) => {
    const { sender, receiver } = await openQueue(t);
    const message = await sendToWaiting(receiver, sender, { body: "held", timeToLive: 1000 });
    await until(() => new Date() > message.expiresAtUtc, "the message has expired");
    await receiver.completeMessage(message);
  });

  test("dead letters do not expire", async (t) => {
    const { queue, client, sender, receiver } = await openQueue(t);
    const message = await sendToWaiting(receiver, sender, { body: "kept", timeToLive: 1000 });
    await receiver.deadLetterMessage(message);
    await until(() => new Date() > message.expiresAtUtc, "its time is over");
    assert.equal((await receiveOne(client.createReceiver(queue, { subQueueType: "deadLetter" }))).body, "kept");
  });
});
