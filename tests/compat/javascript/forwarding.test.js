// Auto-forward as the JavaScript SDK sees it: targets, dead letters with their source, transfer dead letters.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { admin, CHAPTER, createQueue, createSubscription, createTopic, openClient } from "./namespace.js";
import { bodies, receiveExactly, receiveOne } from "./waiting.js";

describe("auto-forward", CHAPTER, () => {
  test("a queue forwards in order, and its messages keep the number they were given first", async (t) => {
    const target = await createQueue();
    const source = await createQueue({ forwardTo: target });
    assert.ok((await admin.getQueue(source)).forwardTo.endsWith(`/${target}`));
    const client = openClient(t);
    await client.createSender(source).sendMessages([{ body: 1 }, { body: 2 }]);
    const received = await receiveExactly(client.createReceiver(target), 2);
    assert.deepEqual(bodies(received), [1, 2]);
    assert.equal(received[1].enqueuedSequenceNumber, 2);
  });

  test("a subscription forwards", async (t) => {
    const target = await createQueue();
    const topic = await createTopic();
    await createSubscription(topic, { forwardTo: target });
    const client = openClient(t);
    await client.createSender(topic).sendMessages({ body: "x" });
    assert.equal((await receiveOne(client.createReceiver(target))).body, "x");
  });

  test("dead letters are forwarded and tell where they come from", async (t) => {
    const graves = await createQueue();
    const queue = await createQueue({ forwardDeadLetteredMessagesTo: graves });
    const client = openClient(t);
    await client.createSender(queue).sendMessages({ body: "x" });
    const receiver = client.createReceiver(queue);
    await receiver.deadLetterMessage(await receiveOne(receiver), { deadLetterReason: "broken" });
    const dead = await receiveOne(client.createReceiver(graves));
    assert.deepEqual([dead.deadLetterReason, dead.deadLetterSource], ["broken", queue]);
  });

  test("what its target does not take is a transfer dead letter", async (t) => {
    const target = await createQueue();
    const source = await createQueue({ forwardTo: target });
    await admin.deleteQueue(target);
    const client = openClient(t);
    await client.createSender(source).sendMessages({ body: "stuck" });
    const receiver = client.createReceiver(source, { subQueueType: "transferDeadLetter" });
    const stuck = await receiveOne(receiver);
    assert.equal(stuck.deadLetterReason, "MessagingEntityNotFoundException");
    assert.equal((await admin.getQueueRuntimeProperties(source)).transferDeadLetterMessageCount, 1);
    await receiver.completeMessage(stuck);
  });

  test("a target has to be there, and a forwarding queue has no receivers", async (t) => {
    await assert.rejects(createQueue({ forwardTo: "missing" }), /no queue or topic/);
    const source = await createQueue({ forwardTo: await createQueue() });
    const receiver = openClient(t).createReceiver(source);
    await assert.rejects(receiver.receiveMessages(1, { maxWaitTimeInMs: 2000 }), /forwards its messages/);
  });
});
