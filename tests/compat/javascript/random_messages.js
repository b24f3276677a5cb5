// Messages with anything that the SDK can write and read back, and what a receiver sees of them.
const BROKERS = [
  "x-opt-sequence-number",
  "x-opt-enqueued-time",
  "x-opt-locked-until",
  "x-opt-enqueue-sequence-number",
  "x-opt-message-state",
];

/** Numbers that look random and are the same in every run (a linear congruential generator). */
function drawing(seed) {
  let state = seed * 2654435761 + 12345;
  return () => {
    state = (Math.imul(state, 1103515245) + 12345) >>> 0;
    return state / 2 ** 32;
  };
}

export function randomMessage(seed) {
  const draw = drawing(seed);
  const oneOf = (values) => values[Math.floor(draw() * values.length)];
  const sometimes = (value) => (draw() < 0.5 ? value : undefined);
  const text = () => oneOf(["a", "Grüße, 世界", "x".repeat(128)]);
  const sessionId = sometimes(text());
  const value = () => oneOf([true, 0, -1, 7, 2 ** 31, 2 ** 40, -(2 ** 40), 1.5, "text", "", new Date(1_700_000_000_000)]);
  return {
    body: oneOf(["text", { an: ["object"] }, Buffer.from([0, 255]), 42, null]),
    messageId: oneOf([`${seed}`, seed, "x".repeat(128)]),
    correlationId: sometimes(oneOf([text(), 7])),
    contentType: sometimes("text/plain"),
    subject: sometimes(text()),
    to: sometimes(text()),
    replyTo: sometimes(text()),
    replyToSessionId: sometimes(text()),
    timeToLive: sometimes(3_600_000),
    sessionId,
    partitionKey: sometimes(sessionId ?? text()),
    scheduledEnqueueTimeUtc: sometimes(new Date(1_700_000_000_000)),
    applicationProperties: sometimes({ one: value(), two: value(), three: value() }),
  };
}

/** What a receiver sees of a message, without what belongs to this delivery. */
export function seen(message) {
  const { body, messageId, correlationId, contentType, subject, to, replyTo, replyToSessionId } = message;
  const { sessionId, partitionKey, timeToLive, applicationProperties, scheduledEnqueueTimeUtc } = message;
  const annotations = { ...message._rawAmqpMessage.messageAnnotations };
  for (const name of BROKERS) delete annotations[name];
  return JSON.parse(
    JSON.stringify({
      ...{ body, messageId, correlationId, contentType, subject, to, replyTo, replyToSessionId },
      ...{ sessionId, partitionKey, timeToLive, applicationProperties, scheduledEnqueueTimeUtc, annotations },
    }),
  );
}
