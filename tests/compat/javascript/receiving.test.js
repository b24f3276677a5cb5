// Receiving: by asking, by iterating and by subscribing, under peek-lock and receive-and-delete.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { CHAPTER, openQueue } from "./namespace.js";
import { assertEmpty, assertNothingToReceive, bodies, emptied, receiveExactly, receiveOne, signal } from "./waiting.js";

describe("receiveMessages", CHAPTER, () => {
  test("peek-lock hands out a lock, and no one else gets the message", async (t) => {
    const { queue, client, sender, receiver } = await openQueue(t);
    await sender.sendMessages({ body: "locked" });
    const message = await receiveOne(receiver);
    assert.match(message.lockToken, /^[0-9a-f-]{36}$/);
    assert.ok(message.lockedUntilUtc > new Date());
    assert.equal(message.deliveryCount, 0);
    assert.equal(message.state, "active");
    await assertNothingToReceive(client.createReceiver(queue));
  });

  test("receive-and-delete removes the message on delivery", async (t) => {
    const { queue, client, sender, receiver } = await openQueue(t);
    await sender.sendMessages([{ body: 1 }, { body: 2 }]);
    const deletingReceiver = client.createReceiver(queue, { receiveMode: "receiveAndDelete" });
    const messages = await receiveExactly(deletingReceiver, 2);
    assert.deepEqual(bodies(messages), [1, 2]);
    assert.equal(messages[0].lockToken, undefined);
    await assert.rejects(deletingReceiver.completeMessage(messages[0]), /not supported in 'receiveAndDelete'/);
    await assertEmpty(receiver);
  });

  test("no more than asked for is handed out", async (t) => {
    const { queue, client, sender, receiver } = await openQueue(t);
    await sender.sendMessages([1, 2, 3, 4, 5].map((body) => ({ body })));
    assert.deepEqual(bodies(await receiver.receiveMessages(2)), [1, 2]);
    assert.deepEqual(bodies(await receiveExactly(client.createReceiver(queue), 3)), [3, 4, 5]);
  });

  test("fewer than asked for are returned when no more come", async (t) => {
    const { sender, receiver } = await openQueue(t);
    await sender.sendMessages([{ body: 1 }, { body: 2 }]);
    assert.deepEqual(bodies(await receiver.receiveMessages(10, { maxWaitTimeInMs: 5000 })), [1, 2]);
    await assertNothingToReceive(receiver);
  });

  test("an empty queue gives an empty array, again and again on the same receiver", async (t) => {
    const { sender, receiver } = await openQueue(t);
    await assertNothingToReceive(receiver);
    await assertNothingToReceive(receiver);
    await sender.sendMessages({ body: "late" });
    assert.equal((await receiveOne(receiver)).body, "late");
  });

  test("a waiting receive gets what is sent meanwhile", async (t) => {
    const { sender, receiver } = await openQueue(t);
    const waiting = receiver.receiveMessages(1, { maxWaitTimeInMs: 10_000 });
    await sender.sendMessages({ body: "while waiting" });
    assert.deepEqual(bodies(await waiting), ["while waiting"]);
  });

  test("an aborted receive ends at once and leaves the message in the queue", async (t) => {
    const { queue, client, sender, receiver } = await openQueue(t);
    const aborter = new AbortController();
    await assertNothingToReceive(receiver);
    const waiting = receiver.receiveMessages(1, { maxWaitTimeInMs: 10_000, abortSignal: aborter.signal });
    setImmediate(() => aborter.abort());
    await assert.rejects(waiting, { name: "AbortError" });
    await receiver.close();
    await sender.sendMessages({ body: "still here" });
    assert.equal((await receiveOne(client.createReceiver(queue))).body, "still here");
  });

  test("a hundred messages are received and completed in one go", async (t) => {
    const { sender, receiver } = await openQueue(t);
    await sender.sendMessages([...Array(100).keys()].map((body) => ({ body })));
    const messages = await receiveExactly(receiver, 100);
    await Promise.all(messages.map((message) => receiver.completeMessage(message)));
    await assertEmpty(receiver);
  });

  test("a closed receiver refuses to receive", async (t) => {
    const { queue, receiver } = await openQueue(t);
    await assertNothingToReceive(receiver);
    assert.equal(receiver.entityPath, queue);
    assert.equal(receiver.receiveMode, "peekLock");
    await receiver.close();
    assert.equal(receiver.isClosed, true);
    await assert.rejects(receiver.receiveMessages(1), /closed/);
  });
});

describe("getMessageIterator", CHAPTER, () => {
  test("the iterator yields messages as they come", async (t) => {
    const { sender, receiver } = await openQueue(t);
    await sender.sendMessages([{ body: 1 }, { body: 2 }]);
    const seen = [];
    for await (const message of receiver.getMessageIterator()) {
      seen.push(message.body);
      await receiver.completeMessage(message);
      if (message.body === 2) await sender.sendMessages({ body: 3 });
      if (message.body === 3) break;
    }
    assert.deepEqual(seen, [1, 2, 3]);
    await assertEmpty(receiver);
  });
});

/** Subscribes and resolves with `count` messages; any processError fails it. */
function collect(receiver, count, options = {}, onMessage = async () => {}) {
  const messages = [];
  const all = signal();
  const subscription = receiver.subscribe(
    {
      async processMessage(message) {
        messages.push(message);
        await onMessage(message);
        if (messages.length === count) all.give(messages);
      },
      async processError({ error }) {
        all.fail(error);
      },
    },
    options,
  );
  return { subscription, all: all.given };
}

describe("subscribe", CHAPTER, () => {
  test("messages are streamed and completed by themselves", async (t) => {
    const { sender, receiver } = await openQueue(t);
    const { subscription, all } = collect(receiver, 5);
    await sender.sendMessages([1, 2, 3, 4, 5].map((body) => ({ body })));
    assert.deepEqual(bodies(await all), [1, 2, 3, 4, 5]);
    await emptied(receiver);
    await subscription.close();
  });

  test("without autoCompleteMessages the handler settles", async (t) => {
    const { sender, receiver } = await openQueue(t);
    await sender.sendMessages([{ body: "complete" }, { body: "dead-letter" }]);
    const { subscription, all } = collect(receiver, 2, { autoCompleteMessages: false }, (message) =>
      message.body === "complete" ? receiver.completeMessage(message) : receiver.deadLetterMessage(message),
    );
    await all;
    await emptied(receiver);
    await subscription.close();
  });

  test("maxConcurrentCalls handlers run at once, and no more", async (t) => {
    const { sender, receiver } = await openQueue(t);
    await sender.sendMessages([...Array(6).keys()].map((body) => ({ body })));
    const release = signal();
    let running = 0;
    let most = 0;
    const { subscription, all } = collect(receiver, 6, { maxConcurrentCalls: 3 }, async () => {
      running += 1;
      most = Math.max(most, running);
      if (running === 3) release.give();
      await release.given;
      running -= 1;
    });
    assert.equal((await all).length, 6);
    assert.equal(most, 3);
    await emptied(receiver);
    await subscription.close();
  });

  test("a handler that throws gets the message again, its delivery count raised", async (t) => {
    const { sender, receiver } = await openQueue(t);
    await sender.sendMessages({ body: "twice" });
    const second = signal();
    const errors = [];
    const subscription = receiver.subscribe({
      async processMessage(message) {
        if (message.deliveryCount === 0) throw new Error("not yet");
        second.give(message);
      },
      async processError(args) {
        errors.push(args);
      },
    });
    assert.equal((await second.given).deliveryCount, 1);
    await emptied(receiver);
    assert.deepEqual(
      errors.map(({ error, errorSource }) => [error.message, errorSource]),
      [["not yet", "processMessageCallback"]],
    );
    await subscription.close();
  });

  test("a closed subscription receives no more; a new one goes on", async (t) => {
    const { sender, receiver } = await openQueue(t);
    const first = collect(receiver, 1);
    await sender.sendMessages({ body: "one" });
    assert.deepEqual(bodies(await first.all), ["one"]);
    await emptied(receiver);
    await first.subscription.close();
    await sender.sendMessages({ body: "two" });
    const second = collect(receiver, 1);
    assert.deepEqual(bodies(await second.all), ["two"]);
    assert.deepEqual(bodies(await first.all), ["one"]);
    await emptied(receiver);
    await second.subscription.close();
  });

  test("receive-and-delete can be streamed too", async (t) => {
    const { queue, client, sender, receiver } = await openQueue(t);
    await sender.sendMessages([{ body: 1 }, { body: 2 }]);
    const { subscription, all } = collect(client.createReceiver(queue, { receiveMode: "receiveAndDelete" }), 2);
    assert.deepEqual(bodies(await all), [1, 2]);
    await subscription.close();
    await assertEmpty(receiver);
  });

  test("two subscribers share the messages of a queue", async (t) => {
    const { queue, client, sender, receiver } = await openQueue(t);
    const seen = [];
    const all = signal();
    const handlers = {
      async processMessage({ body }) {
        seen.push(body);
        if (seen.length === 20) all.give();
      },
      async processError({ error }) {
        all.fail(error);
      },
    };
    const subscriptions = [receiver, client.createReceiver(queue)].map((each) => each.subscribe(handlers));
    await sender.sendMessages([...Array(20).keys()].map((body) => ({ body })));
    await all.given;
    await emptied(receiver);
    assert.deepEqual(
      seen.sort((a, b) => a - b),
      [...Array(20).keys()],
    );
    await Promise.all(subscriptions.map((subscription) => subscription.close()));
  });
});
