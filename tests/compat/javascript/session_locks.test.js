// Session locks: renewing by itself, and losing. The shortest lock is 5 s: these tests wait side by side.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { CHAPTER, createQueue, openClient } from "./namespace.js";
import { receiveOne, signal, until } from "./waiting.js";

const WITHOUT_RENEWAL = { maxAutoLockRenewalDurationInMs: 0 };

async function openShortSession(t, options) {
  const queue = await createQueue({ requiresSession: true, lockDuration: "PT5S" });
  const client = openClient(t);
  await client.createSender(queue).sendMessages({ body: "held", sessionId: "s" });
  return { queue, client, session: await client.acceptSession(queue, "s", options) };
}

describe("session locks", CHAPTER, () => {
  test("an expired lock frees the session, and its first holder has lost it", async (t) => {
    const { queue, session } = await openShortSession(t, WITHOUT_RENEWAL);
    const message = await receiveOne(session);
    const again = await openClient(t).acceptNextSession(queue);
    assert.equal(again.sessionId, "s");
    const redelivered = await receiveOne(again);
    assert.deepEqual([redelivered.body, redelivered.deliveryCount], ["held", 1]);
    await assert.rejects(session.completeMessage(message), /closed|lock/i);
    await again.completeMessage(redelivered);
  });

  test("a subscriber is told that its session is lost", async (t) => {
    const { session } = await openShortSession(t, WITHOUT_RENEWAL);
    const lost = signal();
    session.subscribe({
      async processMessage() {
        await lost.given;
      },
      async processError({ error }) {
        lost.give(error);
      },
    });
    assert.equal((await lost.given).code, "SessionLockLost");
  });

  test("the SDK renews the lock of a session by itself", async (t) => {
    const { session } = await openShortSession(t);
    const first = session.sessionLockedUntilUtc;
    const message = await receiveOne(session);
    await until(() => session.sessionLockedUntilUtc > first && Date.now() > first.getTime(), "the first lock is over");
    await session.completeMessage(message);
  });

  test("a renewed session is not given to the next one who waits", async (t) => {
    const { queue, session } = await openShortSession(t, WITHOUT_RENEWAL);
    const first = session.sessionLockedUntilUtc;
    await until(() => Date.now() > first.getTime() - 2000, "the first lock is nearly over");
    await session.renewSessionLock();
    await until(() => Date.now() > first.getTime(), "the first lock is over");
    await assert.rejects(openClient(t).acceptSession(queue, "s"), { code: "SessionCannotBeLocked" });
    await session.completeMessage(await receiveOne(session));
  });
});
