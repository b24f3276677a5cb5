// A credential in place of a key. The tokens come from the test's own issuer, whose keys the namespace has (--jwks).
import { ServiceBusAdministrationClient, ServiceBusClient, parseServiceBusConnectionString } from "@azure/service-bus";
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import WebSocket from "ws";
import { CHAPTER, connectionString, createQueue, ONE_ATTEMPT, uniqueName } from "./namespace.js";
import { receiveOne } from "./waiting.js";

const { fullyQualifiedNamespace } = parseServiceBusConnectionString(connectionString);

/** A credential as the classes of @azure/identity are: `role` is OWNER, SENDER, RECEIVER or EXPIRED. */
function credential(role) {
  return {
    asked: [],
    async getToken(scopes) {
      this.asked.push(scopes);
      return { token: process.env[`TOKEN_OF_${role}`], expiresOnTimestamp: Date.now() + 3_600_000 };
    },
  };
}

function open(t, given, options = {}) {
  const client = new ServiceBusClient(fullyQualifiedNamespace, given, { retryOptions: { ...ONE_ATTEMPT }, ...options });
  t.after(() => client.close());
  return client;
}

describe("a credential", CHAPTER, () => {
  for (const [way, options] of [
    ["AMQP over TLS", {}],
    ["WebSocket", { webSocketOptions: { webSocket: WebSocket } }],
  ]) {
    test(`sends, receives and settles over ${way}`, async (t) => {
      const [queue, owner] = [await createQueue(), credential("OWNER")];
      const client = open(t, owner, options);
      await client.createSender(queue).sendMessages({ body: "allowed" });
      const receiver = client.createReceiver(queue);
      const message = await receiveOne(receiver);
      assert.equal(message.body, "allowed");
      await receiver.completeMessage(message);
      assert.deepEqual(await receiver.peekMessages(1), []);
      assert.ok(owner.asked.length > 0);
    });
  }

  test("manages entities", async () => {
    const name = uniqueName("queue");
    const admin = new ServiceBusAdministrationClient(fullyQualifiedNamespace, credential("OWNER"));
    await admin.createQueue(name);
    assert.equal(await admin.queueExists(name), true);
    const weak = new ServiceBusAdministrationClient(fullyQualifiedNamespace, credential("SENDER"));
    await assert.rejects(weak.createQueue(uniqueName("queue")), { statusCode: 401 });
  });

  test("does what its role allows, and nothing else", async (t) => {
    const queue = await createQueue();
    await open(t, credential("SENDER")).createSender(queue).sendMessages({ body: "x" });
    await assert.rejects(open(t, credential("RECEIVER")).createSender(queue).sendMessages({ body: "x" }), {
      name: "ServiceBusError",
    });
    assert.equal((await receiveOne(open(t, credential("RECEIVER")).createReceiver(queue))).body, "x");
  });

  test("with an expired token opens nothing", async (t) => {
    const sender = open(t, credential("EXPIRED")).createSender(await createQueue());
    await assert.rejects(sender.sendMessages({ body: "x" }), { code: "UnauthorizedAccess" });
  });
});
