// Rules of subscriptions: through the administration client, and through the rule manager of the messaging client.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { CHAPTER, admin, createSubscription, createTopic, openClient } from "./namespace.js";

const NOT_FOUND = { name: "RestError", statusCode: 404, code: "MessageEntityNotFoundError" };
const INVALID = { name: "RestError", statusCode: 400, code: "ServiceError" };
const PARAMETERS = { "@text": "x & <y>", "@number": 2.5, "@flag": true, "@moment": new Date("2020-07-05T11:12:13Z") };
const EVERYTHING = {
  correlationId: "1",
  messageId: "2",
  to: "3",
  replyTo: "4",
  subject: "5",
  sessionId: "6",
  replyToSessionId: "7",
  contentType: "8",
};
const MESSAGES = [
  { body: "red 5", subject: "order", applicationProperties: { color: "red", size: 5 } },
  { body: "blue 5", subject: "order", applicationProperties: { color: "blue", size: 5 } },
  { body: "red 7.5", subject: "bill", applicationProperties: { color: "red", size: 7.5 } },
];

async function createBoth(options = {}) {
  const topic = await createTopic();
  return { topic, subscription: await createSubscription(topic, options) };
}

async function collect(iterator) {
  const found = [];
  for await (const each of iterator) found.push(each);
  return found;
}

/** What the subscription has after the messages were sent to its topic. */
async function received(client, topic, subscription, messages = MESSAGES) {
  await client.createSender(topic).sendMessages(messages);
  return client.createReceiver(topic, subscription).peekMessages(20);
}

describe("rules through the administration client", CHAPTER, () => {
  test("a SQL rule is made, read, updated and deleted", async () => {
    const { topic, subscription } = await createBoth();
    const filter = { sqlExpression: "size = @number", sqlParameters: PARAMETERS };
    const action = { sqlExpression: "SET size = @number", sqlParameters: PARAMETERS };
    const created = await admin.createRule(topic, subscription, "sql", filter, action);
    assert.equal(created._response.status, 201);
    for (const rule of [created, await admin.getRule(topic, subscription, "sql")]) {
      assert.deepEqual([rule.name, rule.filter, rule.action], ["sql", filter, action]);
    }
    const rule = await admin.getRule(topic, subscription, "sql");
    rule.filter = { sqlExpression: "1=0" };
    rule.action = {};
    assert.equal((await admin.updateRule(topic, subscription, rule))._response.status, 200);
    const updated = await admin.getRule(topic, subscription, "sql");
    assert.deepEqual([updated.filter.sqlExpression, updated.action.sqlExpression], ["1=0", undefined]);
    assert.equal((await admin.deleteRule(topic, subscription, "sql"))._response.status, 200);
    assert.equal(await admin.ruleExists(topic, subscription, "sql"), false);
  });

  test("a correlation rule keeps all its fields", async () => {
    const { topic, subscription } = await createBoth();
    const applicationProperties = { text: "t", number: 2.5, flag: false, moment: PARAMETERS["@moment"] };
    await admin.createRule(topic, subscription, "correlation", { ...EVERYTHING, applicationProperties });
    const rule = await admin.getRule(topic, subscription, "correlation");
    assert.deepEqual(rule.filter, { ...EVERYTHING, applicationProperties });
  });

  test("a subscription is born with the rule it was given", async (t) => {
    const topic = await createTopic();
    const defaultRuleOptions = { name: "red", filter: { sqlExpression: "color = 'red'" } };
    const subscription = await createSubscription(topic, { defaultRuleOptions });
    const rules = await collect(admin.listRules(topic, subscription));
    assert.deepEqual(
      rules.map(({ name }) => name),
      ["red"],
    );
    const found = await received(openClient(t), topic, subscription);
    assert.deepEqual(
      found.map(({ body }) => body),
      ["red 5", "red 7.5"],
    );
  });

  test("rules are listed in pages of any size", async () => {
    const { topic, subscription } = await createBoth();
    for (const name of ["a", "b", "c", "d"]) await admin.createRule(topic, subscription, name);
    const pages = [];
    for await (const page of admin.listRules(topic, subscription).byPage({ maxPageSize: 2 })) {
      pages.push(page.map(({ name }) => name));
    }
    assert.deepEqual(pages, [["$Default", "a"], ["b", "c"], ["d"]]);
  });

  test("what cannot be is refused", async () => {
    const { topic, subscription } = await createBoth();
    const create = (name, expression) => admin.createRule(topic, subscription, name, { sqlExpression: expression });
    await assert.rejects(create("wrong", "color ="), { ...INVALID, message: /At column 8: a value is expected/ });
    await assert.rejects(create("r".repeat(51), "1=1"), INVALID);
    await assert.rejects(create("$Default", "1=1"), { statusCode: 409, code: "MessageEntityAlreadyExistsError" });
    await assert.rejects(admin.deleteRule(topic, subscription, "missing"), NOT_FOUND);
    await assert.rejects(admin.createRule(topic, "missing", "r"), NOT_FOUND);
    const rule = await admin.getRule(topic, subscription, "$Default");
    await assert.rejects(admin.updateRule(topic, subscription, { ...rule, name: "missing" }), NOT_FOUND);
    assert.equal(await admin.ruleExists(topic, subscription, "wrong"), false);
  });

  test("an update of the subscription leaves its rules", async () => {
    const { topic, subscription } = await createBoth();
    await admin.createRule(topic, subscription, "mine", { subject: "x" });
    await admin.updateSubscription({ ...(await admin.getSubscription(topic, subscription)), maxDeliveryCount: 3 });
    const rules = await collect(admin.listRules(topic, subscription));
    assert.deepEqual(
      rules.map(({ name }) => name),
      ["$Default", "mine"],
    );
  });
});

describe("rules through the rule manager", CHAPTER, () => {
  test("rules are made, listed and deleted", async (t) => {
    const { topic, subscription } = await createBoth();
    const rules = openClient(t).createRuleManager(topic, subscription);
    await rules.createRule("sql", { sqlExpression: "size = 5" }, { sqlExpression: "SET size = 6" });
    await rules.createRule("plain", { sqlExpression: "size = 7" });
    await rules.createRule("correlation", { ...EVERYTHING, applicationProperties: { color: "red", size: 5 } });
    await rules.deleteRule("$Default");
    assert.deepEqual(await collect(rules.listRules()), [
      { name: "sql", filter: { sqlExpression: "size = 5" }, action: { sqlExpression: "SET size = 6" } },
      { name: "plain", filter: { sqlExpression: "size = 7" }, action: {} },
      {
        name: "correlation",
        filter: { ...EVERYTHING, applicationProperties: { color: "red", size: 5 } },
        action: {},
      },
    ]);
    const pages = [];
    for await (const page of rules.listRules().byPage({ maxPageSize: 2 })) pages.push(page.length);
    assert.deepEqual(pages, [2, 1]);
    assert.equal((await admin.getRule(topic, subscription, "plain")).filter.sqlExpression, "size = 7");
    for (const name of ["sql", "plain", "correlation"]) await rules.deleteRule(name);
    assert.deepEqual(await collect(admin.listRules(topic, subscription)), []);
  });

  test("the filters of the other client are told as they are", async (t) => {
    const { topic, subscription } = await createBoth();
    const rules = openClient(t).createRuleManager(topic, subscription);
    const [rule] = await collect(rules.listRules());
    assert.deepEqual(rule, { name: "$Default", filter: { sqlExpression: "1=1" }, action: {} });
  });

  test("what cannot be is refused", async (t) => {
    const { topic, subscription } = await createBoth();
    const rules = openClient(t).createRuleManager(topic, subscription);
    await assert.rejects(rules.createRule("wrong", { sqlExpression: "color =" }), /At column 8: a value is expected/);
    await assert.rejects(rules.createRule("$Default", { sqlExpression: "1=1" }), /already exists/);
    await assert.rejects(rules.deleteRule("missing"), { code: "MessagingEntityNotFound" });
  });
});

describe("what rules make of messages", CHAPTER, () => {
  test("a subscription receives what its rules choose, and a copy for each action", async (t) => {
    const { topic, subscription } = await createBoth();
    const client = openClient(t);
    const rules = client.createRuleManager(topic, subscription);
    await rules.deleteRule("$Default");
    await rules.createRule("bills", { subject: "bill" });
    await rules.createRule("red", { sqlExpression: "color = 'red' AND size > 1" });
    await rules.createRule("five", { sqlExpression: "size = 5" }, { sqlExpression: "SET size = size * 2; REMOVE color" });
    const found = await received(client, topic, subscription);
    assert.deepEqual(
      found.map(({ body, applicationProperties }) => [body, applicationProperties]),
      [
        ["red 5", { color: "red", size: 5 }],
        ["red 5", { size: 10, RuleName: "five" }],
        ["blue 5", { size: 10, RuleName: "five" }],
        ["red 7.5", { color: "red", size: 7.5 }],
      ],
    );
  });

  test("a number of the filter matches a number of the message, whatever its width", async (t) => {
    const { topic, subscription } = await createBoth();
    await admin.createRule(topic, subscription, "five", { applicationProperties: { size: 5 } });
    await admin.deleteRule(topic, subscription, "$Default");
    const found = await received(openClient(t), topic, subscription);
    assert.deepEqual(
      found.map(({ body }) => body),
      ["red 5", "blue 5"],
    );
  });
});
