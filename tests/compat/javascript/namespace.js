// The namespace under test as a user's program sees it: a connection string and the unmodified SDK.
// Every test has entities and a client of its own, so that tests of a file run side by side.
import { ServiceBusAdministrationClient, ServiceBusClient } from "@azure/service-bus";
import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";

export const connectionString = process.env.TWINBUS_CONNECTION_STRING;
assert.ok(connectionString, "TWINBUS_CONNECTION_STRING names the namespace to test against");

export const admin = new ServiceBusAdministrationClient(connectionString);

// One attempt only: the SDK's own retries (3, each 30 s apart) would hide an error and wrap it in an AggregateError.
export const ONE_ATTEMPT = { maxRetries: 0, retryDelayInMs: 100, timeoutInMs: 10_000 };

export const CHAPTER = { concurrency: 8, timeout: 30_000 };

export function uniqueName(kind) {
  return `${kind}-${randomUUID().slice(0, 8)}`;
}

export function openClient(t, options = {}) {
  const client = new ServiceBusClient(connectionString, { retryOptions: { ...ONE_ATTEMPT }, ...options });
  t.after(() => client.close());
  return client;
}

export async function createQueue(options = {}) {
  const name = uniqueName("queue");
  await admin.createQueue(name, options);
  return name;
}

export async function createTopic(options = {}) {
  const name = uniqueName("topic");
  await admin.createTopic(name, options);
  return name;
}

export async function createSubscription(topic, options = {}) {
  const name = uniqueName("subscription");
  await admin.createSubscription(topic, name, options);
  return name;
}

/** A queue with a client, a sender and a peek-lock receiver on it. */
export async function openQueue(t, options = {}) {
  const queue = await createQueue(options);
  const client = openClient(t);
  return { queue, client, sender: client.createSender(queue), receiver: client.createReceiver(queue) };
}

/** The connection string with some of its parts replaced; null removes a part. */
export function connectionStringWith(parts) {
  const pairs = connectionString
    .split(";")
    .filter(Boolean)
    .map((pair) => {
      const at = pair.indexOf("=");
      return [pair.slice(0, at), pair.slice(at + 1)];
    });
  const changed = { ...Object.fromEntries(pairs), ...parts };
  return Object.entries(changed)
    .filter(([, value]) => value !== null)
    .map(([key, value]) => `${key}=${value}`)
    .join(";");
}
