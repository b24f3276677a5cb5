// Errors as the SDK reports them: what is missing, what is not allowed, what is closed.
import { isServiceBusError } from "@azure/service-bus";
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { CHAPTER, admin, createTopic, openClient, openQueue, uniqueName } from "./namespace.js";
import { receiveOne, signal } from "./waiting.js";

const NOT_FOUND = { name: "ServiceBusError", code: "MessagingEntityNotFound" };

describe("an entity that is missing", CHAPTER, () => {
  test("cannot be sent to", async (t) => {
    const sender = openClient(t).createSender(uniqueName("missing"));
    await assert.rejects(sender.sendMessages({ body: 1 }), NOT_FOUND);
    await assert.rejects(sender.sendMessages([{ body: 1 }]), NOT_FOUND);
    await assert.rejects(sender.createMessageBatch(), NOT_FOUND);
    await assert.rejects(sender.scheduleMessages({ body: 1 }, new Date()), NOT_FOUND);
  });

  test("cannot be received from", async (t) => {
    const receiver = openClient(t).createReceiver(uniqueName("missing"));
    await assert.rejects(receiver.receiveMessages(1, { maxWaitTimeInMs: 2000 }), NOT_FOUND);
    await assert.rejects(receiver.peekMessages(1), NOT_FOUND);
  });

  test("has no sessions", async (t) => {
    const client = openClient(t);
    await assert.rejects(client.acceptSession(uniqueName("missing"), "a"), NOT_FOUND);
    await assert.rejects(client.acceptNextSession(uniqueName("missing")), NOT_FOUND);
  });

  test("is told to a subscriber", async (t) => {
    const told = signal();
    const receiver = openClient(t).createReceiver(uniqueName("missing"));
    receiver.subscribe({
      async processMessage() {},
      async processError(args) {
        told.give(args);
      },
    });
    const { error, errorSource, entityPath } = await told.given;
    assert.deepEqual(
      [error.code, errorSource, entityPath],
      ["MessagingEntityNotFound", "receive", receiver.entityPath],
    );
    await receiver.close();
  });

  test("may be a subscription of a topic that is there", async (t) => {
    const receiver = openClient(t).createReceiver(await createTopic(), "missing");
    await assert.rejects(receiver.receiveMessages(1, { maxWaitTimeInMs: 2000 }), NOT_FOUND);
  });

  test("may have been there a moment ago", async (t) => {
    const { queue, client, sender } = await openQueue(t);
    await sender.sendMessages({ body: 1 });
    await admin.deleteQueue(queue);
    const error = await client
      .createSender(queue)
      .sendMessages({ body: 2 })
      .catch((caught) => caught);
    assert.ok(isServiceBusError(error));
    assert.equal(error.code, "MessagingEntityNotFound");
    assert.match(error.message, new RegExp(queue));
  });

  test("does not disturb the other links of the connection", async (t) => {
    const { client, sender, receiver } = await openQueue(t);
    await sender.sendMessages({ body: 1 });
    await assert.rejects(client.createSender(uniqueName("missing")).sendMessages({ body: 1 }), NOT_FOUND);
    await sender.sendMessages({ body: 2 });
    assert.equal((await receiveOne(receiver)).body, 1);
    assert.equal((await receiveOne(receiver)).body, 2);
  });
});

describe("what is not allowed", CHAPTER, () => {
  test("a topic cannot be received from", async (t) => {
    const receiver = openClient(t).createReceiver(await createTopic());
    await assert.rejects(receiver.receiveMessages(1, { maxWaitTimeInMs: 2000 }), isServiceBusError);
  });

  test("a closed client refuses everything", async (t) => {
    const { queue, client, sender, receiver } = await openQueue(t);
    await sender.sendMessages({ body: 1 });
    await client.close();
    await assert.rejects(sender.sendMessages({ body: 2 }), /closed/);
    await assert.rejects(receiver.receiveMessages(1), /closed/);
    assert.throws(() => client.createSender(queue), /closed/);
    assert.deepEqual([sender.isClosed, receiver.isClosed], [true, true]);
  });
});
