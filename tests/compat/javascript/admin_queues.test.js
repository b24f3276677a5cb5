// ServiceBusAdministrationClient on queues and the namespace. One test after the other: some of them list everything.
import { ServiceBusAdministrationClient } from "@azure/service-bus";
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { admin, connectionString, createQueue, openClient, uniqueName } from "./namespace.js";
import { receiveOne } from "./waiting.js";

const FOREVER = "P10675199DT2H48M5.4775807S";
const NOT_FOUND = { name: "RestError", statusCode: 404, code: "MessageEntityNotFoundError" };
const INVALID = { name: "RestError", statusCode: 400, code: "ServiceError" };

describe("creating and getting queues", () => {
  test("a queue is born with the service's defaults", async () => {
    const name = uniqueName("queue");
    const created = await admin.createQueue(name);
    assert.equal(created._response.status, 201);
    const expected = {
      name,
      lockDuration: "PT1M",
      maxSizeInMegabytes: 1024,
      requiresDuplicateDetection: false,
      requiresSession: false,
      defaultMessageTimeToLive: FOREVER,
      deadLetteringOnMessageExpiration: false,
      duplicateDetectionHistoryTimeWindow: "PT1M",
      maxDeliveryCount: 10,
      enableBatchedOperations: true,
      status: "Active",
      autoDeleteOnIdle: FOREVER,
      enablePartitioning: false,
      enableExpress: false,
      availabilityStatus: "Available",
    };
    for (const queue of [created, await admin.getQueue(name)]) {
      for (const [field, value] of Object.entries(expected)) assert.equal(queue[field], value, field);
      assert.deepEqual([queue.forwardTo, queue.forwardDeadLetteredMessagesTo], [undefined, undefined]);
    }
  });

  test("every option of a queue is kept", async () => {
    const options = {
      lockDuration: "PT45S",
      maxSizeInMegabytes: 2048,
      requiresDuplicateDetection: true,
      requiresSession: true,
      defaultMessageTimeToLive: "P2D",
      deadLetteringOnMessageExpiration: true,
      duplicateDetectionHistoryTimeWindow: "PT2M",
      maxDeliveryCount: 7,
      enableBatchedOperations: false,
      status: "ReceiveDisabled",
      userMetadata: "owner: ünit <tests> & co",
      autoDeleteOnIdle: "PT1H",
    };
    const name = uniqueName("queue");
    await admin.createQueue(name, options);
    const queue = await admin.getQueue(name);
    for (const [field, value] of Object.entries(options)) assert.equal(queue[field], value, field);
  });

  test("authorization rules of a queue are kept", async () => {
    const name = uniqueName("queue");
    const rule = {
      claimType: "SharedAccessKey",
      accessRights: ["Manage", "Send", "Listen"],
      keyName: "all",
      primaryKey: Buffer.alloc(32, 1).toString("base64"),
      secondaryKey: Buffer.alloc(32, 2).toString("base64"),
    };
    const listen = { ...rule, accessRights: ["Listen"], keyName: "listen" };
    await admin.createQueue(name, { authorizationRules: [rule, listen] });
    const { authorizationRules } = await admin.getQueue(name);
    assert.deepEqual(
      authorizationRules.map(({ keyName }) => keyName),
      ["all", "listen"],
    );
    assert.deepEqual([...authorizationRules[0].accessRights].sort(), ["Listen", "Manage", "Send"]);
    assert.deepEqual(authorizationRules[1].accessRights, ["Listen"]);
    assert.equal(authorizationRules[0].primaryKey, rule.primaryKey);
    assert.equal(authorizationRules[0].secondaryKey, rule.secondaryKey);
  });

  test("names may contain slashes, dots, dashes and underscores", async () => {
    const name = `${uniqueName("queue")}/a.b/c-d_e`;
    assert.equal((await admin.createQueue(name)).name, name);
    assert.equal((await admin.getQueue(name)).name, name);
    await admin.deleteQueue(name);
    assert.equal(await admin.queueExists(name), false);
  });

  test("an older version of the API works too", async () => {
    const older = new ServiceBusAdministrationClient(connectionString, { serviceVersion: "2017-04" });
    const name = uniqueName("queue");
    await older.createQueue(name, { maxDeliveryCount: 3 });
    assert.equal((await older.getQueue(name)).maxDeliveryCount, 3);
  });

  test("a queue that is there cannot be created again", async () => {
    const name = await createQueue();
    const exists = { name: "RestError", statusCode: 409, code: "MessageEntityAlreadyExistsError" };
    await assert.rejects(admin.createQueue(name), exists);
    await assert.rejects(admin.createQueue(name.toUpperCase()), exists);
    await assert.rejects(admin.createTopic(name), { statusCode: 409 });
  });

  test("a queue that is missing is not found", async () => {
    const name = uniqueName("missing");
    await assert.rejects(admin.getQueue(name), NOT_FOUND);
    await assert.rejects(admin.getQueueRuntimeProperties(name), NOT_FOUND);
    await assert.rejects(admin.deleteQueue(name), NOT_FOUND);
    assert.equal(await admin.queueExists(name), false);
  });

  const invalid = [
    ["a lock longer than 5 minutes", { lockDuration: "PT6M" }],
    [
      "a duplicate window longer than 7 days",
      { requiresDuplicateDetection: true, duplicateDetectionHistoryTimeWindow: "P8D" },
    ],
    [
      "a duplicate window shorter than 20 seconds",
      { requiresDuplicateDetection: true, duplicateDetectionHistoryTimeWindow: "PT10S" },
    ],
    ["no deliveries at all", { maxDeliveryCount: 0 }],
    ["idle time shorter than 5 minutes", { autoDeleteOnIdle: "PT1M" }],
    ["larger messages on standard", { maxMessageSizeInKilobytes: 102_400 }],
    ["a duration that is none", { lockDuration: "soon" }],
    ["a size that is not offered", { maxSizeInMegabytes: 1_000_000 }],
  ];
  for (const [what, options] of invalid) {
    test(`${what}: refused`, async () => {
      const name = uniqueName("queue");
      await assert.rejects(admin.createQueue(name, options), INVALID);
      assert.equal(await admin.queueExists(name), false);
    });
  }

  test("a name longer than 260 characters is refused", async () => {
    await assert.rejects(admin.createQueue("q".repeat(261)), INVALID);
  });
});

describe("updating and deleting queues", () => {
  test("an update changes what it names and keeps the rest", async () => {
    const name = uniqueName("queue");
    const queue = await admin.createQueue(name, { userMetadata: "kept", maxDeliveryCount: 5 });
    Object.assign(queue, {
      lockDuration: "PT30S",
      maxDeliveryCount: 20,
      defaultMessageTimeToLive: "PT1H",
      deadLetteringOnMessageExpiration: true,
      autoDeleteOnIdle: "P7D",
      status: "SendDisabled",
    });
    const updated = await admin.updateQueue(queue);
    assert.equal(updated._response.status, 200);
    for (const seen of [updated, await admin.getQueue(name)]) {
      assert.deepEqual({ ...seen }, { ...queue });
      assert.equal(seen.userMetadata, "kept");
    }
  });

  test("an update takes effect on the messages", async (t) => {
    const name = await createQueue();
    const client = openClient(t);
    await admin.updateQueue({ ...(await admin.getQueue(name)), lockDuration: "PT10S" });
    await client.createSender(name).sendMessages({ body: 1 });
    const { lockedUntilUtc, enqueuedTimeUtc } = await receiveOne(client.createReceiver(name));
    assert.ok(lockedUntilUtc - enqueuedTimeUtc < 20_000);
  });

  test("what is fixed at birth cannot be changed", async () => {
    const queue = await admin.getQueue(await createQueue());
    await assert.rejects(admin.updateQueue({ ...queue, requiresSession: true }), INVALID);
    await assert.rejects(admin.updateQueue({ ...queue, requiresDuplicateDetection: true }), INVALID);
    await assert.rejects(admin.updateQueue({ ...queue, lockDuration: "PT1H" }), INVALID);
    assert.equal((await admin.getQueue(queue.name)).requiresSession, false);
  });

  test("a missing queue cannot be updated", async () => {
    const queue = await admin.getQueue(await createQueue());
    await assert.rejects(admin.updateQueue({ ...queue, name: uniqueName("missing") }), NOT_FOUND);
  });

  test("a deleted queue is gone with its messages", async (t) => {
    const name = await createQueue();
    const client = openClient(t);
    await client.createSender(name).sendMessages({ body: "old" });
    const deleted = await admin.deleteQueue(name);
    assert.equal(deleted._response.status, 200);
    assert.equal(await admin.queueExists(name), false);
    await admin.createQueue(name);
    assert.deepEqual(await openClient(t).createReceiver(name).peekMessages(1), []);
  });
});

describe("listing queues and their runtime figures", () => {
  test("every queue is listed, in pages of any size", async () => {
    const made = await Promise.all([1, 2, 3, 4, 5].map(() => createQueue()));
    const listed = [];
    for await (const queue of admin.listQueues()) listed.push(queue.name);
    assert.ok(made.every((name) => listed.includes(name)));

    const paged = [];
    for await (const page of admin.listQueues().byPage({ maxPageSize: 2 })) {
      assert.ok(page.length >= 1 && page.length <= 2);
      paged.push(...page.map(({ name }) => name));
    }
    assert.deepEqual(paged, listed);
  });

  test("a listing can be continued from its token", async () => {
    await Promise.all([1, 2, 3].map(() => createQueue()));
    const pages = admin.listQueues().byPage({ maxPageSize: 2 });
    const { value: first } = await pages.next();
    assert.equal(first.length, 2);
    assert.ok(first.continuationToken);
    const rest = admin.listQueues().byPage({ maxPageSize: 2, continuationToken: first.continuationToken });
    const { value: second } = await rest.next();
    assert.ok(second.length >= 1);
    assert.ok(second.every(({ name }) => !first.some((queue) => queue.name === name)));
  });

  test("the figures tell what a queue holds", async (t) => {
    const name = await createQueue();
    const client = openClient(t);
    const sender = client.createSender(name);
    const receiver = client.createReceiver(name);
    await sender.sendMessages([1, 2, 3, 4].map((body) => ({ body })));
    await sender.scheduleMessages({ body: "later" }, new Date(Date.now() + 3_600_000));
    await receiver.deadLetterMessage(await receiveOne(receiver));
    await receiver.deferMessage(await receiveOne(receiver));
    await receiveOne(receiver);

    const figures = await admin.getQueueRuntimeProperties(name);
    assert.equal(figures.name, name);
    assert.equal(figures.activeMessageCount, 3, "locked and deferred messages count as active");
    assert.deepEqual([figures.deadLetterMessageCount, figures.scheduledMessageCount], [1, 1]);
    assert.deepEqual([figures.transferMessageCount, figures.transferDeadLetterMessageCount], [0, 0]);
    assert.equal(figures.totalMessageCount, 5);
    assert.ok(figures.sizeInBytes > 0);
    for (const when of [figures.createdAt, figures.modifiedAt, figures.accessedAt])
      assert.ok(!Number.isNaN(when.getTime()));
    assert.ok(Math.abs(figures.createdAt.getTime() - Date.now()) < 60_000);

    const listed = [];
    for await (const each of admin.listQueuesRuntimeProperties()) listed.push(each);
    assert.equal(listed.find((each) => each.name === name).totalMessageCount, 5);
    const paged = [];
    for await (const page of admin.listQueuesRuntimeProperties().byPage({ maxPageSize: 3 })) paged.push(...page);
    assert.deepEqual(
      paged.map((each) => each.name),
      listed.map((each) => each.name),
    );
  });

  test("an update is seen in modifiedAt", async () => {
    const name = await createQueue();
    const before = await admin.getQueueRuntimeProperties(name);
    await admin.updateQueue({ ...(await admin.getQueue(name)), maxDeliveryCount: 4 });
    const after = await admin.getQueueRuntimeProperties(name);
    assert.deepEqual(after.createdAt, before.createdAt);
    assert.ok(after.modifiedAt >= before.modifiedAt);
  });
});

describe("the namespace", () => {
  test("tells its name and tier", async () => {
    const properties = await admin.getNamespaceProperties();
    assert.equal(properties.messagingSku, "Standard");
    assert.ok(properties.name);
    assert.equal(properties.messagingUnits, undefined);
    assert.ok(properties.createdAt <= new Date() && properties.modifiedAt <= new Date());
  });
});
