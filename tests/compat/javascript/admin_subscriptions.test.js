// ServiceBusAdministrationClient on subscriptions, and on the rule they are born with.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { CHAPTER, admin, createSubscription, createTopic, openClient, uniqueName } from "./namespace.js";
import { receiveOne } from "./waiting.js";

const FOREVER = "P10675199DT2H48M5.4775807S";
const NOT_FOUND = { name: "RestError", statusCode: 404, code: "MessageEntityNotFoundError" };
const INVALID = { name: "RestError", statusCode: 400, code: "ServiceError" };

async function createBoth(options = {}) {
  const topic = await createTopic();
  return { topic, subscription: await createSubscription(topic, options) };
}

describe("creating, getting, updating and deleting subscriptions", CHAPTER, () => {
  test("a subscription is born with the service's defaults", async () => {
    const topicName = await createTopic();
    const subscriptionName = uniqueName("subscription");
    const created = await admin.createSubscription(topicName, subscriptionName);
    assert.equal(created._response.status, 201);
    const expected = {
      topicName,
      subscriptionName,
      lockDuration: "PT1M",
      requiresSession: false,
      defaultMessageTimeToLive: FOREVER,
      deadLetteringOnMessageExpiration: false,
      deadLetteringOnFilterEvaluationExceptions: true,
      maxDeliveryCount: 10,
      enableBatchedOperations: true,
      status: "Active",
      autoDeleteOnIdle: FOREVER,
      availabilityStatus: "Available",
    };
    for (const subscription of [created, await admin.getSubscription(topicName, subscriptionName)]) {
      for (const [field, value] of Object.entries(expected)) assert.equal(subscription[field], value, field);
    }
  });

  test("every option of a subscription is kept", async () => {
    const options = {
      lockDuration: "PT20S",
      requiresSession: true,
      defaultMessageTimeToLive: "P1DT2H",
      deadLetteringOnMessageExpiration: true,
      deadLetteringOnFilterEvaluationExceptions: false,
      maxDeliveryCount: 3,
      enableBatchedOperations: false,
      status: "ReceiveDisabled",
      userMetadata: "metadata & more",
      autoDeleteOnIdle: "PT30M",
    };
    const { topic, subscription } = await createBoth(options);
    const seen = await admin.getSubscription(topic, subscription);
    for (const [field, value] of Object.entries(options)) assert.equal(seen[field], value, field);
  });

  test("an update changes what it names and keeps the rest", async () => {
    const { topic, subscription } = await createBoth({ userMetadata: "kept" });
    const seen = await admin.getSubscription(topic, subscription);
    Object.assign(seen, {
      lockDuration: "PT2M",
      maxDeliveryCount: 4,
      defaultMessageTimeToLive: "PT9H",
      status: "Disabled",
    });
    const updated = await admin.updateSubscription(seen);
    assert.equal(updated._response.status, 200);
    assert.deepEqual({ ...(await admin.getSubscription(topic, subscription)) }, { ...seen });
  });

  test("a subscription that is there cannot be created again", async () => {
    const { topic, subscription } = await createBoth();
    await assert.rejects(admin.createSubscription(topic, subscription), {
      statusCode: 409,
      code: "MessageEntityAlreadyExistsError",
    });
  });

  test("the same name may be used under another topic", async () => {
    const { subscription } = await createBoth();
    const topic = await createTopic();
    assert.equal((await admin.createSubscription(topic, subscription)).topicName, topic);
  });

  test("what is missing is not found", async () => {
    const { topic, subscription } = await createBoth();
    await assert.rejects(admin.getSubscription(topic, "missing"), NOT_FOUND);
    await assert.rejects(admin.getSubscriptionRuntimeProperties(topic, "missing"), NOT_FOUND);
    await assert.rejects(admin.deleteSubscription(topic, "missing"), NOT_FOUND);
    await assert.rejects(admin.createSubscription(uniqueName("missing"), "s"), NOT_FOUND);
    const seen = await admin.getSubscription(topic, subscription);
    await assert.rejects(admin.updateSubscription({ ...seen, subscriptionName: "missing" }), NOT_FOUND);
    assert.equal(await admin.subscriptionExists(topic, "missing"), false);
  });

  test("invalid options are refused", async () => {
    const { topic, subscription } = await createBoth();
    await assert.rejects(admin.createSubscription(topic, "bad", { lockDuration: "PT10M" }), INVALID);
    await assert.rejects(admin.createSubscription(topic, "bad", { maxDeliveryCount: 0 }), INVALID);
    await assert.rejects(admin.createSubscription(topic, "s".repeat(51)), INVALID);
    assert.equal(await admin.subscriptionExists(topic, "bad"), false);
    const seen = await admin.getSubscription(topic, subscription);
    await assert.rejects(admin.updateSubscription({ ...seen, requiresSession: true }), INVALID);
  });

  test("a deleted subscription is gone", async () => {
    const { topic, subscription } = await createBoth();
    assert.equal(await admin.subscriptionExists(topic, subscription), true);
    assert.equal((await admin.deleteSubscription(topic, subscription))._response.status, 200);
    assert.equal(await admin.subscriptionExists(topic, subscription), false);
  });
});

describe("listing subscriptions and their runtime figures", CHAPTER, () => {
  test("every subscription of a topic is listed, in pages of any size", async () => {
    const topic = await createTopic();
    const made = [];
    for (let number = 0; number < 5; number += 1) made.push(await createSubscription(topic));
    const listed = [];
    for await (const subscription of admin.listSubscriptions(topic)) listed.push(subscription.subscriptionName);
    assert.deepEqual([...listed].sort(), [...made].sort());
    const pages = [];
    for await (const page of admin.listSubscriptions(topic).byPage({ maxPageSize: 2 })) {
      pages.push(page.map(({ subscriptionName }) => subscriptionName));
    }
    assert.deepEqual(
      pages.map(({ length }) => length),
      [2, 2, 1],
    );
    assert.deepEqual(pages.flat(), listed);
  });

  test("a topic without subscriptions lists none", async () => {
    const topic = await createTopic();
    for await (const subscription of admin.listSubscriptions(topic)) assert.fail(subscription.subscriptionName);
  });

  test("the figures tell what a subscription holds", async (t) => {
    const { topic, subscription } = await createBoth();
    const client = openClient(t);
    const receiver = client.createReceiver(topic, subscription);
    await client.createSender(topic).sendMessages([{ body: 1 }, { body: 2 }, { body: 3 }]);
    await receiver.deadLetterMessage(await receiveOne(receiver));

    const figures = await admin.getSubscriptionRuntimeProperties(topic, subscription);
    assert.deepEqual([figures.topicName, figures.subscriptionName], [topic, subscription]);
    assert.deepEqual(
      [figures.activeMessageCount, figures.deadLetterMessageCount, figures.totalMessageCount],
      [2, 1, 3],
    );
    assert.deepEqual([figures.transferMessageCount, figures.transferDeadLetterMessageCount], [0, 0]);
    for (const when of [figures.createdAt, figures.modifiedAt, figures.accessedAt])
      assert.ok(!Number.isNaN(when.getTime()));

    await createSubscription(topic);
    const listed = [];
    for await (const each of admin.listSubscriptionsRuntimeProperties(topic)) listed.push(each);
    assert.equal(listed.find((each) => each.subscriptionName === subscription).totalMessageCount, 3);
    const pages = [];
    for await (const page of admin.listSubscriptionsRuntimeProperties(topic).byPage({ maxPageSize: 1 }))
      pages.push(page.length);
    assert.deepEqual(pages, [1, 1]);
  });
});

describe("the default rule", CHAPTER, () => {
  test("a subscription is born with $Default, which lets everything pass", async () => {
    const { topic, subscription } = await createBoth();
    const rule = await admin.getRule(topic, subscription, "$Default");
    assert.deepEqual([rule.name, rule.filter.sqlExpression, rule.action.sqlExpression], ["$Default", "1=1", undefined]);
    assert.equal(await admin.ruleExists(topic, subscription, "$Default"), true);
    assert.equal(await admin.ruleExists(topic, subscription, "missing"), false);
    await assert.rejects(admin.getRule(topic, subscription, "missing"), NOT_FOUND);
  });

  test("$Default is the only rule listed", async () => {
    const { topic, subscription } = await createBoth();
    const names = [];
    for await (const rule of admin.listRules(topic, subscription)) names.push(rule.name);
    assert.deepEqual(names, ["$Default"]);
    for await (const page of admin.listRules(topic, subscription).byPage({ maxPageSize: 1 }))
      assert.equal(page.length, 1);
  });
});
