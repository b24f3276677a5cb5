// Messages that the SDK has encoded and that are in the backlog: a syphon brings them home, also after a resubmission.
// They are in the format of the backlog, whose names .NET's paired namespaces have too.
import { ServiceBusAdministrationClient, ServiceBusClient } from "@azure/service-bus";
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { describe, it } from "node:test";
import { promisify } from "node:util";
import { createQueue, ONE_ATTEMPT, openClient, uniqueName } from "./namespace.js";
import { randomMessage, seen } from "./random_messages.js";
import { receiveExactly } from "./waiting.js";

const MESSAGES = 60;
const DEAD = 10;
const secondary = process.env.TWINBUS_SECONDARY_CONNECTION_STRING;
const secondaryAdmin = new ServiceBusAdministrationClient(secondary);

/** A message without a time to live: the backlog has it in ticks, as an integer of 64 bits. */
function message(seed) {
  return { ...randomMessage(seed), messageId: `${seed}`, timeToLive: undefined };
}

/** The message as a pair writes it into the backlog. */
function diverted(original, path) {
  const { sessionId, scheduledEnqueueTimeUtc, ...rest } = original;
  const aliases = { "x-ms-path": path };
  if (sessionId !== undefined) aliases["x-ms-sessionid"] = sessionId;
  if (scheduledEnqueueTimeUtc !== undefined) aliases["x-ms-scheduledenqueuetimeutc"] = scheduledEnqueueTimeUtc;
  return { ...rest, applicationProperties: { ...original.applicationProperties, ...aliases } };
}

async function twinbus(name, ...verb) {
  const env = { ...process.env, TWINBUS_PRIMARY_CONNECTION_STRING: process.env.TWINBUS_CONNECTION_STRING };
  await promisify(execFile)(process.env.PYTHON, ["-m", "twinbus", ...verb, "--primary-name", name], { env });
}

describe("backlog", { timeout: 60_000 }, () => {
  it("what the SDK has encoded comes home with everything that it carried", async (t) => {
    const name = uniqueName("contoso");
    const backlog = `${name}/x-servicebus-transfer/0`;
    const [plain, destination] = [await createQueue(), await createQueue()];
    await secondaryAdmin.createQueue(backlog);
    const client = openClient(t);
    const other = new ServiceBusClient(secondary, { retryOptions: { ...ONE_ATTEMPT } });
    t.after(() => other.close());
    const messages = Array.from({ length: MESSAGES }, (_, seed) => message(seed));
    await client.createSender(plain).sendMessages(messages);
    await other.createSender(backlog).sendMessages(messages.map((each) => diverted(each, destination)));

    const waiting = other.createReceiver(backlog);
    for (const each of await receiveExactly(waiting, DEAD)) {
      await waiting.deadLetterMessage(each, { deadLetterReason: "why", deadLetterErrorDescription: "because" });
    }
    await waiting.close();
    await twinbus(name, "deadletter", "resubmit", "--all", "--yes");
    await twinbus(name, "syphon", "--drain");

    const byId = (one, other) => Number(one.messageId) - Number(other.messageId);
    const before = (await receiveExactly(client.createReceiver(plain), MESSAGES)).sort(byId).map(seen);
    const after = (await receiveExactly(client.createReceiver(destination), MESSAGES)).sort(byId).map(seen);
    for (const [seed, each] of before.entries()) assert.deepEqual(after[seed], each, `seed ${seed}`);
    assert.deepEqual(await other.createReceiver(backlog).peekMessages(1), []);
  });
});
