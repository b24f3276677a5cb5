// The SDK over WebSocket, in TLS with the CA of the namespace (NODE_EXTRA_CA_CERTS).
import { ServiceBusClient } from "@azure/service-bus";
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import WebSocket from "ws";
import { CHAPTER, connectionString, connectionStringWith, createQueue, ONE_ATTEMPT } from "./namespace.js";
import { assertEmpty, bodies, peekAll, receiveExactly, receiveOne } from "./waiting.js";

class CountedSocket extends WebSocket {
  static addresses = [];

  constructor(address, ...rest) {
    super(address, ...rest);
    CountedSocket.addresses.push(address);
  }
}

function openClient(t, text = connectionString) {
  const client = new ServiceBusClient(text, {
    retryOptions: { ...ONE_ATTEMPT },
    webSocketOptions: { webSocket: CountedSocket },
  });
  t.after(() => client.close());
  return client;
}

describe("WebSocket", CHAPTER, () => {
  test("messages small and large are sent, peeked, received and settled", async (t) => {
    const queue = await createQueue();
    const client = openClient(t);
    const sender = client.createSender(queue);
    const large = Buffer.alloc(250_000, 7);
    await sender.sendMessages([{ body: "small" }, { body: 2 }]);
    await sender.sendMessages({ body: large });
    const receiver = client.createReceiver(queue);
    assert.equal((await peekAll(receiver)).length, 3);
    const received = await receiveExactly(receiver, 3);
    assert.deepEqual(bodies(received).slice(0, 2), ["small", 2]);
    assert.ok(received[2].body.equals(large));
    for (const message of received) await receiver.completeMessage(message);
    await assertEmpty(receiver);
    assert.ok(CountedSocket.addresses.length > 0);
    assert.ok(CountedSocket.addresses.every((address) => /^wss:.*\/\$servicebus\/websocket$/.test(address)));
  });

  test("sessions, schedules and dead letters work as over AMQP", async (t) => {
    const queue = await createQueue({ requiresSession: true });
    const client = openClient(t);
    const sender = client.createSender(queue);
    await sender.scheduleMessages({ body: "soon", sessionId: "s" }, new Date(Date.now() - 1000));
    const session = await client.acceptSession(queue, "s");
    await session.setSessionState("state");
    assert.equal((await session.getSessionState()).toString(), "state");
    await session.deadLetterMessage(await receiveOne(session), { deadLetterReason: "why" });
    const dead = await receiveOne(client.createReceiver(queue, { subQueueType: "deadLetter" }));
    assert.equal(dead.deadLetterReason, "why");
  });

  test("a wrong key is refused", async (t) => {
    const client = openClient(t, connectionStringWith({ SharedAccessKey: "wrong" }));
    const sender = client.createSender(await createQueue());
    await assert.rejects(sender.sendMessages({ body: "x" }), { code: "UnauthorizedAccess" });
  });
});
