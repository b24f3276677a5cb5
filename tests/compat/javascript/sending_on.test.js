// A received message can be sent on: as the SDK gave it to the program, or as the annotated message inside of it.
// The SDK writes dates as numbers then, and numbers in other types than they had.
import assert from "node:assert/strict";
import { describe, it } from "node:test";
import { CHAPTER, createQueue, openQueue } from "./namespace.js";
import { randomMessage, seen } from "./random_messages.js";
import { peekAll, receiveExactly, receiveOne } from "./waiting.js";

const MESSAGES = 60;
const LATER = new Date("2031-02-03T04:05:06.789Z");
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
