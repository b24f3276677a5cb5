// Waiting for what a test expects: for messages by receiving them, for a state by asking until it is there.
import Long from "long";
import assert from "node:assert/strict";
import { setTimeout as pause } from "node:timers/promises";

const PATIENCE_MS = 15_000;

/** Receives until `count` messages are there; receiveMessages may return fewer than it was asked for. */
export async function receiveExactly(receiver, count) {
  const messages = [];
  while (messages.length < count) {
    const more = await receiver.receiveMessages(count - messages.length, { maxWaitTimeInMs: PATIENCE_MS });
    assert.notEqual(more.length, 0, `only ${messages.length} of ${count} messages arrived`);
    messages.push(...more);
  }
  return messages;
}

export async function receiveOne(receiver) {
  const [message] = await receiveExactly(receiver, 1);
  return message;
}

/** Nothing is there to be received now. */
export async function assertNothingToReceive(receiver) {
  const messages = await receiver.receiveMessages(1, { maxWaitTimeInMs: 300 });
  assert.deepEqual(bodies(messages), []);
}

/** What the entity holds, from its first message on; without a number a peek goes on where the last one ended. */
export function peekAll(receiver) {
  return receiver.peekMessages(100, { fromSequenceNumber: Long.ONE });
}

/** Nothing is left, neither to be received nor locked, deferred or scheduled. */
export async function assertEmpty(receiver) {
  assert.deepEqual(bodies(await peekAll(receiver)), []);
}

/** Asks `question` until its answer is truthy, and returns that answer. */
export async function until(question, what) {
  const deadline = Date.now() + PATIENCE_MS;
  for (;;) {
    const answer = await question();
    if (answer) return answer;
    assert.ok(Date.now() < deadline, `waited in vain until ${what}`);
    await pause(50);
  }
}

/** Waits until nothing is left: a subscriber completes a message only after its handler has returned. */
export function emptied(receiver) {
  return until(async () => (await peekAll(receiver)).length === 0, "every message is settled");
}

export function bodies(messages) {
  return messages.map((message) => message.body);
}

/** A promise to be resolved from inside a message handler. */
export function signal() {
  let give;
  let fail;
  const given = new Promise((resolve, reject) => {
    give = resolve;
    fail = reject;
  });
  return { given, give, fail };
}
