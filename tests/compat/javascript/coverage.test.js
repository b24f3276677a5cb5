// No public method of the SDK is left out: its typings are read, and each method is called by a test.
import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import { describe, test } from "node:test";

// The tests name a variable after what it holds; the last word of its name tells the type.
const TYPES = {
  client: "ServiceBusClient",
  sender: "ServiceBusSender",
  batch: "ServiceBusMessageBatch",
  receiver: "ServiceBusReceiver",
  session: "ServiceBusSessionReceiver",
  admin: "ServiceBusAdministrationClient",
  rules: "ServiceBusRuleManager",
};

const here = (path) => new URL(path, import.meta.url);
const typings = readFileSync(here("node_modules/@azure/service-bus/types/latest/service-bus.d.ts"), "utf8").replaceAll(
  "\r\n",
  "\n",
);
const sources = readdirSync(here("."))
  .filter((name) => name.endsWith(".js") && name !== "coverage.test.js")
  .map((name) => ({ name, text: readFileSync(here(name), "utf8") }));

/** The public methods that the typings declare for a type, with those it inherits from another type of the SDK. */
function publicMethods(type) {
  const declared = typings.match(
    new RegExp(`^export declare (?:class|interface) ${type}(?: extends (\\w+))? \\{\n(.*?)^\\}`, "ms"),
  );
  assert.ok(declared, `${type} is in the typings`);
  const [, parent, members] = declared;
  const own = [...members.matchAll(/^ {4}(?!private|constructor)(\w+)\(/gm)].map(([, method]) => method);
  const inherited = parent?.startsWith("ServiceBus") ? publicMethods(parent) : [];
  return [...new Set([...own, ...inherited])];
}

function calledMethods() {
  const called = new Set();
  for (const { text } of sources) {
    for (const [, variable, method] of text.matchAll(/\b(\w+)\.(\w+)\(/g)) {
      const type = TYPES[variable.match(/[A-Z]?[a-z]+$/)?.[0].toLowerCase()];
      if (type) called.add(`${type}.${method}`);
    }
  }
  return called;
}

const methods = Object.values(TYPES).flatMap((type) => publicMethods(type).map((method) => `${type}.${method}`));

describe("coverage of the SDK", () => {
  test("the typings were understood", () => {
    assert.ok(methods.length >= 70, `${methods.length} methods found`);
    for (const known of ["ServiceBusSessionReceiver.renewSessionLock", "ServiceBusSessionReceiver.completeMessage"]) {
      assert.ok(methods.includes(known), known);
    }
  });

  test("every public method is called by a test", () => {
    const called = calledMethods();
    assert.deepEqual(
      methods.filter((method) => !called.has(method)),
      [],
    );
  });

  test("no test is skipped, left to do or run alone", () => {
    const suspicious = /\b(?:test|describe|it|t)\.(?:skip|todo|only)\b|\b(?:skip|todo|only): (?:true|["'`])/;
    assert.deepEqual(
      sources.filter(({ text }) => suspicious.test(text)).map(({ name }) => name),
      [],
    );
  });
});
