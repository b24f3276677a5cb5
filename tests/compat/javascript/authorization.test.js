// Who may do what: keys, signatures, rights of entity rules, and the credentials the SDK takes (those go over TLS).
import { AzureNamedKeyCredential, AzureSASCredential } from "@azure/core-auth";
import { ServiceBusAdministrationClient, ServiceBusClient, parseServiceBusConnectionString } from "@azure/service-bus";
import assert from "node:assert/strict";
import { createHmac, randomBytes } from "node:crypto";
import { describe, test } from "node:test";
import {
  CHAPTER,
  ONE_ATTEMPT,
  connectionString,
  connectionStringWith,
  createQueue,
  openQueue,
  uniqueName,
} from "./namespace.js";
import { receiveOne } from "./waiting.js";

const UNAUTHORIZED = { name: "ServiceBusError", code: "UnauthorizedAccess" };
const { fullyQualifiedNamespace, sharedAccessKey, sharedAccessKeyName } =
  parseServiceBusConnectionString(connectionString);

function open(t, ...credentials) {
  const client = new ServiceBusClient(...credentials, { retryOptions: { ...ONE_ATTEMPT } });
  t.after(() => client.close());
  return client;
}

function sign(resource, { key = sharedAccessKey, keyName = sharedAccessKeyName, lastsSeconds = 600 } = {}) {
  const sr = encodeURIComponent(resource);
  const se = Math.floor(Date.now() / 1000) + lastsSeconds;
  const sig = encodeURIComponent(createHmac("sha256", key).update(`${sr}\n${se}`).digest("base64"));
  return `SharedAccessSignature sr=${sr}&sig=${sig}&se=${se}&skn=${keyName}`;
}

async function sendsAndReceives(client, queue) {
  await client.createSender(queue).sendMessages({ body: "allowed" });
  assert.equal((await receiveOne(client.createReceiver(queue))).body, "allowed");
}

describe("credentials that are good", CHAPTER, () => {
  test("a named key, over TLS", async (t) => {
    const credential = new AzureNamedKeyCredential(sharedAccessKeyName, sharedAccessKey);
    await sendsAndReceives(open(t, fullyQualifiedNamespace, credential), await createQueue());
  });

  test("a signature for the queue, over TLS", async (t) => {
    const queue = await createQueue();
    const credential = new AzureSASCredential(sign(`sb://${fullyQualifiedNamespace}/${queue}`));
    await sendsAndReceives(open(t, fullyQualifiedNamespace, credential), queue);
  });

  test("a signature in the connection string, for the whole namespace", async (t) => {
    const signature = sign(`sb://${fullyQualifiedNamespace}/`);
    const signed = connectionStringWith({
      SharedAccessKey: null,
      SharedAccessKeyName: null,
      SharedAccessSignature: signature,
    });
    await sendsAndReceives(open(t, signed), await createQueue());
  });

  test("a connection string for one entity, and only for that one", async (t) => {
    const queue = await createQueue();
    const client = open(t, connectionStringWith({ EntityPath: queue }));
    await sendsAndReceives(client, queue);
    assert.throws(() => client.createSender("another"), /entity/i);
  });

  test("a named key for the management API", async () => {
    const credential = new AzureNamedKeyCredential(sharedAccessKeyName, sharedAccessKey);
    const admin = new ServiceBusAdministrationClient(fullyQualifiedNamespace, credential);
    assert.equal(await admin.queueExists(await createQueue()), true);
  });
});

describe("credentials that are not", CHAPTER, () => {
  test("a wrong key opens nothing", async (t) => {
    const { queue, receiver } = await openQueue(t);
    const client = open(t, connectionStringWith({ SharedAccessKey: "wrong" }));
    await assert.rejects(client.createSender(queue).sendMessages({ body: 1 }), UNAUTHORIZED);
    await assert.rejects(client.createReceiver(queue).receiveMessages(1, { maxWaitTimeInMs: 2000 }), UNAUTHORIZED);
    await assert.rejects(client.createReceiver(queue).peekMessages(1), UNAUTHORIZED);
    assert.deepEqual(await receiver.peekMessages(1), []);
  });

  test("a wrong key name opens nothing", async (t) => {
    const client = open(t, connectionStringWith({ SharedAccessKeyName: "Nobody" }));
    await assert.rejects(client.createSender(await createQueue()).sendMessages({ body: 1 }), UNAUTHORIZED);
  });

  test("an expired signature opens nothing", async (t) => {
    const queue = await createQueue();
    const credential = new AzureSASCredential(sign(`sb://${fullyQualifiedNamespace}/${queue}`, { lastsSeconds: -60 }));
    await assert.rejects(
      open(t, fullyQualifiedNamespace, credential).createSender(queue).sendMessages({ body: 1 }),
      UNAUTHORIZED,
    );
  });

  test("a signature for another queue does not open this one", async (t) => {
    const queue = await createQueue();
    const credential = new AzureSASCredential(sign(`sb://${fullyQualifiedNamespace}/${await createQueue()}`));
    await assert.rejects(
      open(t, fullyQualifiedNamespace, credential).createSender(queue).sendMessages({ body: 1 }),
      UNAUTHORIZED,
    );
  });

  test("a wrong key manages nothing", async () => {
    const admin = new ServiceBusAdministrationClient(connectionStringWith({ SharedAccessKey: "wrong" }));
    const unauthorized = { statusCode: 401, code: "UnauthorizedRequestError" };
    await assert.rejects(admin.createQueue(uniqueName("queue")), unauthorized);
    await assert.rejects(admin.getNamespaceProperties(), unauthorized);
  });
});

describe("rights of a queue's own rules", CHAPTER, () => {
  async function openWithRights(t, ...accessRights) {
    const key = randomBytes(32).toString("base64");
    const rule = { claimType: "SharedAccessKey", accessRights, keyName: "own", primaryKey: key, secondaryKey: key };
    const queue = await createQueue({ authorizationRules: [rule] });
    const own = connectionStringWith({ SharedAccessKeyName: "own", SharedAccessKey: key, EntityPath: queue });
    return { queue, client: open(t, own) };
  }

  test("Send lets send, not receive", async (t) => {
    const { queue, client } = await openWithRights(t, "Send");
    await client.createSender(queue).sendMessages({ body: "in" });
    await assert.rejects(client.createReceiver(queue).receiveMessages(1, { maxWaitTimeInMs: 2000 }), UNAUTHORIZED);
  });

  test("Listen lets receive, not send", async (t) => {
    const { queue, client } = await openWithRights(t, "Listen");
    await assert.rejects(client.createSender(queue).sendMessages({ body: "in" }), isRefused);
    assert.deepEqual(await client.createReceiver(queue).peekMessages(1), []);
  });

  test("Send and Listen together let both", async (t) => {
    const { queue, client } = await openWithRights(t, "Send", "Listen");
    await sendsAndReceives(client, queue);
  });
});

// The SDK hides the reason when the service refuses a sender's link instead of its token or its message.
function isRefused(error) {
  return error.name === "ServiceBusError";
}
