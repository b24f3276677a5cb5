// Sessions: accepting one by name or the next, their order, state and settlement.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { CHAPTER, ONE_ATTEMPT, createQueue, openClient, openQueue } from "./namespace.js";
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

const WITH_SESSIONS = { requiresSession: true };

async function openSessionQueue(t, ...sessionIds) {
  const queue = await createQueue(WITH_SESSIONS);
  const client = openClient(t);
  const sender = client.createSender(queue);
  for (const sessionId of sessionIds) {
    await sender.sendMessages([1, 2].map((number) => ({ body: `${sessionId}${number}`, sessionId })));
  }
  return { queue, client, sender };
}

describe("accepting a session", CHAPTER, () => {
  test("a session gives its own messages in order, and no others", async (t) => {
    const { queue, client } = await openSessionQueue(t, "a", "b");
    const session = await client.acceptSession(queue, "b");
    assert.equal(session.sessionId, "b");
    assert.equal(session.entityPath, queue);
    assert.ok(session.sessionLockedUntilUtc > new Date());
    const messages = await receiveExactly(session, 2);
    assert.deepEqual(bodies(messages), ["b1", "b2"]);
    assert.deepEqual(
      messages.map(({ sessionId }) => sessionId),
      ["b", "b"],
    );
    await assertNothingToReceive(session);
  });

  test("the next session is one that has messages and is free", async (t) => {
    const { queue, client } = await openSessionQueue(t, "a", "b");
    const session = await client.acceptNextSession(queue);
    const otherSession = await client.acceptNextSession(queue);
    assert.deepEqual([session.sessionId, otherSession.sessionId].sort(), ["a", "b"]);
    assert.deepEqual(bodies(await receiveExactly(otherSession, 2)), [
      `${otherSession.sessionId}1`,
      `${otherSession.sessionId}2`,
    ]);
  });

  test("waiting for the next session ends when a message comes", async (t) => {
    const { queue, client, sender } = await openSessionQueue(t);
    const waiting = client.acceptNextSession(queue);
    await sender.sendMessages({ body: "new", sessionId: "fresh" });
    const session = await waiting;
    assert.equal(session.sessionId, "fresh");
    assert.equal((await receiveOne(session)).body, "new");
  });

  test("with no session to be had the wait times out", async (t) => {
    const { queue } = await openSessionQueue(t);
    const client = openClient(t, { retryOptions: { ...ONE_ATTEMPT, timeoutInMs: 1500 } });
    await assert.rejects(client.acceptNextSession(queue), { code: "ServiceTimeout" });
  });

  test("a session that is taken cannot be locked, and can once it is given back", async (t) => {
    const { queue, client } = await openSessionQueue(t, "a");
    const session = await client.acceptSession(queue, "a");
    const otherClient = openClient(t);
    await assert.rejects(otherClient.acceptSession(queue, "a"), { code: "SessionCannotBeLocked" });
    await session.close();
    assert.equal(session.isClosed, true);
    const again = await otherClient.acceptSession(queue, "a");
    assert.deepEqual(bodies(await receiveExactly(again, 2)), ["a1", "a2"]);
  });

  test("a session without messages can be accepted by name", async (t) => {
    const { queue, client, sender } = await openSessionQueue(t);
    const session = await client.acceptSession(queue, "later");
    await sender.sendMessages({ body: "first", sessionId: "later" });
    assert.equal((await receiveOne(session)).body, "first");
  });

  test("what a closed session receiver had locked is delivered again", async (t) => {
    const { queue, client } = await openSessionQueue(t, "a");
    const session = await client.acceptSession(queue, "a");
    await receiveOne(session);
    await session.close();
    const again = await client.acceptSession(queue, "a");
    assert.equal((await receiveOne(again)).body, "a1");
  });

  test("a session's messages can be taken in parts", async (t) => {
    const { queue, client } = await openSessionQueue(t, "a");
    const session = await client.acceptSession(queue, "a");
    assert.deepEqual(bodies(await session.receiveMessages(1)), ["a1"]);
    assert.deepEqual(bodies(await session.receiveMessages(1)), ["a2"]);
  });

  test("a session can be received and deleted", async (t) => {
    const { queue, client } = await openSessionQueue(t, "a");
    const session = await client.acceptSession(queue, "a", { receiveMode: "receiveAndDelete" });
    assert.equal(session.receiveMode, "receiveAndDelete");
    assert.deepEqual(bodies(await receiveExactly(session, 2)), ["a1", "a2"]);
    assert.deepEqual(await session.peekMessages(1), []);
  });
});

describe("settling in a session", CHAPTER, () => {
  test("complete, abandon, defer and dead-letter", async (t) => {
    const { queue, client, sender } = await openSessionQueue(t, "a");
    await sender.sendMessages([{ body: "a3", sessionId: "a" }]);
    const session = await client.acceptSession(queue, "a");
    await session.completeMessage(await receiveOne(session));
    await session.abandonMessage(await receiveOne(session), { tried: 1 });
    const second = await receiveOne(session);
    assert.deepEqual([second.body, second.deliveryCount, second.applicationProperties.tried], ["a2", 1, 1]);
    await session.deferMessage(second);
    await session.deadLetterMessage(await receiveOne(session), {
      deadLetterReason: "r",
      deadLetterErrorDescription: "d",
    });
    await assertNothingToReceive(session);

    const [deferred] = await session.receiveDeferredMessages(second.sequenceNumber);
    assert.deepEqual([deferred.body, deferred.sessionId], ["a2", "a"]);
    await session.completeMessage(deferred);
    const dead = await receiveOne(client.createReceiver(queue, { subQueueType: "deadLetter" }));
    assert.deepEqual([dead.body, dead.sessionId, dead.deadLetterReason], ["a3", "a", "r"]);
  });

  test("a peek sees only the session's messages", async (t) => {
    const { queue, client } = await openSessionQueue(t, "a", "b");
    const session = await client.acceptSession(queue, "b");
    assert.deepEqual(bodies(await session.peekMessages(1)), ["b1"]);
    assert.deepEqual(bodies(await session.peekMessages(10)), ["b2"]);
    assert.deepEqual(bodies(await peekAll(session)), ["b1", "b2"]);
  });

  test("the iterator and subscribe work on a session", async (t) => {
    const { queue, client, sender } = await openSessionQueue(t, "a");
    const session = await client.acceptSession(queue, "a");
    for await (const message of session.getMessageIterator()) {
      await session.completeMessage(message);
      if (message.body === "a2") break;
    }
    const third = signal();
    const subscription = session.subscribe({
      async processMessage(message) {
        third.give(message.body);
      },
      async processError({ error }) {
        third.fail(error);
      },
    });
    await sender.sendMessages({ body: "a3", sessionId: "a" });
    assert.equal(await third.given, "a3");
    await emptied(session);
    await subscription.close();
    await session.close();
  });

  test("message locks are not renewed in sessions", async (t) => {
    const { queue, client } = await openSessionQueue(t, "a");
    const session = await client.acceptSession(queue, "a");
    const message = await receiveOne(session);
    await assert.rejects(session.renewMessageLock(message), /invalid operation/);
  });

  test("scheduled messages come to their session", async (t) => {
    const { queue, client, sender } = await openSessionQueue(t);
    await sender.scheduleMessages({ body: "soon", sessionId: "s" }, new Date(Date.now() + 500));
    const session = await client.acceptNextSession(queue);
    assert.deepEqual([session.sessionId, (await receiveOne(session)).body], ["s", "soon"]);
  });
});

describe("session state and lock", CHAPTER, () => {
  test("state is kept with the session, whoever holds it", async (t) => {
    const { queue, client } = await openSessionQueue(t, "a", "b");
    const session = await client.acceptSession(queue, "a");
    assert.equal(await session.getSessionState(), null);
    await session.setSessionState({ step: 2, names: ["x", "ü"] });
    assert.deepEqual(await session.getSessionState(), { step: 2, names: ["x", "ü"] });
    await session.close();

    const otherClient = openClient(t);
    const again = await otherClient.acceptSession(queue, "a");
    assert.deepEqual(await again.getSessionState(), { step: 2, names: ["x", "ü"] });
    const other = await otherClient.acceptSession(queue, "b");
    assert.equal(await other.getSessionState(), null);
  });

  test("state may be text, bytes or nothing", async (t) => {
    const { queue, client } = await openSessionQueue(t, "a");
    const session = await client.acceptSession(queue, "a");
    await session.setSessionState("text");
    assert.equal(await session.getSessionState(), "text");
    await session.setSessionState(Buffer.from([0, 255, 1]));
    assert.deepEqual(await session.getSessionState(), Buffer.from([0, 255, 1]));
    await session.setSessionState(null);
    assert.equal(await session.getSessionState(), null);
  });

  test("state outlives the session's messages", async (t) => {
    const { queue, client } = await openSessionQueue(t, "a");
    const session = await client.acceptSession(queue, "a");
    for (const message of await receiveExactly(session, 2)) await session.completeMessage(message);
    await session.setSessionState("done");
    await session.close();
    assert.equal(await (await client.acceptSession(queue, "a")).getSessionState(), "done");
  });

  test("renewing moves the end of the session's lock", async (t) => {
    const { queue, client } = await openSessionQueue(t, "a");
    const session = await client.acceptSession(queue, "a");
    const before = session.sessionLockedUntilUtc;
    const renewed = await session.renewSessionLock();
    assert.ok(renewed >= before);
    assert.deepEqual(session.sessionLockedUntilUtc, renewed);
  });
});

describe("what sessions refuse", CHAPTER, () => {
  test("a message without a session id is refused by a session queue", async (t) => {
    const { sender } = await openSessionQueue(t);
    await assert.rejects(
      sender.sendMessages({ body: "none" }),
      (error) => error.name === "ServiceBusError" && !error.retryable,
    );
  });

  test("a session queue cannot be received from without a session", async (t) => {
    const { queue, client } = await openSessionQueue(t, "a");
    const receiver = client.createReceiver(queue);
    await assert.rejects(receiver.receiveMessages(1, { maxWaitTimeInMs: 2000 }), /InvalidOperationError/);
  });

  test("a queue without sessions has none to accept", async (t) => {
    const { queue, client } = await openQueue(t);
    await assert.rejects(client.acceptSession(queue, "a"), { name: "ServiceBusError" });
  });

  test("a queue without sessions carries session ids all the same", async (t) => {
    const { sender, receiver } = await openQueue(t);
    await sender.sendMessages({ body: "x", sessionId: "group" });
    const message = await receiveOne(receiver);
    assert.equal(message.sessionId, "group");
    await receiver.completeMessage(message);
    await assertEmpty(receiver);
  });
});
