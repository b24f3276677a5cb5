// ServiceBusAdministrationClient on topics. One test after the other: some of them list everything.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { admin, createQueue, createSubscription, createTopic, openClient, uniqueName } from "./namespace.js";

const FOREVER = "P10675199DT2H48M5.4775807S";
const NOT_FOUND = { name: "RestError", statusCode: 404, code: "MessageEntityNotFoundError" };
const INVALID = { name: "RestError", statusCode: 400, code: "ServiceError" };

describe("creating, getting, updating and deleting topics", () => {
  test("a topic is born with the service's defaults", async () => {
    const name = uniqueName("topic");
    const created = await admin.createTopic(name);
    assert.equal(created._response.status, 201);
    const expected = {
      name,
      defaultMessageTimeToLive: FOREVER,
      maxSizeInMegabytes: 1024,
      requiresDuplicateDetection: false,
      enableBatchedOperations: true,
      status: "Active",
      autoDeleteOnIdle: FOREVER,
      enablePartitioning: false,
      enableExpress: false,
      availabilityStatus: "Available",
    };
    for (const topic of [created, await admin.getTopic(name)]) {
      for (const [field, value] of Object.entries(expected)) assert.equal(topic[field], value, field);
    }
  });

  test("every option of a topic is kept", async () => {
    const options = {
      defaultMessageTimeToLive: "P1D",
      maxSizeInMegabytes: 3072,
      requiresDuplicateDetection: true,
      duplicateDetectionHistoryTimeWindow: "PT5M",
      enableBatchedOperations: false,
      status: "SendDisabled",
      userMetadata: "für <alle>",
      supportOrdering: true,
      autoDeleteOnIdle: "PT2H",
    };
    const name = uniqueName("topic");
    await admin.createTopic(name, options);
    const topic = await admin.getTopic(name);
    for (const [field, value] of Object.entries(options)) assert.equal(topic[field], value, field);
  });

  test("an update changes what it names and keeps the rest", async () => {
    const topic = await admin.getTopic(await createTopic({ userMetadata: "kept" }));
    Object.assign(topic, { defaultMessageTimeToLive: "PT3H", autoDeleteOnIdle: "P3D", status: "SendDisabled" });
    const updated = await admin.updateTopic(topic);
    assert.equal(updated._response.status, 200);
    assert.deepEqual({ ...(await admin.getTopic(topic.name)) }, { ...topic });
  });

  test("a topic that is there cannot be created again, and shares its names with queues", async () => {
    const name = await createTopic();
    await assert.rejects(admin.createTopic(name), { statusCode: 409, code: "MessageEntityAlreadyExistsError" });
    await assert.rejects(admin.createTopic(await createQueue()), { statusCode: 409 });
    await assert.rejects(admin.createQueue(name), { statusCode: 409 });
  });

  test("a topic that is missing is not found", async () => {
    const name = uniqueName("missing");
    await assert.rejects(admin.getTopic(name), NOT_FOUND);
    await assert.rejects(admin.getTopicRuntimeProperties(name), NOT_FOUND);
    await assert.rejects(admin.deleteTopic(name), NOT_FOUND);
    const topic = await admin.getTopic(await createTopic());
    await assert.rejects(admin.updateTopic({ ...topic, name }), NOT_FOUND);
    assert.equal(await admin.topicExists(name), false);
  });

  test("invalid options are refused", async () => {
    const name = uniqueName("topic");
    await assert.rejects(admin.createTopic(name, { autoDeleteOnIdle: "PT1M" }), INVALID);
    await assert.rejects(
      admin.createTopic(name, { requiresDuplicateDetection: true, duplicateDetectionHistoryTimeWindow: "P8D" }),
      INVALID,
    );
    await assert.rejects(admin.createTopic(name, { maxMessageSizeInKilobytes: 102_400 }), INVALID);
    assert.equal(await admin.topicExists(name), false);
    const topic = await admin.getTopic(await createTopic());
    await assert.rejects(admin.updateTopic({ ...topic, requiresDuplicateDetection: true }), INVALID);
  });

  test("a deleted topic takes its subscriptions along", async () => {
    const topic = await createTopic();
    const subscription = await createSubscription(topic);
    assert.equal(await admin.topicExists(topic), true);
    assert.equal((await admin.deleteTopic(topic))._response.status, 200);
    assert.equal(await admin.topicExists(topic), false);
    assert.equal(await admin.subscriptionExists(topic, subscription), false);
    await admin.createTopic(topic);
    assert.equal(await admin.subscriptionExists(topic, subscription), false);
  });

  test("a topic is not a queue", async () => {
    assert.equal(await admin.queueExists(await createTopic()), false);
  });
});

describe("listing topics and their runtime figures", () => {
  test("every topic is listed, in pages of any size", async () => {
    const made = await Promise.all([1, 2, 3, 4, 5].map(() => createTopic()));
    const queue = await createQueue();
    const listed = [];
    for await (const topic of admin.listTopics()) listed.push(topic.name);
    assert.ok(made.every((name) => listed.includes(name)));
    assert.equal(listed.includes(queue), false);
    const paged = [];
    for await (const page of admin.listTopics().byPage({ maxPageSize: 2 })) {
      assert.ok(page.length <= 2);
      paged.push(...page.map(({ name }) => name));
    }
    assert.deepEqual(paged, listed);
  });

  test("the figures tell what a topic has", async (t) => {
    const name = await createTopic();
    await createSubscription(name);
    await createSubscription(name);
    const sender = openClient(t).createSender(name);
    await sender.sendMessages({ body: "now" });
    await sender.scheduleMessages([{ body: 1 }, { body: 2 }], new Date(Date.now() + 3_600_000));

    const figures = await admin.getTopicRuntimeProperties(name);
    assert.deepEqual([figures.name, figures.subscriptionCount, figures.scheduledMessageCount], [name, 2, 2]);
    assert.ok(figures.sizeInBytes > 0);
    for (const when of [figures.createdAt, figures.modifiedAt, figures.accessedAt])
      assert.ok(!Number.isNaN(when.getTime()));

    const listed = [];
    for await (const each of admin.listTopicsRuntimeProperties()) listed.push(each);
    assert.equal(listed.find((each) => each.name === name).subscriptionCount, 2);
    const paged = [];
    for await (const page of admin.listTopicsRuntimeProperties().byPage({ maxPageSize: 2 })) paged.push(...page);
    assert.equal(paged.length, listed.length);
  });
});
