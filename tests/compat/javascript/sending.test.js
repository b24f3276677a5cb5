// Sending: one message, arrays, batches, their limits, and what refuses them.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { CHAPTER, admin, createQueue, openClient, openQueue } from "./namespace.js";
import { assertNothingToReceive, bodies, receiveExactly, receiveOne } from "./waiting.js";

const STANDARD_LIMIT = 262_144;

describe("sending", CHAPTER, () => {
  test("a single message arrives", async (t) => {
    const { sender, receiver } = await openQueue(t);
    await sender.sendMessages({ body: "hello" });
    assert.equal((await receiveOne(receiver)).body, "hello");
  });

  test("an array arrives in order", async (t) => {
    const { sender, receiver } = await openQueue(t);
    await sender.sendMessages([{ body: 1 }, { body: 2 }, { body: 3 }]);
    assert.deepEqual(bodies(await receiveExactly(receiver, 3)), [1, 2, 3]);
  });

  test("an empty array sends nothing", async (t) => {
    const { sender, receiver } = await openQueue(t);
    await sender.sendMessages([]);
    await assertNothingToReceive(receiver);
  });

  test("a batch arrives in order, each message with its own properties", async (t) => {
    const { sender, receiver } = await openQueue(t);
    const batch = await sender.createMessageBatch();
    for (let number = 0; number < 50; number += 1) {
      assert.ok(
        batch.tryAddMessage({ body: { number }, messageId: `id-${number}`, applicationProperties: { number } }),
      );
    }
    assert.equal(batch.count, 50);
    assert.ok(batch.sizeInBytes > 0 && batch.sizeInBytes < batch.maxSizeInBytes);
    await sender.sendMessages(batch);

    const messages = await receiveExactly(receiver, 50);
    assert.deepEqual(
      messages.map((message) => message.messageId),
      [...Array(50).keys()].map((number) => `id-${number}`),
    );
    assert.deepEqual(
      messages.map((message) => message.applicationProperties.number),
      [...Array(50).keys()],
    );
  });

  test("a batch knows the limit of the link and says no when it is full", async (t) => {
    const { sender, receiver } = await openQueue(t);
    const batch = await sender.createMessageBatch();
    assert.equal(batch.maxSizeInBytes, STANDARD_LIMIT);
    while (batch.tryAddMessage({ body: Buffer.alloc(20_000, 7) }));
    assert.equal(batch.count, 13);
    await sender.sendMessages(batch);
    assert.equal((await receiveExactly(receiver, 13)).length, 13);
  });

  test("a batch may be made smaller than the link allows, not larger", async (t) => {
    const { sender } = await openQueue(t);
    const batch = await sender.createMessageBatch({ maxSizeInBytes: 1000 });
    assert.equal(batch.maxSizeInBytes, 1000);
    assert.equal(batch.tryAddMessage({ body: Buffer.alloc(2000) }), false);
    await assert.rejects(
      sender.createMessageBatch({ maxSizeInBytes: STANDARD_LIMIT + 1 }),
      /greater than maximum message size/,
    );
  });

  test("an array larger than the limit is refused as a whole", async (t) => {
    const { sender, receiver } = await openQueue(t);
    const large = { body: Buffer.alloc(150_000) };
    await assert.rejects(sender.sendMessages([large, large]), { code: "MessageSizeExceeded" });
    await assertNothingToReceive(receiver);
  });

  test("a message larger than the limit is refused, and the sender goes on", async (t) => {
    const { sender, receiver } = await openQueue(t);
    await assert.rejects(sender.sendMessages({ body: Buffer.alloc(STANDARD_LIMIT + 1) }), {
      code: "MessageSizeExceeded",
    });
    await sender.sendMessages({ body: "small" });
    assert.equal((await receiveOne(receiver)).body, "small");
  });

  test("many sends at once all arrive", async (t) => {
    const { sender, receiver } = await openQueue(t);
    const numbers = [...Array(200).keys()];
    await Promise.all(numbers.map((number) => sender.sendMessages({ body: number })));
    const received = bodies(await receiveExactly(receiver, 200));
    assert.deepEqual(
      received.sort((a, b) => a - b),
      numbers,
    );
  });

  test("several senders of one client and of another share a queue", async (t) => {
    const queue = await createQueue();
    const client = openClient(t);
    const otherClient = openClient(t);
    await client.createSender(queue).sendMessages({ body: "a" });
    await client.createSender(queue, { identifier: "second" }).sendMessages({ body: "b" });
    await otherClient.createSender(queue).sendMessages({ body: "c" });
    assert.deepEqual(bodies(await receiveExactly(client.createReceiver(queue), 3)), ["a", "b", "c"]);
  });

  test("a sender can be closed; its client goes on", async (t) => {
    const { queue, client, sender, receiver } = await openQueue(t);
    assert.equal(sender.entityPath, queue);
    await sender.sendMessages({ body: "before" });
    await sender.close();
    assert.equal(sender.isClosed, true);
    await assert.rejects(sender.sendMessages({ body: "after" }), /closed/);
    await client.createSender(queue).sendMessages({ body: "again" });
    assert.deepEqual(bodies(await receiveExactly(receiver, 2)), ["before", "again"]);
  });

  test("the name of an entity is case-insensitive", async (t) => {
    const { queue, client, receiver } = await openQueue(t);
    await client.createSender(queue.toUpperCase()).sendMessages({ body: "same queue" });
    assert.equal((await receiveOne(receiver)).body, "same queue");
  });

  test("a name may contain slashes", async (t) => {
    const client = openClient(t);
    const name = `${await createQueue()}/orders/new`;
    await admin.createQueue(name);
    await client.createSender(name).sendMessages({ body: "nested" });
    assert.equal((await receiveOne(client.createReceiver(name))).body, "nested");
  });

  test("a received message can be sent on", async (t) => {
    const { client, sender, receiver } = await openQueue(t);
    const next = await createQueue();
    await sender.sendMessages({ body: { step: 1 }, messageId: "m", subject: "s", applicationProperties: { a: 1 } });
    const message = await receiveOne(receiver);
    await client.createSender(next).sendMessages(message);
    const moved = await receiveOne(client.createReceiver(next));
    assert.deepEqual(
      [moved.body, moved.messageId, moved.subject, moved.applicationProperties],
      [{ step: 1 }, "m", "s", { a: 1 }],
    );
  });
});

describe("what an entity does with a send", CHAPTER, () => {
  test("duplicate detection drops a message id that was seen", async (t) => {
    const { sender, receiver } = await openQueue(t, { requiresDuplicateDetection: true });
    await sender.sendMessages({ body: "first", messageId: "same" });
    await sender.sendMessages({ body: "second", messageId: "same" });
    await sender.sendMessages([
      { body: "third", messageId: "same" },
      { body: "other", messageId: "other" },
    ]);
    assert.deepEqual(bodies(await receiveExactly(receiver, 2)), ["first", "other"]);
    await assertNothingToReceive(receiver);
  });

  test("without duplicate detection the same id arrives twice", async (t) => {
    const { sender, receiver } = await openQueue(t);
    await sender.sendMessages([
      { body: 1, messageId: "same" },
      { body: 2, messageId: "same" },
    ]);
    assert.deepEqual(bodies(await receiveExactly(receiver, 2)), [1, 2]);
  });

  test("a send-disabled queue refuses sends and still gives what it has", async (t) => {
    const { queue, client, sender, receiver } = await openQueue(t);
    await sender.sendMessages({ body: "kept" });
    await admin.updateQueue({ ...(await admin.getQueue(queue)), status: "SendDisabled" });
    await assert.rejects(client.createSender(queue).sendMessages({ body: "no" }), { code: "MessagingEntityDisabled" });
    assert.equal((await receiveOne(receiver)).body, "kept");
  });

  test("a receive-disabled queue takes sends and gives nothing until it is active again", async (t) => {
    const { queue, client, sender } = await openQueue(t, { status: "ReceiveDisabled" });
    await sender.sendMessages({ body: "waiting" });
    await assert.rejects(client.createReceiver(queue).receiveMessages(1, { maxWaitTimeInMs: 2000 }), {
      code: "MessagingEntityDisabled",
    });
    await admin.updateQueue({ ...(await admin.getQueue(queue)), status: "Active" });
    assert.equal((await receiveOne(client.createReceiver(queue))).body, "waiting");
  });

  test("a disabled queue refuses both", async (t) => {
    const { queue, client, sender } = await openQueue(t, { status: "Disabled" });
    await assert.rejects(sender.sendMessages({ body: "no" }), { code: "MessagingEntityDisabled" });
    await assert.rejects(client.createReceiver(queue).receiveMessages(1, { maxWaitTimeInMs: 2000 }), {
      code: "MessagingEntityDisabled",
    });
  });
});
