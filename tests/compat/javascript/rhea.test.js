// rhea, a plain AMQP 1.0 client that knows nothing of Service Bus: over AMQP, over TLS, and in a WebSocket. With a
// PROXY_PORT, also in a WebSocket through a CONNECT proxy: rhea hands the options on to ws, which takes an agent.
import assert from "node:assert/strict";
import { createHmac } from "node:crypto";
import { once } from "node:events";
import { readFileSync } from "node:fs";
import { describe, test } from "node:test";
import { HttpsProxyAgent } from "https-proxy-agent";
import rhea from "rhea";
import WebSocket from "ws";
import { CHAPTER, connectionString, createQueue } from "./namespace.js";

const parts = Object.fromEntries(
  connectionString
    .split(";")
    .filter(Boolean)
    .map((pair) => [pair.slice(0, pair.indexOf("=")), pair.slice(pair.indexOf("=") + 1)]),
);
const { hostname, port } = new URL(parts.Endpoint.replace("sb://", "http://"));
const CA = readFileSync(process.env.NODE_EXTRA_CA_CERTS);

/** A token as any program can make it: a signature over the address and the expiry. */
function token(address) {
  const expiry = Math.floor(Date.now() / 1000) + 600;
  const encoded = encodeURIComponent(address);
  const signature = createHmac("sha256", parts.SharedAccessKey).update(`${encoded}\n${expiry}`).digest("base64");
  const signed = encodeURIComponent(signature);
  return `SharedAccessSignature sr=${encoded}&sig=${signed}&se=${expiry}&skn=${parts.SharedAccessKeyName}`;
}

const { PROXY_PORT, PROXY_USERNAME, PROXY_PASSWORD } = process.env;

function webSocket(container, options = {}) {
  const address = `wss://${hostname}:${port}/$servicebus/websocket`;
  const connect = container.websocket_connect(WebSocket);
  return { connection_details: connect(address, ["AMQPWSB10"], { ca: CA, ...options }) };
}

const WAYS = {
  AMQP: () => ({ host: hostname, port }),
  TLS: () => ({ host: hostname, port, transport: "tls", ca: [CA], servername: hostname }),
  WebSocket: webSocket,
};
if (PROXY_PORT) {
  const proxy = new URL(`http://127.0.0.1:${PROXY_PORT}`);
  if (PROXY_USERNAME) Object.assign(proxy, { username: PROXY_USERNAME, password: PROXY_PASSWORD });
  WAYS["WebSocket through a proxy"] = (container) => webSocket(container, { agent: new HttpsProxyAgent(proxy) });
}

async function connected(t, way) {
  const container = rhea.create_container();
  const options = { hostname, username: undefined, reconnect: false, idle_time_out: 60_000, ...WAYS[way](container) };
  const connection = container.connect(options);
  await once(connection, "connection_open");
  t.after(() => connection.close());
  return connection;
}

/** Puts a token for an entity on $cbs, and returns the answer's status. */
async function authorize(connection, entity) {
  const replies = connection.open_receiver({ source: "$cbs", name: `replies-${entity}` });
  await once(replies, "receiver_open");
  const requests = connection.open_sender({ target: "$cbs", name: `requests-${entity}` });
  await once(requests, "sendable");
  const audience = `sb://${hostname}:${port}/${entity}`;
  requests.send({
    message_id: "1",
    reply_to: "replies",
    application_properties: { operation: "put-token", type: "servicebus.windows.net:sastoken", name: audience },
    body: token(audience),
  });
  const [{ message }] = await once(replies, "message");
  return message.application_properties["status-code"];
}

describe("rhea", CHAPTER, () => {
  for (const way of Object.keys(WAYS)) {
    test(`messages go and come over ${way}`, async (t) => {
      const queue = await createQueue();
      const connection = await connected(t, way);
      assert.equal(await authorize(connection, queue), 202);
      const sender = connection.open_sender(queue);
      await once(sender, "sendable");
      const sent = {
        message_id: "id-1",
        subject: "a subject",
        correlation_id: 7,
        application_properties: { text: "Grüße", number: 5, flag: true },
        message_annotations: { "x-opt-partition-key": "p", "x-opt-mine": "kept" },
        body: { deep: ["value", 1] },
      };
      sender.send(sent);
      await once(sender, "accepted");

      const receiver = connection.open_receiver({ source: queue, credit_window: 0, autoaccept: false });
      receiver.add_credit(1);
      const [{ message, delivery }] = await once(receiver, "message");
      for (const name of ["message_id", "subject", "correlation_id", "application_properties", "body"]) {
        assert.deepEqual(message[name], sent[name], name);
      }
      assert.equal(message.message_annotations["x-opt-partition-key"], "p");
      assert.equal(message.message_annotations["x-opt-mine"], "kept");
      assert.equal(message.message_annotations["x-opt-sequence-number"], 1);
      assert.equal(message.delivery_count, 0);
      delivery.accept();
    });
  }

  test("released comes again, modified counts as failed, rejected is a dead letter, and drain ends", async (t) => {
    const queue = await createQueue();
    const connection = await connected(t, "AMQP");
    await authorize(connection, queue);
    const sender = connection.open_sender(queue);
    await once(sender, "sendable");
    sender.send({ body: "x" });
    await once(sender, "accepted");
    const receiver = connection.open_receiver({ source: queue, credit_window: 0, autoaccept: false });
    const next = async () => {
      receiver.add_credit(1);
      return (await once(receiver, "message"))[0];
    };
    (await next()).delivery.release();
    const again = await next();
    assert.equal(again.message.delivery_count, 0);
    again.delivery.modified({ delivery_failed: true, undeliverable_here: false });
    const failed = await next();
    assert.equal(failed.message.delivery_count, 1);
    failed.delivery.reject({ condition: "a-reason", description: "a description" });
    const dead = connection.open_receiver({ source: `${queue}/$deadletterqueue`, autoaccept: true });
    assert.equal((await once(dead, "message"))[0].message.body, "x");
    receiver.add_credit(5);
    receiver.drain_credit();
    await once(receiver, "receiver_drained");
  });

  test("without a token, and on an entity that does not exist, links are refused with a condition", async (t) => {
    const connection = await connected(t, "AMQP");
    const sender = connection.open_sender(await createQueue());
    await once(sender, "sender_error");
    assert.equal(sender.error.condition, "amqp:unauthorized-access");
    assert.equal(await authorize(connection, "not-there"), 404);
  });
});
