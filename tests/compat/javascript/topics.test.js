// Topics: fan-out to subscriptions, each of which has all that a queue has.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { CHAPTER, admin, createSubscription, createTopic, openClient } from "./namespace.js";
import {
  assertEmpty,
  assertNothingToReceive,
  bodies,
  emptied,
  peekAll,
  receiveExactly,
  receiveOne,
  signal,
} from "./waiting.js";

async function openTopic(t, { topicOptions = {}, subscriptionOptions = {}, subscriptions = 1 } = {}) {
  const topic = await createTopic(topicOptions);
  const names = [];
  for (let made = 0; made < subscriptions; made += 1) names.push(await createSubscription(topic, subscriptionOptions));
  const client = openClient(t);
  const receivers = names.map((name) => client.createReceiver(topic, name));
  return { topic, client, sender: client.createSender(topic), subscriptions: names, receivers, receiver: receivers[0] };
}

describe("fan-out", CHAPTER, () => {
  test("every subscription gets its own copy, in order", async (t) => {
    const { sender, receivers } = await openTopic(t, { subscriptions: 3 });
    await sender.sendMessages({ body: 1 });
    await sender.sendMessages([{ body: 2 }, { body: 3 }]);
    for (const receiver of receivers) assert.deepEqual(bodies(await receiveExactly(receiver, 3)), [1, 2, 3]);
  });

  test("settling in one subscription leaves the others alone", async (t) => {
    const { sender, receivers } = await openTopic(t, { subscriptions: 2 });
    const [receiver, otherReceiver] = receivers;
    await sender.sendMessages({ body: "copy" });
    await receiver.completeMessage(await receiveOne(receiver));
    await assertEmpty(receiver);
    assert.deepEqual(bodies(await peekAll(otherReceiver)), ["copy"]);
  });

  test("a batch fans out as its messages", async (t) => {
    const { sender, receivers } = await openTopic(t, { subscriptions: 2 });
    const batch = await sender.createMessageBatch();
    for (let body = 0; body < 10; body += 1) batch.tryAddMessage({ body });
    await sender.sendMessages(batch);
    for (const receiver of receivers) assert.equal((await receiveExactly(receiver, 10)).length, 10);
  });

  test("a subscription gets what is sent after it was made", async (t) => {
    const { topic, client, sender, receiver } = await openTopic(t);
    await sender.sendMessages({ body: "before" });
    const late = await createSubscription(topic);
    await sender.sendMessages({ body: "after" });
    assert.equal((await receiveOne(client.createReceiver(topic, late))).body, "after");
    assert.deepEqual(bodies(await receiveExactly(receiver, 2)), ["before", "after"]);
  });

  test("a topic without subscriptions takes messages and keeps none", async (t) => {
    const { topic, client, sender } = await openTopic(t, { subscriptions: 0 });
    await sender.sendMessages({ body: "nobody listens" });
    const name = await createSubscription(topic);
    await assertEmpty(client.createReceiver(topic, name));
  });

  test("every field and body kind reaches the subscription", async (t) => {
    const { sender, receiver } = await openTopic(t);
    const sent = {
      body: { a: [1] },
      messageId: "m",
      subject: "s",
      correlationId: "c",
      applicationProperties: { n: 1 },
    };
    await sender.sendMessages(sent);
    await sender.sendMessages({ bodyType: "sequence", body: [1, "two"] });
    const [first, second] = await receiveExactly(receiver, 2);
    const { body, messageId, subject, correlationId, applicationProperties } = first;
    assert.deepEqual({ body, messageId, subject, correlationId, applicationProperties }, sent);
    assert.deepEqual([second.body, second._rawAmqpMessage.bodyType], [[1, "two"], "sequence"]);
  });

  test("a topic with duplicate detection drops a repeated id for all subscriptions", async (t) => {
    const { sender, receivers } = await openTopic(t, {
      topicOptions: { requiresDuplicateDetection: true },
      subscriptions: 2,
    });
    await sender.sendMessages({ body: 1, messageId: "same" });
    await sender.sendMessages({ body: 2, messageId: "same" });
    for (const receiver of receivers) assert.deepEqual(bodies(await peekAll(receiver)), [1]);
  });

  test("a message scheduled on a topic comes to the subscriptions at its time", async (t) => {
    const { topic, sender, receiver } = await openTopic(t);
    const cancelled = await sender.scheduleMessages([{ body: 1 }, { body: 2 }], new Date(Date.now() + 3_600_000));
    assert.equal((await admin.getTopicRuntimeProperties(topic)).scheduledMessageCount, 2);
    await sender.cancelScheduledMessages(cancelled);
    const at = new Date(Date.now() + 500);
    await sender.scheduleMessages({ body: "soon" }, at);
    assert.equal((await receiveOne(receiver)).body, "soon");
    assert.ok(new Date() >= at);
    await assertNothingToReceive(receiver);
  });
});

describe("a subscription", CHAPTER, () => {
  test("abandons, defers and dead-letters like a queue", async (t) => {
    const { topic, client, sender, subscriptions, receiver } = await openTopic(t);
    await sender.sendMessages({ body: "x" });
    await receiver.abandonMessage(await receiveOne(receiver), { tried: 1 });
    const again = await receiveOne(receiver);
    assert.deepEqual([again.deliveryCount, again.applicationProperties.tried], [1, 1]);
    await receiver.renewMessageLock(again);
    await receiver.deferMessage(again);
    const [deferred] = await receiver.receiveDeferredMessages(again.sequenceNumber);
    await receiver.deadLetterMessage(deferred, { deadLetterReason: "r", deadLetterErrorDescription: "d" });
    const deadLettersReceiver = client.createReceiver(topic, subscriptions[0], { subQueueType: "deadLetter" });
    const dead = await receiveOne(deadLettersReceiver);
    assert.deepEqual([dead.body, dead.deadLetterReason, dead.deadLetterErrorDescription], ["x", "r", "d"]);
    await deadLettersReceiver.completeMessage(dead);
    await assertEmpty(deadLettersReceiver);
  });

  test("receives and deletes, and streams", async (t) => {
    const { topic, client, sender, subscriptions, receiver } = await openTopic(t);
    await sender.sendMessages([{ body: 1 }, { body: 2 }]);
    const deletingReceiver = client.createReceiver(topic, subscriptions[0], { receiveMode: "receiveAndDelete" });
    assert.equal((await receiveOne(deletingReceiver)).body, 1);
    const second = signal();
    const subscription = receiver.subscribe({
      async processMessage(message) {
        second.give(message.body);
      },
      async processError({ error }) {
        second.fail(error);
      },
    });
    assert.equal(await second.given, 2);
    await emptied(receiver);
    await subscription.close();
  });

  test("has sessions where it requires them", async (t) => {
    const { topic, client, sender, subscriptions } = await openTopic(t, {
      subscriptionOptions: { requiresSession: true },
    });
    await sender.sendMessages([
      { body: "a1", sessionId: "a" },
      { body: "b1", sessionId: "b" },
      { body: "a2", sessionId: "a" },
    ]);
    const session = await client.acceptSession(topic, subscriptions[0], "a");
    assert.deepEqual(bodies(await receiveExactly(session, 2)), ["a1", "a2"]);
    await session.setSessionState({ at: 2 });
    assert.deepEqual(await session.getSessionState(), { at: 2 });
    const next = await client.acceptNextSession(topic, subscriptions[0]);
    assert.equal(next.sessionId, "b");
  });

  test("dead-letters what expires where it says so", async (t) => {
    const { topic, client, sender, subscriptions } = await openTopic(t, {
      subscriptionOptions: { defaultMessageTimeToLive: "PT1S", deadLetteringOnMessageExpiration: true },
    });
    await sender.sendMessages({ body: "short" });
    const dead = await receiveOne(client.createReceiver(topic, subscriptions[0], { subQueueType: "deadLetter" }));
    assert.deepEqual([dead.body, dead.deadLetterReason], ["short", "TTLExpiredException"]);
  });

  test("that is deleted is gone, and the topic goes on", async (t) => {
    const { topic, client, sender, subscriptions, receivers } = await openTopic(t, { subscriptions: 2 });
    await admin.deleteSubscription(topic, subscriptions[0]);
    await sender.sendMessages({ body: "one listener" });
    assert.equal((await receiveOne(receivers[1])).body, "one listener");
    await assert.rejects(client.createReceiver(topic, subscriptions[0]).receiveMessages(1, { maxWaitTimeInMs: 2000 }), {
      code: "MessagingEntityNotFound",
    });
  });
});
