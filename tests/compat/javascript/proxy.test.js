// The SDK through a CONNECT proxy: WebSocket with an agent, as its documentation tells, and the administration.
import { ServiceBusAdministrationClient, ServiceBusClient } from "@azure/service-bus";
import { HttpsProxyAgent } from "https-proxy-agent";
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import WebSocket from "ws";
import { CHAPTER, connectionString, ONE_ATTEMPT, uniqueName } from "./namespace.js";
import { assertEmpty, bodies, receiveExactly } from "./waiting.js";

const { PROXY_PORT, PROXY_USERNAME, PROXY_PASSWORD } = process.env;
const host = "http://127.0.0.1";
const admin = new ServiceBusAdministrationClient(connectionString, {
  proxyOptions: { host, port: Number(PROXY_PORT), username: PROXY_USERNAME, password: PROXY_PASSWORD },
});

function openClient(t, username = PROXY_USERNAME, password = PROXY_PASSWORD) {
  const proxy = new URL(`${host}:${PROXY_PORT}`);
  if (username) Object.assign(proxy, { username, password });
  const client = new ServiceBusClient(connectionString, {
    retryOptions: { ...ONE_ATTEMPT },
    webSocketOptions: { webSocket: WebSocket, webSocketConstructorOptions: { agent: new HttpsProxyAgent(proxy) } },
  });
  t.after(() => client.close());
  return client;
}

describe("proxy", CHAPTER, () => {
  test("messages are sent, received and settled through it", async (t) => {
    const queue = uniqueName("queue");
    await admin.createQueue(queue);
    const client = openClient(t);
    const large = Buffer.alloc(250_000, 7);
    const sender = client.createSender(queue);
    await sender.sendMessages({ body: "small" });
    await sender.sendMessages({ body: large });
    const receiver = client.createReceiver(queue);
    const received = await receiveExactly(receiver, 2);
    assert.equal(bodies(received)[0], "small");
    assert.ok(received[1].body.equals(large));
    for (const message of received) await receiver.completeMessage(message);
    await assertEmpty(receiver);
    assert.equal((await admin.getQueueRuntimeProperties(queue)).totalMessageCount, 0);
  });

  test("wrong credentials are refused by the proxy", { skip: !PROXY_USERNAME }, async (t) => {
    const sender = openClient(t, "twin", "wrong").createSender("any");
    await assert.rejects(sender.sendMessages({ body: "x" }));
  });
});
